"""A network's tensors side by side in one vector, so that what is done to all of them is one call.

Each tensor begins at a cache line, as it does where PyTorch allocates it: some kernels add in another order elsewhere.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.core.tensors import ALIGN
from unskew.core.types import Tensors


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
