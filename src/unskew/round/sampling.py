"""1. Participation: who is available, who is sampled (a sampler turns key, roster and K into visits), who arrives."""

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
    """A round's visits; if a method decides it, how many clients were available and how many visits did not happen."""

    visits: list[Visit]
    available: int | None = None
    absent: int | None = None


def draw(algorithm: "Algorithm", key: Key, number: int, roster: Roster, per_round: int) -> Drawn:
    """Decide which clients, if any, take part in round ``number`` of the run with this key."""
    round_key, available, absent = key.fold("round", number), None, None
    mask = algorithm.available and algorithm.available(key.fold("available"), number, roster)
    if mask is not None:
        roster = Roster(np.where(mask, roster.sizes, 0))  # the sampler sees no other clients
        available = len(roster.inhabited)
    visits = algorithm.sampler(round_key.fold("sample"), roster, per_round) if available != 0 else []
    arrived = algorithm.arrive and algorithm.arrive(round_key.fold("arrive"), visits)
    if arrived is not None:
        visits, absent = arrived, len(visits) - len(arrived)
    return Drawn(visits, available, absent)


def uniform(key: Key, roster: Roster, per_round: int) -> list[Visit]:
    """Sample K clients uniformly without replacement, in ascending order, each weighted by its number of examples.

    Clients without examples are never sampled.
    """
    if roster.clients == len(roster.inhabited) and per_round == roster.clients:
        chosen = roster.inhabited
    else:
        if not len(roster.inhabited):
            raise UserError("no client in the partition has any examples; use another partition")
        count = min(per_round, len(roster.inhabited))
        chosen = roster.inhabited[np.sort(key.numpy().choice(len(roster.inhabited), count, replace=False))]
    return [Visit(client, float(roster.size(client))) for client in chosen.tolist()]
