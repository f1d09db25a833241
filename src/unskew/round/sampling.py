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
    """A round's visits; how many clients were available and how many visits failed to come, if a method decides it."""

    visits: list[Visit]
    available: int | None = None
    absent: int | None = None


def draw(algorithm: "Algorithm", key: Key, number: int, roster: Roster, per_round: int) -> Drawn:
    """Decide who takes part in round ``number`` of the run with this key. It may be nobody."""
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
    """Sample K clients uniformly without replacement, in ascending order, each weighted by its number of examples.

    Clients without examples are never sampled.
    """
    if roster.clients == len(roster.inhabited) and per_round == roster.clients:
        chosen = roster.inhabited
    else:
        if not len(roster.inhabited):
            raise UserError("no client in the partition has any examples; make a new partition")
        count = min(per_round, len(roster.inhabited))
        chosen = roster.inhabited[np.sort(key.numpy().choice(len(roster.inhabited), count, replace=False))]
    return [Visit(client, float(roster.size(client))) for client in chosen.tolist()]
