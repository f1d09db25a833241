"""The table of calibrations: ccvr, uscc, lda; what each does with class statistics and a classifier."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unskew import text
from unskew.calibration.forms import Form
from unskew.calibration.gaussians import ClassReport, Gaussians
from unskew.calibration.head import CalibratedClassifier, Report, Transformation
from unskew.calibration.retrain import Descent, discriminant, retrained
from unskew.calibration.statistics import ClassStatistics
from unskew.errors import UserError, nearest
from unskew.key import Key

Made = tuple[nn.Linear, float, float, tuple[ClassReport, ...]]


@dataclass(frozen=True)
class Calibration:
    """A way from statistics to a classifier, and the transformation that features pass before it."""

    make: Callable[[nn.Linear, ClassStatistics, Key], Made]
    form: Form = field(default_factory=Form)  # of the statistics it wants
    transformation: Transformation = field(default_factory=Transformation)


def ccvr(
    per_class: int = 2000, epochs: int = 10, lr: float = 0.001, batch: int = 64, momentum: float = 0.9,
    weight_decay: float = 1e-5, relu: bool = False, tukey: float = 1.0, proportional: bool = False,
    covariance: str = "full",
) -> Calibration:  # fmt: skip
    """Re-trains the classifier on virtual features drawn from each class's Gaussian.

    M_c = ``per_class`` features from N(μ_c, Σ_c) for every class, or with ``proportional`` that many on average and
    M_c ∝ N_c; then SGD on the classifier alone, from the trained one. Defaults: Table 8's for CIFAR-10 with α = 0.1 and
    0.05. ``covariance`` is how much of Σ_c the clients send: full, diagonal, shared, "low-rank(32)".

    Departs from the paper: it applies ReLU and Tukey's transformation (λ 0.5) and does not say whether before or after
    the statistics are taken; ours are off unless asked for (``relu=true, tukey=0.5``), come after, and real features
    pass the same transformation at inference.

    Reference: Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data",
    NeurIPS 2021, Algorithm 1.
    """
    form = Form.parse(covariance)
    _positive("ccvr", per_class=per_class, epochs=epochs, batch=batch, lr=lr)
    if not 0 <= momentum < 1:
        raise ValueError(f"ccvr(momentum={momentum}): give 0 or more and less than 1")
    if not 0 <= tukey <= 1:
        raise ValueError(f"ccvr(tukey={tukey}): Tukey's power lies between 0 (the logarithm) and 1 (as they are)")
    if tukey < 1 and not relu:
        raise ValueError(f"ccvr(tukey={tukey}): Tukey's power needs features of 0 or more; add relu=true")
    transformation = Transformation(relu, tukey)
    descent = Descent(epochs, batch, lr, momentum, weight_decay)

    def make(classifier: nn.Linear, statistics: ClassStatistics, key: Key) -> Made:
        features, labels, reports = virtual_features(statistics, per_class, key, proportional=proportional)
        absent = [label for label in range(statistics.classes) if label not in set(statistics.held.tolist())]
        return *retrained(classifier, transformation(features), labels, descent, key, absent), reports

    return Calibration(make, form, transformation)


def uscc(
    per_class: int = 400, epochs: int = 20, lr: float = 0.001, batch: int = 64, covariance: str = "full"
) -> Calibration:
    """FedECCR's second stage: as ccvr, without transformation, equally many features a class.

    Where the paper is silent, rate and momentum are ccvr's.

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023, section 3.3 and Algorithm 2.
    """
    return ccvr(per_class=per_class, epochs=epochs, lr=lr, batch=batch, covariance=covariance)


def lda(ridge: float = 0.001) -> Calibration:
    """Replaces the classifier by the linear discriminant of class means and pooled covariance, in closed form.

    w_c = (Σ + ρ·tr(Σ)/d·I)⁻¹·μ_c, b_c = −½·μ_cᵀw_c: the best classifier if all classes are Gaussians of one shape and
    equally likely. No training, nothing drawn.

    Reference: Fisher, "The Use of Multiple Measurements in Taxonomic Problems", Annals of Eugenics, 1936.
    """
    if not 0 < ridge < float("inf"):
        raise ValueError(
            f"lda(ridge={ridge}): give a number above 0; features of a network are often linearly dependent"
        )

    def make(classifier: nn.Linear, statistics: ClassStatistics, key: Key) -> Made:
        means = statistics.sums["sums"] / statistics.number[:, None]
        linear = discriminant(classifier, means, statistics.within(), statistics.held, ridge)
        pairs = zip(statistics.held.tolist(), statistics.number.tolist(), strict=True)
        return (
            linear,
            float("nan"),
            float("nan"),
            tuple(ClassReport(label, count, shrunk=1.0) for label, count in pairs),
        )

    return Calibration(make, Form("shared"))


CALIBRATIONS: dict[str, Callable[..., Calibration]] = {"ccvr": ccvr, "uscc": uscc, "lda": lda}


def parse(source: str) -> Calibration:
    """The calibration that a text such as ``ccvr(per_class=500)`` stands for."""
    calls = text.parse(source, "calibration")
    if len(calls) > 1:
        raise text.complain(source, calls[1].start, "one calibration at a time; run another beside it")
    build = CALIBRATIONS.get(calls[0].name)
    if build is None:
        hint = nearest(calls[0].name, CALIBRATIONS)
        raise text.complain(source, calls[0].start, f"no calibration is called {calls[0].name!r}; {hint}")
    found: Calibration = text.apply(calls[0], build, "calibration")
    return found


def calibrate(
    classifier: nn.Linear, statistics: ClassStatistics, method: str = "ccvr", seed: int = 0
) -> CalibratedClassifier:
    """A module to put in the classifier's place, made from the statistics alone; the classifier is left as it was."""
    calibration = parse(method)
    if not isinstance(classifier, nn.Linear):
        raise UserError(f"the classifier must be an nn.Linear, this is a {type(classifier).__name__}")
    wanted = (statistics.classes, statistics.width)
    if (classifier.out_features, classifier.in_features) != wanted:
        raise UserError(
            f"the classifier takes {classifier.in_features} features to {classifier.out_features} classes, "
            f"the statistics are of {wanted[1]} features and {wanted[0]} classes"
        )
    if not len(statistics.held):
        raise UserError("the statistics are of nobody: no class is held")
    held = set(statistics.held.tolist())
    absent = tuple(label for label in range(statistics.classes) if label not in held)
    if absent:
        words = ", ".join(map(str, absent[:10])) + (" …" if len(absent) > 10 else "")
        warnings.warn(f"nobody holds class {words}: the classifier keeps its row for it", stacklevel=2)
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # a new layer draws weights that are overwritten, and disturbs nobody
        linear, before, after, reports = calibration.make(classifier, statistics, Key(seed).fold("calibrate"))
    report = Report(method, reports, absent, before, after, time.perf_counter() - began)
    return CalibratedClassifier(linear, calibration.transformation, report)


def virtual_features(
    statistics: ClassStatistics, per_class: int, key: Key, *, proportional: bool = False
) -> tuple[Tensor, Tensor, tuple[ClassReport, ...]]:
    """Features [n, d] drawn from every class's Gaussian in float32, labels [n], and what was done for each class."""
    gaussians = Gaussians(statistics)
    share = statistics.number / statistics.number.sum() * len(statistics.held)
    features, labels, reports = [], [], []
    for place, label in enumerate(statistics.held.tolist()):
        count = max(1, round(per_class * float(share[place]))) if proportional else per_class
        drawn, report = gaussians.draw(place, count, key)
        features.append(drawn.float())
        labels.append(torch.full((count,), label))
        reports.append(report)
    return torch.cat(features), torch.cat(labels), tuple(reports)


def _positive(name: str, **values: float) -> None:
    for knob, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}({knob}={value}): give a number above 0")
