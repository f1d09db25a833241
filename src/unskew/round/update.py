"""What a client's training comes to: weight·(old − new) and a few numbers, side by side in one vector."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.core.packing import DOUBLE, Packed, PackedSums
from unskew.core.tensors import ALIGN, Layout
from unskew.core.types import Sums, Tensors

if TYPE_CHECKING:
    from unskew.round.client import ClientSide

NUMBERS = ("weight", "scaled", "metric/loss", "metric/examples", "metric/visits")
HEAD = ALIGN // DOUBLE  # of the vector: the numbers, then zeros
REST = (0.0,) * (HEAD - len(NUMBERS))


def new_room(count: int) -> Tensor:
    """Room for a vector of so many numbers, wherever there is some."""
    return torch.empty(count, dtype=torch.float64)


def update_layout(packed: Packed) -> Layout:
    """Where everything is: the numbers first, then the tensors as the network has them."""
    numbers: Layout = [(name, "float64", [], place * DOUBLE) for place, name in enumerate(NUMBERS)]
    deltas: Layout = [
        (f"delta/{name}", "float64", list(place.shape), (HEAD + place.start) * DOUBLE)
        for name, place in packed.places.items()
    ]
    return [*numbers[:2], *deltas, *numbers[2:]]


def update(
    side: "ClientSide", shared: Tensors, before: Tensor, factor: float, numbers: tuple[float, ...]
) -> PackedSums:
    """The update of a visit; ``before`` is the server's model as packed, in float64, ``numbers`` are as named above.

    float64 carries float32's differences exactly, so that one client's round is plain SGD to the last bit.
    """
    weight, vector = numbers[0], side.room(HEAD + len(before))
    vector[:HEAD] = torch.tensor((*numbers, *REST), dtype=torch.float64)
    moved = vector[HEAD:]
    moved.copy_(side.packed.vector)
    torch.sub(before, moved, out=moved).mul_(weight)
    whole = PackedSums(side.update_layout, vector)
    if factor == 1 and not side.packed.others:
        return whole
    sums = _with_others(side, shared, whole.by_name(), weight) if side.packed.others else whole.by_name()
    if factor != 1:  # of parameters alone: buffers are averaged plainly
        torch._foreach_mul_([value for name, value in sums.items() if name.startswith("delta/params/")], factor)
    return PackedSums.of(sums) if side.packed.others else whole


def _with_others(side: "ClientSide", shared: Tensors, sums: Sums, weight: float) -> Sums:
    """With the tensors that are not in the packed vector, all in the network's order."""
    for name in side.packed.others:
        sums[f"delta/{name}"] = (shared[name].double() - side.weights[name].cpu().double()).mul_(weight)
    names = (*NUMBERS[:2], *(f"delta/{name}" for name in side.weights), *NUMBERS[2:])
    return {name: sums[name] for name in names}
