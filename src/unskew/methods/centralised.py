"""The baseline: the same model, data and budget with all examples in one place."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import EVERYONE, Engine, Outcome, Roster, Tensors, Visit
from unskew.round.algorithm import Method
from unskew.round.server import sgd, weighted_mean


def centralised() -> Method:
    """Trains on all examples in one place, without a federation.

    This is what relative accuracy is relative to. A round is one visit to all examples, with the epochs, batches, rate
    and augmentation of the clients. Where only K of N clients come in a round, it takes K/N of the examples, a new draw
    each round, so that the budget is the same. Nothing is sent. The momentum starts from zero in each round, as a
    client's does.

    Reference: the upper bound in Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution",
    ECCV 2020, section 6.
    """
    return lambda algorithm: replace(
        algorithm,
        available=_everyone_can,
        sampler=_everyone,
        arrive=_everyone_does,
        correction=_nothing,
        exchange=_in_one_place,
        aggregate=partial(weighted_mean),
        server=sgd(),
    )


def _everyone_can(key: Key, number: int, roster: Roster) -> None:
    """No client is needed. This slot and ``arrive`` are claimed, so that methods that keep clients away are refused."""


def _everyone_does(key: Key, visits: list[Visit]) -> None:
    return


def _in_one_place(
    engine: Engine, job: str, shared: Tensors, visits: Sequence[Visit], key: Key, *, round: int = 0
) -> Outcome:
    """Nothing is sent, so nothing can be masked. The slot is claimed, so that secure updates are refused by name."""
    return engine.map_sum(job, shared, visits, key, round=round)


def _everyone(key: Key, roster: Roster, per_round: int) -> list[Visit]:
    examples = roster.examples
    if examples == 0:
        raise UserError("no client of the partition has any examples; make a new partition")
    share = per_round / len(roster.inhabited)
    return [Visit(EVERYONE, float(examples), take=None if share >= 1 else max(1, round(examples * share)))]


def _nothing(shared: Tensors, memory: Tensors) -> Tensors:
    """Nothing drifts here. The slot is claimed, so that a method that corrects drift is refused by name."""
    return {}
