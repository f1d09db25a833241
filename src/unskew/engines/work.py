"""One job as it is spread over processes: which visits are open, which results wait, the sum in the visits' order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unskew.core.tensors import DOUBLE, Layout, PackedSums
from unskew.core.types import Failure, Outcome, Roster, Sums, TestPart, Visit
from unskew.engines.outcomes import Total

DEATHS = 3  # how often a visit may take its worker with it before it counts as failed
WAITING_BYTES = 512 * 2**20  # results held back because an earlier visit is not done yet
SHORT = 128  # examples: a visit of so few may queue behind others, however few are left
GROUP = 8  # visits that a worker is given at once, at most
GROUP_EXAMPLES = 512  # a group with that many examples takes no further visit: long visits go one by one
GROUP_BYTES = 8 * 2**20  # what a group's results may take


@dataclass
class Work:
    """The state of one map_sum: what is open, what is running, what is waiting to be added."""

    visits: Sequence[Visit | TestPart]
    lengths: Sequence[int]  # the longest are begun first
    examples: Sequence[int] = ()  # that each visit looks at; only where visits are given in groups
    known: int | None = None  # numbers in a result, where a job like this one was done before
    open: list[int] = field(init=False)
    added: int = 0  # visits up to here are in the sum, or have failed
    waiting: dict[int, PackedSums | None] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    receipts: dict[int, str] = field(default_factory=dict)  # by client
    total: Total = field(default_factory=Total)

    def __post_init__(self) -> None:
        self.open = sorted(
            range(len(self.visits)), key=lambda place: (self.lengths[place], -place)
        )  # taken from the end

    @property
    def done(self) -> bool:
        """Whether every visit is in the sum, or has failed."""
        return self.added == len(self.visits)

    @property
    def numbers(self) -> int | None:
        """How many numbers a result has, once that is known."""
        return self.known if self.total.packed is None else self.total.packed.vector.numel()

    def next_place(self) -> int | None:
        """The longest open visit whose result could still be held back if it came too early."""
        reach = self.added + max(64, WAITING_BYTES // (DOUBLE * (self.numbers or 1)))
        for at in range(len(self.open) - 1, -1, -1):
            if self.open[at] < reach:
                return self.open.pop(at)
        return None

    def next_group(self, workers: int) -> list[int]:
        """The next visits for one of so many workers: several while they are short and many are open, else one."""
        fitting = GROUP_BYTES // (DOUBLE * self.numbers) if self.numbers else 1
        most = max(1, min(GROUP, fitting, len(self.open) // (4 * workers)))
        group: list[int] = []
        examples = 0
        while len(group) < most and examples < GROUP_EXAMPLES and (place := self.next_place()) is not None:
            group.append(place)
            examples += self.examples[place]
        return group

    def may_queue(self, workers: int) -> bool:
        """Whether a worker that is busy should have its next visits already: not where another might do them sooner."""
        return len(self.open) >= 4 * workers or (bool(self.open) and self.examples[self.open[-1]] <= SHORT)

    def finish(self, place: int, layout: Layout, vector: Tensor, receipt: str | None, *, borrowed: bool = True) -> None:
        """Take a visit's result: all its sums as one vector, and where each one is in it.

        A result that is next is added at once, one that is early has to wait. It is copied if its memory is
        ``borrowed`` for this call; otherwise the memory must stay as it is until the result is added, or ``own`` is
        called.
        """
        visit = self.visits[place]
        if receipt is not None and isinstance(visit, Visit):
            self.receipts[visit.client] = receipt
        self.waiting[place] = PackedSums(layout, vector)
        if borrowed and place != self.added:
            self.own([place])
        self._add_what_is_next()

    def own(self, places: Iterable[int]) -> None:
        """Copy those of these results that still wait: their memory will be used again."""
        for place in places:
            if (early := self.waiting.get(place)) is not None:
                self.waiting[place] = PackedSums(early.layout, early.vector.clone())

    def fail(self, place: int, reason: str) -> None:
        """Go on without a visit."""
        self.failures[place] = reason
        self.waiting[place] = None
        self._add_what_is_next()

    def worker_died(self, place: int, reason: str) -> None:
        """Do a visit again, unless it has taken too many workers with it."""
        self.deaths[place] = self.deaths.get(place, 0) + 1
        if self.deaths[place] < DEATHS:
            self.again([place])
        else:
            self.fail(place, f"its worker process died {DEATHS} times ({reason})")

    def again(self, places: Sequence[int]) -> None:
        """Open these visits again, before all others."""
        self.open.extend(reversed(places))

    def outcome(self) -> Outcome:
        """The sum, when all is done."""
        failures = tuple(_failure(self.visits[place], self.failures[place]) for place in sorted(self.failures))
        return Outcome(self.total.sums(), failures, self.receipts)

    def _add_what_is_next(self) -> None:
        while self.added in self.waiting:
            result = self.waiting.pop(self.added)
            if result is not None:
                self.total.add(result)
            self.added += 1


def _failure(visit: Visit | TestPart, reason: str) -> Failure:
    return Failure(visit.client, reason, visit.repeat) if isinstance(visit, Visit) else Failure(None, reason)


def examples_of(roster: Roster, visit: Visit | TestPart) -> int:
    """How many examples a visit looks at in one pass."""
    if isinstance(visit, TestPart):
        return visit.stop - visit.start
    return roster.size(visit.client) if visit.take is None else visit.take


def work_of(roster: Roster, job: str, visits: Sequence[Visit | TestPart], epochs: int, known: dict[str, int]) -> Work:
    """A job's visits as work; ``known`` has, by job, how many numbers a result had the last time."""
    return Work(
        visits,
        [length_of(roster, job, visit) for visit in visits],
        [(epochs if trains(job) else 1) * examples_of(roster, visit) for visit in visits],
        known.get(job.partition(" ")[0]),
    )


def trains(job: str) -> bool:
    """Whether a job trains, masked and rounded too."""
    return job.partition(" ")[0].endswith("train")


def length_of(roster: Roster, job: str, visit: Visit | TestPart) -> int:
    """How long a visit takes beside others, in examples: the long ones are begun first."""
    if isinstance(visit, TestPart) or not trains(job):
        return 1
    return examples_of(roster, visit)


def unpack(layout: Layout, vector: Tensor) -> Sums:
    """The sums by name, as views of the one vector."""
    return PackedSums(layout, vector).by_name()


def visit_from(fields: dict[str, Any]) -> Visit | TestPart:
    """The visit, or the part of the test images, that crossed as these fields."""
    return Visit(**fields) if "client" in fields else TestPart(**fields)
