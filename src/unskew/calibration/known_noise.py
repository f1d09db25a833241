"""What to do with noise of a known size in class statistics: which part of a covariance is noise, and what is left.

`private` adds Gaussian noise whose size everybody knows. On a second moment it is a symmetric matrix whose entries off
the diagonal have the deviation s. The eigenvalues of such a matrix fill the semicircle from −2·s·√d to 2·s·√d, so no
eigenvalue of a noisy covariance below the edge 2·s·√d can be told from noise. The rule has two parts:

- to draw features, these eigenvalues are set to their mean (never below 0): noise does not change it on average;
- to invert the covariance (lda), they are raised to the edge: the ridge that this noise needs, and no more.

Both are made from released numbers alone, so they cost no privacy. The noise of the class means enters a covariance
too, with a rank of twice the classes; it is not taken out.

Reference: Wigner, "On the Distribution of the Roots of Certain Symmetric Matrices", Annals of Mathematics, 1958; shrunk
means: Efron, Morris, "Stein's Estimation Rule and Its Competitors", JASA 1973.

Shapes: P classes held, d features.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from unskew.calibration.statistics import ClassStatistics

MUCH = 0.1  # the share of noise in the variance between class means from which on it is worth a note


@dataclass(frozen=True)
class KnownNoise:
    """Standard deviations of the noise."""

    sums: float  # on every entry of Σz
    second: float  # on a second moment: on its squares, the diagonal; off it smaller by √2

    def __add__(self, other: "KnownNoise") -> "KnownNoise":
        """Of a sum of two releases, which are noisy independently of each other."""
        return KnownNoise(math.hypot(self.sums, other.sums), math.hypot(self.second, other.second))


def edge(deviation: float, width: int) -> float:
    """2·s·√d, where the noise's spectrum ends: s = ``deviation``/√2 off the diagonal of a [d, d] matrix."""
    return math.sqrt(2 * width) * deviation


def pooled_edge(statistics: "ClassStatistics") -> float:
    """Where the spectrum of the noise in the pooled covariance ends; 0 without noise.

    Where every class has its own second moment, their noises add up. For variances alone it is about the largest of d
    Gaussian draws, √(2·ln d) deviations.
    """
    if statistics.noise is None:
        return 0.0
    parts = 1 if statistics.form.common else len(statistics.held)
    deviation = statistics.noise.second * math.sqrt(parts) / (int(statistics.number.sum()) - len(statistics.held))
    if "second" in statistics.sums:
        return edge(deviation, statistics.width)
    return deviation * math.sqrt(2 * math.log(max(statistics.width, 2)))


def without_noise(matrix: Tensor, limit: float) -> Tensor:
    """[d, d], eigenvalues below the limit set to their mean, or to 0 where that is negative."""
    values, vectors = torch.linalg.eigh(matrix)
    low = values < limit
    mean = values[low].mean().clamp(min=0) if bool(low.any()) else values.new_zeros(())
    factor = vectors * torch.where(low, mean, values.clamp(min=0)).sqrt()
    found: Tensor = factor @ factor.t()
    return found


def raised(matrix: Tensor, limit: float) -> Tensor:
    """[d, d], eigenvalues below the limit raised to it."""
    values, vectors = torch.linalg.eigh(matrix)
    factor = vectors * values.clamp(min=limit).sqrt()
    found: Tensor = factor @ factor.t()
    return found


def share_of_noise(statistics: "ClassStatistics") -> tuple[float, float]:
    """The noise's variance on an entry of a class mean, averaged over classes; its share of that between the means."""
    if statistics.noise is None:
        return 0.0, 0.0
    means = statistics.means()
    variance = float((statistics.noise.sums / statistics.number.double()).square().mean())
    if len(means) < 2:
        return variance, 0.0
    between = float(means.var(0).mean())
    return variance, min(1.0, variance / between) if between > 0 else 1.0


def notes_on_noise(statistics: "ClassStatistics") -> tuple[str, ...]:
    """A note for when noise decides more than the features do; none where it does not.

    It does where raising a covariance to the noise's edge at least doubles its trace, or where the means are apart by
    noise for more than a tenth.
    """
    if statistics.noise is None or int(statistics.number.sum()) - len(statistics.held) < 1:
        return ()
    _, share = share_of_noise(statistics)
    values, limit = torch.linalg.eigvalsh(statistics.within()), pooled_edge(statistics)
    if share < MUCH and float((limit - values).clamp(min=0).sum()) < float(values.sum()):
        return ()
    below = int((values < limit).sum())
    return (
        f"noise rules: {below} of {statistics.width} directions of the pooled covariance cannot be told from noise, "
        f"and noise is {share:.0%} of the variance between class means; more examples or a larger epsilon help",
    )
