"""One client after another in this process: the definition of what an engine does."""

from collections.abc import Sequence

from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.types import Failure, Outcome, Progress, Tensors, TestPart, Visit
from unskew.engines.jobs import JOBS
from unskew.engines.malloc import keep_freed_memory
from unskew.engines.outcomes import Total
from unskew.engines.parts import Remembering
from unskew.round.client import ClientSide
from unskew.round.jobs import attempt, find_job


class Loop(Remembering):
    """Client work on one thread, so that its result does not depend on the machine's number of cores."""

    def __init__(self, side: ClientSide) -> None:
        super().__init__(side.memory)
        keep_freed_memory()
        self.roster = side.population.roster
        self.progress: Progress | None = None
        self._side = side

    def map_sum(
        self, job: str, shared: Tensors, visits: Sequence[Visit | TestPart], key: Key, *, round: int = 0
    ) -> Outcome:
        """Do the job for each visit and add up the results."""
        total = Total()
        failures, receipts = [], dict[int, str]()
        work, assigned = find_job(job, JOBS), self._slots.assign(visits)
        with neutral():
            for place, visit in enumerate(assigned, 1):
                result = attempt(self._side, work, shared, visit, key)
                if isinstance(result, Failure):
                    failures.append(result)
                else:
                    total.add(result.packed)
                    if result.receipt is not None and isinstance(visit, Visit):
                        receipts[visit.client] = result.receipt
                if self.progress is not None:
                    self.progress(place, len(visits))
        self._slots.give_back(assigned, receipts)
        return Outcome(total.sums(), tuple(failures), receipts)

    def close(self) -> None:
        """Close the files of memories and sessions."""
        for file in (self._side.memory, self._side.sessions):
            if file is not None:
                file.close()
