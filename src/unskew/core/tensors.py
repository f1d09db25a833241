"""Arithmetic over flat dicts of tensors: the state of a network, its differences, its sums."""

import hashlib
import math
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unskew.core.types import Sums, Tensors

ALIGN = 64  # bytes: a cache line

Layout = list[tuple[str, str, list[int], int]]  # name, dtype, shape and offset of each tensor in raw memory


def of_module(module: nn.Module) -> Tensors:
    """A network's tensors, not copied, as "params/…" and "buffers/…"."""
    params = {f"params/{name}": value.detach() for name, value in module.named_parameters()}
    buffers = {f"buffers/{name}": value for name, value in module.named_buffers()}
    return params | buffers


def overwrite(module: nn.Module, values: Tensors) -> None:
    """Set all parameters and buffers of a network, in place."""
    with torch.no_grad():
        for name, target in of_module(module).items():
            target.copy_(values[name])


def overwrite_some(module: nn.Module, values: Tensors) -> None:
    """Set some of a network's parameters and buffers, in place."""
    targets = of_module(module)
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)


def copy(tensors: Tensors) -> Tensors:
    """Copies of all tensors."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def on_device(tensors: Tensors, device: torch.device | str) -> Tensors:
    """The tensors on that device; those already on it are not copied."""
    return {name: value.to(device) for name, value in tensors.items()}


def under(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors of a namespace, without the prefix in their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def parameters(model: Tensors) -> Tensors:
    """A model's parameters under their full names, without buffers."""
    return {name: value for name, value in model.items() if name.startswith("params/")}


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors with the prefix added to their names."""
    return {prefix + name: value for name, value in tensors.items()}


def flat(tensors: Tensors) -> Tensor:
    """All values in one float64 vector, in the order of the names."""
    pieces = [value.reshape(-1) for value in tensors.values()]
    if len({piece.dtype for piece in pieces}) > 1:  # cat with float32 would round large whole numbers
        pieces = [piece.double() for piece in pieces]
    return torch.cat(pieces).double()


def shaped(vector: Tensor, like: Tensors) -> Tensors:
    """Views of the vector with these names and shapes."""
    parts = torch.split_with_sizes(vector, [value.numel() for value in like.values()])
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}


def finite(tensors: Tensors) -> bool:
    """Whether no entry is NaN or infinite; if their sum is finite, no entry needs a check of its own."""
    bases = {id(base): base for base in (value if value._base is None else value._base for value in tensors.values())}
    total = sum(base.sum(dtype=torch.float64).item() for base in bases.values())
    return math.isfinite(total) or all(bool(value.isfinite().all()) for value in tensors.values())


def plan_layout(tensors: Tensors) -> tuple[Layout, int]:
    """The position of each tensor in raw memory, and the total size."""
    layout: Layout = []
    end = 0
    for name, value in tensors.items():
        layout.append((name, str(value.dtype).removeprefix("torch."), list(value.shape), end))
        end += -(-value.numel() * value.element_size() // ALIGN) * ALIGN
    return layout, max(end, ALIGN)


def views(memory: mmap.mmap | bytearray | memoryview, layout: Layout) -> Tensors:
    """Tensors over the memory, by name."""
    tensors = {}
    for name, dtype, shape, offset in layout:
        kind = getattr(torch, dtype)
        if count := math.prod(shape):
            tensors[name] = torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=kind)
    return tensors


def count_bytes(tensors: Tensors) -> int:
    """How many bytes the tensors have."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def sha256(tensors: Tensors) -> str:
    """SHA-256 over the tensors' names, without namespace, and raw bytes, in the order of the names."""
    plain = {name.removeprefix("params/").removeprefix("buffers/"): value for name, value in tensors.items()}
    digest = hashlib.sha256()
    for name in sorted(plain):
        digest.update(name.encode())
        digest.update(plain[name].detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


class _HalfSquaredDistance(torch.autograd.Function):
    """½·Σ‖x − r‖² over many tensors in a handful of calls; its gradient is x − r."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, reference: list[Tensor], *values: Tensor) -> Tensor:
        difference = torch._foreach_sub([v.detach() for v in values], reference)
        ctx.difference = difference  # type: ignore[attr-defined]
        norms = torch._foreach_norm(difference)
        return torch.stack(norms).square_().sum().mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = torch._foreach_mul(ctx.difference, gradients[0])  # type: ignore[attr-defined]
        return None, *scaled


def half_squared_distance(values: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """½·Σ‖values − reference‖², differentiable in ``values``."""
    result: Tensor = _HalfSquaredDistance.apply(list(reference), *values)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


DOUBLE = 8  # bytes of a number in a sum


@dataclass(frozen=True)
class Packed:
    """A vector that holds a network's tensors; ``others`` names the tensors outside it."""

    vector: Tensor
    positions: dict[str, tuple[torch.Size, tuple[int, ...], int]]  # shape, strides and first element
    others: tuple[str, ...]

    def views(self, vector: Tensor) -> Tensors:
        """The tensors in a vector of this layout, not copied."""
        return {name: vector.as_strided(*position) for name, position in self.positions.items()}

    def copied(self, tensors: Tensors) -> Tensor:
        """A new vector of this layout with the values of these tensors, zeros in the gaps."""
        vector = torch.zeros_like(self.vector)
        for name, view in self.views(vector).items():
            view.copy_(tensors[name])
        return vector


def pack(module: nn.Module) -> Packed:
    """Move a network's parameters and buffers into one vector, in place: they become views of it.

    Tensors of another dtype or device than the first, and those that share memory, stay outside.
    """
    params = {f"params/{name}": value for name, value in module.named_parameters()}
    tensors: Tensors = {**params, **{f"buffers/{name}": value for name, value in module.named_buffers()}}
    first = next(iter(tensors.values()), torch.empty(0))
    step = max(1, ALIGN // first.element_size())
    sharing = Counter(value.untyped_storage().data_ptr() for value in tensors.values())
    positions: dict[str, tuple[torch.Size, tuple[int, ...], int]] = {}
    end = 0
    for name, value in tensors.items():
        storage = value.untyped_storage()
        alone = sharing[storage.data_ptr()] == 1 and storage.nbytes() == value.numel() * value.element_size()
        if alone and value.is_contiguous() and (value.dtype, value.device) == (first.dtype, first.device):
            positions[name] = value.shape, value.stride(), end
            end += -(-value.numel() // step) * step
    vector = torch.zeros(end, dtype=first.dtype, device=first.device)
    packed = Packed(vector, positions, tuple(name for name in tensors if name not in positions))
    for name, view in packed.views(vector).items():
        view.copy_(tensors[name].detach())
        tensors[name].data = view
    return packed


class PackedSums(Mapping[str, Tensor]):
    """Sums in one vector of 64-bit numbers: first float64, then int64, located by the layout."""

    def __init__(self, layout: Layout, vector: Tensor) -> None:
        self.layout, self.vector = layout, vector  # float64, on the CPU

    @staticmethod
    def of(sums: Mapping[str, Tensor]) -> "PackedSums":
        """The sums in one vector, padded with zeros; they are copied unless they are packed already."""
        if isinstance(sums, PackedSums):
            return sums
        layout, end = plan_layout(dict(sorted(sums.items(), key=lambda item: not item[1].is_floating_point())))
        packed = PackedSums(layout, torch.zeros(end // DOUBLE, dtype=torch.float64))
        for name, view in packed.by_name().items():
            view.copy_(sums[name])
        return packed

    def by_name(self) -> Sums:
        """The sums by name: views of the vector."""
        sums = {}
        for name, dtype, shape, offset in self.layout:
            part = self.vector[offset // DOUBLE : offset // DOUBLE + math.prod(shape)].view(shape)
            sums[name] = part if dtype == "float64" else part.view(torch.int64)
        return sums

    _named = cached_property(by_name)  # for single entries

    def add(self, other: "PackedSums") -> None:
        """Add sums of the same layout, in place."""
        if other.layout is not self.layout and other.layout != self.layout:
            names = {entry[0] for entry in other.layout} ^ {entry[0] for entry in self.layout}
            difference = ", ".join(sorted(names)) or "their order or their shapes differ"
            raise ValueError(f"sums with different entries cannot be added: {difference}")
        split = self._floats
        self.vector[:split].add_(other.vector[:split])
        if split < len(self.vector):
            self.vector[split:].view(torch.int64).add_(other.vector[split:].view(torch.int64))

    def finite(self) -> bool:
        """Whether no float is NaN or infinite; if their sum is finite, all are."""
        floats = self.vector[: self._floats]
        return math.isfinite(floats.sum().item()) or bool(floats.isfinite().all())

    @property
    def _floats(self) -> int:
        if not self.layout or self.layout[-1][1] == "float64":
            return len(self.vector)
        return next(offset for _, dtype, _, offset in self.layout if dtype != "float64") // DOUBLE

    def __getitem__(self, name: str) -> Tensor:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return (entry[0] for entry in self.layout)

    def __len__(self) -> int:
        return len(self.layout)
