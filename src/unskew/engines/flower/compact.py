"""Sums in fewer bytes on the wire, without losing a bit: 32 bits where a 64-bit number holds no more than that.

An update is weight·(old − new) in float64, and the receiver has old and weight: the new values in the model's own type
say the same. Every form is tried by undoing it; where one bit would differ, the number goes as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.core.types import Tensors

DELTA = "delta/"
PLAIN, SINGLE, MODEL = "plain", "single", "model"
FORMS = (PLAIN, SINGLE, MODEL)


@dataclass(frozen=True)
class WireContext:
    """What both sides have: the tensors that the server sent, the visit's weight, the factor on its update."""

    shared: Tensors
    weight: float
    factor: float = 1.0


def compact(sums: Mapping[str, Tensor], context: WireContext) -> list[tuple[str, str, Tensor]]:
    """(name, form, tensor) for each of the sums; ``restore`` gives the sums back, bit for bit."""
    return [(name, *_compact_one(name, value, context)) for name, value in sums.items()]


def restore(name: str, form: str, sent: Tensor, context: WireContext) -> Tensor:
    """The sum that was sent in this form. Raises ValueError where it cannot have been."""
    if form == PLAIN and sent.dtype in (torch.float64, torch.int64):
        return sent
    if form == SINGLE and sent.dtype == torch.float32:
        return sent.double()
    if form == MODEL:
        return _from_model(name, sent, context)
    raise ValueError(f"{name}: {sent.dtype} is not the type of a form {form[:20]!r}")


def factor_of(sums: Mapping[str, Tensor], weight: float) -> float:
    """The factor on a visit's update, from its sums; 1 where there is none."""
    scaled = sums.get("scaled")
    if scaled is None or scaled.dtype != torch.float64 or float(scaled) == weight or not float(scaled):
        return 1.0
    return weight / float(scaled)


def _compact_one(name: str, value: Tensor, context: WireContext) -> tuple[str, Tensor]:
    attempts: tuple[tuple[str, Callable[[], Tensor | None]], ...] = (
        (MODEL, lambda: _as_model(name, value, context)),
        (SINGLE, lambda: value.float() if value.numel() > 1 else None),
    )
    for form, make in attempts if value.dtype == torch.float64 else ():
        sent = make()
        if sent is not None and _same_bits(restore(name, form, sent, context), value):
            return form, sent
    return PLAIN, value


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.int64), right.contiguous().view(torch.int64)
    )


def _as_model(name: str, value: Tensor, context: WireContext) -> Tensor | None:
    old = context.shared.get(name.removeprefix(DELTA)) if name.startswith(DELTA) else None
    scale = context.weight * _factor(name, context)
    if old is None or old.shape != value.shape or not scale:
        return None
    new = old.double() - value / scale
    return new.to(old.dtype) if old.is_floating_point() else new.round().to(old.dtype)


def _from_model(name: str, sent: Tensor, context: WireContext) -> Tensor:
    old = context.shared.get(name.removeprefix(DELTA))
    if old is None or old.shape != sent.shape or old.dtype != sent.dtype:
        raise ValueError(f"{name}: it is not like the tensor that was sent")
    delta = torch.sub(old.double(), sent.double()).mul_(context.weight)
    factor = _factor(name, context)
    return delta if factor == 1 else delta.mul_(factor)


def _factor(name: str, context: WireContext) -> float:
    return context.factor if name.startswith("delta/params/") else 1.0  # buffers are averaged plainly
