"""What the other ranks do: wait for rank 0, do the visits that it gives, end when it ends.

One thread listens, so that rank 0's end is noticed in the middle of a visit too; one writes; the main thread works.
"""

import os
import signal
import sys
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock, Thread
from types import FrameType
from typing import NoReturn

import torch
from torch import Tensor

from unskew.core.errors import LostMemory, StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.machine import device_count, neutral, resolve_device, worker_device
from unskew.core.tensors import Layout, views
from unskew.core.types import EVERYONE, Failure, Tensors, TestPart, Visit
from unskew.engines.blueprint import Blueprint, build
from unskew.engines.jobs import JOBS
from unskew.engines.malloc import keep_freed_memory
from unskew.engines.torchrun.join import come
from unskew.engines.torchrun.launch import Launched
from unskew.engines.torchrun.link import ALIVE, FOREVER, Message, Writer, from_bytes, receive
from unskew.engines.torchrun.signals import INTERRUPTS
from unskew.engines.work import visit_from
from unskew.privacy.sessions import Sessions
from unskew.round.client import ClientSide
from unskew.round.client_memory import ClientMemory, anonymous_file
from unskew.round.jobs import Done, Job, attempt, find_job

SILENT_SECONDS = 60.0  # after which rank 0 counts as lost, while it has an engine open
GIVEN, KEPT = 0, 1  # the slots of a rank's own file of memories: what came with a visit, what goes back
INTERRUPTED = 130


def follow(place: Launched) -> NoReturn:
    """Work for rank 0, in one run after another, until it ends."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_DFL)  # there is nothing to lose yet
    torch.set_num_threads(1)
    keep_freed_memory()
    if come(place):
        with neutral():
            _Follower(place).serve()
    sys.exit(0)


class _Follower:
    """A rank that works for rank 0."""

    def __init__(self, place: Launched) -> None:
        self._place = place
        self._inbox: SimpleQueue[tuple[Message, list[Tensor]] | None] = SimpleQueue()
        self._writer: Writer | None = None  # while rank 0 has an engine open
        self._working = False
        self._ending = Lock()  # taken by the first that ends the process
        self._side: ClientSide | None = None
        self._told: Layout | None = None  # the last one that rank 0 was told
        for number in INTERRUPTS:
            signal.signal(number, self._interrupt)
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def serve(self) -> None:
        """Do what the messages say, until there are no more."""
        opening: Message = {}
        data: Tensors = {}
        job: tuple[Job, str] | None = None
        while (item := self._inbox.get()) is not None:
            self._working = True
            message, contents = item
            if "open" in message:
                opening = message
            elif "tensor" in message:
                data[message["tensor"]] = from_bytes(contents[0], message["dtype"], message["shape"])
            elif "build" in message:
                self._build(opening, data)
            elif "close" in message:
                self._close()
                data = {}
            elif "begin" in message:
                job, key = find_job(message["begin"], JOBS), Key(message["seed"], tuple(message["key"]))
                shared = views(contents[0].numpy().data, message["weights"])
            elif self._side is not None and job is not None:
                self._visit_all(self._side, message, contents, job, shared, key)
            self._working = False
        self._listener.join()  # a thread inside PyTorch when the interpreter ends would abort the process

    def _build(self, opening: Message, data: Tensors) -> None:
        """The client's side as rank 0 describes it; what stands in the way is told to rank 0."""
        try:
            blueprint = Blueprint.from_json(opening["open"])
            device = resolve_device(blueprint.device)
            own = worker_device(device, device_count(device), self._place.local_rank)
            memories = anonymous_file() if opening["remembers"] else None
            side = build(replace(blueprint, device=own), data, memories)
            self._side = replace(side, secret=bytes.fromhex(opening["secret"]), sessions=Sessions.temporary())
        except Exception as error:  # noqa: BLE001  rank 0 decides what follows, and says it
            self._send({"refused": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"})
        else:
            self._send({"ready": True})

    def _visit_all(
        self, side: ClientSide, message: Message, contents: list[Tensor], job: tuple[Job, str], shared: Tensors,
        key: Key,
    ) -> None:  # fmt: skip
        """Do a group of visits, and answer for all of them at once."""
        results, answers, came = list[Message](), list[Tensor](), iter(contents)
        for task in message["tasks"]:
            given = [next(came) for _ in range(task["kept"])]
            try:
                result, sent = self._visit(side, task, given, job, shared, key)
            except StorageFailure as error:
                self._send({"storage": str(error), "lost": isinstance(error, LostMemory)})
                return
            results.append(result | {"place": task["place"], "tensors": len(sent)})
            answers += sent
        self._send({"number": message["number"], "results": results}, *answers)

    def _visit(
        self, side: ClientSide, task: Message, given: list[Tensor], job: tuple[Job, str], shared: Tensors, key: Key
    ) -> tuple[Message, list[Tensor]]:
        """What rank 0 is told of a visit: words, and the sums and what the client keeps as bytes."""
        visit = visit_from(task["visit"])
        if task["record"] and side.sessions is not None and isinstance(visit, Visit):
            side.sessions.join(visit.client, bytes.fromhex(task["record"]))
        if isinstance(visit, Visit) and isinstance(side.memory, ClientMemory):
            ticket = side.memory.put(GIVEN, bytearray(given[0].numpy())) if given else None
            visit = replace(visit, ticket=ticket, slot=None if visit.slot is None else KEPT)
        result = attempt(side, job, shared, visit, key)
        kept, record = self._kept(side, result), _record(side, visit, task["record"])
        if isinstance(result, Failure):
            return record | {"failure": result.reason}, []
        layout, sums = result.packed.layout, result.packed.vector.view(torch.uint8)
        words = record if layout == self._told else record | {"layout": layout}  # long, and nearly always the same
        self._told = layout
        return words, [sums, *kept]

    def _kept(self, side: ClientSide, result: Done | Failure) -> list[Tensor]:
        """What the client keeps, as bytes."""
        if isinstance(result, Failure) or result.receipt is None or not isinstance(side.memory, ClientMemory):
            return []
        return [torch.frombuffer(side.memory.content(result.receipt, -1), dtype=torch.uint8)]

    def _close(self) -> None:
        if self._side is not None and self._side.memory is not None:
            self._side.memory.close()
        if self._side is not None and self._side.sessions is not None:
            self._side.sessions.close()
        self._side, self._told = None, None

    def _send(self, message: Message, *tensors: Tensor) -> None:
        if (writer := self._writer) is not None:
            writer.send(message, *tensors)

    def _listen(self) -> None:
        try:
            while True:
                message, contents = receive(0, SILENT_SECONDS if self._writer else FOREVER)
                if ALIVE in message:
                    continue
                if "open" in message:
                    self._writer = Writer(0, self._lost)
                elif "close" in message and self._writer is not None:
                    self._writer.send({"closed": True})
                    self._writer.finish()
                    self._writer = None
                self._inbox.put((message, contents))
        except ConnectionError as error:
            self._lost(str(error))

    def _lost(self, reason: str) -> None:
        """Rank 0 has ended. Between two runs that is how the work ends; torchrun tells the rest."""
        if not self._ending.acquire(blocking=False):
            return
        if self._writer is not None and self._place.rank == 1:
            os.write(2, f"unskew: rank 0 is lost: {reason}; resume its run with: unskew resume RUN\n".encode())
        if self._writer is not None or self._working:
            os._exit(1)
        self._inbox.put(None)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Tell rank 0, in a thread, since this one may be in the middle of a message."""
        Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        if self._writer is not None:
            self._writer.send({"interrupted": True})
            self._writer.finish()
        os._exit(INTERRUPTED)


def _record(side: ClientSide, visit: Visit | TestPart, before: str) -> Message:
    """What the client has answered in secure sums, where that is new."""
    if side.sessions is None or not isinstance(visit, Visit) or visit.client == EVERYONE:
        return {}
    now = side.sessions.content(visit.client).hex()
    return {} if now == before else {"record": now}
