"""1. Who comes: who can be drawn, who is drawn (a sampler turns a key, the roster and K into visits), who arrives."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Roster, Visit

if TYPE_CHECKING:
    from unskew.round.algorithm import Algorithm


@dataclass(frozen=True)
class Drawn:
    """A round's visits; how many clients could be drawn and how many visits did not come, where a method decides it."""

    visits: list[Visit]
    available: int | None = None
    absent: int | None = None


def draw(algorithm: "Algorithm", key: Key, number: int, roster: Roster, per_round: int) -> Drawn:
    """Who comes to round ``number`` of the run with this key. There may be no visit at all."""
    here, available, absent = key.fold("round", number), None, None
    can_come = algorithm.available and algorithm.available(key.fold("available"), number, roster)
    if can_come is not None:
        roster = Roster(np.where(can_come, roster.sizes, 0))  # the sampler knows of no one else
        available = len(roster.inhabited)
    visits = algorithm.sampler(here.fold("sample"), roster, per_round) if available != 0 else []
    arrived = algorithm.arrive and algorithm.arrive(here.fold("arrive"), visits)
    if arrived is not None:
        visits, absent = arrived, len(visits) - len(arrived)
    return Drawn(visits, available, absent)


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
