"""One client after another in this process: the definition of what an engine does."""

from collections.abc import Sequence

from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.tensors import one_thread
from unskew.core.types import Failure, Outcome, Progress, Sums, Tensors, Visit
from unskew.engines.malloc import keep_freed_memory
from unskew.round.client import ClientSide, attempt
from unskew.round.client import job as find


class Loop:
    """Client work on one thread, so that its result does not depend on the machine's number of cores."""

    name = "loop"

    def __init__(self, side: ClientSide) -> None:
        keep_freed_memory()
        self.population, self.memories = side.population, side.memories
        self.progress: Progress | None = None
        self._side = side

    def map_sum(self, job: str, shared: Tensors, visits: Sequence[Visit], key: Key) -> Outcome:
        """Do the job for each visit and add up what comes out."""
        total: Sums | None = None
        failures = []
        work = find(self._side, job)
        with one_thread():
            for place, visit in enumerate(visits, 1):
                result = attempt(work, shared, visit, key)
                if isinstance(result, Failure):
                    failures.append(result)
                else:
                    total = tensors.add(total, result)
                if self.progress is not None:
                    self.progress(place, len(visits))
        return Outcome(total or {}, tuple(failures))

    def close(self) -> None:
        """Give the memories' file back."""
        if self.memories is not None:
            self.memories.close()
