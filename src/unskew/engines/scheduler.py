"""Assigns visits to workers, the longest first, and passes results on in visit order.

Every transport that distributes visits among processes uses it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unskew.core.tensors import DOUBLE, PackedSums
from unskew.core.types import Failure, Job, Local, Reply, Roster, TestPart, Visit
from unskew.data.batches import examples_for
from unskew.round.client import Train

DEATHS = 3  # worker deaths after which a visit counts as failed
WAITING_BYTES = 512 * 2**20  # limit for results that wait for an earlier visit
SHORT = 128  # examples; shorter visits may queue at a busy worker even if few are left
GROUP = 8  # maximum number of visits in a group
GROUP_EXAMPLES = 512  # a group with this many examples is full, so long visits are assigned one by one
GROUP_BYTES = 8 * 2**20  # limit for a group's results


class Scheduler:
    """The visits of one job: which are open or running, and which results wait for an earlier one.

    Parameters
    ----------
    job, visits : the work, and the clients.
    roster : the clients' numbers of examples.
    local : the clients' training settings, for the length of a training visit.
    numbers : how many numbers a reply has, by type of job; updated for the next job.
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
        sizes = [  # in one pass
            visit.stop - visit.start
            if isinstance(visit, TestPart)
            else (roster.size(visit.client) if visit.take is None else visit.take)
            for visit in visits
        ]
        self.visits = visits
        self._examples = [examples_for(size, local) if trains else size for size in sizes]
        self._numbers, self._kind = numbers, type(job)
        self._open = sorted(range(len(visits)), key=lambda index: (sizes[index] if trains else 1, -index))  # last first
        self._results: dict[int, Reply | Failure] = {}  # not yet passed on
        self._deaths = Counter[int]()
        self._next = 0  # the visit whose result is passed on next

    @property
    def done(self) -> bool:
        """Whether every result has been passed on."""
        return self._next == len(self.visits)

    def take(self) -> Reply | Failure | None:
        """The next result in visit order; None if it is not available yet."""
        if self._next not in self._results:
            return None
        result = self._results.pop(self._next)
        self._next += 1
        return result

    def waits(self, indices: Iterable[int]) -> bool:
        """Whether a result of these visits has not been passed on yet."""
        return any(index in self._results for index in indices)

    def next_group(self, workers: int) -> list[int]:
        """The next visits for one of ``workers`` workers: several if they are short and many are open, else one."""
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
        """Whether to assign further visits to a busy worker; not if another might do them sooner."""
        return len(self._open) >= 4 * workers or (bool(self._open) and self._examples[self._open[-1]] <= SHORT)

    def finish(self, index: int, result: Reply | Failure) -> None:
        """Record a visit's result. Its tensors must not change until it is passed on, or ``own`` is called."""
        self._results[index] = result
        if isinstance(result, Reply) and isinstance(result.sums, PackedSums):
            self._numbers[self._kind] = result.sums.vector.numel()

    def own(self, indices: Iterable[int]) -> None:
        """Copy those of these results that still wait, because their memory will be reused."""
        for index in indices:
            result = self._results.get(index)
            if isinstance(result, Reply) and isinstance(result.sums, PackedSums):
                sums = PackedSums(result.sums.layout, result.sums.vector.clone())
                extra = {name: value.clone() for name, value in result.extra.items()}
                self._results[index] = replace(result, sums=sums, extra=extra)

    def fail(self, index: int, reason: str) -> None:
        """Record that a visit failed."""
        visit = self.visits[index]
        failure = Failure(visit.client, reason, visit.repeat) if isinstance(visit, Visit) else Failure(None, reason)
        self._results[index] = failure

    def worker_died(self, index: int, reason: str) -> None:
        """Repeat a visit, unless too many workers have died during it."""
        self._deaths[index] += 1
        if self._deaths[index] < DEATHS:
            self.again([index])
        else:
            self.fail(index, f"its worker process died {DEATHS} times ({reason})")

    def again(self, indices: Sequence[int]) -> None:
        """Reopen these visits, before all others."""
        self._open.extend(reversed(indices))

    def _next_open(self, numbers: int | None) -> int | None:
        """The longest open visit whose result could still wait if it is early."""
        reach = self._next + max(64, WAITING_BYTES // (DOUBLE * (numbers or 1)))
        for at in range(len(self._open) - 1, -1, -1):
            if self._open[at] < reach:
                return self._open.pop(at)
        return None
