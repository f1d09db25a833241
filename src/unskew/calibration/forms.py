"""How much of a class's covariance is described: what every form can do, its text, its checks.

The forms themselves are in ``covariances``: Full, Diagonal, Shared, LowRank.

Shapes: P classes held, d features.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.machine import physical_memory
from unskew.core.types import Tensors

if TYPE_CHECKING:
    from unskew.calibration.gaussians import ClassReport, Gaussians, Spread
    from unskew.calibration.statistics import ClassStatistics

MAX_FEATURES = 2**24  # in a file of a stranger: a few bytes must not ask for terabytes


class Form(Protocol):
    """How much of the second moments is kept. All are sums over examples, so clients' statistics are added.

    ``str(form)`` is the text that ``parse_form`` takes.
    """

    @property
    def common(self) -> tuple[str, ...]:
        """The names of the sums that all classes share."""

    @property
    def least_width(self) -> int:
        """The fewest features that there can be."""

    def shapes(self, held: int, width: int) -> dict[str, tuple[int, ...]]:
        """The shape of each float64 sum for this many classes held and features; the counts come on top."""

    def measure(self, features: Tensor, parts: Sequence[Tensor], sums: Tensors) -> None:
        """Write the second moments of features [n, d], which ``parts`` has by class, into ``sums``."""

    def scatter(self, statistics: "ClassStatistics", place: int) -> Tensor:
        """[d, d], Σ(z − μ)(z − μ)ᵀ of one class, as far as the form knows it."""

    def pooled_scatter(self, statistics: "ClassStatistics") -> Tensor:
        """[d, d], the sum of all classes' scatters."""

    def spread(self, gaussians: "Gaussians", place: int) -> "tuple[Spread, ClassReport]":
        """What to draw one class's features from, and what had to be done for it."""


def statistics_bytes(form: Form, held: int, width: int) -> int:
    """The size of statistics of this form: float64 sums, int64 labels and counts."""
    return 16 * held + 8 * sum(math.prod(shape) for shape in form.shapes(held, width).values())


def check_memory(form: Form, others: Sequence[Form], held: int, width: int) -> None:
    """Refuse, before anything is allocated, statistics of more classes than this machine's memory holds."""
    needed, there = statistics_bytes(form, held, width), 0.8 * physical_memory()
    if needed > there:
        sizes = ", ".join(
            f"{each} ({statistics_bytes(each, held, width) / 1e9:.2f} GB)" for each in others if each != form
        )
        raise UserError(
            f"{form} statistics of {held:,} classes and {width:,} features take {needed / 1e9:.1f} GB, there are "
            f"{there / 1e9:.1f} GB for them on this machine; take the form {sizes}"
        )


def check_square(width: int) -> None:
    """Refuse a covariance [d, d] that this machine's memory cannot have: diagonal sums of few bytes may ask for it."""
    needed, there = 16 * width**2, 0.8 * physical_memory()  # two of float64 at once
    if needed > there:
        raise UserError(
            f"a covariance of {width:,} features takes {needed / 1e9:.1f} GB, there are {there / 1e9:.1f} GB for it on "
            "this machine; take fewer features"
        )


def fault(form: Form, held: int, sums: Tensors) -> str:
    """Why these cannot be the sums of this many classes held; empty where they can be."""
    if any(value.dtype != torch.float64 for value in sums.values()):
        return "sums must be float64"
    given, least = tuple(sums["sums"].shape), form.least_width
    if len(given) != 2 or not least <= given[1] <= MAX_FEATURES:
        return f"sums has the shape {given}, wanted is ({held}, d) with d from {least} to {MAX_FEATURES}"
    for name, shape in form.shapes(held, given[1]).items():
        if tuple(sums[name].shape) != shape:
            return f"{name} has the shape {tuple(sums[name].shape)}, wanted is {shape}"
        if not bool(sums[name].isfinite().all()):
            return f"{name} holds NaN or infinity"
    if "second" in sums and sums["second"].numel():
        second = sums["second"]
        scale = second.abs().amax((-2, -1), keepdim=True)  # of each class: a large one excuses no small one
        if bool(((second - second.mT).abs() > 1e-9 * scale).any()):
            return "second moments must be symmetric"
        if bool((second.diagonal(dim1=-2, dim2=-1) < 0).any()):
            return "second moments must not be negative"
    if "squares" in sums and bool((sums["squares"] < 0).any()):
        return "sums of squares must not be negative"
    return ""
