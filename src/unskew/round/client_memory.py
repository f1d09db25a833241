"""What clients remember between visits: slots of one size in a file, so that memory does not grow with clients seen.

A slot that the current state or the last checkpoint refers to is never overwritten: a new version goes to a free one.
So a round that fails, or a crash at any moment, leaves every version that a state can still ask for.
"""

import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from unskew.core.errors import LostMemory, StorageFailure
from unskew.core.tensors import Layout, copy, plan_layout, prefixed, views
from unskew.core.types import Memory, Tensors, Visit, Visited

Places = Mapping[int, tuple[int, int]]  # client -> its slot and the checksum of what lies there


class Memories:
    """The file, read and written in whole slots; processes may share its descriptor."""

    def __init__(self, remember: Sequence[Memory], model: Tensors, descriptor: int) -> None:
        blank: Tensors = {}
        for memory in remember:
            blank |= prefixed(memory.blank(model), f"{memory.name}/")
        self._remember = tuple(remember)
        self._layout, self.slot_bytes = plan_layout(blank)
        self._pinned: set[int] = set()
        self.descriptor = descriptor

    def assign(self, visits: Sequence[Visit], places: Places) -> list[Visit]:
        """The visits with the slots they read and write. Of several visits to one client the last one keeps."""
        busy = {slot for slot, _ in places.values()} | self._pinned
        free = (slot for slot in count() if slot not in busy)
        last = {visit.client: at for at, visit in enumerate(visits)}
        return [
            replace(visit, recall=places.get(visit.client), keep=next(free) if last[visit.client] == at else None)
            for at, visit in enumerate(visits)
        ]

    def kept(self, visits: Sequence[Visit]) -> dict[int, tuple[int, int]]:
        """Where the memories of these visits lie now."""
        return {v.client: (v.keep, zlib.crc32(self._bytes(v.keep))) for v in visits if v.keep is not None}

    def pin(self, places: Places) -> None:
        """A checkpoint refers to these now, and to no others."""
        self._pinned = {slot for slot, _ in places.values()}

    def sync(self) -> None:
        """Make everything written durable."""
        with _storage():
            os.fsync(self.descriptor)

    def require(self, places: Places) -> None:
        """Refuse at once a file that is too short for what a state refers to."""
        for client, (slot, _) in places.items():
            if os.fstat(self.descriptor).st_size < (slot + 1) * self.slot_bytes:
                raise LostMemory(f"what client {client} remembers is gone: its file is cut short; start the run anew")

    def recall(self, visit: Visit) -> Tensors:
        """What the client kept at its last visit; nothing at its first."""
        if visit.recall is None:
            return {}
        slot, checksum = visit.recall
        found = self._bytes(slot, f"client {visit.client}")
        if zlib.crc32(found) != checksum:
            raise LostMemory(f"what client {visit.client} remembers is damaged on disk; start the run anew")
        return views(found, self._layout)

    def keep(self, visited: Visited) -> None:
        """Write down what the client keeps, if this visit is the one that does."""
        if visited.visit.keep is None:
            return
        values: Tensors = {}
        for memory in self._remember:
            values |= prefixed(memory.keep(visited), f"{memory.name}/")
        _same_kinds(self._layout, plan_layout(values)[0])
        content = bytearray(self.slot_bytes)
        for name, view in views(content, self._layout).items():
            view.copy_(values[name])
        start, done = visited.visit.keep * self.slot_bytes, 0
        with _storage():
            while done < self.slot_bytes:
                done += os.pwrite(self.descriptor, memoryview(content)[done:], start + done)

    def close(self) -> None:
        """Give the file back."""
        os.close(self.descriptor)

    def _bytes(self, slot: int, whose: str = "a client") -> bytearray:
        found = bytearray()
        while len(found) < self.slot_bytes:
            more = os.pread(self.descriptor, self.slot_bytes - len(found), slot * self.slot_bytes + len(found))
            if not more:
                raise LostMemory(f"what {whose} remembers is gone: its file is cut short; start the run anew")
            found += more
        return found


def _same_kinds(blank: Layout, kept: Layout) -> None:
    """Copying would stretch another shape, round another type, and drop what has no place."""
    said, given = ({name: f"{dtype} {shape}" for name, dtype, shape, _ in each} for each in (blank, kept))
    for name in said | given:
        if said.get(name) != given.get(name):
            raise ValueError(
                f"memory {name}: blank says {said.get(name, 'nothing')}, keep gives {given.get(name, 'nothing')}"
            )


@contextmanager
def _storage() -> Iterator[None]:
    """A full or broken disk, said as what it is."""
    try:
        yield
    except OSError as error:
        raise StorageFailure(f"what clients remember cannot be written: {error.strerror or error}") from error


def anonymous_file() -> int:
    """The descriptor of a file without a name: it goes with the last process that holds it."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def whole_model(name: str) -> Memory:
    """The client's own model, as its training left it."""
    return Memory(name, blank=lambda model: model, keep=lambda visited: copy(visited.model))
