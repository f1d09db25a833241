"""Differential privacy for class statistics: what is released would look much the same without any one example.

For any two data sets that differ by one example, and any set S of releases, P(S) ≤ e^ε·P′(S) + δ. Central: whoever
holds the sum adds the noise, once. One example with ‖z‖ ≤ R changes, in one class alone, the count by 1, Σz by R at
most and the second moment by R² at most (‖zzᵀ‖_F = ‖z‖², ‖z²‖ ≤ ‖z‖²). In units of 1, R and R² that is √3 at most
together (L2), so one Gaussian mechanism releases all three.

The noise is drawn in float64, whose lowest bits are not quite Gaussian: the promise is that of the real numbers.

Reference: Dwork, Roth, "The Algorithmic Foundations of Differential Privacy", 2014, appendix A. The standard deviation
is that of Balle, Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, as dp_accounting has it.

Shapes: C classes, K of them released, d features.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unskew.calibration.classifier import shortened
from unskew.calibration.covariances import Diagonal, Form, Full, Shared
from unskew.calibration.known_noise import KnownNoise, edge, without_noise
from unskew.calibration.statistics import ClassStatistics, checked
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.core.types import Tensors


def normal(shape: tuple[int, ...], key: Key | None, *path: str | int) -> Tensor:
    """Standard Gaussian noise from 64 random bits a value: a sign, and the quantile of 63 bits, out to 9.1."""
    size = 8 * torch.Size(shape).numel()
    drawn = os.urandom(size) if key is None else key.fold("noise", *path).numpy().bytes(size)
    words = torch.from_numpy(np.frombuffer(drawn, dtype="<i8").copy()).reshape(shape)
    share = ((words & (2**63 - 1)).double() + 0.5) * 2.0**-64  # (0, ½]
    noise: Tensor = torch.special.ndtri(share) * torch.where(words < 0, 1.0, -1.0)
    return noise


SENSITIVITY = 3**0.5  # of (N, Σz/R, second/R²) to one example
SLACK = 1e-3  # what rounding may add to a sum of clipped features; a check against features that were not clipped


@dataclass(frozen=True)
class Guarantee:
    """What one release promises to every example: (ε, δ), for features of length ``radius`` at most.

    ``sigma`` is the standard deviation of the noise on a count; on Σz it is sigma·R, on the second moment sigma·R²
    (off the diagonal of Σzzᵀ, where two equal entries are one number, sigma·R²/√2).
    """

    epsilon: float
    delta: float
    radius: float
    sigma: float

    @staticmethod
    def of(radius: float, epsilon: float, delta: float) -> "Guarantee":
        """The promise and the noise that it takes. A second release of the same examples is a second promise."""
        _check_radius(radius)
        if not 0 < epsilon < float("inf"):
            raise UserError(f"epsilon={epsilon}: give a finite number above 0; 1 is strong, 10 is weak")
        if not 0 < delta < 1:
            raise UserError(f"delta={delta}: give a number between 0 and 1, well below 1 / the number of examples")
        least = float(require_extra("dp_accounting").get_sigma_gaussian(epsilon, delta))  # for a sensitivity of 1
        return Guarantee(epsilon, delta, radius, SENSITIVITY * least * (1 + 1e-9))  # the search's tolerance is 1e-12


def clipped(features: Tensor, radius: float) -> Tensor:
    """[n, d], features longer than the radius (L2) drawn back to it, a rounding error below; shorter ones unchanged."""
    _check_radius(radius)
    if features.dim() != 2 or not features.is_floating_point():
        raise UserError(f"features must be [n, d] of a floating type, these are {list(features.shape)}")
    if not bool(features.isfinite().all()):
        raise UserError("features hold NaN or infinity; the encoder or its images are broken")
    return shortened(features, radius)


def noisy(
    statistics: ClassStatistics, radius: float, epsilon: float, delta: float, key: Key | None = None, *,
    threshold: float | None = None,
) -> ClassStatistics:  # fmt: skip
    """The statistics of clipped features, fit to be released with ``Guarantee.of(radius, epsilon, delta)``.

    Every class gets noise, also one that no client holds: that it is absent is a secret too. Then, from the noisy
    numbers alone, classes with a count below ``threshold`` are dropped with a warning (None: 4·sigma, which a class
    that no client holds passes with a chance of 3e-5; never below 1), counts are rounded, and what cannot be told from
    noise in a covariance is evened out (``calibration.known_noise``). Where the form is ``shared``, the pooled second
    moment keeps the part of the dropped classes.

    ``key`` is for studies that must be repeatable. For a release leave it None, and the noise comes from the operating
    system: a known seed lets anyone remove the noise. With a key the draw depends on everything that is released,
    the statistics included: no two releases that differ in anything share their noise.
    """
    guarantee = Guarantee.of(radius, epsilon, delta)
    statistics = checked(statistics.classes, statistics.form, statistics.tensors(), "the sum")
    _check_clipped(statistics, radius)
    classes, width, sigma = statistics.classes, statistics.width, guarantee.sigma
    threshold = max(1.0, 4 * sigma if threshold is None else threshold)
    if key is not None:
        promise = repr((float(radius), float(epsilon), float(delta), float(threshold)))
        key = key.fold("release", promise, statistics.about(), tensors.sha256(statistics.tensors()))
    counts = statistics.counts + sigma * normal((classes,), key, "count")  # [C]
    released = (counts >= threshold).nonzero()[:, 0]  # [K]
    if len(released) < classes:
        words = f"{classes - len(released)} of {classes} classes are dropped: their noisy counts are below"
        warnings.warn(f"{words} {threshold:.4g}", stacklevel=2)
    number = counts[released].round().long()
    sums = _rows(statistics, "sums", released) + (sigma * radius * normal((classes, width), key, "sums"))[released]
    release = _Release(statistics, released, number, sums, sigma * radius**2, key)
    noise = KnownNoise(sigma * radius, sigma * radius**2)
    second = NOISY_SECOND[type(statistics.form)](release)
    return ClassStatistics(classes, statistics.form, released, number, {"sums": sums, **second}, noise)


def min_count(statistics: ClassStatistics, least: int) -> tuple[ClassStatistics, tuple[int, ...]]:
    """The statistics of the classes with at least ``least`` examples, and the classes that are left out.

    For a client, before anything is sent. A rule of thumb without a guarantee: it keeps the features of single images
    from being sent as means.
    """
    if least < 1:
        raise UserError(f"min_count(least={least}): least counts examples, give at least 1")
    kept = statistics.number >= least
    home = tuple(statistics.held[~kept].tolist())
    if not home:
        return statistics, home
    if not bool(kept.any()):
        return ClassStatistics.empty(statistics.classes, statistics.width, statistics.form), home
    if statistics.form.common:
        raise UserError(
            f"min_count(least={least}): the form shared has one second moment for all classes, and class {home[0]} "
            "cannot be taken out of it; leave its examples out before measuring, or take another form"
        )
    sums = {name: value[kept] for name, value in statistics.sums.items()}
    held, number = statistics.held[kept], statistics.number[kept]
    return ClassStatistics(statistics.classes, statistics.form, held, number, sums), home


@dataclass(frozen=True)
class _Release:
    """What is known when second moments get their noise."""

    statistics: ClassStatistics
    released: Tensor  # [K], the classes
    number: Tensor  # [K], noisy counts
    sums: Tensor  # [K, d], noisy sums
    scale: float
    key: Key | None


def _noisy_full(release: _Release) -> Tensors:
    sums, number = release.sums, release.number
    second = _rows(release.statistics, "second", release.released)  # [K, d, d]
    for place, label in enumerate(release.released.tolist()):  # a class that is dropped needs no draw
        around = torch.outer(sums[place], sums[place]) / number[place]
        noise = release.scale * _symmetric(release.statistics.width, release.key, "second", label)
        limit = edge(release.scale, release.statistics.width)
        second[place] = around + without_noise(second[place] + noise - around, limit)
    return {"second": second}


def _noisy_diagonal(release: _Release) -> Tensors:
    statistics, released = release.statistics, release.released
    noise = release.scale * normal((statistics.classes, statistics.width), release.key, "second")
    around = release.sums.square() / release.number[:, None]
    own = _rows(statistics, "squares", released) + noise[released] - around
    return {"squares": around + own.clamp(min=0)}


def _noisy_shared(release: _Release) -> Tensors:
    statistics = release.statistics
    around = (release.sums / release.number[:, None]).t() @ release.sums
    noise = release.scale * _symmetric(statistics.width, release.key, "second")
    limit = edge(release.scale, statistics.width)
    return {"second": around + without_noise(statistics.sums["second"] + noise - around, limit)}


# second moments with noise, evened out where nothing else can be told, for the forms with a known sensitivity
NOISY_SECOND: dict[type, Callable[[_Release], Tensors]] = {
    Full: _noisy_full,
    Diagonal: _noisy_diagonal,
    Shared: _noisy_shared,
}


def sensitivity_known(form: Form) -> bool:
    """Whether statistics of this form can be released with noise."""
    return type(form) in NOISY_SECOND


def _rows(statistics: ClassStatistics, name: str, labels: Tensor) -> Tensor:
    """[K, …], a sum's rows for these classes, zero for those that no client holds."""
    value = statistics.sums[name]
    rows = torch.zeros(len(labels), *value.shape[1:], dtype=torch.float64)
    held = torch.isin(labels, statistics.held)
    rows[held] = value[torch.searchsorted(statistics.held, labels[held])]
    return rows


def _symmetric(width: int, key: Key | None, *path: str | int) -> Tensor:
    """[d, d], noise on every entry, made symmetric: standard deviation 1 on the diagonal, 1/√2 off it."""
    noise = normal((width, width), key, *path)
    return (noise + noise.t()) / 2


def _check_radius(radius: float) -> None:
    if not 0 < radius < float("inf"):
        raise UserError(f"radius={radius}: give a finite length above 0")


def _check_clipped(statistics: ClassStatistics, radius: float) -> None:
    """Refuse what clipped features cannot add up to, and a form whose sensitivity is not known here."""
    sums = statistics.sums
    if not sensitivity_known(statistics.form):
        raise UserError(
            f"noise is known for the forms full, diagonal and shared; these statistics are {statistics.form}"
        )
    lengths = sums["squares"].sum(-1) if "squares" in sums else sums["second"].diagonal(dim1=-2, dim2=-1).sum(-1)
    number = statistics.number.sum() if statistics.form.common else statistics.number
    if bool((sums["sums"].norm(dim=1) > statistics.number * radius * (1 + SLACK)).any()) or bool(
        (lengths > number * radius**2 * (1 + SLACK)).any()
    ):
        raise UserError(f"these are not the sums of features of length {radius} at most: clipped(features, {radius})")
