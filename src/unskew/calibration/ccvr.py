"""CCVR: the classifier re-trained on virtual features drawn from each class's Gaussian."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import Transformation, last_linear
from unskew.calibration.covariances import parse_form
from unskew.calibration.finisher import Finisher, Made, StatisticsRequest, finisher
from unskew.calibration.gaussians import ClassReport, Gaussians
from unskew.calibration.retraining import check_positive, descent_of, retrained
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


@finisher
def ccvr(
    per_class: int = 2000, epochs: int = 10, lr: float = 0.001, batch: int = 64, momentum: float = 0.9,
    weight_decay: float = 1e-5, relu: bool = False, tukey: float = 1.0, proportional: bool = False,
    covariance: str = "full", layers: int = 1, components: int = 1,
) -> Finisher:  # fmt: skip
    """Re-trains the classifier on features drawn from class Gaussians.

    M_c = ``per_class`` features from N(μ_c, Σ_c) for every class, or with ``proportional`` that many on average and
    M_c ∝ N_c; then SGD on the classifier alone, from the trained one. Defaults: Table 8's for CIFAR-10 with α = 0.1 and
    0.05. ``covariance`` is how much of Σ_c the clients send: full, diagonal, shared, "low-rank(32)".

    Departs from the paper: it applies ReLU and Tukey's transformation (λ 0.5) and does not say whether before or after
    the statistics are taken; ours are off unless asked for (``relu=true, tukey=0.5``), come after, and real features
    pass the same transformation at inference. Beyond it: ``layers`` linear layers may be re-trained instead of one,
    and a class may have several Gaussians (``components``), found by k-means over the federation.

    Reference: Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data",
    NeurIPS 2021, Algorithm 1.
    """
    form = parse_form(covariance)
    check_positive("ccvr", per_class=per_class, layers=layers, components=components)
    descent = descent_of("ccvr", epochs, batch, lr, momentum, weight_decay)
    if not 0 <= tukey <= 1:
        raise ValueError(f"ccvr(tukey={tukey}): give Tukey's power as 0 (the logarithm) to 1 (no change)")
    if tukey < 1 and not relu:
        raise ValueError(f"ccvr(tukey={tukey}): Tukey's power needs features of 0 or more; add relu=true")
    transformation = Transformation(relu, tukey)

    def make(head: nn.Module, statistics: ClassStatistics, key: Key) -> Made:
        features, labels, reports = virtual_features(
            statistics, per_class, key, proportional=proportional, components=components
        )
        absent = sorted(set(range(last_linear(head).out_features)) - set(labels.tolist()))
        return Made(*retrained(head, transformation(features), labels, descent, key, absent), reports, transformation)

    return Finisher(make, StatisticsRequest(form, layers, components=components), virtual=per_class, bends=relu)


@finisher
def uscc(
    per_class: int = 400, epochs: int = 20, lr: float = 0.01, batch: int = 64, covariance: str = "full"
) -> Finisher:
    """Re-trains as ccvr does, with FedECCR's settings: its second stage.

    The same number of virtual features for each class, no transformation.

    Momentum and weight decay, on which the paper is silent, are ccvr's.

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023, sections 3.3 and 4.1, Algorithm 2.
    """
    check_positive("uscc", per_class=per_class, epochs=epochs, batch=batch, lr=lr)
    return ccvr(per_class=per_class, epochs=epochs, lr=lr, batch=batch, covariance=covariance)
