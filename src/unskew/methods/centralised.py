"""The centralized baseline: the same model, data and budget with pooled examples."""

from dataclasses import replace

from unskew.core.key import Key
from unskew.core.types import EVERYONE, Roster, Visit
from unskew.round.algorithm import Method


def centralised() -> Method:
    """Trains on the pooled examples, without a federation.

    The upper bound that relative accuracy refers to. A round is one visit to all examples, with the clients' epochs,
    batch size, learning rate and augmentation. If only K of N clients take part in a round, it uses K/N of the
    examples, a new draw each round, so that the budget is the same. Nothing is sent. Momentum starts from zero in each
    round, as on a client.

    Reference: the upper bound in Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution",
    ECCV 2020, section 6.
    """
    # nothing is sent, corrected or averaged, so methods that change these are rejected by name
    claims = ("available", "arrive", "correction", "exchange", "aggregate", "server")
    return lambda algorithm: replace(algorithm, sampler=_everyone, claims=claims)


def _everyone(key: Key, roster: Roster, per_round: int) -> list[Visit]:
    examples = roster.examples
    share = per_round / len(roster.inhabited)
    return [Visit(EVERYONE, float(examples), take=None if share >= 1 else max(1, round(examples * share)))]
