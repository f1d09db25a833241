"""What calibration may gain, from the class Gaussians alone, before anything is trained.

Shapes: P classes held, d features, u directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import copy_head
from unskew.calibration.covariances import Gaussians, factorise
from unskew.calibration.lda import RIDGE, features_vary, solve_discriminant
from unskew.calibration.protection import pooled_edge, raise_eigenvalues, share_of_noise
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

DIRECTIONS = 256
MAX_FEATURES = 20_000  # virtual ones in all


@dataclass(frozen=True)
class Forecast:
    """How far apart the class Gaussians are, and how many features drawn from them a classifier gets right."""

    separability: float  # mean sliced Wasserstein distance between two classes, in the features' own unit
    before: float | None = None  # the classifier as it is
    after: float | None = None  # the linear discriminant of the same Gaussians

    @property
    def gain(self) -> float | None:
        """What is left to gain, as a share of the features."""
        return None if self.before is None or self.after is None else self.after - self.before


def separability(statistics: ClassStatistics, key: Key) -> float:
    """The sliced Wasserstein distance between the Gaussians of two classes, averaged over all pairs.

    Along a direction u the Gaussians are N(m, s²), and W₂² = (m − m′)² + (s − s′)²; its mean over random directions is
    the squared distance of the pair.

    Reference: Kolouri et al., "Generalized Sliced Wasserstein Distances", NeurIPS 2019; Luo et al. 2021, section 5.4.
    """
    return float(pairwise_separability(statistics, key).mean()) if len(statistics.held) > 1 else 0.0


def pairwise_separability(statistics: ClassStatistics, key: Key) -> Tensor:
    """[P·(P − 1)/2], that distance for each pair of classes: the first with all later ones, then the second, …"""
    gaussians, count = Gaussians(statistics), len(statistics.held)
    drawn = torch.randn(statistics.width, DIRECTIONS, generator=key.fold("slices").torch(), dtype=torch.float64)
    slices = drawn / drawn.norm(dim=0)  # [d, u]
    points = gaussians.means @ slices  # [P, u]
    if not statistics.form.common:  # with one spread for all classes it would cancel
        spreads = torch.stack([gaussians.spread(row)[0].deviation_along(slices) for row in range(count)])
        points = torch.cat([points, spreads], dim=1)  # [P, 2u]
    distances: Tensor = torch.pdist(points) / DIRECTIONS**0.5
    return distances


def forecast(head: nn.Module | None, statistics: ClassStatistics, classes: int, key: Key) -> Forecast:
    """The separability, and what the head and a linear discriminant make of features drawn from the Gaussians.

    Without a head that takes these features, or where they do not vary, there is the separability alone. Of statistics
    with known noise the forecast is a cautious one: features are drawn around means that may be the true ones instead
    of the noisy ones, as widely as the noise allows.
    """
    mean, gaussians = separability(statistics, key), Gaussians(statistics)
    if head is None or int(statistics.number.sum()) - len(statistics.held) < 1:
        return Forecast(mean)
    if not features_vary(gaussians.means, gaussians.within):
        return Forecast(mean)
    within, wide = gaussians.within, None
    if statistics.noise is not None:
        within = raise_eigenvalues(within, pooled_edge(statistics))
        wide = factorise(within)[0]
    rival = solve_discriminant(None, gaussians.means, within, statistics.held, RIDGE, classes)
    means = _draw_true_means(statistics, key)
    head, count = copy_head(head).cpu().double(), max(2, min(500, MAX_FEATURES // len(statistics.held)))
    right = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for row, label in enumerate(statistics.held.tolist()):
            if wide is None:
                drawn, _ = gaussians.draw(row, count, key.fold("forecast"))
            else:
                drawn = means[row] + wide.draw(count, key.fold("forecast", "class", label).torch())
            right += torch.stack([(classify(drawn).argmax(1) == label).sum() for classify in (head, rival.double())])
    before, after = (right.double() / (count * len(statistics.held))).tolist()
    return Forecast(mean, before, after)


def _draw_true_means(statistics: ClassStatistics, key: Key) -> Tensor:
    """[P, d], class means that may be the true ones, given the noisy ones: drawn from their posterior.

    Its prior is the means' own spread without the noise's part (empirical Bayes): all means move towards their common
    one as far as noise has driven them apart.
    """
    means = statistics.means()
    variance, share = share_of_noise(statistics)
    if not variance:
        return means
    drawn = torch.randn(means.shape, generator=key.fold("true means").torch(), dtype=torch.float64)
    middle = means.mean(0)
    posterior: Tensor = middle + (1 - share) * (means - middle) + ((1 - share) * variance) ** 0.5 * drawn
    return posterior
