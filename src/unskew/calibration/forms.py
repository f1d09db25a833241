"""How much of a class's covariance is described: everything, its diagonal, one for all classes, or a few directions.

Shapes: P classes held, d features, r directions.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from unskew.core import text
from unskew.core.errors import UserError, nearest
from unskew.core.key import Key
from unskew.core.machine import physical_memory
from unskew.core.types import Tensors

NAMES = ("full", "diagonal", "shared", "low-rank")
MOST = 2**24  # classes, or features, that a stranger may speak of: a few bytes must not ask for terabytes


@dataclass(frozen=True)
class Form:
    """``full``: Σzzᵀ of each class. ``diagonal``: Σz² of each class. ``shared``: Σzzᵀ over all classes.

    ``low-rank(r)``: Σz·(zᵀΩ) of each class for one Ω [d, r] that everybody knows, and Σz². Every form is a sum over
    examples, so that clients' statistics are added; from Σzzᵀ·Ω the server finds the r directions that matter
    (Nyström), and what they leave of each feature's variance stays on the diagonal.
    """

    name: str = "full"
    rank: int = 0

    @staticmethod
    def parse(source: "str | Form") -> "Form":
        """The form of a text such as ``low-rank(32)``."""
        if isinstance(source, Form):
            return source
        calls = text.parse_calls(source, "covariance form")
        name = calls[0].name
        if len(calls) > 1 or name not in NAMES:
            raise UserError(f"no covariance form is called {source!r}; {nearest(name, NAMES)}")
        if name == "low-rank":
            return text.apply(calls[0], _low_rank, "covariance form")  # type: ignore[no-any-return]
        return text.apply(calls[0], lambda: Form(name), "covariance form")  # type: ignore[no-any-return]

    def __str__(self) -> str:
        """The text that ``parse`` takes."""
        return f"low-rank({self.rank})" if self.name == "low-rank" else self.name

    @property
    def common(self) -> tuple[str, ...]:
        """The sums that are one for all classes."""
        return ("second",) if self.name == "shared" else ()

    def shapes(self, held: int, width: int) -> dict[str, tuple[int, ...]]:
        """The shape of each float64 sum for so many classes held and features; the counts come on top."""
        _check_rank(self.rank, width)
        second: dict[str, dict[str, tuple[int, ...]]] = {
            "full": {"second": (held, width, width)},
            "diagonal": {"squares": (held, width)},
            "shared": {"second": (width, width)},
            "low-rank": {"sketch": (held, width, self.rank), "squares": (held, width)},
        }
        return {"sums": (held, width), **second[self.name]}

    def bytes(self, held: int, width: int) -> int:
        """What statistics of this form weigh: float64 sums, int64 labels and counts."""
        return 16 * held + 8 * sum(math.prod(shape) for shape in self.shapes(held, width).values())

    def must_fit(self, held: int, width: int) -> None:
        """Refuse, before anything is allocated, statistics of more classes than this machine's memory holds."""
        needed, there = self.bytes(held, width), 0.8 * physical_memory()
        if needed > there:
            others = [Form("shared"), Form("diagonal"), Form("low-rank", min(32, width))]
            sizes = ", ".join(f"{form} ({form.bytes(held, width) / 1e9:.2f} GB)" for form in others if form != self)
            raise UserError(
                f"{self} statistics of {held:,} classes and {width:,} features take {needed / 1e9:.1f} GB, there are "
                f"{there / 1e9:.1f} GB for them on this machine; take the form {sizes}"
            )

    def fault(self, held: int, sums: Tensors) -> str:
        """Why these cannot be the sums of so many classes held; empty: they can be."""
        if any(value.dtype != torch.float64 for value in sums.values()):
            return "sums must be float64"
        given, least = tuple(sums["sums"].shape), max(1, self.rank)
        if len(given) != 2 or not least <= given[1] <= MOST:
            return f"sums has the shape {given}, wanted is ({held}, d) with d from {least} to {MOST}"
        for name, shape in self.shapes(held, given[1]).items():
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

    def measure(self, features: Tensor, into: Tensors) -> None:
        """Write the second moments of features [n, d]: of one class, or of all where the form is ``shared``."""
        if "second" in into:
            torch.mm(features.t(), features, out=into["second"])
        if "squares" in into:
            torch.linalg.vecdot(features, features, dim=0, out=into["squares"])
        if "sketch" in into:
            torch.mm(features.t(), features @ directions(features.shape[1], self.rank), out=into["sketch"])


@lru_cache(maxsize=4)
def directions(width: int, rank: int) -> Tensor:
    """Ω [d, r]: r orthonormal directions, the same for everybody."""
    _check_rank(rank, width)
    drawn = torch.randn(width, rank, generator=Key(0).fold("directions", width).torch(), dtype=torch.float64)
    found: Tensor = torch.linalg.qr(drawn).Q
    return found


def _check_rank(rank: int, width: int) -> None:
    if rank > width:
        raise UserError(f"low-rank({rank}): the features have only {width} dimensions; give at most that")


def _low_rank(rank: int = 32) -> Form:
    if rank < 1:
        raise ValueError(f"low-rank({rank}): rank counts directions, give at least 1")
    return Form("low-rank", rank)
