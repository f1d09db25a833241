"""CCVR: the classifier re-trained on virtual features drawn from each class's Gaussian."""

from torch import nn

from unskew.calibration.covariances import parse_form
from unskew.calibration.finisher import Finisher, Made, finisher
from unskew.calibration.heads import last_linear
from unskew.calibration.knobs import check_positive, descent_of
from unskew.calibration.request import StatisticsRequest
from unskew.calibration.retraining import retrained
from unskew.calibration.statistics import ClassStatistics
from unskew.calibration.transformations import Transformation
from unskew.calibration.virtual import virtual_features
from unskew.core.key import Key


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
