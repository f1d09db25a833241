"""The other ranks as rank 0 sees them: opened, given visits, heard, noticed when they die."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Thread

import torch
from torch import Tensor

from unskew.core.errors import LostMemory, StorageFailure, UserError
from unskew.core.tensors import Layout
from unskew.core.types import EVERYONE, Progress, Tensors, TestPart, Visit
from unskew.engines.torchrun.join import Known
from unskew.engines.torchrun.link import ALIVE, Message, Writer, receive
from unskew.engines.torchrun.signals import Signals
from unskew.engines.work import Work
from unskew.privacy.sessions import Sessions
from unskew.round.client_memory import ClientMemory

AHEAD = 2  # groups of visits that a rank has at once: one under way, one waiting, so that it is never idle
SILENT_SECONDS = 15.0  # after which a rank that says nothing counts as lost
CLOSE_SECONDS = 5.0  # that the others have to say goodbye
SIGNAL_SECONDS = 2.0  # within which torchrun ends the ranks of a machine where one has died
GO_ON = "the run can go on with any number of ranks, or without torchrun"


@dataclass
class _Other:
    known: Known
    writer: Writer = field(init=False)
    ready: bool = False
    left: bool = False  # whether it said that it ends
    tasks: list[list[int]] = field(default_factory=list)  # places of the visits that it was given, group by group
    layout: Layout | None = None  # of its last result: it is nearly always the same


class Others:
    """The other ranks. One thread listens to each; what they find is told to the main thread when it asks."""

    def __init__(self, known: Sequence[Known], memory: ClientMemory | None, sessions: Sessions | None = None) -> None:
        self._memory, self._sessions = memory, sessions
        self._changed = threading.Condition()  # guards what follows
        self._work: Work | None = None
        self._number = 0  # of the job: an answer to an earlier one is of no use
        self._busy = False  # whether the main thread is in a visit of its own
        self._error: BaseException | None = None  # the first that a thread met
        self._wait = 0.0  # for the signal that torchrun is about to send, in seconds
        self._interrupted = False  # whether another rank was told to end
        self._signals = Signals()
        self._closing = False
        self._others = [_Other(each) for each in known]
        for other in self._others:
            other.writer = Writer(other.known.rank, partial(self._lose, other))
        self._listeners = [Thread(target=self._listen, args=(other,), daemon=True) for other in self._others]
        for listener in self._listeners:
            listener.start()

    def open(self, opening: Message, data: Tensors) -> None:
        """Give every rank all that it needs for any client's work, and wait until they have it."""
        for other in self._others:
            other.writer.send(opening)
            for name, value in data.items():
                kind = str(value.dtype).removeprefix("torch.")
                other.writer.send({"tensor": name, "dtype": kind, "shape": list(value.shape)}, value)
            other.writer.send({"build": True})
        with self._changed:
            while not all(other.ready for other in self._others):
                self._raise_what_happened()
                self._changed.wait()

    def begin(self, work: Work, job: Message, shared: Tensor) -> None:
        """Begin a job with all ranks."""
        with self._changed:
            self._work, self._number = work, self._number + 1
            for other in self._others:
                other.tasks.clear()
                other.writer.send(job, shared)
        self._hand_out()

    def next_own(self, work: Work, progress: Progress | None) -> list[int]:
        """The places of visits for rank 0 itself, waiting until there are some; none when all are done."""
        with self._changed:
            self._busy = False
            while True:
                self._raise_what_happened()
                if progress is not None:
                    progress(work.added, len(work.visits))
                if work.done:
                    return []
                if places := work.next_group(len(self._others) + 1):
                    self._busy = threading.current_thread() is threading.main_thread()
                    return places
                self._changed.wait()

    def finish(self, place: int, layout: Layout, vector: Tensor, receipt: str | None) -> None:
        """Rank 0's own result."""
        with self._changed:
            if self._work is not None:
                self._work.finish(place, layout, vector, receipt)
        self._hand_out()

    def fail(self, place: int, reason: str) -> None:
        """Rank 0's own failure."""
        with self._changed:
            if self._work is not None:
                self._work.fail(place, reason)
        self._hand_out()

    def end(self) -> None:
        """The job is over, or given up."""
        with self._changed:
            self._work, self._busy = None, False

    def instead_of_interrupt(self) -> BaseException:
        """What to raise for an interrupt: torchrun sends one when a rank has died, and so do we."""
        with self._changed:
            if self._error is None and self._others and not self._closing:
                self._changed.wait(0.3)
            return self._error or KeyboardInterrupt()

    def close(self) -> bool:
        """Let them wait for another run; whether all have said that they do."""
        self._closing = True
        for other in self._others:
            other.writer.send({"close": True})
        for listener in self._listeners:
            listener.join(CLOSE_SECONDS)
        for other in self._others:
            other.writer.finish(CLOSE_SECONDS)
        self._signals.restore(self._wait)
        return not any(listener.is_alive() for listener in self._listeners)

    def _hand_out(self) -> None:
        """Give visits to ranks that have room; a second group only while many are open, so that none has to queue."""
        given = []
        with self._changed:
            work, number, ranks = self._work, self._number, len(self._others) + 1
            if work is None:
                return
            for other in self._others:
                while not other.tasks or (len(other.tasks) < AHEAD and work.may_queue(ranks)):
                    if not (places := work.next_group(ranks)):
                        break
                    other.tasks.append(places)
                    given.append((other, [(place, work.visits[place]) for place in places]))
        for other, visits in given:
            tasks, contents = list[Message](), list[Tensor]()
            for place, visit in visits:
                kept = self._kept(visit)
                fields = vars(visit)
                tasks.append({"place": place, "visit": fields, "record": self._record(visit), "kept": len(kept)})
                contents += kept
            other.writer.send({"number": number, "tasks": tasks}, *contents)

    def _record(self, visit: Visit | TestPart) -> str:
        """What the client has answered in secure sums, as text; empty where it has never been in one."""
        if self._sessions is None or not isinstance(visit, Visit) or visit.client == EVERYONE:
            return ""
        return self._sessions.content(visit.client).hex()

    def _kept(self, visit: Visit | TestPart) -> tuple[Tensor, ...]:
        """What the client kept at its last visit, as bytes."""
        if self._memory is None or not isinstance(visit, Visit) or visit.ticket is None:
            return ()
        return (torch.frombuffer(self._memory.content(visit.ticket, visit.client), dtype=torch.uint8),)

    def _listen(self, other: _Other) -> None:
        """Hear all that a rank says, to its goodbye."""
        try:
            while True:
                message, contents = receive(other.known.rank, SILENT_SECONDS)
                if "closed" in message:
                    return
                if "interrupted" in message:
                    other.left = True
                    self._tell(None)
                    return
                if ALIVE not in message:
                    self._hear_well(other, message, contents)
        except ConnectionAbortedError:  # the rank that was silent is told by the thread that listens to it
            return
        except ConnectionError as error:
            self._lose(other, str(error))

    def _hear_well(self, other: _Other, message: Message, contents: Sequence[Tensor]) -> None:
        try:
            self._hear(other, message, contents)
        except Exception as error:  # noqa: BLE001  raised again in the main thread
            self._tell(error)

    def _hear(self, other: _Other, message: Message, contents: Sequence[Tensor]) -> None:
        if "refused" in message:
            raise UserError(f"{other.known.name}: {message['refused']}")
        if "storage" in message:
            kind = LostMemory if message["lost"] else StorageFailure
            raise kind(f"{other.known.name}: {message['storage']}")
        if "ready" in message:
            with self._changed:
                other.ready = True
                self._changed.notify_all()
            return
        self._take(other, message, contents)
        self._hand_out()

    def _take(self, other: _Other, message: Message, contents: Sequence[Tensor]) -> None:
        """A group's results: for each visit how it ended, and the tensors that came with it."""
        results: list[Message] = message["results"]
        with self._changed:
            work = self._work if message["number"] == self._number else None
            if work is None:
                return
            if (places := [each["place"] for each in results]) not in other.tasks:
                raise UserError(f"{other.known.name} answered for visits that it was not given")
        came = iter(contents)
        parts = [[next(came) for _ in range(each["tensors"])] for each in results]
        receipts = [
            self._kept_again(work.visits[each["place"]], each, part) for each, part in zip(results, parts, strict=True)
        ]
        with self._changed:
            other.tasks.remove(places)
            for each, part, receipt in zip(results, parts, receipts, strict=True):
                if "failure" in each:
                    work.fail(each["place"], each["failure"])
                    continue
                if "layout" in each:  # JSON has no tuples
                    other.layout = [(name, kind, shape, start) for name, kind, shape, start in each["layout"]]
                assert other.layout is not None
                vector = part[0].view(torch.float64)
                work.finish(each["place"], other.layout, vector, receipt, borrowed=False)
            self._changed.notify_all()

    def _kept_again(self, visit: Visit | TestPart, result: Message, part: Sequence[Tensor]) -> str | None:
        """Store what the client answered in secure sums and what it keeps; the receipt for the latter."""
        if not isinstance(visit, Visit):
            return None
        if "record" in result and self._sessions is not None:
            self._sessions.join(visit.client, bytes.fromhex(result["record"]))
        if len(part) < 2 or self._memory is None:
            return None
        assert visit.slot is not None
        return self._memory.put(visit.slot, bytearray(part[1].numpy()))

    def _lose(self, other: _Other, reason: str) -> None:
        if not other.left:
            lost = UserError(f"{other.known.name} is lost: {reason}; {GO_ON}")
            self._tell(lost, SIGNAL_SECONDS * other.known.ended_with_us)

    def _tell(self, error: BaseException | None, wait: float = 0.0) -> None:
        """Let the main thread know, out of a visit of its own too; without an error, that it should end."""
        with self._changed:
            if error is None:
                self._interrupted = True
            elif self._error is None and not self._closing:
                self._error, self._wait = error, wait
            if self._busy:
                self._busy = False
                self._signals.interrupt()
            self._changed.notify_all()

    def _raise_what_happened(self) -> None:
        if self._interrupted and self._error is None:
            self._changed.wait(0.5)  # the interrupt that this process gets itself is on its way, or a rank has died
        if self._error is not None or self._interrupted:
            self._signals.ending = True
            raise self._error or KeyboardInterrupt
