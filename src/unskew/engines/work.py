"""One job as it is spread over processes: which visits are open, which results wait, the sum in the visits' order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unskew.core.roster import Roster
from unskew.core.tensors import Layout
from unskew.core.types import Failure, Outcome, Sums, TestPart, Visit

DEATHS = 3  # how often a visit may take its worker with it before it counts as failed
WAITING_BYTES = 512 * 2**20  # results held back because an earlier visit is not done yet


@dataclass
class Work:
    """The state of one map_sum: what is open, what is running, what is waiting to be added."""

    visits: Sequence[Visit | TestPart]
    lengths: Sequence[int]
    open: list[int] = field(init=False)
    added: int = 0  # visits up to here are in the sum, or have failed
    waiting: dict[int, tuple[Layout, Tensor] | None] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    receipts: dict[int, str] = field(default_factory=dict)  # by client
    layout: Layout | None = None
    total: Tensor | None = None

    def __post_init__(self) -> None:
        self.open = sorted(
            range(len(self.visits)), key=lambda place: (self.lengths[place], -place)
        )  # taken from the end

    @property
    def done(self) -> bool:
        """Whether every visit is in the sum, or has failed."""
        return self.added == len(self.visits)

    def next_place(self) -> int | None:
        """The longest open visit whose result could still be held back if it came too early."""
        size = 8 * self.total.numel() if self.total is not None else 1
        reach = self.added + max(64, WAITING_BYTES // size)
        for at in range(len(self.open) - 1, -1, -1):
            if self.open[at] < reach:
                return self.open.pop(at)
        return None

    def finish(self, place: int, layout: Layout, vector: Tensor, receipt: str | None) -> None:
        """Take a visit's result: all its sums as one vector, and where each one is in it."""
        visit = self.visits[place]
        if receipt is not None and isinstance(visit, Visit):
            self.receipts[visit.client] = receipt
        # a result that is next is added in place; one that is early is copied, since its slot will be reused
        self.waiting[place] = (layout, vector if place == self.added else vector.clone())
        self._add_what_is_next()

    def fail(self, place: int, reason: str) -> None:
        """Go on without a visit."""
        self.failures[place] = reason
        self.waiting[place] = None
        self._add_what_is_next()

    def worker_died(self, place: int, reason: str) -> None:
        """Do a visit again, unless it has taken too many workers with it."""
        self.deaths[place] = self.deaths.get(place, 0) + 1
        if self.deaths[place] < DEATHS:
            self.open.append(place)
        else:
            self.fail(place, f"its worker process died {DEATHS} times ({reason})")

    def outcome(self) -> Outcome:
        """The sum, when all is done."""
        failures = tuple(_failure(self.visits[place], self.failures[place]) for place in sorted(self.failures))
        sums: Sums = {} if self.layout is None or self.total is None else unpack(self.layout, self.total)
        return Outcome(sums, failures, self.receipts)

    def _add_what_is_next(self) -> None:
        while self.added in self.waiting:
            result = self.waiting.pop(self.added)
            if result is not None:
                layout, vector = result
                if self.total is None:
                    self.layout, self.total = layout, vector.clone()
                elif layout != self.layout:
                    raise ValueError("sums with other entries cannot be added")
                else:
                    self.total += vector
            self.added += 1


def _failure(visit: Visit | TestPart, reason: str) -> Failure:
    return Failure(visit.client, reason, visit.repeat) if isinstance(visit, Visit) else Failure(None, reason)


def length_of(roster: Roster, job: str, visit: Visit | TestPart) -> int:
    """How long a visit takes beside others, in examples: the long ones are begun first."""
    if isinstance(visit, TestPart) or job.partition(" ")[0] != "train":
        return 1
    return roster.size(visit.client) if visit.take is None else visit.take


def unpack(layout: Layout, vector: Tensor) -> Sums:
    """The sums by name, as views of the one vector."""
    return {
        name: vector[offset // 8 : offset // 8 + torch.Size(shape).numel()].view(shape)
        for name, _, shape, offset in layout
    }


def visit_from(fields: dict[str, Any]) -> Visit | TestPart:
    """The visit, or the part of the test images, that crossed as these fields."""
    return Visit(**fields) if "client" in fields else TestPart(**fields)
