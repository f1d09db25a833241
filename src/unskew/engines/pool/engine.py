"""One process a core, one thread each, data and weights in shared memory: the default on a CPU.

On a small network two processes of one thread do about a third more than one process of two threads. Results are
added in the order of the visits, so that the number of workers does not change a bit of the sum.
"""

import os
import selectors
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from unskew.core.context import neutral
from unskew.core.errors import LostMemory, StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.machine import device_count, files_left, resolve_device, too_many_files, worker_device
from unskew.core.roster import Roster
from unskew.core.tensors import Layout
from unskew.core.types import Failure, Outcome, Progress, Sums, Tensors, TestPart, Visit
from unskew.data.population import Population
from unskew.engines.blueprint import Blueprint
from unskew.engines.pool.process import Worker, unpack
from unskew.engines.pool.shared import SharedFile
from unskew.privacy.sessions import Sessions
from unskew.round.client_memory import ClientMemory, Slots

FILES = 12  # open at one time while a worker is started, beside those that stay
FILES_OF_WORKER = 6  # that stay open: its line, its life line, its results, its standard error
DEATHS = 3  # how often a visit may take its worker with it before it counts as failed
WAITING_BYTES = 512 * 2**20  # results held back because an earlier visit is not done yet


class Pool:
    """Workers that live as long as the engine, and are replaced when they die. The shared data become its own."""

    def __init__(
        self, blueprint: Blueprint, data: SharedFile, layout: Layout, workers: int, memory: ClientMemory | None = None,
        secret: bytes = b"", sessions: Sessions | None = None,
    ) -> None:  # fmt: skip
        if (needed := FILES + workers * FILES_OF_WORKER) > files_left():
            wanted = f"a pool of {workers} workers needs {needed} more open files"
            raise UserError(f"{too_many_files(wanted)}, or give fewer --workers, or --engine loop")
        tensors = data.read(layout)
        self.roster = Population(tensors["population/order"].numpy(), tensors["population/offsets"].numpy()).roster
        self._memory, self._slots = memory, Slots()
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
        work = _Work(self._slots.assign(visits), [_length(self.roster, job, visit) for visit in visits])
        with neutral():  # the workers have the cores: a second thread here would wait for one of them at every sum
            while not work.done:
                for worker in self._workers:
                    self._feed(worker, work)
                for selected, _ in self._selector.select():
                    self._hear(selected.data, work, begin)
                if self.progress is not None:
                    self.progress(work.added, len(visits))
        outcome = work.outcome()
        self._slots.give_back(work.visits, outcome.receipts)
        return outcome

    def accept(self, superseded: Iterable[str]) -> None:
        """The server has the last receipts; older memories may be overwritten, unless a checkpoint refers to them."""
        self._slots.accept(superseded)

    def sync(self) -> None:
        """Make every memory durable."""
        if self._memory is not None:
            self._memory.sync()

    def pin(self, tickets: Iterable[str]) -> None:
        """A checkpoint refers to these memories and to no others."""
        tickets = list(tickets)
        if self._memory is not None:
            self._memory.require(tickets)
        self._slots.pin(tickets)

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
        worker = Worker([self._data, self._weights], self._sessions, self._memory, hello, number)
        self._workers.append(worker)
        self._selector.register(worker.line.connection, selectors.EVENT_READ, worker)
        return worker

    def _feed(self, worker: Worker, work: "_Work") -> None:
        """Give a worker its next task; a second one only while many are open, so that the last do not queue."""
        while worker.ready and (slot := worker.free_slot()) is not None:
            if worker.tasks and len(work.open) < 4 * len(self._workers):
                return
            if (place := work.next_place()) is None:
                return
            worker.tasks[slot] = place
            worker.send({"place": place, "slot": slot, "visit": asdict(work.visits[place])})

    def _hear(self, worker: Worker, work: "_Work", begin: dict[str, Any]) -> None:
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

    def _take(self, worker: Worker, message: dict[str, Any], work: "_Work") -> None:
        place, slot = message["place"], message["slot"]
        if worker.tasks.get(slot) != place:
            raise RuntimeError(f"a worker answered for visit {place}, which it was not given")
        if "storage" in message:
            raise (LostMemory if message["lost"] else StorageFailure)(message["storage"])
        if "failure" in message:
            work.fail(place, message["failure"])
        else:
            work.finish(place, *worker.result(slot, message.get("layout")), receipt=message.get("receipt"))
        del worker.tasks[slot]

    def _replace(self, worker: Worker, work: "_Work", begin: dict[str, Any]) -> None:
        """A worker died: another takes its place and its visits are done again."""
        self._selector.unregister(worker.line.connection)
        self._workers.remove(worker)
        reason = worker.exit_reason()
        places = list(worker.tasks.values())
        worker.close()
        if not worker.ready:
            self._failed_starts += 1
        if self._failed_starts >= DEATHS:
            raise UserError(f"worker processes cannot start ({reason}); --engine loop does without them")
        for place in places:
            work.worker_died(place, reason)
        self._start(worker.number).send(begin)


@dataclass
class _Work:
    """The state of one map_sum: what is open, what is running, what is waiting to be added."""

    visits: Sequence[Visit | TestPart]
    lengths: Sequence[int]
    open: list[int] = field(init=False)
    added: int = 0  # visits up to here are in the sum, or have failed
    waiting: dict[int, tuple[Layout, Tensor] | None] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    receipts: dict[int, str] = field(default_factory=dict)  # by client
    layout: Layout | None = None
    total: Tensor | None = None

    def __post_init__(self) -> None:
        self.open = sorted(
            range(len(self.visits)), key=lambda place: (self.lengths[place], -place)
        )  # taken from the end

    @property
    def done(self) -> bool:
        return self.added == len(self.visits)

    def next_place(self) -> int | None:
        """The longest open visit whose result could still be held back if it came too early."""
        size = 8 * self.total.numel() if self.total is not None else 1
        reach = self.added + max(64, WAITING_BYTES // size)
        for at in range(len(self.open) - 1, -1, -1):
            if self.open[at] < reach:
                return self.open.pop(at)
        return None

    def finish(self, place: int, layout: Layout, vector: Tensor, receipt: str | None) -> None:
        visit = self.visits[place]
        if receipt is not None and isinstance(visit, Visit):
            self.receipts[visit.client] = receipt
        # a result that is next is added in place; one that is early is copied, since its slot will be reused
        self.waiting[place] = (layout, vector if place == self.added else vector.clone())
        self._add_what_is_next()

    def fail(self, place: int, reason: str) -> None:
        self.failures[place] = reason
        self.waiting[place] = None
        self._add_what_is_next()

    def worker_died(self, place: int, reason: str) -> None:
        self.deaths[place] = self.deaths.get(place, 0) + 1
        if self.deaths[place] < DEATHS:
            self.open.append(place)
        else:
            self.fail(place, f"its worker process died {DEATHS} times ({reason})")

    def outcome(self) -> Outcome:
        failures = tuple(_failure(self.visits[place], self.failures[place]) for place in sorted(self.failures))
        sums: Sums = {} if self.layout is None or self.total is None else unpack(self.layout, self.total)
        return Outcome(sums, failures, self.receipts)

    def _add_what_is_next(self) -> None:
        while self.added in self.waiting:
            result = self.waiting.pop(self.added)
            if result is not None:
                layout, vector = result
                if self.total is None:
                    self.layout, self.total = layout, vector.clone()
                elif layout != self.layout:
                    raise ValueError("sums with other entries cannot be added")
                else:
                    self.total += vector
            self.added += 1


def _failure(visit: Visit | TestPart, reason: str) -> Failure:
    return Failure(visit.client, reason, visit.repeat) if isinstance(visit, Visit) else Failure(None, reason)


def _length(roster: Roster, job: str, visit: Visit | TestPart) -> int:
    """How long a visit takes beside others, in examples: the long ones are begun first."""
    if isinstance(visit, TestPart) or not job.partition(" ")[0].endswith("train"):  # masked and rounded too
        return 1
    return roster.size(visit.client) if visit.take is None else visit.take
