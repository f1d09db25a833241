"""What clients store between visits: slots of equal size in a file on the client side.

The server knows only a memory's ticket. A slot that the server's state or the last checkpoint refers to is never
overwritten: a new version goes to a free slot. So a failed round or a crash loses nothing that a state refers to, and
the file does not grow with the number of rounds.
"""

import heapq
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from unskew.core.errors import LostMemory, StorageFailure
from unskew.core.tensors import copy, plan_layout, prefixed, views
from unskew.core.types import Memory, Tensors, Visit, Visited

START_A_NEW_RUN = "start a new run"


class SavedStates(Protocol):
    """The clients' memories, as jobs read and write them."""

    format: "MemoryFormat"

    def recall(self, visit: Visit) -> Tensors:
        """What the client stored at its last visit; empty at its first."""

    def write(self, slot: int, values: Tensors) -> str:
        """Write the values into the slot and return their ticket."""

    def close(self) -> None:
        """Release open files."""


class MemoryFormat:
    """The methods' memories of a visit as bytes: the same number for every visit."""

    def __init__(self, remember: Sequence[Memory], model: Tensors) -> None:
        blank: Tensors = {}
        for memory in remember:
            blank |= prefixed(memory.blank(model), f"{memory.name}/")
        self._remember = tuple(remember)
        self._layout, self.bytes = plan_layout(blank)

    def values(self, visited: Visited) -> Tensors:
        """What the methods store of this visit."""
        values: Tensors = {}
        for memory in self._remember:
            values |= prefixed(memory.keep(visited), f"{memory.name}/")
        layouts = self._layout, plan_layout(values)[0]
        declared, actual = ({name: f"{dtype} {shape}" for name, dtype, shape, _ in layout} for layout in layouts)
        for name in declared | actual:  # copying would broadcast another shape and round another dtype
            if declared.get(name) != actual.get(name):
                before, after = declared.get(name, "nothing"), actual.get(name, "nothing")
                raise ValueError(f"memory {name}: blank declares {before}, but keep returns {after}")
        return values

    def packed(self, values: Tensors) -> bytearray:
        """The values as bytes."""
        content = bytearray(self.bytes)
        for name, view in views(content, self._layout).items():
            view.copy_(values[name])
        return content

    def unpacked(self, content: bytearray) -> Tensors:
        """The values as views of the bytes."""
        return views(content, self._layout)


class ClientMemory:
    """A file of slots; processes may share its descriptor, and the first one assigns the slots."""

    def __init__(self, remember: Sequence[Memory], model: Tensors, descriptor: int) -> None:
        self.format = MemoryFormat(remember, model)
        self.slot_bytes = self.format.bytes
        self.descriptor = descriptor
        self._used: set[int] = set()
        self._pinned: set[int] = set()
        self._free: list[int] = []  # a heap, below the first slot never used
        self._next = 0

    def assign(self, visits: Sequence[Visit]) -> list[Visit]:
        """The visits, with a free slot for each that stores a memory."""
        return [replace(visit, slot=self._take()) if visit.keep else visit for visit in visits]

    def release(self, visits: Sequence[Visit], tickets: Mapping[int, str]) -> None:
        """Free the slots of visits without a ticket."""
        written = {_read_ticket(ticket)[0] for ticket in tickets.values()}
        self._free_slots({visit.slot for visit in visits if visit.slot is not None} - written)

    def supersede(self, tickets: Iterable[str]) -> None:
        """Free the slots of memories that only a checkpoint may still refer to."""
        self._free_slots(_read_ticket(ticket)[0] for ticket in tickets)

    def pin(self, tickets: Iterable[str]) -> None:
        """Record that the checkpoint and the server's state refer to these memories only."""
        self._pinned = {_read_ticket(ticket)[0] for ticket in tickets}
        self._next = max(self._pinned, default=-1) + 1
        if self._next and os.fstat(self.descriptor).st_size < self._next * self.slot_bytes:
            raise LostMemory(f"the clients' saved state is incomplete: its file is truncated; {START_A_NEW_RUN}")
        self._used = set(self._pinned)
        self._free = [slot for slot in range(self._next) if slot not in self._pinned]  # ascending: a heap already

    def _free_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot in self._used:
                self._used.remove(slot)
                if slot not in self._pinned:
                    heapq.heappush(self._free, slot)

    def _take(self) -> int:
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot, self._next = self._next, self._next + 1
        self._used.add(slot)
        return slot

    def recall(self, visit: Visit) -> Tensors:
        """What the client stored at its last visit; empty at its first."""
        if visit.ticket is None:
            return {}
        return self.format.unpacked(self.content(visit.ticket, visit.client))

    def content(self, ticket: str, client: int) -> bytearray:
        """The bytes stored under a ticket, for a process that does not share the file."""
        (slot, checksum), content = _read_ticket(ticket), bytearray()
        while len(content) < self.slot_bytes:
            more = os.pread(self.descriptor, self.slot_bytes - len(content), slot * self.slot_bytes + len(content))
            if not more:
                raise LostMemory(f"client {client}'s saved state is missing: its file is truncated; {START_A_NEW_RUN}")
            content += more
        if zlib.crc32(content) != checksum:
            raise LostMemory(f"client {client}'s saved state is damaged on disk; {START_A_NEW_RUN}")
        return content

    def write(self, slot: int, values: Tensors) -> str:
        """Write the values into the slot and return their ticket."""
        return self.put(slot, self.format.packed(values))

    def put(self, slot: int, content: bytearray) -> str:
        """Write bytes from ``content`` into the slot and return their ticket."""
        start, done = slot * self.slot_bytes, 0
        with storage_failures():
            while done < self.slot_bytes:
                done += os.pwrite(self.descriptor, memoryview(content)[done:], start + done)
        return f"{slot}-{zlib.crc32(content):08x}"

    def sync(self) -> None:
        """Make everything written durable."""
        with storage_failures():
            os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def with_tickets(visits: Sequence[Visit], tickets: Mapping[int, str]) -> list[Visit]:
    """The visits with their clients' tickets; only the last of several visits to a client stores a memory."""
    last = {visit.client: index for index, visit in enumerate(visits)}
    return [
        replace(visit, ticket=tickets.get(visit.client), keep=last[visit.client] == index)
        for index, visit in enumerate(visits)
    ]


def _read_ticket(ticket: str) -> tuple[int, int]:
    slot, _, checksum = ticket.partition("-")
    try:
        return int(slot), int(checksum, 16)
    except ValueError:
        raise LostMemory(f"{ticket!r} is not a ticket for a client's saved state; {START_A_NEW_RUN}") from None


@contextmanager
def storage_failures() -> Iterator[None]:
    """Report a full or broken disk as a StorageFailure."""
    try:
        yield
    except OSError as error:
        raise StorageFailure(f"the clients' state cannot be saved: {error.strerror or error}") from error


def anonymous_file() -> int:
    """The descriptor of an unnamed file, which disappears with the last process that has it open."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def whole_model(name: str) -> Memory:
    """A memory of the client's model after training."""
    return Memory(name, blank=lambda model: model, keep=lambda visited: copy(visited.model))
