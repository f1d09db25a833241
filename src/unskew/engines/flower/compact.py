"""Sums in fewer bytes on the wire, without losing a bit: 32 bits where a 64-bit number holds no more than that.

An update is weight·(old − new) in float64, and the receiver has old and weight: the new values in the model's own type
say the same. Every form is tried by undoing it; where one bit would differ, the number goes as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unskew.core.types import Sums, Tensors
from unskew.privacy.rows import PACK, in_row, packed, unpacked

DELTA = "delta/"
PLAIN, SINGLE, WORDS, BYTES, MODEL, ROW = "plain", "single", "words", "bytes", "model", "row"
FORMS = (PLAIN, SINGLE, WORDS, BYTES, MODEL, ROW)


@dataclass(frozen=True)
class Known:
    """What both sides have: the tensors that the server sent, the visit's weight, the factor on its update."""

    shared: Tensors
    weight: float
    factor: float = 1.0
    row: int | None = None  # the visit's place among the members of a secure sum
    members: int = 0


def compacted(sums: Sums, known: Known) -> list[tuple[str, str, Tensor]]:
    """(name, form, tensor) for each of the sums; ``restored`` gives the sums back, bit for bit."""
    return [(name, *_compacted(name, value, known)) for name, value in sums.items()]


def restored(name: str, form: str, sent: Tensor, known: Known) -> Tensor:
    """The sum that was sent in this form. Raises ValueError where it cannot have been."""
    undo = _UNDO.get(form)
    if undo is None:
        raise ValueError(f"{name}: there is no form {form[:20]!r}")
    return undo(name, sent, known)


def factor_of(sums: Mapping[str, Tensor], weight: float) -> float:
    """The factor on a visit's update, from its sums; 1 where there is none."""
    scaled = sums.get("scaled")
    if scaled is None or scaled.numel() != 1 or float(scaled) == weight or not float(scaled):
        return 1.0
    return weight / float(scaled)


def _compacted(name: str, value: Tensor, known: Known) -> tuple[str, Tensor]:
    for form, make in _MAKE.items():
        sent = make(name, value, known)
        if sent is not None and _same_bits(restored(name, form, sent, known), value):
            return form, sent
    return PLAIN, value


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.int64), right.contiguous().view(torch.int64)
    )


def _as_model(name: str, value: Tensor, known: Known) -> Tensor | None:
    old = known.shared.get(name.removeprefix(DELTA)) if name.startswith(DELTA) else None
    scale = known.weight * _factor(name, known)
    if old is None or old.shape != value.shape or not scale:
        return None
    new = old.double() - value / scale
    return new.to(old.dtype) if old.is_floating_point() else new.round().to(old.dtype)


def _from_model(name: str, sent: Tensor, known: Known) -> Tensor:
    old = known.shared.get(name.removeprefix(DELTA))
    if old is None or old.shape != sent.shape or old.dtype != sent.dtype:
        raise ValueError(f"{name}: it is not like the tensor that was sent")
    delta = torch.sub(old.double(), sent.double()).mul_(known.weight)
    factor = _factor(name, known)
    return delta if factor == 1 else delta.mul_(factor)


def _factor(name: str, known: Known) -> float:
    return known.factor if name.startswith("delta/params/") else 1.0  # buffers are averaged plainly


def _as_row(name: str, value: Tensor, known: Known) -> Tensor | None:
    """The visit's own row, six bytes a number, where all other rows are zero: keys and shares of a secure sum."""
    if known.row is None or value.dim() < 2 or len(value) != known.members:
        return None
    own = value[known.row]
    if not bool(((own >= 0) & (own < 256.0**PACK) & (own == own.round())).all()):
        return None
    return torch.from_numpy(unpacked(own, PACK * own.shape[-1]))


def _from_row(name: str, sent: Tensor, known: Known) -> Tensor:
    if known.row is None or sent.dtype != torch.uint8 or not sent.dim() or sent.shape[-1] % PACK:
        raise ValueError(f"{name}: it is no row of a secure sum")
    return in_row(known.row, known.members, packed(sent.numpy()))


def _single(name: str, value: Tensor, known: Known) -> Tensor | None:
    return value.float() if value.numel() > 1 else None


def _words(name: str, value: Tensor, known: Known) -> Tensor | None:
    """Whole numbers below 2³², as the halves of masked numbers are; int32 carries their bits."""
    if value.numel() < 2 or not bool(((value >= 0) & (value < 2**32)).all()):
        return None
    return torch.from_numpy(value.numpy().astype(np.uint32).view(np.int32))


def _bytes(name: str, value: Tensor, known: Known) -> Tensor | None:
    if value.numel() < 2 or not bool(((value >= 0) & (value < 256)).all()):
        return None
    return value.to(torch.uint8)


def _of_type(dtype: torch.dtype, undo: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor, Known], Tensor]:
    def checked(name: str, sent: Tensor, known: Known) -> Tensor:
        if sent.dtype != dtype:
            raise ValueError(f"{name}: {sent.dtype} is not the type of its form")
        return undo(sent)

    return checked


_MAKE: Mapping[str, Callable[[str, Tensor, Known], Tensor | None]] = {
    MODEL: _as_model, ROW: _as_row, BYTES: _bytes, SINGLE: _single, WORDS: _words,
}  # fmt: skip
_UNDO: Mapping[str, Callable[[str, Tensor, Known], Tensor]] = {
    PLAIN: _of_type(torch.float64, lambda sent: sent),
    SINGLE: _of_type(torch.float32, lambda sent: sent.double()),
    WORDS: _of_type(torch.int32, lambda sent: torch.from_numpy(sent.numpy().view(np.uint32).astype(np.float64))),
    BYTES: _of_type(torch.uint8, lambda sent: sent.double()),
    MODEL: _from_model,
    ROW: _from_row,
}
