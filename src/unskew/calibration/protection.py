"""Protection of class statistics: noise for differential privacy, its removal, and fixed point for secure sums.

docs/explanation/privacy.md has the guarantees.

**Differential privacy.** One example with ‖z‖ ≤ R changes, in one class only, the count by 1, Σz by at most R and the
second moment by at most R² (‖zzᵀ‖_F = ‖z‖², ‖z²‖ ≤ ‖z‖²): in units of 1, R and R² by at most √3 in total (L2). One
Gaussian mechanism releases all three.

**Noise of a known size.** Noise on a second moment is a symmetric matrix with the deviation s off the diagonal. Its
eigenvalues fill the semicircle from −2·s·√d to 2·s·√d, so those of a noisy covariance below the edge 2·s·√d cannot be
distinguished from noise. To draw features, they are set to their mean (never below 0), which noise does not change on
average; to invert the covariance (lda, ridge), they are raised to the edge. The noise of the class means, with a rank
of twice the number of classes, also enters a covariance; it is not removed.

**Fixed point.** A `Layout` turns statistics into a vector of whole numbers that can be masked and added modulo 2⁶⁴.

References: Dwork, Roth, "The Algorithmic Foundations of Differential Privacy", 2014, appendix A. The standard deviation
is that of Balle, Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, from dp_accounting.
Wigner, "On the Distribution of the Roots of Certain Symmetric Matrices", Annals of Mathematics, 1958. Shrunk means:
Efron, Morris, "Stein's Estimation Rule and Its Competitors", JASA 1973.

Shapes: C classes, P of them with examples, K of them released, d features, W = C + the form's sums: the length of a
vector.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.calibration.classifier import limit_length, require_finite
from unskew.calibration.covariances import Diagonal, Form, LowRank, Shared, pack, packed_diagonal, parse_form, unpack
from unskew.calibration.statistics import MAX_EXAMPLES, ClassStatistics, KnownNoise, check_statistics, from_sums
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.core.types import Tensors
from unskew.privacy.ledger import concentration
from unskew.privacy.noise import SHARE_BITS, add_gaussian, add_share, normal, raise_deviation, to_steps

SENSITIVITY = 3**0.5  # of (N, Σz/R, second/R²) to one example
SLACK = 1e-3  # tolerance for rounding in the check that features were clipped


@dataclass(frozen=True)
class Guarantee:
    """The (ε, δ) guarantee of one release to every example; a second release needs a second guarantee.

    The noise has the standard deviation sigma on a count, sigma·R on Σz and sigma·R² on the second moment (off the
    diagonal of Σzzᵀ, where two equal entries are one number, sigma·R²/√2).
    """

    epsilon: float
    delta: float
    radius: float  # the maximum length R of a feature
    sigma: float

    @staticmethod
    def of(radius: float, epsilon: float, delta: float, *, in_masks: bool = False) -> "Guarantee":
        """Find the noise that the guarantee requires; with ``in_masks`` the discrete noise that clients add."""
        if not (0 < radius < math.inf and 0 < epsilon < math.inf and 0 < delta < 1):
            rule = "give finite numbers above 0, and a delta below 1 (well below 1/n for n examples)"
            raise UserError(f"radius={radius}, epsilon={epsilon}, delta={delta}: {rule}")
        if in_masks:
            return Guarantee(epsilon, delta, radius, SENSITIVITY * (2 * concentration(epsilon, delta)) ** -0.5)
        least = float(require_extra("dp_accounting").get_sigma_gaussian(epsilon, delta))  # for a sensitivity of 1
        return Guarantee(epsilon, delta, radius, SENSITIVITY * least * (1 + 1e-9))  # the search's tolerance is 1e-12


def clip_features(features: Tensor, radius: float) -> Tensor:
    """Scale features [n, d] that are longer than the radius (L2) down to just below it."""
    if not 0 < radius < math.inf:
        raise UserError(f"radius={radius}: give a finite radius above 0")
    require_finite(features)
    return limit_length(features, radius)


def add_noise(
    statistics: ClassStatistics,
    radius: float,
    epsilon: float,
    delta: float,
    key: Key | None = None,
    *,
    threshold: float | None = None,
) -> ClassStatistics:
    """Add noise to statistics of clipped features, for a release with ``Guarantee.of(radius, epsilon, delta)``.

    Every class gets noise, even one without examples, since its absence is a secret too. Then, using only the noisy
    numbers, classes with small counts are dropped with a warning, counts are rounded, and the part of a covariance that
    cannot be distinguished from noise is flattened. With the form ``shared``, the pooled second moment keeps the part
    of the dropped classes.

    With a ``key``, for repeatable studies, the draw depends on everything that is released, so releases that differ in
    anything have independent noise. Without one, for a real release, the noise comes from the operating system, since
    anyone who knows a seed can remove the noise. Classes below the ``threshold``, by default 4·sigma, are dropped; a
    class without examples exceeds it with a probability of 3e-5.
    """
    sigma = Guarantee.of(radius, epsilon, delta).sigma
    statistics = check_statistics(statistics.classes, statistics.form, statistics.tensors(), "the sum")
    form, classes, width = statistics.form, statistics.classes, statistics.width
    if isinstance(form, LowRank):
        raise UserError(f"noise can only be added to full, diagonal and shared statistics, not to {form}")
    number = statistics.number.sum() if form.common else statistics.number
    long = statistics.sums["sums"].norm(dim=1) > statistics.number * radius * (1 + SLACK)
    if bool(long.any()) or bool((statistics.squares().sum(-1) > number * radius**2 * (1 + SLACK)).any()):
        raise UserError(f"some features are longer than {radius}; call clip_features(features, {radius}) first")
    threshold = max(1.0, 4 * sigma if threshold is None else threshold)
    if key is not None:
        promise = repr((float(radius), float(epsilon), float(delta), float(threshold)))
        key = key.fold("release", promise, statistics.about(), tensors.sha256(statistics.tensors()))
    else:  # one example changes each of the three sums by 1 in its unit
        sigma = raise_deviation(sigma, 1.0, classes + sum(map(math.prod, form.shapes(classes, width).values())))
    counts = add_gaussian(statistics.counts, sigma, key, "count")  # [C]
    second, sums = sigma * radius**2, statistics.to_sums()

    def noisy(name: str, labels: Tensor) -> Tensor:
        if name == "second" and form.common:
            return _add_to_triangle(sums[name], width, second, key, name)
        if name == "second":
            rows = sums[name][labels]
            for row, label in enumerate(labels.tolist()):  # dropped classes need no draw
                rows[row] = _add_to_triangle(rows[row], width, second, key, name, label)
            return rows
        deviation, drawn = (sigma * radius, "sums") if name == "sums" else (second, "second")
        return add_gaussian(sums[name], deviation, key, drawn)[labels]

    return _clean_up(classes, form, counts, noisy, KnownNoise(sigma * radius, second), threshold)


def _clean_up(
    classes: int,
    form: Form,
    counts: Tensor,
    noisy: Callable[[str, Tensor], Tensor],
    known: KnownNoise,
    threshold: float,
) -> ClassStatistics:
    """Statistics from noisy numbers alone; ``noisy(name, labels)`` returns rows of a sum."""
    released = (counts >= threshold).nonzero()[:, 0]  # [K]
    if len(released) < classes:
        dropped = f"{classes - len(released)} of {classes} classes are dropped"
        warnings.warn(f"{dropped}: their noisy counts are below {threshold:.4g}", stacklevel=3)
    number = counts[released].round().long()
    sums = noisy("sums", released)  # [K, d]
    limit = noise_edge(known.second, sums.shape[1])
    if isinstance(form, Diagonal):
        squares = sums.square() / number[:, None]
        second = {"squares": squares + (noisy("squares", released) - squares).clamp(min=0)}
    elif isinstance(form, Shared):
        between = (sums / number[:, None]).t() @ sums
        second = {"second": _flatten_around(noisy("second", released), between, limit)}
    else:
        second = {"second": noisy("second", released)}  # [K, d·(d + 1)/2]
        for row, packed in enumerate(second["second"]):
            packed.copy_(_flatten_around(packed, torch.outer(sums[row], sums[row]) / number[row], limit))
    return ClassStatistics(classes, form, released, number, {"sums": sums, **second}, known)


def _flatten_around(packed: Tensor, product: Tensor, limit: float) -> Tensor:
    return pack(product + flatten_noise(unpack(packed, len(product)) - product, limit))


def drop_small_classes(statistics: ClassStatistics, min_count: int) -> tuple[ClassStatistics, tuple[int, ...]]:
    """Leave out classes with few examples, on a client, before anything is sent; also returns their labels.

    A rule of thumb without a guarantee: it prevents features of single images from being sent as means.
    """
    large = statistics.number >= min_count
    if not (dropped := tuple(statistics.held[~large].tolist())):
        return statistics, dropped
    if not bool(large.any()):
        return ClassStatistics.empty(statistics.classes, statistics.width, statistics.form), dropped
    if statistics.form.common:
        reason = f"class {dropped[0]} cannot be removed from the second moment, which all classes share"
        raise UserError(f"min_count={min_count}: {reason}; leave out all of its examples, or use another form")
    sums = {name: value[large] for name, value in statistics.sums.items()}
    held, number = statistics.held[large], statistics.number[large]
    return ClassStatistics(statistics.classes, statistics.form, held, number, sums), dropped


def _add_to_triangle(packed: Tensor, width: int, deviation: float, key: Key | None, *path: str | int) -> Tensor:
    """Add symmetric noise to a triangle; off the diagonal its deviation is smaller by √2."""
    if key is not None:
        noise = normal((width, width), key, *path)
        return packed + deviation * pack((noise + noise.t()) / 2)
    noisy, diagonal = add_gaussian(packed, deviation / 2**0.5, None), packed_diagonal(width)
    noisy[diagonal] = add_gaussian(packed[diagonal], deviation, None)
    return noisy


def noise_edge(deviation: float, width: int) -> float:
    """2·s·√d, the end of the noise's spectrum; s = ``deviation``/√2 off the diagonal of a [d, d] matrix."""
    return math.sqrt(2 * width) * deviation


def pooled_edge(statistics: ClassStatistics) -> float:
    """The end of the noise's spectrum in the pooled covariance; 0 without noise.

    If every class has its own second moment, their noises add up. For variances it is about the largest of d Gaussian
    draws, √(2·ln d) deviations.
    """
    if statistics.noise is None:
        return 0.0
    parts = 1 if statistics.form.common else len(statistics.held)
    deviation = statistics.noise.second * math.sqrt(parts) / statistics.degrees
    if "second" in statistics.sums:
        return noise_edge(deviation, statistics.width)
    return deviation * math.sqrt(2 * math.log(max(statistics.width, 2)))


def flatten_noise(matrix: Tensor, limit: float) -> Tensor:
    """[d, d], eigenvalues below the limit set to their mean, or to 0 if that is negative."""
    values, vectors = torch.linalg.eigh(matrix)
    low = values < limit
    mean = values[low].mean().clamp(min=0) if bool(low.any()) else values.new_zeros(())
    factor: Tensor = vectors * torch.where(low, mean, values.clamp(min=0)).sqrt()
    return factor @ factor.t()


def raise_eigenvalues(matrix: Tensor, limit: float) -> Tensor:
    """[d, d], eigenvalues below the limit raised to it."""
    values, vectors = torch.linalg.eigh(matrix)
    factor: Tensor = vectors * values.clamp(min=limit).sqrt()
    return factor @ factor.t()


def notes_on_noise(statistics: ClassStatistics) -> tuple[str, ...]:
    """A note if the noise dominates; otherwise nothing.

    It does if raising a covariance to the noise's edge at least doubles its trace, or if noise makes up more than a
    tenth of the variance between means.
    """
    if statistics.noise is None or int(statistics.number.sum()) - len(statistics.held) < 1:
        return ()
    share = 0.0
    if len(statistics.held) > 1:
        between = float(statistics.means().var(0).mean())
        variance = float((statistics.noise.sums / statistics.number.double()).square().mean())
        share = min(1.0, variance / between) if between > 0 else 1.0
    values, limit = torch.linalg.eigvalsh(statistics.within()), pooled_edge(statistics)
    if share < 0.1 and float((limit - values).clamp(min=0).sum()) < float(values.sum()):
        return ()
    below = int((values < limit).sum())
    return (
        f"mostly noise: {below} of {statistics.width} directions of the pooled covariance are lost in noise, "
        f"and noise makes up {share:.0%} of the variance between class means; more examples or a larger epsilon help",
    )


@dataclass(frozen=True)
class Layout:
    """The fixed-point layout that server and clients agree on: classes, features, form, and steps of 2^-``bits``.

    A vector has the counts of all C classes, then the form's sums for all C, zero for absent ones, so its length
    reveals nothing about the client. Each of n clients may use ±(2⁶³ − 1)/n steps, ±5.5e9 for 100 clients and 24 bits;
    counts are whole numbers already.
    """

    classes: int
    width: int
    form: Form
    bits: int

    @staticmethod
    def of(classes: int, width: int, form: str | Form = "full", *, bits: int = 24) -> "Layout":
        """The layout for this number of classes and features."""
        if classes < 1 or width < 1 or not 0 <= bits <= 52:
            given = f"a layout of {classes} classes, {width} features and {bits} bits"
            raise UserError(f"{given}: give at least 1 class, at least 1 feature, and 0 to 52 bits")
        return Layout(classes, width, parse_form(form), bits)

    @property
    def bytes(self) -> int:
        """The bytes that each client sends, whatever it has: 8 bytes per word."""
        return 8 * (self.classes + sum(map(math.prod, self._shapes.values())))

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.form.shapes(self.classes, self.width)

    def _split(self, vector: Tensor) -> tuple[Tensor, Tensors]:
        """The counts, and the sums by name, in steps."""
        counts, *parts = torch.split_with_sizes(vector, [self.classes, *map(math.prod, self._shapes.values())])
        return counts, {name: part.view(self._shapes[name]) for name, part in zip(self._shapes, parts, strict=True)}

    def about(self) -> str:
        """A short description."""
        return f"{self.form} over {self.classes} classes of {self.width} features in steps of 2^-{self.bits}"

    def shorter(self, radius: float, sigma: float = 0.0) -> float:
        """The length to clip features to if the noise is for features of length ``radius`` and the sums are rounded.

        One example changes the sums of one client. Entries are rounded with and without it, so the rounded difference
        is off by at most one step h: Σz by h·√d in length, Σzzᵀ by h·d (Σz² by h·√d). With r + h·√d ≤ R and
        r² + h·d ≤ R² one example changes the rounded sums by no more than R and R². The last factor is for the float64
        sums before rounding. If clients add noise of ``sigma``, its steps are coarser.
        """
        coarse, width = sigma * 2.0**-SHARE_BITS, self.width
        step, finest = 2.0**-self.bits + coarse * radius, 2.0**-self.bits
        entries = float(width) if "second" in self._shapes else width**0.5
        least = 1.001 * max(2 * finest * width**0.5, (4 / 3 * finest * entries) ** 0.5)
        second = finest + coarse * radius**2
        left = min(radius - step * math.sqrt(width), math.sqrt(max(0.0, radius**2 - second * entries))) * (1 - 1e-6)
        if radius < least or left < radius / 4:
            raise UserError(
                f"clip={radius:g} is too small for a secure sum of {width} features in steps of 2^-{self.bits}: "
                f"rounding and noise could change the sum as much as an example does; give clip={least:.2g} or more "
                "and a larger epsilon, or leave out secure"
            )
        return left

    def quantise(self, statistics: ClassStatistics, clients: int, who: str) -> Tensor:
        """[W] int64, the statistics in fixed point; refused, naming ``who``, if their sum could overflow."""
        statistics = check_statistics(statistics.classes, statistics.form, statistics.tensors(), who)
        if (statistics.classes, statistics.width, statistics.form) != (self.classes, self.width, self.form):
            raise UserError(f"the statistics of {who} are rejected: {statistics.about()}; expected {self.about()}")
        if bool((statistics.number > (most := MAX_EXAMPLES // clients)).any()):
            raise UserError(f"the statistics of {who} are rejected: a class has more than {most} examples")
        flat, hint = [statistics.counts], "use fewer bits or clip the features"
        for name, value in statistics.to_sums().items():
            if name != "number":
                what = f"the statistics of {who} are rejected: an entry of {name}"
                flat.append(to_steps(value.flatten(), self.bits, clients, what, hint))
        return torch.cat(flat)

    def with_share(self, vector: Tensor, guarantee: Guarantee, needed: int, members: int) -> Tensor:
        """[W] int64, a client's vector with its share of the noise; counts are in steps like everything else."""
        counts, sums = self._split(vector)
        sigma = guarantee.sigma * 2.0**self.bits
        noised = [add_share(counts << self.bits, sigma, needed)]
        for name, part in sums.items():
            deviation = sigma * guarantee.radius ** (1 if name == "sums" else 2)
            if name == "second":
                noisy, diagonal = add_share(part, deviation / 2**0.5, needed), packed_diagonal(self.width)
                noisy[..., diagonal] = add_share(part[..., diagonal], deviation, needed)
            else:
                noisy = add_share(part, deviation, needed)
            noised.append(noisy.flatten())
        if int(counts.max()) >= 2 ** (62 - self.bits) // members or any(
            int(part.abs().max()) >= 2**62 // members for part in noised
        ):
            raise UserError("the statistics are too large for a secure sum with noise; give a smaller clip")
        return torch.cat(noised)

    def released(self, vector: Tensor, guarantee: Guarantee, excess: float) -> ClassStatistics:
        """Statistics from a sum of vectors with noise; ``excess`` is its variance divided by the promised one."""
        counts, sums = self._split(vector)

        def noisy(name: str, labels: Tensor) -> Tensor:
            return (sums[name] if name in self.form.common else sums[name][labels]).double() * 2.0**-self.bits

        sigma = guarantee.sigma * excess**0.5
        known = KnownNoise(sigma * guarantee.radius, sigma * guarantee.radius**2)
        counts = counts.double() * 2.0**-self.bits
        return _clean_up(self.classes, self.form, counts, noisy, known, max(1.0, 4 * sigma))

    def statistics(self, vector: Tensor, who: str) -> ClassStatistics:
        """Statistics from an unmasked sum of vectors."""
        counts, sums = self._split(vector)
        if bool(((counts < 0) | (counts > MAX_EXAMPLES)).any()):
            rule = "every client must answer and unmask the same session, with the same clients and layout"
            raise UserError(f"the masks of {who} do not cancel: {rule}")
        plain = {name: value.double() * 2.0**-self.bits for name, value in sums.items()}
        found = from_sums({"number": counts.double(), **plain}, self.form)
        return check_statistics(self.classes, self.form, found.tensors(), who)
