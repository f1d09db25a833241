"""One process per core, one thread each, data and weights in shared memory: the default on a CPU.

On a small network, two processes with one thread are about a third faster than one process with two threads. Replies
are yielded in visit order, so the number of workers does not change the sums.
"""

import os
import selectors
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from unskew.core.child import Child, JsonLines, start_worker
from unskew.core.errors import LostMemory, StorageFailure, UserError, describe_error
from unskew.core.key import Key
from unskew.core.machine import files_left, too_many_files, worker_device
from unskew.core.tensors import DOUBLE, Layout, PackedSums
from unskew.core.types import Failure, Job, Local, Note, Reply, Roster, Tensors, TestPart, Visit
from unskew.data.batches import examples_for
from unskew.engines.blueprint import Blueprint, build, keep_freed_memory
from unskew.engines.results import ResultFile, SharedFile
from unskew.privacy.sessions import Sessions
from unskew.round.client import ClientSide, Train, plan_ahead
from unskew.round.jobs import answer, decode_job, encode_job

if TYPE_CHECKING:
    from unskew.engines.torchrun import Rank, RankZero

FILES = 12  # open only while a worker starts
FILES_OF_WORKER = 9  # that stay open: two connections, its results and their mappings, its standard error
AHEAD = 2  # groups of visits that a worker has at once: it starts the second while the parent handles the first
SLOTS = 3  # result files of a worker: for the current group, the next one, and one waiting to be added
PATIENCE = 2.0  # seconds for a worker to exit by itself
DEATHS = 3  # worker deaths after which a visit counts as failed
WAITING_BYTES = 512 * 2**20  # limit for results that wait for an earlier visit
SHORT = 128  # examples; shorter visits may queue at a busy worker even if few are left
GROUP = 8  # maximum number of visits in a group
GROUP_EXAMPLES = 512  # a group with this many examples is full, so long visits are assigned one by one
GROUP_BYTES = 8 * 2**20  # limit for a group's results


class Hello(msgspec.Struct, tag="hello"):
    """What a worker builds its client side from."""

    blueprint: dict[str, Any]
    data: Layout
    secret: bytes
    number: int  # decides the worker's device if there are several


class Begin(msgspec.Struct, tag="begin"):
    """The job of the following visits."""

    number: int
    job: dict[str, Any]
    weights: Layout
    seed: str  # too large for an integer in JSON
    key: list[int | str]


class VisitGroup(msgspec.Struct, tag="group", omit_defaults=True):
    """Visits to do, each with its index in the job; ``slot`` is the file for their results."""

    slot: int
    visits: list[tuple[int, Visit]] = []
    parts: list[tuple[int, TestPart]] = []


class VisitResult(msgspec.Struct, omit_defaults=True):
    """The result of one visit: where its sums and extra are in the slot's file, or why it failed."""

    index: int
    failure: str | None = None
    where: tuple[int, int] | None = None
    layout: Layout | None = None  # None: as in the worker's last result
    extra: Layout = []
    ticket: str | None = None


class GroupResults(msgspec.Struct, tag="results", omit_defaults=True):
    """The results of a group of visits; ``storage``: why the clients' memories cannot be stored."""

    number: int
    slot: int
    results: list[VisitResult]
    storage: str = ""
    lost: bool = False


class Ready(msgspec.Struct, tag="ready"):
    """The worker has built its client side, or says why it cannot."""

    refused: str = ""


@dataclass(frozen=True)
class WorkerFiles:
    """The files that a worker shares with its parent, whose client side has those of memories and sessions."""

    data: SharedFile
    weights: SharedFile
    results: list[ResultFile]
    side: ClientSide

    @property
    def descriptors(self) -> list[int]:
        """The descriptors, in the order of the arguments of ``serve``."""
        own = (self.side.sessions, self.side.memory_file)
        return [file.descriptor for file in (self.data, self.weights, *self.results, *own) if file is not None]


class Scheduler:
    """The visits of one job: which are open or running, and which results wait for an earlier one.

    ``numbers`` has how many numbers a reply has, by type of job, and is updated for the next job.
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

    def results(self) -> Iterator[Reply | Failure]:
        """Yield the results that are ready, in visit order."""
        while (result := self._results.pop(self._next, None)) is not None:
            self._next += 1
            yield result

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


class Pool:
    """Worker processes, replaced when they die, and ranks of torchrun. The pool owns and closes the shared data."""

    def __init__(
        self,
        blueprint: Blueprint,
        data: SharedFile,
        layout: Layout,
        workers: int,
        side: ClientSide,
        ranks: "Sequence[Rank]" = (),
    ) -> None:
        if (needed := FILES + workers * FILES_OF_WORKER) > files_left():
            problem = f"a pool of {workers} workers needs to open {needed} more files"
            raise UserError(f"{too_many_files(problem)}, or give fewer --workers, or --engine loop")
        self._side, self._local = side, blueprint.local
        self.roster, self.memory = side.population.roster, side.memory_file  # the workers share the file
        self._data, self._weights = data, SharedFile()
        self._blueprint, self._layout = blueprint.to_json(), layout
        self._ranks = ranks
        self._numbers: dict[type, int] = {}  # how many numbers a reply has, by type of job
        self._job = 0  # number of the current job; results of earlier ones are ignored
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._failed_starts = 0
        for number in range(workers):
            self._start(number)
        for rank in ranks:
            self._start(rank.joined.local_rank, rank)

    def visit(
        self, job: Job, shared: Tensors, visits: Sequence[Visit] | Sequence[TestPart], key: Key
    ) -> Iterator[Reply | Failure | Note]:
        """Distribute the visits among the workers, the longest first."""
        self._job += 1
        begin = Begin(self._job, encode_job(job), self._weights.write(shared), str(key.seed), list(key.path))
        for worker in self._workers:
            worker.child.send(begin)
        schedule = Scheduler(job, visits, self.roster, self._local, self._numbers)
        while True:
            yield from schedule.results()
            if schedule.done:
                return
            for worker in self._workers:
                self._feed(worker, schedule)
            for selected, _ in self._selector.select(1.0 if self._ranks else None):
                self._receive(selected.data, schedule, begin)
            for rank in self._ranks:
                rank.check_heard()

    def close(self) -> None:
        """End the workers and release the shared memory."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._selector.close()
        self._weights.close()
        self._data.close()
        self._side.close()

    def _start(self, number: int, rank: "Rank | None" = None) -> "Worker":
        files = WorkerFiles(self._data, self._weights, [ResultFile() for _ in range(SLOTS)], self._side)
        child = start_worker(__name__, *files.descriptors) if rank is None else rank.attach(files)
        child.send(Hello(self._blueprint, self._layout, self._side.secret, number))
        worker = Worker(child, files.results, number)
        self._workers.append(worker)
        self._selector.register(worker.child, selectors.EVENT_READ, worker)
        return worker

    def _feed(self, worker: "Worker", schedule: Scheduler) -> None:
        """Send a worker its next visits; a second group only while many are open, so that the last do not wait."""
        while worker.ready and len(worker.tasks) < AHEAD:
            if worker.tasks and not schedule.may_queue(len(self._workers)):
                return
            slot = self._free_slot(worker, schedule)
            if slot is None or not (indices := schedule.next_group(len(self._workers))):
                return
            worker.tasks[slot] = indices
            group = [(index, schedule.visits[index]) for index in indices]
            visits = [(index, visit) for index, visit in group if isinstance(visit, Visit)]
            parts = [(index, part) for index, part in group if isinstance(part, TestPart)]
            worker.child.send(VisitGroup(slot, visits, parts))

    def _free_slot(self, worker: "Worker", schedule: Scheduler) -> int | None:
        """A slot for the next group's results; for an idle worker, one is freed by copying its results."""
        for slot in [slot for slot, indices in worker.held.items() if not schedule.waits(indices)]:
            del worker.held[slot]
        free = next((slot for slot in range(SLOTS) if slot not in worker.tasks and slot not in worker.held), None)
        if free is not None or worker.tasks:
            return free
        slot, indices = worker.held.popitem()
        schedule.own(indices)
        return slot

    def _receive(self, worker: "Worker", schedule: Scheduler, begin: Begin) -> None:
        while True:
            message = worker.child.receive(Ready | GroupResults)
            if message is None:
                self._replace(worker, schedule, begin)
                return
            if isinstance(message, GroupResults):
                self._record(worker, message, schedule)
            elif isinstance(message, Ready) and message.refused:
                raise UserError(f"{worker.child.name} cannot start: {message.refused}")
            worker.ready = worker.ready or isinstance(message, Ready)
            if not worker.child.pending():
                return

    def _record(self, worker: "Worker", message: GroupResults, schedule: Scheduler) -> None:
        if message.storage:
            raise (LostMemory if message.lost else StorageFailure)(message.storage)
        worker.tasks.pop(message.slot, None)
        current = message.number == self._job
        if current:
            worker.held[message.slot] = [result.index for result in message.results]
        for result in message.results:
            worker.layout = worker.layout if result.layout is None else result.layout
            if current and result.failure is not None:
                schedule.fail(result.index, result.failure)
            elif current:
                schedule.finish(result.index, worker.read(message.slot, result))

    def _replace(self, worker: "Worker", schedule: Scheduler, begin: Begin) -> None:
        """Replace a worker that died, and repeat its visits."""
        reason, running = worker.child.exit_reason(), worker.running()
        self._selector.unregister(worker.child)
        self._workers.remove(worker)
        indices = [index for group in worker.tasks.values() for index in group]
        worker.close()
        if not worker.ready:
            self._failed_starts += 1
        if self._failed_starts >= DEATHS:
            raise UserError(f"worker processes cannot start ({reason}); use --engine loop, which does not need them")
        schedule.again([index for index in indices if running is not None and index != running])
        for index in indices if running is None else [running]:
            schedule.worker_died(index, reason)
        self._start(worker.number).child.send(begin)


class Worker:
    """The parent's side of a worker, and the memory that its results are written to."""

    def __init__(self, child: "Child | Rank", results: list[ResultFile], number: int) -> None:
        self.child, self._results, self.number = child, results, number
        self.ready = False
        self.tasks: dict[int, list[int]] = {}  # the indices of its current visits, by slot
        self.held: dict[int, list[int]] = {}  # the indices whose results may still be needed, by slot
        self.layout: Layout = []  # of its last result; sent only when it changes

    def read(self, slot: int, result: VisitResult) -> Reply:
        """A visit's reply: views of the slot's memory."""
        assert result.where is not None
        file = self._results[slot]
        extra = file.read(result.extra) if result.extra else {}
        return Reply(PackedSums(self.layout, file.vector(*result.where)), extra, result.ticket)

    def running(self) -> int | None:
        """The index of the visit during which the worker died; None if there was none."""
        indices = (self._results[slot].running[0] for slot in self.tasks)
        return next((index for index in indices if any(index in group for group in self.tasks.values())), None)

    def close(self) -> None:
        """End the process and close its files."""
        self.child.end(PATIENCE)
        for file in self._results:
            file.close()


def main(parent: JsonLines, *descriptors: int) -> None:
    """A worker process: answer until the parent exits."""
    if (hello := parent.receive(Hello)) is not None:
        serve(parent, hello, *descriptors)


def serve(parent: "JsonLines | RankZero", hello: Hello, data: int, weights: int, *others: int) -> None:
    """Answer until the parent sends anything but jobs and visits, or exits; close the files.

    The descriptors are those of the data, the weights, SLOTS result files, the sessions and, if the method has any,
    the memories.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    desk, (sessions, *memories) = None, others[SLOTS:]
    try:
        blueprint = Blueprint.from_json(hello.blueprint)
        blueprint = replace(blueprint, device=worker_device(blueprint.device, hello.number))
        side = build(blueprint, SharedFile(data).read(hello.data), *memories)
        side = replace(side, secret=hello.secret, sessions=Sessions(sessions))
        desk = Desk(side, [ResultFile(descriptor) for descriptor in others[:SLOTS]])
    except Exception as error:  # noqa: BLE001  the parent reports it
        parent.send(Ready(describe_error(error)))
    else:
        parent.send(Ready())
    inbox = SharedFile(weights)
    while isinstance(message := parent.receive(Begin | VisitGroup), Begin | VisitGroup) and desk is not None:
        if isinstance(message, Begin):
            desk.begin(message, inbox.read(message.weights))
        else:
            parent.send(desk.answer(message))
    if desk is not None:
        side.close()
    for descriptor in (data, weights, *others[:SLOTS], *([] if desk else others[SLOTS:])):
        os.close(descriptor)


class Desk:
    """Does the visits of a job in a worker, group by group."""

    def __init__(self, side: ClientSide, files: list[ResultFile]) -> None:
        self._files, self._file = files, files[0]
        self._side = replace(side, room=lambda count: self._file.room(count))  # updates are computed in shared memory
        self._layout: Layout | None = None  # the last one sent to the parent: long, and rarely different

    def begin(self, message: Begin, shared: Tensors) -> None:
        """Start a job."""
        self._number, self._shared = message.number, shared
        self._job, self._key = decode_job(message.job), Key(int(message.seed), tuple(message.key))

    def answer(self, group: VisitGroup) -> GroupResults:
        """Do a group of visits, and return the message for the parent."""
        self._file = self._files[group.slot]
        self._file.clear()
        results: list[VisitResult] = []
        plan_ahead(self._side, self._job, self._shared, [visit for _, visit in group.visits], self._key)
        visits: list[tuple[int, Visit | TestPart]] = [*group.visits, *group.parts]
        try:
            for index, visit in visits:
                self._file.running[0] = index
                results.append(self._visit(index, visit))
        except StorageFailure as error:
            return GroupResults(self._number, group.slot, [], str(error), isinstance(error, LostMemory))
        return GroupResults(self._number, group.slot, results)

    def _visit(self, index: int, visit: Visit | TestPart) -> VisitResult:
        reply = answer(self._side, self._job, self._shared, visit, self._key)
        if isinstance(reply, Failure):
            return VisitResult(index, reply.reason)
        assert isinstance(reply.sums, PackedSums)
        where, layout = self._file.append(reply.sums.vector), reply.sums.layout
        extra = self._file.append_tensors(dict(reply.extra)) if reply.extra else []
        new = layout is not self._layout and layout != self._layout
        self._layout = layout
        return VisitResult(index, None, where, layout if new else None, extra, reply.ticket)
