"""Class statistics as a vector of whole numbers: what can be masked, added modulo 2⁶⁴ and read back.

Shapes: C classes, d features, W = C + the form's sums: the words of a vector.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.calibration.covariances import Form, parse_form
from unskew.calibration.statistics import ClassStatistics, checked
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.types import Sums
from unskew.round.jobs import NOT_FINITE

MAX_EXAMPLES = 2**40  # of a class in a sum; more are a sign of masks that did not cancel


@dataclass(frozen=True)
class Layout:
    """What server and clients agree on: classes, features, form, and the fixed point, in steps of 2^-``bits``.

    A vector holds the counts of all C classes, then the form's sums for all C, absent ones zero, so that its length
    says nothing about its client. Of n clients each may use ±(2⁶³ − 1)/n steps, ±5.5e9 for 100 clients and 24 bits;
    counts are whole and stay as they are.
    """

    classes: int
    width: int
    form: Form
    bits: int

    @staticmethod
    def of(classes: int, width: int, form: str | Form = "full", *, bits: int = 24) -> "Layout":
        """The layout for this number of classes and features."""
        if classes < 1 or width < 1:
            raise UserError(f"a layout of {classes} classes of {width} features: give at least one of each")
        if not 0 <= bits <= 52:
            raise UserError(f"bits={bits}: give 0 to 52 binary places")
        return Layout(classes, width, parse_form(form), bits)

    @property
    def bytes(self) -> int:
        """What one client sends, whatever it holds: 8 bytes a word."""
        return 8 * (self.classes + sum(torch.Size(shape).numel() for shape in self._shapes.values()))

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.form.shapes(self.classes, self.width)

    def about(self) -> str:
        """What it is, in a few words."""
        return f"{self.form} over {self.classes} classes of {self.width} features in steps of 2^-{self.bits}"

    def shorter(self, radius: float) -> float:
        """The length to clip features to, where noise is for features of length ``radius`` and the sums are rounded.

        One example changes the sums of one client. Each of its entries was rounded with it and would be without it, so
        the rounded difference is off by one step h at most: Σz by h·√d in length, Σzzᵀ by h·d (Σz² by h·√d). With
        r + h·√d ≤ R and r² + h·d ≤ R² one example moves the rounded sums no more than R and R². The last factor is for
        the float64 sums before they are rounded.
        """
        step, width = 2.0**-self.bits, self.width
        entries = float(width) if "second" in self._shapes else width**0.5
        least = 1.001 * max(2 * step * width**0.5, (4 / 3 * step * entries) ** 0.5)
        if radius < least:
            raise UserError(
                f"clip={radius:g} is too short for a secure sum of {width} features in steps of 2^-{self.bits}: "
                f"rounding may move it half as far as an example; give clip={least:.2g} or more, or leave secure out"
            )
        return min(radius - step * math.sqrt(width), math.sqrt(radius**2 - step * entries)) * (1 - 1e-6)

    def quantised(self, statistics: ClassStatistics, clients: int, who: str) -> Tensor:
        """[W] int64, the statistics laid out; refused, naming ``who``, where a sum over ``clients`` could overflow."""
        statistics = checked(statistics.classes, statistics.form, statistics.tensors(), who)
        if (statistics.classes, statistics.width, statistics.form) != (self.classes, self.width, self.form):
            raise UserError(f"the statistics of {who} are refused: {statistics.about()}; expected {self.about()}")
        limit = MAX_EXAMPLES // clients
        if bool((statistics.number > limit).any()):
            raise UserError(f"the statistics of {who} are refused: a class has more than {limit} examples")
        flat = [statistics.counts]
        for name, shape in self._shapes.items():
            value = statistics.sums[name]
            if name == "second":
                value = (value + value.mT) / 2  # products are symmetric but for rounding, which must not grow to a step
            if self._by_class(name):
                value = torch.zeros(shape, dtype=torch.float64).index_copy_(0, statistics.held, value)
            flat.append(self._steps(value.flatten(), name, clients, who))
        return torch.cat(flat)

    def statistics(self, vector: Tensor, who: str) -> ClassStatistics:
        """The statistics of a sum of vectors that carries no mask any more."""
        counts, *parts = torch.split_with_sizes(
            vector, [self.classes, *(torch.Size(shape).numel() for shape in self._shapes.values())]
        )
        if bool(((counts < 0) | (counts > MAX_EXAMPLES)).any()):
            raise UserError(
                f"the masks of {who} do not cancel: all must answer one session with the same clients and layout, "
                "and open it"
            )
        held = counts.nonzero()[:, 0]
        values = {"held": held, "number": counts[held]}
        for (name, shape), part in zip(self._shapes.items(), parts, strict=True):
            value = part.reshape(shape).double() * 2.0**-self.bits
            values[name] = value[held] if self._by_class(name) else value
        return checked(self.classes, self.form, values, who)

    def _by_class(self, name: str) -> bool:
        return name not in self.form.common

    def _steps(self, value: Tensor, name: str, clients: int, who: str) -> Tensor:
        limit = (2**63 - 1) // clients
        steps = (value * 2.0**self.bits).round()
        if bool((steps.abs() >= 2.0**63).any()) or bool((steps.long().abs() > limit).any()):
            raise UserError(
                f"the statistics of {who} are refused: {name} reach {float(value.abs().max()):.3g}, in a sum over "
                f"{clients} clients there is room for {limit * 2.0**-self.bits:.3g}; take fewer bits or clip features"
            )
        return steps.long()


BITS = 32  # binary places of a training's sums: steps of 2^-32


def as_steps(sums: Sums, clients: int, who: str, bits: int = BITS) -> dict[str, Tensor]:
    """Every sum in steps of 2^-bits, int64; refused, naming ``who``, where a sum over ``clients`` could overflow."""
    if not tensors.finite(sums):
        raise UserError(f"{who}: {NOT_FINITE}")
    limit = (2**63 - 1) // clients
    words = {}
    for name, value in sums.items():
        steps = (value * 2.0**bits).round()
        if bool((steps.abs() >= 2.0**63).any()) or bool((steps.long().abs() > limit).any()):
            raise UserError(
                f"{who}: {name} reaches {float(value.abs().max()):.3g}, and in a sum over {clients} visits there is "
                f"room for {limit * 2.0**-bits:.3g} each; smaller --lr, or fewer clients a round, or leave secure out"
            )
        words[name] = steps.long()
    return words


def from_steps(words: Mapping[str, Tensor], bits: int = BITS) -> Sums:
    """The sums that these steps add up to."""
    return {name: torch.as_tensor(value.double() * 2.0**-bits) for name, value in words.items()}
