"""From class statistics to class Gaussians: means, covariances that may be singular, and features drawn from them.

Shapes: C classes, d features, k directions of a Gaussian's spread, M features drawn.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.key import Key

if TYPE_CHECKING:
    from unskew.calibration.statistics import ClassStatistics

CLIPPED = 1e-6  # a share of negative eigenvalues above this is not rounding, and is said
TINY = 1e-12  # eigenvalues below this share of the largest are rounding


@dataclass(frozen=True, eq=False)
class Spread:
    """A covariance as F·Fᵀ + diag(v): what is drawn is F·ε + √v·ε′."""

    factor: Tensor | None  # [d, k]
    variance: Tensor | None  # [d]

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """[M, d], around zero."""
        drawn: Tensor | float = 0.0
        if self.factor is not None:
            noise = torch.randn(count, self.factor.shape[1], generator=generator, dtype=torch.float64)
            drawn = noise @ self.factor.t()
        if self.variance is not None:
            noise = torch.randn(count, len(self.variance), generator=generator, dtype=torch.float64)
            drawn = drawn + noise * self.variance.sqrt()
        assert isinstance(drawn, Tensor)
        return drawn


@dataclass(frozen=True)
class ClassReport:
    """What was done to one class's covariance before it could be drawn from; shares of its trace."""

    label: int
    count: int
    shrunk: float = 0.0  # the weight of the pooled covariance
    clipped: float = 0.0  # negative eigenvalues set to zero, as a share of all of them, signs aside
    left_over: float = 0.0  # variance outside the low-rank directions, kept on the diagonal


class Gaussians:
    """The Gaussian of each class held, made on demand: one class's spread in memory at a time."""

    def __init__(self, statistics: "ClassStatistics") -> None:
        self.statistics = statistics
        self.means = statistics.means()  # [P, d]

    @cached_property
    def within(self) -> Tensor:
        """[d, d], the covariance pooled over all classes: computed once, however many small classes need it."""
        return self.statistics.within()

    @cached_property
    def variance(self) -> Tensor:
        """[d], each feature's variance pooled over all classes, for the forms that keep no more."""
        return _pooled_squares(self.statistics)

    @cached_property
    def common(self) -> tuple[Spread, float]:
        """The spread pooled over all classes, and the share of it that was clipped."""
        return spread_of(self.within)

    def draw(self, place: int, count: int, key: Key) -> tuple[Tensor, ClassReport]:
        """[M, d] features of the class at this place, and what had to be done for them."""
        spread, report = self.spread(place)
        label = int(self.statistics.held[place])
        return self.means[place] + spread.draw(count, key.fold("class", label).torch()), report

    def spread(self, place: int) -> tuple[Spread, ClassReport]:
        """What to draw one class's features from, and what had to be done for it."""
        return self.statistics.form.spread(self, place)


def pooled_weight(statistics: "ClassStatistics", place: int) -> tuple[int, float]:
    """How many examples a class has, and the weight of the pooled covariance in its own: 1 − (N − 1)/d.

    It goes from 1 for a single example down to 0 where N reaches d + 1.
    """
    count = int(statistics.number[place])
    return count, max(0.0, 1 - (count - 1) / statistics.width)


def spread_of(covariance: Tensor) -> tuple[Spread, float]:
    """V·√λ of a symmetric matrix, negative λ set to zero, directions without spread left out; what was clipped."""
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    clipped = negative_share(values)
    kept = values > TINY * values.abs().max()
    return Spread(vectors[:, kept] * values[kept].sqrt(), None), clipped


def without_negative(covariance: Tensor) -> tuple[Tensor, float]:
    """The matrix with its negative eigenvalues set to zero, and their share; as it is where they are rounding alone."""
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    share = negative_share(values)
    if share <= CLIPPED:
        return covariance, 0.0
    return (vectors * values.clamp(min=0)) @ vectors.t(), share


def negative_share(values: Tensor) -> float:
    """Σ of what is below zero, as a share of the sum of all, signs aside."""
    total = float(values.abs().sum())
    return float(values.clamp(max=0).abs().sum()) / total if total else 0.0


def squares_around_mean(statistics: "ClassStatistics", place: int) -> Tensor:
    """[d], Σ(z − μ)² of one class."""
    total = statistics.sums["sums"][place]
    return statistics.sums["squares"][place] - total.square() / statistics.number[place]


def _pooled_squares(statistics: "ClassStatistics") -> Tensor:
    """[d], each feature's variance pooled over the classes."""
    degrees = int(statistics.number.sum()) - len(statistics.held)
    if degrees < 1:
        raise UserError("no class has two examples; a covariance needs them")
    number = statistics.number[:, None]
    return (statistics.sums["squares"] - statistics.sums["sums"].square() / number).sum(0) / degrees
