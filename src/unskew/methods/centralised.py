"""The baseline: the same model, data and budget with all examples in one place."""

from dataclasses import replace

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import EVERYONE, Roster, Visit
from unskew.round.algorithm import Method


def centralised() -> Method:
    """Trains on all examples in one place, without a federation.

    The upper bound that relative accuracy refers to. A round is one visit to all examples, with the clients' epochs,
    batch size, learning rate and augmentation. If only K of N clients take part in a round, it uses K/N of the
    examples, a new draw each round, so that the budget is the same. Nothing is sent. The momentum starts from zero in
    each round, as a client's does.

    Reference: the upper bound in Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution",
    ECCV 2020, section 6.
    """
    # nothing is sent, corrected or averaged here: methods that change how are rejected by name
    claims = ("available", "arrive", "correction", "exchange", "aggregate", "server")
    return lambda algorithm: replace(algorithm, sampler=_everyone, claims=claims)


def _everyone(key: Key, roster: Roster, per_round: int) -> list[Visit]:
    examples = roster.examples
    if examples == 0:
        raise UserError("no client in the partition has any examples; make a new partition")
    share = per_round / len(roster.inhabited)
    return [Visit(EVERYONE, float(examples), take=None if share >= 1 else max(1, round(examples * share)))]
