"""The other ranks: wait for rank 0, do the visits that it sends, exit when it does.

One thread listens, so that the loss of rank 0 is noticed even during a visit; one writes; the main thread works.
"""

import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock, Thread
from types import FrameType
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from unskew.core.errors import LostMemory, StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.machine import device_count, neutral, resolve_device, worker_device
from unskew.core.tensors import Layout, PackedSums, prefixed
from unskew.core.types import EVERYONE, Failure, Tensors, TestPart, Visit
from unskew.engines.blueprint import Blueprint, build, keep_freed_memory
from unskew.engines.results import ResultFile, SharedFile, offer, open_offered
from unskew.engines.torchrun.engine import INTERRUPTS
from unskew.engines.torchrun.join import Launched, join_rank_zero
from unskew.engines.torchrun.link import ALIVE, FOREVER, Message, Writer, receive
from unskew.privacy.sessions import Sessions
from unskew.round.client import ClientSide, new_room, plan_ahead
from unskew.round.client_memory import anonymous_file
from unskew.round.jobs import answer, decode_job

SILENT_SECONDS = 60.0  # after which rank 0 counts as lost, while it has an open engine
RECEIVED, RETURNED = 0, 1  # slots of the rank's memory file
INTERRUPTED = 130
SLOTS = 4  # files for sums: two groups running or queued, two waiting to be added


def follow(launch: Launched) -> NoReturn:
    """Work for rank 0, run after run, until it exits."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_DFL)  # nothing to clean up yet
    torch.set_num_threads(1)
    keep_freed_memory()
    if join_rank_zero(launch):
        with neutral():
            _Follower(launch).serve()
    sys.exit(0)


class _Follower:
    def __init__(self, launch: Launched) -> None:
        self._launch = launch
        self._inbox: SimpleQueue[tuple[Message, Tensors] | None] = SimpleQueue()
        self._writer: Writer | None = None  # while rank 0 has an engine open
        self._working = False
        self._ending = Lock()  # acquired by the first thread that ends the process
        self._side: ClientSide | None = None
        self._layout: Layout | None = None  # the last one sent to rank 0
        self._inputs: SharedFile | None = None  # rank 0's file of the server's tensors; None: they are sent
        self._files: list[ResultFile] = []
        self._file: ResultFile | None = None  # for the sums of these visits; None: they are sent
        for number in INTERRUPTS:
            signal.signal(number, self._interrupt)
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def serve(self) -> None:
        """Handle messages until there are no more."""
        opening: Message = {}
        data: Tensors = {}
        while (item := self._inbox.get()) is not None:
            self._working = True
            message, tensors = item
            if "open" in message:
                opening = message
            elif "data" in message:
                data |= tensors
            elif "build" in message:
                self._build(opening, data)
            elif "close" in message:
                self._close()
                data = {}
            elif "begin" in message:
                self._job, self._shared = decode_job(message["begin"]), tensors
                if self._inputs is not None:
                    self._shared = self._inputs.read(message["layout"])
                self._key = Key(int(message["seed"]), tuple(message["key"]))
            elif self._side is not None:
                self._answer(self._side, message, tensors)
            self._working = False
        self._listener.join()  # a thread in PyTorch at exit would abort the process

    def _build(self, opening: Message, data: Tensors) -> None:
        """Build the client side that rank 0 describes, or report why that fails."""
        try:
            blueprint = Blueprint.from_json(opening["open"])
            device = resolve_device(blueprint.device)
            own = worker_device(device, device_count(device), self._launch.local_rank)
            memories = anonymous_file() if opening["remembers"] else None
            side = build(replace(blueprint, device=own), data, memories)
            secret = bytes.fromhex(opening["secret"])
            self._side = replace(side, secret=secret, sessions=Sessions.temporary(), room=self._room)
            self._files = [ResultFile() for _ in range(SLOTS)]
            descriptor = open_offered(*opening["shared"])
            self._inputs = None if descriptor is None else SharedFile(descriptor)
        except Exception as error:  # noqa: BLE001  rank 0 reports it
            self._send({"refused": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"})
        else:
            self._send({"ready": True, "shares": self._inputs is not None, "files": list(map(offer, self._files))})

    def _room(self, count: int) -> Tensor:
        return new_room(count) if self._file is None else self._file.room(count)

    def _answer(self, side: ClientSide, message: Message, memories: Tensors) -> None:
        results, sent = list[Message](), list[tuple[str, Tensor]]()
        visits: list[Visit | TestPart] = [
            msgspec.convert(task["visit"], Visit) if "client" in task["visit"] else TestPart(**task["visit"])
            for task in message["tasks"]
        ]
        slot = message["slot"]
        self._file = None if slot is None else self._files[slot]
        if self._file is not None:
            self._file.clear()
        plan_ahead(side, self._job, self._shared, visits, self._key)
        for task, visit in zip(message["tasks"], visits, strict=True):
            try:
                result, tensors = self._visit(side, task, visit, memories.get(str(task["index"])))
            except StorageFailure as error:
                self._send({"storage": str(error), "lost": isinstance(error, LostMemory)})
                return
            if self._file is not None and "sums" in tensors:
                result = result | {"where": (slot, *self._file.write(tensors.pop("sums")))}
            results.append(result | {"index": task["index"]})
            sent += [(f"{task['index']}/{name}", value) for name, value in tensors.items()]
        self._send({"number": message["number"], "results": results}, sent)

    def _visit(
        self, side: ClientSide, task: Message, visit: Visit | TestPart, memory: Tensor | None
    ) -> tuple[Message, Tensors]:
        """Do a visit; the fields and tensors to send: its sums, its extra and the client's memory."""
        if isinstance(visit, Visit) and task["record"] and side.sessions is not None:
            side.sessions.join(visit.client, bytes.fromhex(task["record"]))
        if isinstance(visit, Visit) and side.memory_file is not None:
            ticket = None if memory is None else side.memory_file.put(RECEIVED, bytearray(memory.numpy()))
            visit = replace(visit, ticket=ticket, slot=None if visit.slot is None else RETURNED)
        reply = answer(side, self._job, self._shared, visit, self._key)
        record = _record(side, visit, task["record"])
        if isinstance(reply, Failure):
            return record | {"failure": reply.reason}, {}
        assert isinstance(reply.sums, PackedSums)
        layout, tensors = reply.sums.layout, {"sums": reply.sums.vector, **prefixed(dict(reply.extra), "extra/")}
        if reply.ticket is not None and side.memory_file is not None:
            tensors["kept"] = torch.frombuffer(side.memory_file.content(reply.ticket, -1), dtype=torch.uint8)
        fields = record if layout == self._layout else record | {"layout": layout}  # long, and rarely different
        self._layout = layout
        return fields, tensors

    def _close(self) -> None:
        if self._side is not None:
            self._side.close()
        for file in self._files:
            file.close()
        if self._inputs is not None:
            self._inputs.close()
        self._side, self._layout, self._inputs, self._files = None, None, None, []

    def _send(self, message: Message, tensors: Iterable[tuple[str, Tensor]] = ()) -> None:
        if (writer := self._writer) is not None:
            writer.send(message, tensors)

    def _listen(self) -> None:
        try:
            while True:
                message, tensors = receive(0, SILENT_SECONDS if self._writer else FOREVER)
                if ALIVE in message:
                    continue
                if "open" in message:
                    self._writer = Writer(0, self._lost)
                elif "close" in message and self._writer is not None:
                    self._writer.send({"closed": True})
                    self._writer.finish()
                    self._writer = None
                self._inbox.put((message, tensors))
        except ConnectionError as error:
            self._lost(str(error))

    def _lost(self, reason: str) -> None:
        """Rank 0 has exited: the normal end between two runs, otherwise a failure that torchrun reports."""
        if not self._ending.acquire(blocking=False):
            return
        if self._writer is not None and self._launch.rank == 1:
            os.write(2, f"unskew: rank 0 is lost: {reason}; resume its run with: unskew resume RUN\n".encode())
        if self._writer is not None or self._working:
            os._exit(1)
        self._inbox.put(None)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Notify rank 0, in another thread, because this one may be in the middle of a message."""
        Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        if self._writer is not None:
            self._writer.send({"interrupted": True})
            self._writer.finish()
        os._exit(INTERRUPTED)


def _record(side: ClientSide, visit: Visit | TestPart, before: str) -> Message:
    """The client's replies in secure sums, if there are new ones."""
    if side.sessions is None or not isinstance(visit, Visit) or visit.client == EVERYONE:
        return {}
    now = side.sessions.content(visit.client).hex()
    return {} if now == before else {"record": now}
