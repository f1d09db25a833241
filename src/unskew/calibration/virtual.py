"""Virtual features: drawn from each class's Gaussian, as many as a calibration asks for.

Shapes: n features of d dimensions.
"""

from dataclasses import replace

import torch
from torch import Tensor

from unskew.calibration.gaussians import ClassReport, Gaussians
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import physical_memory


def check_virtual_memory(count: int, per_class: int, width: int) -> None:
    """Refuse more virtual features than this machine's memory holds."""
    needed, there = 4 * count * width, 0.8 * physical_memory()
    if needed > there:
        raise UserError(
            f"{count:,} virtual features take {needed / 1e9:.1f} GB, this machine has {there / 1e9:.1f} GB "
            f"for them; give per_class={max(1, int(per_class * there / needed))} or less"
        )


def virtual_features(
    statistics: ClassStatistics, per_class: int, key: Key, *, proportional: bool = False, components: int = 1
) -> tuple[Tensor, Tensor, tuple[ClassReport, ...]]:
    """Features [n, d] drawn from every class's Gaussian in float32, labels [n], and what was done for each class.

    A class of several components has their features in the proportion of their examples.
    """
    gaussians = Gaussians(statistics)
    owner = statistics.held // components
    held, places = torch.unique(owner, return_inverse=True)
    size = torch.zeros(len(held), dtype=torch.float64).index_add_(0, places, statistics.number.double())
    share = statistics.number / (statistics.number.sum() / len(held) if proportional else size[places])
    counts = (per_class * share).round().clamp(min=1).long()
    check_virtual_memory(int(counts.sum()), per_class, statistics.width)
    features = torch.empty(int(counts.sum()), statistics.width)
    reports = []
    for place, rows in enumerate(torch.split_with_sizes(features, counts.tolist())):
        drawn, report = gaussians.draw(place, len(rows), key)
        rows.copy_(drawn)
        reports.append(replace(report, label=int(owner[place])))
    return features, torch.repeat_interleave(owner, counts), tuple(reports)
