"""One process a core, one thread each, data and weights in shared memory: the default on a CPU.

On a small network two processes of one thread do about a third more than one process of two threads. Results are
added in the order of the visits, so that the number of workers does not change a bit of the sum.
"""

import os
import selectors
import sys
from collections.abc import Sequence
from typing import Any

from unskew.core.errors import LostMemory, StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.machine import device_count, files_left, neutral, resolve_device, too_many_files, worker_device
from unskew.core.tensors import Layout
from unskew.core.types import Outcome, Progress, Tensors, TestPart, Visit
from unskew.data.population import Population
from unskew.engines.blueprint import Blueprint
from unskew.engines.parts import Spreading
from unskew.engines.pool.process import Worker
from unskew.engines.pool.shared import SharedFile
from unskew.engines.work import DEATHS, Work
from unskew.privacy.sessions import Sessions
from unskew.round.client_memory import ClientMemory

FILES = 12  # open at one time while a worker is started, beside those that stay
FILES_OF_WORKER = 9  # that stay open: its line, its life line, its results and their mappings, its standard error
AHEAD = 2  # groups of visits that a worker has at once: it begins the second while the parent takes the first


class Pool(Spreading):
    """Workers that live as long as the engine, and are replaced when they die. The shared data become its own."""

    def __init__(
        self, blueprint: Blueprint, data: SharedFile, layout: Layout, workers: int, memory: ClientMemory | None = None,
        secret: bytes = b"", sessions: Sessions | None = None,
    ) -> None:  # fmt: skip
        if (needed := FILES + workers * FILES_OF_WORKER) > files_left():
            wanted = f"a pool of {workers} workers needs {needed} more open files"
            raise UserError(f"{too_many_files(wanted)}, or give fewer --workers, or --engine loop")
        tensors = data.read(layout)
        population = Population(tensors["population/order"].numpy(), tensors["population/offsets"].numpy())
        super().__init__(population.roster, blueprint.local.epochs, memory)
        self._file = memory  # which its workers write to
        self._sessions = sessions or Sessions.temporary()
        self.progress: Progress | None = None
        self._data, self._weights = data, SharedFile()
        self._hello: dict[str, Any] = {
            "blueprint": blueprint.to_json(),
            "data": layout,
            "path": [os.path.abspath(each) for each in sys.path],  # another working directory changes nothing
            "secret": secret.hex(),
        }
        self._device = resolve_device(blueprint.device)
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._failed_starts = 0
        for number in range(workers):
            self._start(number)

    def map_sum(
        self, job: str, shared: Tensors, visits: Sequence[Visit | TestPart], key: Key, *, round: int = 0
    ) -> Outcome:
        """Spread the visits over the workers, the long ones first, and add the results in the visits' order."""
        begin = {"begin": job, "weights": self._weights.write(shared), "seed": key.seed, "key": list(key.path)}
        for worker in self._workers:
            worker.send(begin)
        work = self._work_of(job, visits)
        with neutral():  # the workers have the cores: a second thread here would wait for one of them at every sum
            while not work.done:
                for worker in self._workers:
                    self._feed(worker, work)
                for selected, _ in self._selector.select():
                    self._hear(selected.data, work, begin)
                if self.progress is not None:
                    self.progress(work.added, len(visits))
        return self._outcome_of(job, work)

    def close(self) -> None:
        """End the workers and give the memory back."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._selector.close()
        for file in (self._weights, self._data, self._memory, self._sessions):
            if file is not None:
                file.close()

    def _start(self, number: int) -> Worker:
        device = worker_device(self._device, device_count(self._device), number)
        hello = self._hello | {"blueprint": self._hello["blueprint"] | {"device": device}}
        worker = Worker([self._data, self._weights], self._sessions, self._file, hello, number)
        self._workers.append(worker)
        self._selector.register(worker.line.connection, selectors.EVENT_READ, worker)
        return worker

    def _feed(self, worker: Worker, work: Work) -> None:
        """Give a worker its next visits; a second group only while many are open, so that the last do not queue."""
        while worker.ready and len(worker.tasks) < AHEAD:
            if worker.tasks and not work.may_queue(len(self._workers)):
                return
            if (slot := self._free_slot(worker, work)) is None or not (places := work.next_group(len(self._workers))):
                return
            worker.tasks[slot] = places
            worker.send({"slot": slot, "visits": [(place, vars(work.visits[place])) for place in places]})

    def _free_slot(self, worker: Worker, work: Work) -> int | None:
        """A slot for the next group's results; those of a worker that has nothing to do are copied out of one."""
        for slot in [slot for slot, places in worker.held.items() if not any(p in work.waiting for p in places)]:
            del worker.held[slot]
        if (free := worker.free_slot()) is not None or worker.tasks:
            return free
        slot, places = worker.held.popitem()
        work.own(places)
        return slot

    def _hear(self, worker: Worker, work: Work, begin: dict[str, Any]) -> None:
        while True:
            message = worker.line.receive()
            if message is None:
                self._replace(worker, work, begin)
                return
            if "ready" in message:
                worker.ready = True
            else:
                self._take(worker, message, work)
            if not worker.line.waiting():
                return

    def _take(self, worker: Worker, message: dict[str, Any], work: Work) -> None:
        slot, results = message["slot"], message["results"]
        if "storage" in message:
            raise (LostMemory if message["lost"] else StorageFailure)(message["storage"])
        if (places := [result["place"] for result in results]) != worker.tasks.pop(slot, None):
            raise RuntimeError(f"a worker answered for visits {places}, which it was not given")
        worker.held[slot] = places
        for result in results:
            if "failure" in result:
                work.fail(result["place"], result["failure"])
            else:
                layout, vector = worker.result(slot, result["where"], result.get("layout"))
                work.finish(result["place"], layout, vector, result.get("receipt"), borrowed=False)

    def _replace(self, worker: Worker, work: Work, begin: dict[str, Any]) -> None:
        """A worker died: another takes its place and its visits are done again."""
        self._selector.unregister(worker.line.connection)
        self._workers.remove(worker)
        reason, running = worker.exit_reason(), worker.running()
        places = [place for group in worker.tasks.values() for place in group]
        worker.close()
        if not worker.ready:
            self._failed_starts += 1
        if self._failed_starts >= DEATHS:
            raise UserError(f"worker processes cannot start ({reason}); --engine loop does without them")
        work.again([place for place in places if running is not None and place != running])
        for place in places if running is None else [running]:
            work.worker_died(place, reason)
        self._start(worker.number).send(begin)
