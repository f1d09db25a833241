"""The class Gaussians: the four forms of a covariance, and drawing features from them.

Shapes: C classes, P of them with examples, d features, r directions of a low-rank form, k directions of a Gaussian's
spread, M features drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.core import language
from unskew.core.errors import UserError, brief, whole_number
from unskew.core.key import Key
from unskew.core.machine import available_memory, physical_memory
from unskew.core.types import Tensors
from unskew.core.units import counted, format_bytes

if TYPE_CHECKING:
    from unskew.calibration.statistics import ClassStatistics


CLIPPED = 1e-6  # a share of negative eigenvalues above this is more than rounding error, and is reported
TINY = 1e-12  # eigenvalues below this share of the largest are rounding errors


@dataclass(frozen=True, eq=False)
class Spread:
    """A covariance F·Fᵀ + diag(v), from which F·ε + √v·ε′ is drawn."""

    factor: Tensor  # [d, k]; k may be 0
    variance: Tensor | None = None  # [d]

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """[M, d], around zero."""
        noise = torch.randn(count, self.factor.shape[1], generator=generator, dtype=torch.float64)
        drawn = noise @ self.factor.t()
        if self.variance is not None:
            noise = torch.randn(count, len(self.variance), generator=generator, dtype=torch.float64)
            drawn = drawn + noise * self.variance.sqrt()
        return drawn

    def deviation_along(self, directions: Tensor) -> Tensor:
        """[u], the standard deviation along each of the directions [d, u]."""
        variance = (self.factor.t() @ directions).square().sum(0)
        if self.variance is not None:
            variance += self.variance @ directions.square()
        return variance.sqrt()


@dataclass(frozen=True)
class ClassReport:
    """How one class's covariance was changed before drawing from it, as shares of its trace."""

    label: int
    count: int
    shrunk: float = 0.0  # the weight of the pooled covariance
    clipped: float = 0.0  # negative eigenvalues set to zero, as a share of the sum of absolute values
    left_over: float = 0.0  # variance outside the low-rank directions, left on the diagonal


class Gaussians:
    """The Gaussian of each class, made on demand: one class's spread in memory at a time."""

    def __init__(self, statistics: "ClassStatistics", *, mix: bool = True) -> None:
        self.statistics = statistics
        self.mix = mix  # small classes' covariances with the pooled one
        self.means = statistics.means()  # [P, d]

    @cached_property
    def within(self) -> Tensor:
        """[d, d], the covariance pooled over all classes."""
        return self.statistics.within()

    @cached_property
    def variance(self) -> Tensor:
        """[d], each feature's variance pooled over all classes, for forms with no more than that."""
        return squares_around_mean(self.statistics, slice(None)).sum(0) / self.statistics.degrees

    @cached_property
    def common(self) -> tuple[Spread, float]:
        """The spread pooled over all classes, and the share of it that was clipped."""
        return factorise(self.within)

    def draw(self, row: int, count: int, key: Key) -> tuple[Tensor, ClassReport]:
        """[M, d] features of the class in this row, and a report."""
        spread, report = self.spread(row)
        return self.means[row] + spread.draw(count, key.fold("class", report.label).torch()), report

    def spread(self, row: int) -> tuple[Spread, ClassReport]:
        """The spread of the class in this row, and a report.

        The weight of the pooled covariance, 1 − (N − 1)/d, decreases from 1 for a single example to 0 for N = d + 1. It
        is 0 without mixing.
        """
        label, count = int(self.statistics.held[row]), int(self.statistics.number[row])
        weight = max(0.0, 1 - (count - 1) / self.statistics.width) if self.mix else 0.0
        return self.statistics.form.spread(self, row, ClassReport(label, count, weight))


def factorise(covariance: Tensor) -> tuple[Spread, float]:
    """V·√λ of a symmetric matrix, without directions of negative or tiny λ, and the share of negative λ."""
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    positive = values > TINY * values.abs().max()
    return Spread(vectors[:, positive] * values[positive].sqrt()), negative_share(values)


def negative_share(values: Tensor) -> float:
    """The sum of negative values as a share of the sum of absolute values."""
    total = float(values.abs().sum())
    return float(values.clamp(max=0).abs().sum()) / total if total else 0.0


@lru_cache(maxsize=2)
def triangle(width: int) -> Tensor:
    """The indices of the upper triangle in a flattened [d, d], row by row."""
    index: Tensor = torch.triu_indices(width, width)
    return index[0] * width + index[1]


def pack(square: Tensor) -> Tensor:
    """[…, d·(d + 1)/2], the upper triangle of symmetric matrices [d, d]: the stored form of second moments."""
    return square.flatten(-2)[..., triangle(square.shape[-1])]


def unpack(packed: Tensor, width: int) -> Tensor:
    """[…, d, d], the inverse of ``pack``."""
    rows, columns = torch.triu_indices(width, width)
    square = packed.new_empty(*packed.shape[:-1], width, width)
    square[..., rows, columns] = packed
    square[..., columns, rows] = packed
    return square


def packed_diagonal(width: int) -> Tensor:
    """[d], the indices of the diagonal in a packed triangle."""
    rows = torch.arange(width)
    return rows * (2 * width - rows + 1) // 2


def squares_around_mean(statistics: "ClassStatistics", row: int | slice) -> Tensor:
    """[d], Σ(z − μ)² of one class; of a slice of classes [P, d]."""
    return statistics.sums["squares"][row] - statistics.sums["sums"][row].square() / statistics.number[row, None]


MAX_FEATURES = 2**24  # in an untrusted file: a few bytes must not claim terabytes


def statistics_bytes(form: "Form", held: int, width: int) -> int:
    """The size of statistics of this form: float64 sums, int64 labels and counts."""
    return 16 * held + 8 * sum(math.prod(shape) for shape in form.shapes(held, width).values())


def require_memory(needed: int, what: str, hint: str, held: int = 0) -> None:
    """Refuse what does not fit in memory, before it is allocated; ``held`` bytes of it are allocated already."""
    if needed > (free := min(0.8 * physical_memory(), available_memory() + held)):
        limit = f"this machine has only {free / 1e9:.1f} GB for them"
        raise UserError(f"{what} need {needed / 1e9:.1f} GB, but {limit}; {hint}")


# The forms of second moments. All are sums over examples, so clients' statistics can be added. ``common`` names the
# sums that all classes share; ``parse_form`` reads ``str(form)``.


@dataclass(frozen=True)
class Full:
    """Σzzᵀ of each class, its upper triangle."""

    common = ()

    def __str__(self) -> str:
        return "full"

    def shapes(self, held: int, width: int) -> dict[str, tuple[int, ...]]:
        """The shape of each float64 sum for ``held`` classes and ``width`` features, without the counts."""
        return {"sums": (held, width), "second": (held, width * (width + 1) // 2)}

    def measure(self, features: Tensor, parts: Sequence[Tensor], sums: Tensors) -> None:
        """Write the second moments of features [n, d] into ``sums``; ``parts`` has them by class, in float64."""
        width = features.shape[1]
        square, upper = torch.empty(width, width, dtype=torch.float64), triangle(width)
        for part, second in zip(parts, sums["second"], strict=True):
            torch.mm(part.t(), part, out=square)
            torch.index_select(square.view(-1), 0, upper, out=second)

    def scatter(self, statistics: "ClassStatistics", row: int) -> Tensor:
        """[d, d], Σ(z − μ)(z − μ)ᵀ of one class, if the form has it."""
        total = statistics.sums["sums"][row]
        second = unpack(statistics.sums["second"][row], statistics.width)
        return second - torch.outer(total, total) / statistics.number[row]

    def spread(self, gaussians: Gaussians, row: int, report: ClassReport) -> tuple[Spread, ClassReport]:
        """The class's covariance, mixed with the pooled one as reported; and a complete report."""
        covariance = self.scatter(gaussians.statistics, row) / max(report.count - 1, 1)
        if (weight := report.shrunk) > 0:
            covariance = (1 - weight) * covariance + weight * gaussians.within
        spread, clipped = factorise(covariance)
        return spread, replace(report, clipped=clipped)


@dataclass(frozen=True)
class Diagonal:
    """Σz² of each class."""

    common = ()

    def __str__(self) -> str:
        return "diagonal"

    def shapes(self, held: int, width: int) -> dict[str, tuple[int, ...]]:
        """As in Full."""
        return {"sums": (held, width), "squares": (held, width)}

    def measure(self, features: Tensor, parts: Sequence[Tensor], sums: Tensors) -> None:
        """As in Full."""
        for part, squares in zip(parts, sums["squares"], strict=True):
            torch.linalg.vecdot(part, part, dim=0, out=squares)

    def scatter(self, statistics: "ClassStatistics", row: int) -> Tensor:
        """As in Full."""
        return torch.diag(squares_around_mean(statistics, row))

    def spread(self, gaussians: Gaussians, row: int, report: ClassReport) -> tuple[Spread, ClassReport]:
        """As in Full."""
        variance = squares_around_mean(gaussians.statistics, row) / max(report.count - 1, 1)
        if (weight := report.shrunk) > 0:
            variance = (1 - weight) * variance + weight * gaussians.variance
        spread = Spread(variance.new_zeros(len(variance), 0), variance.clamp(min=0))
        return spread, replace(report, clipped=negative_share(variance))


@dataclass(frozen=True)
class Shared:
    """Σzzᵀ over all classes, its upper triangle."""

    common = ("second",)

    def __str__(self) -> str:
        return "shared"

    def shapes(self, held: int, width: int) -> dict[str, tuple[int, ...]]:
        """As in Full."""
        return {"sums": (held, width), "second": (width * (width + 1) // 2,)}

    def measure(self, features: Tensor, parts: Sequence[Tensor], sums: Tensors) -> None:
        """As in Full."""
        features = features.double()
        product = (features.t() @ features).flatten()
        torch.index_select(product, 0, triangle(features.shape[1]), out=sums["second"])

    def spread(self, gaussians: Gaussians, row: int, report: ClassReport) -> tuple[Spread, ClassReport]:
        """The pooled spread, the same for all classes."""
        spread, clipped = gaussians.common
        return spread, replace(report, shrunk=1.0, clipped=clipped)


@dataclass(frozen=True)
class LowRank:
    """Σz·(zᵀΩ) of each class for an Ω [d, r] that all clients know, and Σz².

    From Σzzᵀ·Ω the server finds the r main directions (Nyström); the rest of each feature's variance stays on the
    diagonal.
    """

    rank: int = 32
    common = ()

    def __post_init__(self) -> None:
        whole_number(self.rank, "low-rank: rank", 1, MAX_FEATURES)

    def __str__(self) -> str:
        return f"low-rank({self.rank})"

    def shapes(self, held: int, width: int) -> dict[str, tuple[int, ...]]:
        """As in Full."""
        if self.rank > width:
            raise UserError(f"low-rank({self.rank}): there are only {width} features; give a rank of {width} or less")
        return {"sums": (held, width), "sketch": (held, width, self.rank), "squares": (held, width)}

    def measure(self, features: Tensor, parts: Sequence[Tensor], sums: Tensors) -> None:
        """As in Full."""
        omega = draw_directions(features.shape[1], self.rank)
        for part, squares, sketch in zip(parts, sums["squares"], sums["sketch"], strict=True):
            torch.linalg.vecdot(part, part, dim=0, out=squares)
            torch.mm(part.t(), part @ omega, out=sketch)

    def scatter(self, statistics: "ClassStatistics", row: int) -> Tensor:
        """As in Full."""
        factor, rest = self._nystrom(statistics, row)
        return factor @ factor.t() + torch.diag(rest.clamp(min=0))

    def spread(self, gaussians: Gaussians, row: int, report: ClassReport) -> tuple[Spread, ClassReport]:
        """The class's main directions, the rest on the diagonal; a small class is mixed with the pooled diagonal."""
        count, weight = report.count, report.shrunk
        factor, rest = self._nystrom(gaussians.statistics, row)
        factor, rest = factor / max(count - 1, 1) ** 0.5, rest / max(count - 1, 1)
        clipped = negative_share(torch.cat([factor.square().sum(1), rest]))
        rest = rest.clamp(min=0)
        traces = float(factor.square().sum()), float(rest.sum())
        if weight > 0:
            pooled = gaussians.variance.clamp(min=0)
            factor, rest = (1 - weight) ** 0.5 * factor, (1 - weight) * rest + weight * pooled
        if count > 1:  # one example leaves only rounding errors
            report = replace(report, clipped=clipped, left_over=traces[1] / max(sum(traces), 1e-300))
        return Spread(factor, rest), report

    def _nystrom(self, statistics: "ClassStatistics", row: int) -> tuple[Tensor, Tensor]:
        """F [d, r] with F·Fᵀ ≈ the scatter, from its products with Ω; and the rest of the diagonal [d].

        With S·Ω = Y and ΩᵀY = B, S ≈ Y·B⁻¹·Yᵀ: exact if S has rank r or less, and never above S.
        """
        total, number = statistics.sums["sums"][row], statistics.number[row]
        omega = draw_directions(statistics.width, self.rank)
        products = statistics.sums["sketch"][row] - torch.outer(total, total @ omega) / number
        small = omega.t() @ products
        values, vectors = torch.linalg.eigh((small + small.mT) / 2)
        positive = values > 1e-10 * values.abs().max()
        factor = products @ (vectors[:, positive] / values[positive].sqrt())
        return factor, squares_around_mean(statistics, row) - factor.square().sum(1)


Form = Full | Diagonal | Shared | LowRank
FORMS: dict[str, Callable[..., Form]] = {"full": Full, "diagonal": Diagonal, "shared": Shared, "low-rank": LowRank}


def parse_form(source: str | Form) -> Form:
    """Parse a form such as ``low-rank(32)``; a form is returned unchanged."""
    if isinstance(source, Form):
        return source
    calls = language.parse_calls(source, "covariance form") if isinstance(source, str) else []
    if len(calls) != 1 or calls[0].name not in FORMS:
        raise UserError(f"no covariance form is called {brief(source)}; give full, diagonal, shared or low-rank(32)")
    form: Form = language.apply(calls[0], FORMS[calls[0].name], "covariance form")
    return form


def list_smaller_forms(form: Form, held: int, width: int) -> str:
    """The smaller forms, with their sizes."""
    sizes = {other: statistics_bytes(other, held, width) for other in (Shared(), Diagonal(), LowRank(min(32, width)))}
    most = statistics_bytes(form, held, width)
    return ", ".join(f"{other} ({format_bytes(size)})" for other, size in sizes.items() if size < most)


def advise_smaller_form(form: Form, held: int, width: int, examples: int) -> str:
    """Advice on statistics above 1 MB that are 50 times as large as the features; otherwise empty."""
    size = statistics_bytes(form, held, width)
    if size < max(10**6, 50 * 4 * width * examples):
        return ""
    return (
        f"{form} statistics of {counted(examples, 'example')} need {format_bytes(size)}; if many clients have so few, "
        f"use a smaller form for all of them: {list_smaller_forms(form, held, width)}"
    )


def check_memory(form: Form, held: int, width: int, before: int = 0) -> None:
    """Refuse statistics of more classes than fit in memory; those of ``before`` classes are allocated already."""
    what = f"{form} statistics of {held:,} classes and {width:,} features"
    hint = f"use covariance={list_smaller_forms(form, held, width)}"
    require_memory(
        statistics_bytes(form, held, width), what, hint, statistics_bytes(form, before, width) if before else 0
    )


@lru_cache(maxsize=4)
def draw_directions(width: int, rank: int) -> Tensor:
    """Ω [d, r]: r orthonormal directions, the same for every client."""
    drawn = torch.randn(width, rank, generator=Key(0).fold("directions", width).torch(), dtype=torch.float64)
    omega: Tensor = torch.linalg.qr(drawn).Q
    return omega
