"""Normalisation by name: BatchNorm, or GroupNorm, which has no statistics that clients would have to share."""

from collections.abc import Callable
from functools import partial

from torch import nn

from unskew.core.errors import UserError, nearest

GROUP_SIZE = 16  # channels that GroupNorm normalises together, where they divide the layer's channels
NORMS = ("batch", "group")

Norm = Callable[[int], nn.Module]  # channels -> the layer


def norm_layer(name: str, *, eps: float = 1e-5, momentum: float = 0.1) -> Norm:
    """``batch`` or ``group``, as a function of the number of channels."""
    if name not in NORMS:
        raise UserError(f"norm={name}: {nearest(name, NORMS)}")
    if name == "batch":
        return partial(nn.BatchNorm2d, eps=eps, momentum=momentum)
    return partial(_group_norm, eps=eps)


def _group_norm(channels: int, *, eps: float) -> nn.GroupNorm:
    size = next(size for size in (GROUP_SIZE, 8, 4, 2, 1) if channels % size == 0)
    return nn.GroupNorm(channels // size, channels, eps=eps)
