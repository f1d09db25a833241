"""Tensors in memory that several processes see, and short messages between them. Nothing is pickled.

The memory is a file without a name: it cannot be left behind, however the processes end.
"""

import json
import mmap
import os
import socket
import tempfile
from typing import Any

import torch
from torch import Tensor

from unskew.core.tensors import ALIGN, DOUBLE, Layout, plan_layout, views
from unskew.core.types import Tensors

SLOTS = 3  # files that a worker has for results: a group being written, the next one's, one that waits to be added


class SharedFile:
    """Anonymous shared memory that can grow; each process maps it for itself from the descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def mapped(self, size: int) -> mmap.mmap:
        """The memory, mapped to at least ``size`` bytes; grown where it is smaller."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, max(os.fstat(self.descriptor).st_size, 1))
        return self._map

    def write(self, tensors: Tensors) -> Layout:
        """Copy the tensors in; the layout says where each one is."""
        layout, end = plan_layout(tensors)
        for name, view in views(self.mapped(end), layout).items():
            view.copy_(tensors[name])
        return layout

    def read(self, layout: Layout) -> Tensors:
        """The tensors of that layout: views, not copies."""
        return views(self.mapped(_end(layout)), layout)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when its last view does."""
        os.close(self.descriptor)


class ResultFile:
    """The results of a group of visits: one vector after another, behind a line with the visit that is being done."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._file = SharedFile(descriptor)
        self._running = memoryview(self._file.mapped(ALIGN)).cast("q")
        self._end = ALIGN

    @property
    def descriptor(self) -> int:
        """For another process."""
        return self._file.descriptor

    @property
    def running(self) -> int:
        """The place of the visit that is being done, or was when its worker died."""
        return self._running[0]

    @running.setter
    def running(self, place: int) -> None:
        self._running[0] = place

    def clear(self) -> None:
        """The next vector will be the first one."""
        self._end = ALIGN

    def room(self, count: int) -> Tensor:
        """Room for a vector behind the last one."""
        return self.read(self._end, count)

    def write(self, vector: Tensor) -> tuple[int, int]:
        """Write a vector behind the last one, unless it was made there: where it begins, how many numbers it has."""
        where = (self._end, vector.numel())
        room = self.read(*where)
        if room.data_ptr() != vector.data_ptr():
            room.copy_(vector)
        self._end += -(-vector.numel() * DOUBLE // ALIGN) * ALIGN
        return where

    def read(self, start: int, count: int) -> Tensor:
        """The vector that is there: a view, not a copy."""
        memory = self._file.mapped(start + count * DOUBLE)
        return torch.frombuffer(memory, dtype=torch.float64, count=count, offset=start)

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()


class Line:
    """JSON messages, one a line, over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send one message whole."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None when the other side is gone."""
        while b"\n" not in self._rest:
            try:
                more = self.connection.recv(1 << 20)
            except ConnectionError:
                return None
            if not more:
                return None
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def waiting(self) -> bool:
        """Whether a whole message has been read already."""
        return b"\n" in self._rest


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("unskew")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _end(layout: Layout) -> int:
    sizes = (torch.Size(shape).numel() * int(getattr(torch, dtype).itemsize) for _, dtype, shape, _ in layout)
    return max([ALIGN, *(place[3] + size for place, size in zip(layout, sizes, strict=True))])
