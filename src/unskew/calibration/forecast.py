"""Forecasts the gain of a calibration from the class Gaussians, before anything is trained.

Shapes: P classes with examples, d features, u directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import copy_head
from unskew.calibration.covariances import Full, Gaussians, factorise
from unskew.calibration.lda import discriminate, features_vary
from unskew.calibration.protection import pooled_edge, raise_eigenvalues
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

DIRECTIONS = 256
MAX_FEATURES = 20_000  # virtual features in total
LEVERAGE = 0.5  # of an example on its own prediction; above this nothing is forecast


@dataclass(frozen=True)
class Forecast:
    """The distance between class Gaussians, and the accuracies of two classifiers on features drawn from them."""

    separability: float  # mean sliced Wasserstein distance between two classes, in the features' unit
    before: float | None = None  # accuracy of the trained classifier
    after: float | None = None  # accuracy of the linear discriminant of the same Gaussians


def pairwise_separability(statistics: ClassStatistics, key: Key) -> Tensor:
    """[P·(P − 1)/2], the sliced Wasserstein distance of each pair of class Gaussians, in the order of triu_indices.

    Along a direction u the Gaussians are N(m, s²), and W₂² = (m − m′)² + (s − s′)²; its mean over random directions is
    the squared distance of the pair.

    Reference: Kolouri et al., "Generalized Sliced Wasserstein Distances", NeurIPS 2019; Luo et al. 2021, section 5.4.
    """
    gaussians, count = Gaussians(statistics), len(statistics.held)
    drawn = torch.randn(statistics.width, DIRECTIONS, generator=key.fold("slices").torch(), dtype=torch.float64)
    slices = drawn / drawn.norm(dim=0)  # [d, u]
    points = gaussians.means @ slices  # [P, u]
    if not statistics.form.common:  # a common spread would cancel
        spreads = torch.stack([gaussians.spread(row)[0].deviation_along(slices) for row in range(count)])
        points = torch.cat([points, spreads], dim=1)  # [P, 2u]
    distances: Tensor = torch.pdist(points) / DIRECTIONS**0.5
    return distances


def forecast(head: nn.Module | None, statistics: ClassStatistics, classes: int, key: Key) -> Forecast:
    """The separability, and the accuracy of the head and of a linear discriminant on features from the Gaussians.

    The features represent unseen ones: they are drawn around plausible true means, given those of the examples, and for
    the discriminant as widely as unseen features vary along its weights. The discriminant's accuracy is still an upper
    bound, since real features are not Gaussian: 0.2 to 0.8 of the forecast gain was achieved
    (explanation/calibration). Only the separability is reported if a forecast would be unreliable: with any form but
    ``full`` (the pooled covariance forecast 99 % instead of 51 %), if an example determines more than half of its own
    prediction, if no head takes these features, and if they do not vary.
    """
    gaussians = Gaussians(statistics)
    mean = float(pairwise_separability(statistics, key).mean()) if len(statistics.held) > 1 else 0.0
    if head is None or not isinstance(statistics.form, Full) or int(statistics.number.sum()) <= len(statistics.held):
        return Forecast(mean)
    if not features_vary(gaussians.means, gaussians.within):
        return Forecast(mean)
    if (rival := discriminate(statistics)).inflation > 1 / (1 - LEVERAGE):
        return Forecast(mean)
    wide = None
    if statistics.noise is not None:
        wide = factorise(raise_eigenvalues(gaussians.within, pooled_edge(statistics)))[0]
    head, count = copy_head(head).cpu().double(), max(2, min(500, MAX_FEATURES // len(statistics.held)))
    right, centre = torch.zeros(2, dtype=torch.int64), gaussians.means.mean(0)
    with torch.no_grad():
        for row, label in enumerate(statistics.held.tolist()):
            spread, stream = gaussians.spread(row)[0] if wide is None else wide, key.fold("forecast", "class", label)
            share, number = float(rival.shrinkage[row]), int(statistics.number[row])
            true = centre + share * (gaussians.means[row] - centre)
            drawn = (1 + share / number) ** 0.5 * spread.draw(count, stream.torch())
            if statistics.noise is not None:
                generator = stream.fold("noise").torch()
                noise = torch.randn(count, statistics.width, generator=generator, dtype=torch.float64)
                drawn += share**0.5 * statistics.noise.sums / number * noise
            right[0] += int((head(true + drawn).argmax(1) == label).sum())
            logits = (true + rival.inflation * drawn) @ rival.weight.t() + rival.bias
            right[1] += int((statistics.held[logits.argmax(1)] == label).sum())
    before, after = (right.double() / (count * len(statistics.held))).tolist()
    return Forecast(mean, before, after)
