"""From class statistics to class Gaussians: means, covariances that may be singular, and features drawn from them.

Shapes: C classes, d features, k directions of a Gaussian's spread, M features drawn.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.calibration.forms import directions
from unskew.core.errors import UserError
from unskew.core.key import Key

if TYPE_CHECKING:
    from unskew.calibration.statistics import ClassStatistics

TINY = 1e-12  # eigenvalues below this share of the largest are rounding


@dataclass(frozen=True, eq=False)
class Spread:
    """A covariance as F·Fᵀ + diag(v): what is drawn is F·ε + √v·ε′."""

    factor: Tensor | None  # [d, k]
    variance: Tensor | None  # [d]

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """[M, d], around zero."""
        found: Tensor | float = 0.0
        if self.factor is not None:
            noise = torch.randn(count, self.factor.shape[1], generator=generator, dtype=torch.float64)
            found = noise @ self.factor.t()
        if self.variance is not None:
            noise = torch.randn(count, len(self.variance), generator=generator, dtype=torch.float64)
            found = found + noise * self.variance.sqrt()
        assert isinstance(found, Tensor)
        return found


@dataclass(frozen=True)
class ClassReport:
    """What was done to one class's covariance before it could be drawn from; shares of its trace."""

    label: int
    count: int
    shrunk: float = 0.0  # the weight of the pooled covariance
    clipped: float = 0.0  # negative eigenvalues set to zero, as a share of all of them, signs aside
    left_over: float = 0.0  # variance outside the low-rank directions, kept on the diagonal


class Gaussians:
    """The Gaussian of each class held, made when asked for: one class's spread in memory at a time."""

    def __init__(self, statistics: "ClassStatistics") -> None:
        self.statistics = statistics
        self.means = statistics.sums["sums"] / statistics.number[:, None]  # [P, d]

    @cached_property
    def within(self) -> Tensor:
        """[d, d], the covariance pooled over all classes: found once, however many small classes want it."""
        return self.statistics.within()

    @cached_property
    def variance(self) -> Tensor:
        """[d], each feature's variance pooled over all classes, for the forms that know no more."""
        return _pooled_squares(self.statistics)

    @cached_property
    def common(self) -> tuple[Spread, float]:
        """The spread pooled over all classes, and the share of it that was clipped."""
        return _spread(self.within)

    def draw(self, place: int, count: int, key: Key) -> tuple[Tensor, ClassReport]:
        """[M, d] features of the class at this place, and what had to be done for them."""
        spread, report = self.spread(place)
        label = int(self.statistics.held[place])
        return self.means[place] + spread.draw(count, key.fold("class", label).torch()), report

    def spread(self, place: int) -> tuple[Spread, ClassReport]:
        """One class's spread. Fewer examples than features: the pooled covariance takes part.

        Its weight is 1 − (N − 1)/d, from 1 for a single example down to 0 where N reaches d + 1.
        """
        held = self.statistics
        label, count = int(held.held[place]), int(held.number[place])
        if held.form.name == "shared":
            spread, clipped = self.common
            return spread, ClassReport(label, count, shrunk=1.0, clipped=clipped)
        weight = max(0.0, 1 - (count - 1) / held.width)
        if held.form.name == "full":
            own = scatter(held, place) / max(count - 1, 1)
            mixed = own if weight == 0 else (1 - weight) * own + weight * self.within
            spread, clipped = _spread(mixed)
            return spread, ClassReport(label, count, weight, clipped)
        if held.form.name == "diagonal":
            own = _squares(held, place) / max(count - 1, 1)
            mixed = own if weight == 0 else (1 - weight) * own + weight * self.variance
            return Spread(None, mixed.clamp(min=0)), ClassReport(label, count, weight, _negative_share(mixed))
        return _low_rank_spread(held, place, weight, self.variance if weight > 0 else None)


def scatter(statistics: "ClassStatistics", place: int) -> Tensor:
    """[d, d], Σ(z − μ)(z − μ)ᵀ of one class, as far as the form knows it."""
    form = statistics.form.name
    if form == "full":
        total = statistics.sums["sums"][place]
        return statistics.sums["second"][place] - torch.outer(total, total) / statistics.number[place]
    if form == "diagonal":
        return torch.diag(_squares(statistics, place))
    factor, rest = _nystrom(statistics, place)
    return factor @ factor.t() + torch.diag(rest.clamp(min=0))


def pooled_scatter(statistics: "ClassStatistics") -> Tensor:
    """[d, d], the sum of all classes' scatters."""
    if statistics.form.name == "shared":
        sums = statistics.sums["sums"]
        return statistics.sums["second"] - (sums / statistics.number[:, None]).t() @ sums
    total = torch.zeros(statistics.width, statistics.width, dtype=torch.float64)
    for place in range(len(statistics.held)):
        total += scatter(statistics, place)
    return total


def _spread(covariance: Tensor) -> tuple[Spread, float]:
    """V·√λ of a symmetric matrix, negative λ set to zero, directions without spread left out; what was clipped."""
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    clipped = _negative_share(values)
    kept = values > TINY * values.abs().max()
    return Spread(vectors[:, kept] * values[kept].sqrt(), None), clipped


def _negative_share(values: Tensor) -> float:
    """Σ of what is below zero, as a share of the sum of all, signs aside."""
    total = float(values.abs().sum())
    return float(values.clamp(max=0).abs().sum()) / total if total else 0.0


def _squares(statistics: "ClassStatistics", place: int) -> Tensor:
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


def _nystrom(statistics: "ClassStatistics", place: int) -> tuple[Tensor, Tensor]:
    """F [d, r] with F·Fᵀ ≈ the scatter, from its products with Ω; and what F leaves of the diagonal [d].

    With S·Ω = Y and ΩᵀY = B, S ≈ Y·B⁻¹·Yᵀ: exact where S has rank r or less, and never above S.
    """
    total, number = statistics.sums["sums"][place], statistics.number[place]
    omega = directions(statistics.width, statistics.form.rank)
    products = statistics.sums["sketch"][place] - torch.outer(total, total @ omega) / number
    small = omega.t() @ products
    values, vectors = torch.linalg.eigh((small + small.mT) / 2)
    kept = values > 1e-10 * values.abs().max()
    factor = products @ (vectors[:, kept] / values[kept].sqrt())
    return factor, _squares(statistics, place) - factor.square().sum(1)


def _low_rank_spread(
    statistics: "ClassStatistics", place: int, weight: float, pooled: Tensor | None
) -> tuple[Spread, ClassReport]:
    """The class's own directions, the rest on the diagonal; a small class is mixed with the pooled diagonal."""
    label, count = int(statistics.held[place]), int(statistics.number[place])
    factor, rest = (
        value / max(count - 1, 1) ** power for value, power in zip(_nystrom(statistics, place), (0.5, 1), strict=True)
    )
    clipped = _negative_share(torch.cat([factor.square().sum(1), rest]))
    rest = rest.clamp(min=0)
    own = float(factor.square().sum()), float(rest.sum())
    if pooled is not None:
        factor, rest = (1 - weight) ** 0.5 * factor, (1 - weight) * rest + weight * pooled.clamp(min=0)
    left_over = own[1] / max(sum(own), 1e-300) if count > 1 else 0.0  # of one example there is only rounding
    return Spread(factor, rest), ClassReport(label, count, weight, clipped if count > 1 else 0.0, left_over)
