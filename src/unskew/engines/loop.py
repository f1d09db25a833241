"""One client after another in this process: the definition of what an engine does."""

from collections.abc import Sequence

from unskew import tensors
from unskew.engines.memory import keep_freed_memory
from unskew.key import Key
from unskew.round.client import Bench, attempt
from unskew.round.client import job as find
from unskew.tensors import one_thread
from unskew.types import Failure, Outcome, Progress, Sums, Tensors, Visit


class Loop:
    """Client work on one thread, so that its result does not depend on the machine's number of cores."""

    name = "loop"

    def __init__(self, bench: Bench) -> None:
        keep_freed_memory()
        self.population, self.memories = bench.population, bench.memories
        self.progress: Progress | None = None
        self._bench = bench

    def map_sum(self, job: str, shared: Tensors, visits: Sequence[Visit], key: Key) -> Outcome:
        """Do the job for each visit and add up what comes out."""
        total: Sums | None = None
        failures = []
        work = find(self._bench, job)
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
