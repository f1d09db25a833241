"""Several Gaussians a class, by k-means over the federation: clients send sums, the server moves the centres.

In the statistics each part of a class counts as a class: class c's part k has the label c·K + k.

Reference: Lloyd, "Least Squares Quantization in PCM", IEEE Transactions on Information Theory, 1982.

Shapes: C classes, P of them held, K parts of each, d features.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from unskew.calibration.covariances import Gaussians
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

PASSES = 8  # of Lloyd's algorithm


def centres_of(
    whole: ClassStatistics, components: int, gather: Callable[[Tensor], ClassStatistics], key: Key
) -> Tensor:
    """[C, K, d] after PASSES passes; ``gather`` gives the statistics of all parts under given centres.

    The first centres are virtual features, so that no client reveals a feature.
    """
    centres = torch.zeros(whole.classes, components, whole.width, dtype=torch.float64)
    gaussians = Gaussians(whole)
    for place, label in enumerate(whole.held.tolist()):
        centres[label] = gaussians.draw(place, components, key.fold("centres"))[0]
    for _ in range(PASSES):
        centres = move_centres(centres, gather(centres))
    return centres


def move_centres(centres: Tensor, parts: ClassStatistics) -> Tensor:
    """[C, K, d], each centre at the mean of what was nearest to it; one that nothing was near to stays."""
    flat = centres.flatten(0, 1).clone()
    flat[parts.held] = parts.means()
    return flat.view(centres.shape)


def by_part(centres: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(features [n, d], labels [n] on the CPU) -> [n]: label·K + the nearest of the class's own centres."""
    own = centres.cpu()

    def relabel(features: Tensor, labels: Tensor) -> Tensor:
        features, parts = features.cpu(), torch.empty_like(labels)
        for label in torch.bincount(labels).nonzero()[:, 0].tolist():
            rows = (labels == label).nonzero()[:, 0]
            # not by products: far from zero they lose the difference, and their rounding depends on the batch
            apart = torch.cdist(features[rows].double(), own[label], compute_mode="donot_use_mm_for_euclid_dist")
            parts[rows] = label * centres.shape[1] + apart.argmin(1)
        return parts

    return relabel
