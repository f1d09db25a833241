"""The engine of rank 0, which has the run: it does visits itself and gives the other ranks visits to do.

Replies come in the order of the visits, so the number of ranks does not change a bit of a sum. What a
client keeps goes to the rank that does its visit and comes back with the result: all of it is in rank 0's file, so
that a run can go on with another number of ranks, or in another engine. The record of secure sums goes the same way,
and all ranks share one secret: whichever does a client's next visit is the same member of the sum.
"""

import sys
import threading
from collections.abc import Iterator, Sequence

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.types import Failure, Job, MemoryStore, Note, Reply, Roster, Tensors, TestPart, Visit
from unskew.engines.blueprint import Blueprint, keep_freed_memory
from unskew.engines.codec import Body
from unskew.engines.scheduler import Scheduler
from unskew.engines.torchrun.join import Known
from unskew.engines.torchrun.others import Others
from unskew.round.client import ClientSide, plan_ahead
from unskew.round.client_memory import ClientMemory
from unskew.round.jobs import answer, encode_job

_AT_WORK = threading.Lock()  # the other ranks work for one engine at a time


class Ranks:
    """This process and the other ranks. One that dies ends the run, which can be resumed."""

    def __init__(self, blueprint: Blueprint, data: Tensors, side: ClientSide, others: Sequence[Known]) -> None:
        keep_freed_memory()
        self._side, self._epochs = side, blueprint.local.epochs
        self._numbers: dict[type, int] = {}
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

    @property
    def roster(self) -> Roster:
        """All clients of the simulation."""
        return self._side.population.roster

    @property
    def memory(self) -> MemoryStore | None:
        """The file of what clients keep between visits; it is rank 0's."""
        return self._side.memory if isinstance(self._side.memory, ClientMemory) else None

    def visit(
        self, job: Job, shared: Tensors, visits: Sequence[Visit] | Sequence[TestPart], key: Key
    ) -> Iterator[Reply | Failure | Note]:
        """Spread the visits over the ranks, the long ones first."""
        schedule = Scheduler(job, visits, self.roster, self._epochs, self._numbers)
        begin = {"begin": encode_job(job), "seed": str(key.seed), "key": list(key.path)}
        try:
            self._others.begin(schedule, begin, Body.of(shared.items()))
            while True:
                yield from self._others.take(schedule)
                if not (indices := self._others.next_own(schedule)):
                    if schedule.done:
                        return
                    continue
                with neutral():
                    plan_ahead(self._side, job, shared, [visits[index] for index in indices], key)
                    for index in indices:
                        self._others.finish(index, answer(self._side, job, shared, visits[index], key))
        except KeyboardInterrupt:
            raise self._others.instead_of_interrupt() from None
        finally:
            self._others.end()

    def close(self) -> None:
        """Let the other ranks wait for another run, and close the memories' file."""
        if self._closed:
            return
        self._closed = True
        if self._others.close():
            _AT_WORK.release()
        self._side.close()
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):  # on its way out, between two jobs
            raise self._others.instead_of_interrupt() from None
