"""The engine of rank 0, which has the run: it does visits itself and assigns visits to the other ranks.

Replies are yielded in visit order, so the number of ranks does not change the sums. A client's memory is sent to the
rank that does its visit and returned with the result: all memories are in rank 0's file, so a run can continue with
another number of ranks, or in another engine. The record of secure sums travels the same way, and all ranks share one
secret, so that a client is the same member of the sum on every rank.
"""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from unskew.core.errors import LostMemory, StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.tensors import Layout, PackedSums, under
from unskew.core.types import EVERYONE, Failure, Job, Note, Reply, Tensors, TestPart, Visit
from unskew.engines.blueprint import Blueprint, keep_freed_memory
from unskew.engines.codec import NO_TENSORS, Body
from unskew.engines.results import ResultFile, SharedFile, offer, open_offered
from unskew.engines.scheduler import Scheduler
from unskew.engines.torchrun.join import Rank
from unskew.engines.torchrun.link import ALIVE, Message, Writer, receive
from unskew.privacy.sessions import Sessions
from unskew.round.client import ClientSide, plan_ahead
from unskew.round.client_memory import ClientMemory
from unskew.round.jobs import answer, encode_job

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Handles this process's interrupts; outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.ending = False  # from then on interrupts are ignored
        self._received = threading.Event()
        self._ours = False  # whether the next interrupt is from ``interrupt``
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in INTERRUPTS}

    def interrupt(self) -> None:
        """Interrupt the main thread, from another thread."""
        self._ours = True
        _thread.interrupt_main()

    def restore(self, wait: float = 0.0) -> None:
        """Restore the handlers, after up to ``wait`` seconds for an interrupt that is expected."""
        if not self._before:
            return
        if wait:
            self._received.wait(wait)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._ours:
            self._received.set()
        self._ours = False
        before = self._before.get(number)
        if self.ending or before is signal.SIG_IGN:
            return
        self.ending = True
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt


AHEAD = 2  # groups of visits per rank: one running and one queued, so that it is never idle
SILENT_SECONDS = 15.0  # after which a silent rank counts as lost
CLOSE_SECONDS = 5.0  # for the other ranks to confirm the end of a run
SIGNAL_SECONDS = 2.0  # within which torchrun ends the ranks of a machine after one has died
RESUME = "the run can be resumed with any number of ranks, or without torchrun"


@dataclass
class _OtherRank:
    known: Rank
    writer: Writer = field(init=False)
    ready: bool = False
    left: bool = False  # whether it has announced its end
    tasks: list[list[int]] = field(default_factory=list)  # indices of its visits, by group
    layout: Layout | None = None  # of its last result, which rarely changes
    shares: bool = False  # whether it is on this machine and reads the model from shared memory
    files: list[ResultFile] = field(default_factory=list)  # for its sums, if it is on this machine
    slots: dict[int, list[int]] = field(default_factory=dict)  # the visits whose sums are or will be in each file


class OtherRanks:
    """The other ranks. A thread listens to each; the main thread collects the results."""

    def __init__(self, known: Sequence[Rank], memory: ClientMemory | None, sessions: Sessions | None = None) -> None:
        self._memory, self._sessions = memory, sessions
        self._changed = threading.Condition()  # guards the attributes below
        self._schedule: Scheduler | None = None
        self._added = 0  # results that the main thread no longer needs, in visit order
        self._number = 0  # of the current job; replies to earlier ones are ignored
        self._busy = False  # whether the main thread is doing a visit itself
        self._error: BaseException | None = None  # the first in any thread
        self._wait = 0.0  # seconds to wait for torchrun's signal
        self._interrupted = False  # whether another rank was interrupted
        self._signals = Signals()
        self._closing = False
        self._shared = SharedFile()  # the server's tensors, for ranks on this machine
        self._others = [_OtherRank(rank) for rank in known]
        for other in self._others:
            other.writer = Writer(other.known.rank, partial(self._lose, other))
        self._listeners = [Thread(target=self._listen, args=(other,), daemon=True) for other in self._others]
        for listener in self._listeners:
            listener.start()

    def open(self, opening: Message, data: Tensors) -> None:
        """Send every rank what it needs for any client's work, and wait until all are ready."""
        opening = opening | {"shared": offer(self._shared)}
        for other in self._others:
            other.writer.send(opening)
            for item in data.items():
                other.writer.send({"data": True}, [item])
            other.writer.send({"build": True})
        with self._changed:
            while not all(other.ready for other in self._others):
                self._raise_pending()
                self._changed.wait()

    def begin(self, schedule: Scheduler, job: Message, shared: Tensors) -> None:
        """Start a job on all ranks."""
        near, far = ([other for other in self._others if other.shares == local] for local in (True, False))
        layout = self._shared.write(shared) if near else []
        body = Body.of(shared.items()) if far else NO_TENSORS
        with self._changed:
            self._schedule, self._number, self._added = schedule, self._number + 1, 0
            for other in self._others:
                other.tasks.clear()
                other.slots.clear()
            for other in near:
                other.writer.send(job | {"layout": layout})
            for other in far:
                other.writer.send(job, body)
        self._hand_out()

    def take(self, schedule: Scheduler) -> list[Reply | Failure]:
        """The results that are next in visit order."""
        with self._changed:
            self._added = schedule.passed  # the caller has added all earlier results
            return list(iter(schedule.take, None))

    def next_own(self, schedule: Scheduler) -> list[int]:
        """The indices of visits for rank 0 itself; empty if a result can be passed on, or all have been."""
        with self._changed:
            self._busy = False
            while True:
                self._raise_pending()
                if schedule.done or schedule.ready:
                    return []
                if indices := schedule.next_group(len(self._others) + 1):
                    self._busy = threading.current_thread() is threading.main_thread()
                    return indices
                self._changed.wait()

    def finish(self, index: int, result: Reply | Failure) -> None:
        """Record rank 0's own result."""
        with self._changed:
            if self._schedule is not None:
                self._schedule.finish(index, result)
        self._hand_out()

    def end(self) -> None:
        """End the job."""
        with self._changed:
            self._schedule, self._busy = None, False

    def pending_error(self) -> BaseException:
        """The error behind an interrupt: torchrun sends one when a rank has died, and so do we."""
        with self._changed:
            if self._error is None and self._others and not self._closing:
                self._changed.wait(0.3)
            return self._error or KeyboardInterrupt()

    def close(self) -> bool:
        """Make the ranks wait for another run; returns whether all have confirmed."""
        self._closing = True
        for other in self._others:
            other.writer.send({"close": True})
        for listener in self._listeners:
            listener.join(CLOSE_SECONDS)
        for other in self._others:
            other.writer.finish(CLOSE_SECONDS)
            for file in other.files:
                file.close()
        self._shared.close()
        self._signals.restore(self._wait)
        return not any(listener.is_alive() for listener in self._listeners)

    def _hand_out(self) -> None:
        """Assign visits to ranks; a second group only while many are open, so that the last do not wait."""
        assigned = []
        with self._changed:
            schedule, number, ranks = self._schedule, self._number, len(self._others) + 1
            if schedule is None:
                return
            for other in self._others:
                while not other.tasks or (len(other.tasks) < AHEAD and schedule.may_queue(ranks)):
                    if not (indices := schedule.next_group(ranks)):
                        break
                    other.tasks.append(indices)
                    slot = self._free_slot(other, indices)
                    assigned.append((other, slot, [(index, schedule.visits[index]) for index in indices]))
        for other, slot, visits in assigned:
            tasks, memories = list[Message](), list[tuple[str, Tensor]]()
            for index, visit in visits:
                tasks.append({"index": index, "visit": visit, "record": self._record(visit)})
                if self._memory is not None and isinstance(visit, Visit) and visit.ticket is not None:
                    content = self._memory.content(visit.ticket, visit.client)
                    memories.append((str(index), torch.frombuffer(content, dtype=torch.uint8)))
            other.writer.send({"number": number, "tasks": tasks, "slot": slot}, memories)

    def _free_slot(self, other: _OtherRank, indices: list[int]) -> int | None:
        """The file for these visits' sums; None if the rank must send them."""
        for slot in range(len(other.files)):
            if all(index < self._added for index in other.slots.get(slot, ())):
                other.slots[slot] = indices
                return slot
        return None

    def _record(self, visit: Visit | TestPart) -> str:
        """The client's replies in secure sums, as text; empty if there are none."""
        if self._sessions is None or not isinstance(visit, Visit) or visit.client == EVERYONE:
            return ""
        return self._sessions.content(visit.client).hex()

    def _listen(self, other: _OtherRank) -> None:
        try:
            while True:
                message, tensors = receive(other.known.rank, SILENT_SECONDS)
                if "closed" in message:
                    return
                if "interrupted" in message:
                    other.left = True
                    self._notify(None)
                    return
                if ALIVE not in message:
                    self._hear(other, message, tensors)
        except ConnectionAbortedError:  # the thread that listens to the silent rank reports it
            return
        except ConnectionError as error:
            self._lose(other, str(error))

    def _hear(self, other: _OtherRank, message: Message, tensors: Tensors) -> None:
        try:
            if "refused" in message:
                raise UserError(f"{other.known.name}: {message['refused']}")
            if "storage" in message:
                kind = LostMemory if message["lost"] else StorageFailure
                raise kind(f"{other.known.name}: {message['storage']}")
            if "ready" in message:
                descriptors = [open_offered(*offered) for offered in message["files"]]
                with self._changed:
                    other.ready, other.shares = True, message["shares"]
                    other.files = [ResultFile(descriptor) for descriptor in descriptors if descriptor is not None]
                    self._changed.notify_all()
            else:
                self._take(other, message, tensors)
                self._hand_out()
        except Exception as error:  # noqa: BLE001  raised again in the main thread
            self._notify(error)

    def _take(self, other: _OtherRank, message: Message, tensors: Tensors) -> None:
        """Record the results of a group of visits."""
        results: list[Message] = message["results"]
        with self._changed:
            schedule = self._schedule if message["number"] == self._number else None
            if schedule is None:
                return
            if (indices := [result["index"] for result in results]) not in other.tasks:
                raise UserError(f"{other.known.name} replied to visits that it was not assigned")
        replies = [self._reply(other, schedule.visits[result["index"]], result, tensors) for result in results]
        with self._changed:
            other.tasks.remove(indices)
            for index, reply in zip(indices, replies, strict=True):
                if isinstance(reply, str):
                    schedule.fail(index, reply)
                else:
                    schedule.finish(index, reply)
            self._changed.notify_all()

    def _reply(self, other: _OtherRank, visit: Visit | TestPart, result: Message, tensors: Tensors) -> Reply | str:
        """A visit's reply, or why it failed; stores the client's memory and its record of secure sums."""
        index = result["index"]
        if isinstance(visit, Visit) and result.get("record") and self._sessions is not None:
            self._sessions.join(visit.client, bytes.fromhex(result["record"]))
        if "failure" in result:
            return str(result["failure"])
        if "layout" in result:  # JSON has no tuples
            other.layout = [(name, kind, shape, start) for name, kind, shape, start in result["layout"]]
        assert other.layout is not None
        ticket = None
        memory = tensors.get(f"{index}/kept")
        if memory is not None and isinstance(visit, Visit) and visit.slot is not None and self._memory is not None:
            ticket = self._memory.put(visit.slot, bytearray(memory.numpy()))
        extra = under(tensors, f"{index}/extra/")
        if "where" in result:
            slot, start, count = result["where"]
            return Reply(PackedSums(other.layout, other.files[slot].read(start, count)), extra, ticket)
        return Reply(PackedSums(other.layout, tensors[f"{index}/sums"]), extra, ticket)

    def _lose(self, other: _OtherRank, reason: str) -> None:
        if not other.left:
            lost = UserError(f"{other.known.name} is lost: {reason}; {RESUME}")
            self._notify(lost, SIGNAL_SECONDS * other.known.ended_with_us)

    def _notify(self, error: BaseException | None, wait: float = 0.0) -> None:
        """Report an error to the main thread, interrupting its own visit; None: another rank was interrupted."""
        with self._changed:
            if error is None:
                self._interrupted = True
            elif self._error is None and not self._closing:
                self._error, self._wait = error, wait
            if self._busy:
                self._busy = False
                self._signals.interrupt()
            self._changed.notify_all()

    def _raise_pending(self) -> None:
        if self._interrupted and self._error is None:
            self._changed.wait(0.5)  # until this process is interrupted too, or the loss of a rank is noticed
        if self._error is not None or self._interrupted:
            self._signals.ending = True
            raise self._error or KeyboardInterrupt


_AT_WORK = threading.Lock()  # the other ranks serve one engine at a time


class Ranks:
    """This process and the other ranks. If a rank dies, the run ends and can be resumed."""

    def __init__(self, blueprint: Blueprint, data: Tensors, side: ClientSide, others: Sequence[Rank]) -> None:
        keep_freed_memory()
        self._side, self._local = side, blueprint.local
        self.roster, self.memory = side.population.roster, side.memory_file
        self._numbers: dict[type, int] = {}
        self._closed = False
        opening: Message = {"open": blueprint.to_json() if others else {}, "secret": side.secret.hex()}
        opening["remembers"] = side.memory is not None
        if not _AT_WORK.acquire(blocking=False):
            raise UserError("--engine torchrun: the other ranks are still working on another run of this process")
        self._others = OtherRanks(others, self.memory, side.sessions)
        try:
            self._others.open(opening, data)
        except BaseException:
            self.close()
            raise

    def visit(
        self, job: Job, shared: Tensors, visits: Sequence[Visit] | Sequence[TestPart], key: Key
    ) -> Iterator[Reply | Failure | Note]:
        """Distribute the visits among the ranks, the longest first."""
        schedule = Scheduler(job, visits, self.roster, self._local, self._numbers)
        begin = {"begin": encode_job(job), "seed": str(key.seed), "key": list(key.path)}
        try:
            self._others.begin(schedule, begin, shared)
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
            raise self._others.pending_error() from None
        finally:
            self._others.end()

    def close(self) -> None:
        """Make the other ranks wait for another run, and close the files."""
        if self._closed:
            return
        self._closed = True
        if self._others.close():
            _AT_WORK.release()
        self._side.close()
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):  # between two jobs
            raise self._others.pending_error() from None
