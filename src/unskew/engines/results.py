"""Shared memory between processes of one machine, for models and for the results of visits."""

import mmap
import os

import torch
from torch import Tensor

from unskew.core.tensors import ALIGN, DOUBLE, Layout, plan_layout, views
from unskew.core.types import Tensors
from unskew.round.client_memory import anonymous_file


class SharedFile:
    """Anonymous shared memory that can grow; each process maps it for itself from the descriptor.

    It is a file without a name: it cannot be left behind, however the processes end.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("unskew") if hasattr(os, "memfd_create") else anonymous_file()
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    def mapped(self, size: int) -> mmap.mmap:
        """The memory, mapped to at least ``size`` bytes; grown where it is smaller."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, max(os.fstat(self.descriptor).st_size, 1))
        return self._map

    def write(self, tensors: Tensors) -> Layout:
        """Copy the tensors in; their layout."""
        layout, end = plan_layout(tensors)
        for name, view in views(self.mapped(end), layout).items():
            view.copy_(tensors[name])
        return layout

    def read(self, layout: Layout) -> Tensors:
        """The tensors of that layout: views, not copies."""
        sizes = (torch.Size(shape).numel() * int(getattr(torch, dtype).itemsize) for _, dtype, shape, _ in layout)
        end = max([ALIGN, *(entry[3] + size for entry, size in zip(layout, sizes, strict=True))])
        return views(self.mapped(end), layout)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when its last view does."""
        os.close(self.descriptor)


class ResultFile:
    """The results of a group of visits, one after another, behind a line with the visit that is being done."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._file = SharedFile(descriptor)
        self.descriptor = self._file.descriptor  # for another process
        self.running = memoryview(self._file.mapped(ALIGN)).cast("q")  # [0]: the index of the visit being done
        self._end = ALIGN

    def clear(self) -> None:
        """The next vector will be the first one."""
        self._end = ALIGN

    def room(self, count: int) -> Tensor:
        """Room for a vector behind the last one."""
        return self.read(self._end, count)

    def write(self, vector: Tensor) -> tuple[int, int]:
        """Write a vector behind the last one, unless it was made there: where it begins, how many numbers it has."""
        start, room = self._end, self.room(vector.numel())
        if room.data_ptr() != vector.data_ptr():
            room.copy_(vector)
        self._end += -(-vector.numel() * DOUBLE // ALIGN) * ALIGN
        return start, vector.numel()

    def read(self, start: int, count: int) -> Tensor:
        """The vector that is there: a view, not a copy."""
        memory = self._file.mapped(start + count * DOUBLE)
        return torch.frombuffer(memory, dtype=torch.float64, count=count, offset=start)

    def write_bytes(self, content: bytes) -> tuple[int, int]:
        """Write bytes behind the last vector: where they begin, and how many."""
        start = self._end
        self._file.mapped(start + len(content))[start : start + len(content)] = content
        self._end += -(-len(content) // ALIGN) * ALIGN
        return start, len(content)

    def read_bytes(self, start: int, count: int) -> bytes:
        """A copy of the bytes that are there."""
        return self._file.mapped(start + count)[start : start + count]

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()


def offer(file: ResultFile | SharedFile) -> tuple[int, int, int]:
    """Put a token into the file's first line; the arguments with which another process can open it."""
    token = int.from_bytes(os.urandom(7), "little")
    memoryview(SharedFile(file.descriptor).mapped(ALIGN)).cast("q")[0] = token
    return os.getpid(), file.descriptor, token


def open_offered(process: int, descriptor: int, token: int) -> int | None:
    """The descriptor of another process's file; None if that process is on another machine."""
    try:
        found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    if os.fstat(found).st_size >= ALIGN and memoryview(SharedFile(found).mapped(ALIGN)).cast("q")[0] == token:
        return found
    os.close(found)
    return None
