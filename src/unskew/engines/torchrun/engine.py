"""The engine of rank 0, which has the run: it does visits itself and gives the other ranks visits to do.

Results are added in the order of the visits, so that the number of ranks does not change a bit of the sum. What a
client keeps goes to the rank that does its visit and comes back with the result: all of it is in rank 0's file, so
that a run can go on with another number of ranks, or in another engine. The record of secure sums goes the same way,
and all ranks share one secret: whichever does a client's next visit is the same member of the sum.
"""

import sys
import threading
from collections.abc import Sequence

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.tensors import laid_out
from unskew.core.types import Failure, Outcome, Progress, Tensors, TestPart, Visit
from unskew.engines.blueprint import Blueprint
from unskew.engines.jobs import JOBS
from unskew.engines.malloc import keep_freed_memory
from unskew.engines.parts import Spreading
from unskew.engines.torchrun.join import Known
from unskew.engines.torchrun.others import Others
from unskew.round.client import ClientSide
from unskew.round.client_memory import ClientMemory
from unskew.round.jobs import attempt, find_job

_AT_WORK = threading.Lock()  # the other ranks work for one engine at a time


class Ranks(Spreading):
    """This process and the other ranks. One that dies ends the run, which can be resumed."""

    def __init__(self, blueprint: Blueprint, data: Tensors, side: ClientSide, others: Sequence[Known]) -> None:
        super().__init__(side.population.roster, blueprint.local.epochs, side.memory)
        keep_freed_memory()
        self.progress: Progress | None = None
        self._side = side
        self._closed = False
        opening = {
            "open": blueprint.to_json() if others else {},
            "secret": side.secret.hex(),
            "remembers": side.memory is not None,
        }
        if not _AT_WORK.acquire(blocking=False):
            raise UserError("--engine torchrun: the other ranks still work for another run of this process")
        memory = side.memory if isinstance(side.memory, ClientMemory) else None
        self._others = Others(others, memory, side.sessions)
        try:
            self._others.open(opening, data)
        except BaseException:
            self.close()
            raise

    def map_sum(
        self, job: str, shared: Tensors, visits: Sequence[Visit | TestPart], key: Key, *, round: int = 0
    ) -> Outcome:
        """Spread the visits over the ranks, the long ones first, and add the results in the visits' order."""
        found = find_job(job, JOBS)
        work = self._work_of(job, visits)
        layout, values = laid_out(shared)
        begin = {"begin": job, "weights": layout, "seed": key.seed, "key": list(key.path)}
        try:
            with neutral():
                self._others.begin(work, begin, values)
                while places := self._others.next_own(work, self.progress):
                    for place in places:
                        result = attempt(self._side, found, shared, work.visits[place], key)
                        if isinstance(result, Failure):
                            self._others.fail(place, result.reason)
                        else:
                            self._others.finish(place, result.packed.layout, result.packed.vector, result.receipt)
        except KeyboardInterrupt:
            raise self._others.instead_of_interrupt() from None
        finally:
            self._others.end()
        return self._outcome_of(job, work)

    def close(self) -> None:
        """Let the other ranks wait for another run, and close the memories' file."""
        if self._closed:
            return
        self._closed = True
        if self._others.close():
            _AT_WORK.release()
        if self._side.memory is not None:
            self._side.memory.close()
        if self._side.sessions is not None:
            self._side.sessions.close()
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):  # on its way out, between two jobs
            raise self._others.instead_of_interrupt() from None
