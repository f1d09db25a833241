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

from unskew.core.tensors import ALIGN, Layout, plan_layout, views
from unskew.core.types import Tensors

SLOTS = 2  # results a worker may have waiting: one being written while the parent adds the other


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
