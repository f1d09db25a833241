"""Outcomes added up: what an engine that spreads its visits makes of the parts."""

from collections.abc import Iterable

from unskew.core import tensors
from unskew.core.types import Failure, Outcome, Sums


def add_outcomes(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcomes as one, their sums added in this order.

    Give one outcome for each visit, in the order of the visits: then every engine has the same bits, whatever the order
    of arrival. An outcome of several visits is a sum already, and adding sums of sums rounds differently.
    """
    total: Sums | None = None
    failures: list[Failure] = []
    receipts: dict[int, str] = {}
    for outcome in outcomes:
        if outcome.sums:
            total = tensors.add(total, outcome.sums)
        failures += outcome.failures
        receipts |= outcome.receipts
    return Outcome(total or {}, tuple(failures), receipts)
