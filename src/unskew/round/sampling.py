"""1. Who comes: a sampler turns a key, the roster and K into the round's visits."""

import numpy as np

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.roster import Roster
from unskew.core.types import Visit


def uniform(key: Key, roster: Roster, per_round: int) -> list[Visit]:
    """K clients drawn uniformly without replacement, in ascending order, each weighted by its number of examples.

    Clients that hold nothing never come: they could report nothing.
    """
    if roster.clients == len(roster.inhabited) and per_round == roster.clients:
        chosen = roster.inhabited
    else:
        drawn = key.numpy().choice(len(roster.inhabited), _at_most(per_round, roster), replace=False)
        chosen = roster.inhabited[np.sort(drawn)]
    return [Visit(client, float(roster.size(client))) for client in chosen.tolist()]


def _at_most(per_round: int, roster: Roster) -> int:
    held = len(roster.inhabited)
    if held == 0:
        raise UserError("no client of the partition holds an example; make a new partition")
    return min(per_round, held)
