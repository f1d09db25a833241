"""Which worker does which visit, and when a result may be passed on: longest visits first, results in visit order.

Every transport that spreads visits over processes uses it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from unskew.core.tensors import DOUBLE, PackedSums
from unskew.core.types import Failure, Job, Local, Reply, Roster, TestPart, Visit
from unskew.data.batches import examples_for
from unskew.round.client import Train

DEATHS = 3  # how often a visit may take its worker with it before it counts as failed
WAITING_BYTES = 512 * 2**20  # results held back because an earlier visit is not done yet
SHORT = 128  # examples: a visit of so few may queue behind others, however few are left
GROUP = 8  # visits that a worker is given at once, at most
GROUP_EXAMPLES = 512  # a group with that many examples takes no further visit: long visits go one by one
GROUP_BYTES = 8 * 2**20  # what a group's results may take


class Scheduler:
    """The visits of one job: what is open, what is running, which results wait for an earlier one.

    Parameters
    ----------
    job, visits : what is done, and for whom.
    roster : who has how many examples.
    local : how long a training visit is.
    numbers : by type of job, how many numbers a reply of it has; filled in for the next time.
    """

    def __init__(
        self,
        job: Job,
        visits: Sequence[Visit] | Sequence[TestPart],
        roster: Roster,
        local: Local,
        numbers: dict[type, int],
    ) -> None:
        trains = isinstance(getattr(job, "inner", job), Train)
        sizes = [_examples_of(roster, visit) for visit in visits]
        self.visits = visits
        self._examples = [examples_for(size, local) if trains else size for size in sizes]
        self._numbers, self._kind = numbers, type(job)
        self._open = sorted(range(len(visits)), key=lambda index: (sizes[index] if trains else 1, -index))  # last first
        self._results: dict[int, Reply | Failure] = {}  # early ones
        self._deaths: dict[int, int] = {}
        self._next = 0  # the visit whose result is passed on next

    @property
    def passed(self) -> int:
        """How many results were passed on, in visit order."""
        return self._next

    @property
    def done(self) -> bool:
        """Whether every result was passed on."""
        return self._next == len(self.visits)

    def take(self) -> Reply | Failure | None:
        """The next result in visit order; None while it is not there."""
        if self._next not in self._results:
            return None
        result = self._results.pop(self._next)
        self._next += 1
        return result

    @property
    def ready(self) -> bool:
        """Whether the next result in visit order is there."""
        return self._next in self._results

    def waits(self, indices: Iterable[int]) -> bool:
        """Whether a result of these visits was not passed on yet."""
        return any(index in self._results for index in indices)

    def next_group(self, workers: int) -> list[int]:
        """The next visits for one of so many workers: several while they are short and many are open, else one."""
        numbers = self._numbers.get(self._kind)
        fitting = GROUP_BYTES // (DOUBLE * numbers) if numbers else 1
        most = max(1, min(GROUP, fitting, len(self._open) // (4 * workers)))
        group: list[int] = []
        examples = 0
        while len(group) < most and examples < GROUP_EXAMPLES and (index := self._next_open(numbers)) is not None:
            group.append(index)
            examples += self._examples[index]
        return group

    def may_queue(self, workers: int) -> bool:
        """Whether a worker that is busy should have its next visits already: not where another might do them sooner."""
        return len(self._open) >= 4 * workers or (bool(self._open) and self._examples[self._open[-1]] <= SHORT)

    def finish(self, index: int, result: Reply | Failure) -> None:
        """Take a visit's result. Its tensors must stay as they are until it is passed on, or ``own`` is called."""
        self._results[index] = result
        if isinstance(result, Reply) and isinstance(result.sums, PackedSums):
            self._numbers[self._kind] = result.sums.vector.numel()

    def own(self, indices: Iterable[int]) -> None:
        """Copy those of these results that still wait: their memory will be used again."""
        for index in indices:
            result = self._results.get(index)
            if isinstance(result, Reply) and isinstance(result.sums, PackedSums):
                sums = PackedSums(result.sums.layout, result.sums.vector.clone())
                extra = {name: value.clone() for name, value in result.extra.items()}
                self._results[index] = replace(result, sums=sums, extra=extra)

    def fail(self, index: int, reason: str) -> None:
        """Go on without a visit."""
        visit = self.visits[index]
        failure = Failure(visit.client, reason, visit.repeat) if isinstance(visit, Visit) else Failure(None, reason)
        self._results[index] = failure

    def worker_died(self, index: int, reason: str) -> None:
        """Do a visit again, unless it has taken too many workers with it."""
        self._deaths[index] = self._deaths.get(index, 0) + 1
        if self._deaths[index] < DEATHS:
            self.again([index])
        else:
            self.fail(index, f"its worker process died {DEATHS} times ({reason})")

    def again(self, indices: Sequence[int]) -> None:
        """Open these visits again, before all others."""
        self._open.extend(reversed(indices))

    def _next_open(self, numbers: int | None) -> int | None:
        """The longest open visit whose result could still be held back if it came too early."""
        reach = self._next + max(64, WAITING_BYTES // (DOUBLE * (numbers or 1)))
        for at in range(len(self._open) - 1, -1, -1):
            if self._open[at] < reach:
                return self._open.pop(at)
        return None


def _examples_of(roster: Roster, visit: Visit | TestPart) -> int:
    """How many examples a visit looks at in one pass."""
    if isinstance(visit, TestPart):
        return visit.stop - visit.start
    return roster.size(visit.client) if visit.take is None else visit.take
