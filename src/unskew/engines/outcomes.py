"""Outcomes added up: what an engine that spreads its visits makes of the parts."""

from collections.abc import Iterable
from dataclasses import dataclass

from unskew.core import tensors
from unskew.core.tensors import PackedSums
from unskew.core.types import Failure, Outcome, Sums


@dataclass
class Total:
    """Sums added up in the order in which they come: as ``tensors.add``, in one call for all of them."""

    packed: PackedSums | None = None

    def add(self, more: PackedSums) -> None:
        """Add the next visit's."""
        if self.packed is None:
            self.packed = PackedSums(more.layout, more.vector.clone())
        elif more.layout is self.packed.layout or more.layout == self.packed.layout:
            self.packed.vector.add_(more.vector)
        else:
            odd = {each[0] for each in more.layout} ^ {each[0] for each in self.packed.layout}
            words = ", ".join(sorted(odd)) or "their order or their shapes differ"
            raise ValueError(f"sums with other entries cannot be added: {words}")

    def sums(self) -> Sums:
        """By name; none where nothing was added."""
        return {} if self.packed is None else self.packed.by_name()


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
