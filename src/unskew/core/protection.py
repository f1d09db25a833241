"""What protects the clients' sums on their way: records and protocols for secure aggregation and private updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from unskew.core.types import Engine, Outcome, Sums, Tensors, Visit

if TYPE_CHECKING:
    from unskew.core.key import Key

THRESHOLD = 0.66  # of the clients that begin a secure sum, so many must stay to the end


@dataclass(frozen=True)
class SecureAggregation:
    """Sums are masked; ``threshold`` is the share of the clients that must stay until the masks are taken off."""

    threshold: float = THRESHOLD

    def __str__(self) -> str:
        """As the text of a method has it."""
        return "secure" if self.threshold == THRESHOLD else f"secure(threshold={self.threshold:g})"


class Exchange(Protocol):
    """How the sums of a round's job reach the server, in the place of ``engine.map_sum``."""

    def __call__(
        self, engine: Engine, job: str, shared: Tensors, visits: Sequence[Visit], key: "Key", *, round: int = 0
    ) -> Outcome:
        """The job's sums over the visits; ``void`` where too few stayed."""


class Mechanism(Protocol):
    """Differential privacy of updates: what a client does to its own, what the server does to their sum, its price."""

    @property
    def delta(self) -> float:
        """The chance for which nothing is promised."""

    @property
    def repeatable(self) -> bool:
        """Whether the noise follows from the key."""

    def clipped(self, sums: Sums) -> Sums:
        """A client's sums as it may send them."""

    def noisy(self, sums: Sums, params: Tensors, expected: int, key: "Key") -> Sums:
        """The sums over a round's visits with noise; nobody may have come. ``expected`` visits were to come."""

    def epsilon(self, rounds: int, drawn: int, clients: int) -> float | None:
        """ε of so many rounds with ``drawn`` of all ``clients`` in each; None: without noise nothing is promised."""
