"""One client after another in this process: the reference for what an engine does."""

from collections.abc import Iterator, Sequence

from unskew.core.key import Key
from unskew.core.types import Failure, Job, Note, Reply, Tensors, TestPart, Visit
from unskew.engines.blueprint import keep_freed_memory
from unskew.round.client import ClientSide
from unskew.round.jobs import answer


class Loop:
    """Client work on one thread, so that results do not depend on the number of cores."""

    def __init__(self, side: ClientSide) -> None:
        keep_freed_memory()
        self._side, self.roster, self.memory = side, side.population.roster, side.memory_file

    def visit(
        self, job: Job, shared: Tensors, visits: Sequence[Visit] | Sequence[TestPart], key: Key
    ) -> Iterator[Reply | Failure | Note]:
        """Do the job for each visit, in the context that ``add`` sets up once for all visits."""
        for visit in visits:
            yield answer(self._side, job, shared, visit, key)

    def close(self) -> None:
        """Close the files of memories and sessions."""
        self._side.close()
