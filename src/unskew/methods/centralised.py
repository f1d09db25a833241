"""The baseline of all: the same model, data and budget with everything in one place."""

from dataclasses import replace
from functools import partial

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.roster import Roster
from unskew.core.types import EVERYONE, Tensors, Visit
from unskew.round.aggregation import weighted_mean
from unskew.round.algorithm import Method
from unskew.round.server import sgd


def centralised() -> Method:
    """Trains on everybody's examples together, without federation: what relative accuracy is relative to.

    A round is one visit to all examples, with the epochs, batches, rate and augmentation of the clients. Where only K
    of N clients come in a round, it takes K/N of the examples, drawn anew each round, so that the budget is the same.
    Nothing is sent. The momentum starts from zero in each round, as a client's does.

    Reference: the upper bound in Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution",
    ECCV 2020, section 6.
    """
    return lambda algorithm: replace(
        algorithm, sampler=_everyone, correction=_nothing, aggregate=partial(weighted_mean), server=sgd()
    )


def _everyone(key: Key, roster: Roster, per_round: int) -> list[Visit]:
    held = roster.examples
    if held == 0:
        raise UserError("no client of the partition holds an example; make the partition anew")
    share = per_round / len(roster.inhabited)
    return [Visit(EVERYONE, float(held), take=None if share >= 1 else max(1, round(held * share)))]


def _nothing(shared: Tensors, memory: Tensors) -> Tensors:
    """Nobody drifts: the slot is held, so that what corrects drift is refused by name."""
    return {}
