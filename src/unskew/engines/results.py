"""Shared memory between processes of one machine, for models and for the results of visits."""

import mmap
import os

import torch
from torch import Tensor

from unskew.core.tensors import ALIGN, DOUBLE, Layout, plan_layout, views
from unskew.core.types import Tensors
from unskew.round.client_memory import anonymous_file


class SharedFile:
    """Anonymous shared memory that can grow; each process maps it from the descriptor.

    As a file without a name, it disappears with the last process, however that ends.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("unskew") if hasattr(os, "memfd_create") else anonymous_file()
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    def mapped(self, size: int) -> mmap.mmap:
        """Map at least ``size`` bytes, growing the memory if necessary."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, max(os.fstat(self.descriptor).st_size, 1))
        return self._map

    def write(self, tensors: Tensors) -> Layout:
        """Copy the tensors and return their layout."""
        layout, end = plan_layout(tensors)
        for name, view in views(self.mapped(end), layout).items():
            view.copy_(tensors[name])
        return layout

    def read(self, layout: Layout) -> Tensors:
        """The tensors of that layout, as views."""
        return views(self.mapped(end_of(layout)), layout)

    def content(self, layout: Layout) -> bytes:
        """The bytes of the tensors of that layout."""
        return self.mapped(end := end_of(layout))[:end]

    def fill(self, content: bytes | bytearray) -> None:
        """Overwrite the beginning."""
        self.mapped(len(content))[: len(content)] = content

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last view."""
        os.close(self.descriptor)


def end_of(layout: Layout) -> int:
    """Where the last tensor of a layout ends."""
    sizes = (torch.Size(shape).numel() * int(getattr(torch, dtype).itemsize) for _, dtype, shape, _ in layout)
    return max([ALIGN, *(entry[3] + size for entry, size in zip(layout, sizes, strict=True))])


class ResultFile(SharedFile):
    """The results of a group of visits, after a line with the index of the current visit."""

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__(descriptor)
        self.running = memoryview(self.mapped(ALIGN)).cast("q")  # [0]: the index of the current visit
        self._end = ALIGN

    def clear(self) -> None:
        """Start again with the first result."""
        self._end = ALIGN

    def room(self, count: int) -> Tensor:
        """Room for a vector after the last result."""
        return self.vector(self._end, count)

    def append(self, vector: Tensor) -> tuple[int, int]:
        """Append a vector, unless it was computed in place; returns its start and length."""
        start, room = self._end, self.room(vector.numel())
        if room.data_ptr() != vector.data_ptr():
            room.copy_(vector)
        self._end += -(-vector.numel() * DOUBLE // ALIGN) * ALIGN
        return start, vector.numel()

    def vector(self, start: int, count: int) -> Tensor:
        """The vector at that position, as a view."""
        memory = self.mapped(start + count * DOUBLE)
        return torch.frombuffer(memory, dtype=torch.float64, count=count, offset=start)

    def append_tensors(self, tensors: Tensors) -> Layout:
        """Append tensors; returns their layout in the file, from which ``read`` returns them."""
        layout, size = plan_layout(tensors)
        layout = [(name, dtype, shape, self._end + offset) for name, dtype, shape, offset in layout]
        for name, view in self.read(layout).items():
            view.copy_(tensors[name].detach())
        self._end += size
        return layout
