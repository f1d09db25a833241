"""Tensors side by side in one vector, so that what is done to all of them is one call: a network's, and sums.

Each of a network's tensors begins at a cache line, as it does where PyTorch allocates it: some kernels add in another
order elsewhere.
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.core.tensors import ALIGN, Layout, plan_layout
from unskew.core.types import Sums, Tensors

DOUBLE = 8  # bytes of a number in a sum


@dataclass(frozen=True)
class Place:
    """Where a tensor is in the vector: its shape, its strides and its first element."""

    shape: torch.Size
    strides: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Packed:
    """The vector and each tensor's place in it, by name; ``others`` names the tensors that are not in it."""

    vector: Tensor
    places: dict[str, Place]
    others: tuple[str, ...]

    def views(self, vector: Tensor, prefix: str = "") -> Tensors:
        """The tensors in a vector like this one, one namespace deeper: not copies."""
        return {
            prefix + name: vector.as_strided(place.shape, place.strides, place.start)
            for name, place in self.places.items()
        }

    def copied(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """The values of such tensors in a new vector like this one, with zeros between them."""
        vector = torch.zeros_like(self.vector, dtype=dtype)
        for name, view in self.views(vector).items():
            view.copy_(tensors[name])
        return vector


def pack(module: nn.Module) -> Packed:
    """Move a network's parameters and buffers into one vector, in place: the network's tensors are views of it.

    A tensor of another type than the first one stays where it is, and so does one that shares its memory.
    """
    params = {f"params/{name}": value for name, value in module.named_parameters()}
    own: Tensors = {**params, **{f"buffers/{name}": value for name, value in module.named_buffers()}}
    first = next(iter(own.values()), torch.empty(0))
    step = max(1, ALIGN // first.element_size())
    sharing = Counter(value.untyped_storage().data_ptr() for value in own.values())
    places: dict[str, Place] = {}
    end = 0
    for name, value in own.items():
        storage = value.untyped_storage()
        alone = sharing[storage.data_ptr()] == 1 and storage.nbytes() == value.numel() * value.element_size()
        if alone and value.is_contiguous() and (value.dtype, value.device) == (first.dtype, first.device):
            places[name] = Place(value.shape, value.stride(), end)
            end += -(-value.numel() // step) * step
    vector = torch.zeros(end, dtype=first.dtype, device=first.device)
    packed = Packed(vector, places, tuple(name for name in own if name not in places))
    for name, view in packed.views(vector).items():
        view.copy_(own[name].detach())
        own[name].data = view
    return packed


@dataclass(frozen=True)
class PackedSums:
    """Sums side by side in one vector; the layout says where each one is."""

    layout: Layout
    vector: Tensor  # float64, on the CPU

    @staticmethod
    def of(sums: Sums) -> "PackedSums":
        """The values of these sums in a new vector, with zeros between them."""
        layout, end = plan_layout(sums)
        packed = PackedSums(layout, torch.zeros(end // DOUBLE, dtype=torch.float64))
        for name, view in packed.by_name().items():
            view.copy_(sums[name])
        return packed

    def by_name(self) -> Sums:
        """The sums by name: views of the vector."""
        return {
            name: self.vector[offset // DOUBLE : offset // DOUBLE + torch.Size(shape).numel()].view(shape)
            for name, _, shape, offset in self.layout
        }

    def finite(self) -> bool:
        """Whether no entry holds NaN or infinity: their sum is either if one is, and only then each is looked at."""
        return math.isfinite(self.vector.sum().item()) or bool(self.vector.isfinite().all())
