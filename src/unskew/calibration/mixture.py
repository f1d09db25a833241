"""Several Gaussians per class, by k-means over the federation: clients send sums, the server moves the centers.

In the statistics each component of a class counts as a class: component k of class c has the label c·K + k.

Reference: Lloyd, "Least Squares Quantization in PCM", IEEE Transactions on Information Theory, 1982.

Shapes: C classes, P of them with examples, K components each, d features.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from unskew.calibration.covariances import Gaussians
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

PASSES = 8  # of Lloyd's algorithm


def find_centres(
    statistics: ClassStatistics, components: int, gather: Callable[[Tensor], ClassStatistics], key: Key
) -> Tensor:
    """[C, K, d], the centers after PASSES passes; ``gather`` returns the components' statistics for given centers.

    The first centers are virtual features, so that no client reveals a feature.
    """
    centres = torch.zeros(statistics.classes, components, statistics.width, dtype=torch.float64)
    gaussians = Gaussians(statistics)
    for row, label in enumerate(statistics.held.tolist()):
        centres[label] = gaussians.draw(row, components, key.fold("centres"))[0]
    for _ in range(PASSES):
        centres = move_centres(centres, gather(centres))
    return centres


def move_centres(centres: Tensor, parts: ClassStatistics) -> Tensor:
    """[C, K, d], each center at the mean of the features nearest to it; a center without any stays."""
    flat = centres.flatten(0, 1).clone()
    flat[parts.held] = parts.means()
    return flat.view(centres.shape)


def by_part(centres: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(features [n, d], labels [n] on the CPU) -> [n]: label·K + the index of the class's nearest center."""
    on_cpu = centres.cpu()

    def relabel(features: Tensor, labels: Tensor) -> Tensor:
        features, parts = features.cpu(), torch.empty_like(labels)
        for label in torch.bincount(labels).nonzero()[:, 0].tolist():
            rows = (labels == label).nonzero()[:, 0]
            # not by matrix products: far from zero they lose precision, and their rounding depends on the batch
            distance = torch.cdist(features[rows].double(), on_cpu[label], compute_mode="donot_use_mm_for_euclid_dist")
            parts[rows] = label * centres.shape[1] + distance.argmin(1)
        return parts

    return relabel
