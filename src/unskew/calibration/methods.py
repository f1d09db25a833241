"""The table of calibrations: ccvr, uscc, lda, oracle; what each does with class statistics and a classifier."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import CalibratedClassifier, Lift, Report, Transformation, last_linear
from unskew.calibration.forms import Form
from unskew.calibration.gaussians import ClassReport, Gaussians
from unskew.calibration.retraining import Descent, discriminant, retrained
from unskew.calibration.statistics import ClassStatistics
from unskew.core import text
from unskew.core.errors import UserError, nearest
from unskew.core.key import Key
from unskew.core.machine import physical_memory

Made = tuple[nn.Module, float, float, tuple[ClassReport, ...]]  # the head, its loss before and after, what was done


@dataclass(frozen=True)
class Calibration:
    """A way from statistics to a classifier, and what has to be asked for it."""

    make: Callable[[nn.Module | None, ClassStatistics, int, Key], Made] | None  # None: needs real features
    form: Form = field(default_factory=Form)  # of the statistics it wants
    layers: int = 1  # linear layers that it makes anew
    expand: int = 0  # random features that it wants beside the network's own
    components: int = 1  # Gaussians a class
    transformation: Transformation = field(default_factory=Transformation)
    real: int | None = None  # real features of each class, for the oracle; 0: all
    descent: Descent = field(default_factory=Descent)


def ccvr(
    per_class: int = 2000, epochs: int = 10, lr: float = 0.001, batch: int = 64, momentum: float = 0.9,
    weight_decay: float = 1e-5, relu: bool = False, tukey: float = 1.0, proportional: bool = False,
    covariance: str = "full", layers: int = 1, components: int = 1,
) -> Calibration:  # fmt: skip
    """Re-trains the classifier on virtual features drawn from each class's Gaussian.

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
    form = Form.parse(covariance)
    _positive("ccvr", per_class=per_class, layers=layers, components=components)
    descent = _descent("ccvr", epochs, batch, lr, momentum, weight_decay)
    if not 0 <= tukey <= 1:
        raise ValueError(f"ccvr(tukey={tukey}): Tukey's power lies between 0 (the logarithm) and 1 (as they are)")
    if tukey < 1 and not relu:
        raise ValueError(f"ccvr(tukey={tukey}): Tukey's power needs features of 0 or more; add relu=true")
    transformation = Transformation(relu, tukey)

    def make(head: nn.Module | None, statistics: ClassStatistics, classes: int, key: Key) -> Made:
        assert head is not None
        features, labels, reports = virtual_features(
            statistics, per_class, key, proportional=proportional, components=components
        )
        absent = sorted(set(range(classes)) - set(labels.tolist()))
        return *retrained(head, transformation(features), labels, descent, key, absent), reports

    return Calibration(make, form, layers, components=components, transformation=transformation)


def uscc(
    per_class: int = 400, epochs: int = 20, lr: float = 0.001, batch: int = 64, covariance: str = "full"
) -> Calibration:
    """FedECCR's second stage: as ccvr, without transformation, equally many features a class.

    Where the paper is silent, rate and momentum are ccvr's.

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023, section 3.3 and Algorithm 2.
    """
    _positive("uscc", per_class=per_class, epochs=epochs, batch=batch, lr=lr)
    return ccvr(per_class=per_class, epochs=epochs, lr=lr, batch=batch, covariance=covariance)


def lda(ridge: float = 0.001, layers: int = 1, expand: int = 0) -> Calibration:
    """Replaces the classifier by the linear discriminant of class means and pooled covariance, in closed form.

    w_c = (Σ + ρ·tr(Σ)/d·I)⁻¹·μ_c, b_c = −½·μ_cᵀw_c: the best classifier if all classes are Gaussians of one shape and
    equally likely. No training, nothing drawn. With ``layers`` above 1 it stands in for so many linear layers of the
    network; with ``expand`` it sees ReLU of so many random sums of their input beside ReLU of the input itself, and is
    no longer linear in it.

    Reference: Fisher, "The Use of Multiple Measurements in Taxonomic Problems", Annals of Eugenics, 1936; random
    features: Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007.
    """
    if not 0 < ridge < float("inf"):
        raise ValueError(
            f"lda(ridge={ridge}): give a number above 0; features of a network are often linearly dependent"
        )
    _positive("lda", layers=layers)
    if expand < 0:
        raise ValueError(f"lda(expand={expand}): it counts random features, give 0 or more")

    def make(head: nn.Module | None, statistics: ClassStatistics, classes: int, key: Key) -> Made:
        means = statistics.sums["sums"] / statistics.number[:, None]
        linear = discriminant(head, means, statistics.within(), statistics.held, ridge, classes)
        pairs = zip(statistics.held.tolist(), statistics.number.tolist(), strict=True)
        reports = tuple(ClassReport(label, count, shrunk=1.0) for label, count in pairs)
        return linear, float("nan"), float("nan"), reports

    return Calibration(make, Form("shared"), layers, expand)


def oracle(
    per_class: str | int = "all", epochs: int = 50, lr: float = 0.001, batch: int = 64, momentum: float = 0.9,
    weight_decay: float = 1e-5, layers: int = 1,
) -> Calibration:  # fmt: skip
    """Re-trains the classifier on the clients' real features, all or ``per_class`` of each class: for study alone.

    What calibration could reach at most with these features, if they could be pooled.

    Reference: Luo et al., NeurIPS 2021, Table 5.
    """
    count = 0 if per_class == "all" else per_class
    if type(count) is not int or (count < 1 and per_class != "all"):
        raise ValueError(f"oracle(per_class={per_class}): give all, or how many features of each class")
    _positive("oracle", layers=layers)
    descent = _descent("oracle", epochs, batch, lr, momentum, weight_decay)
    return Calibration(None, layers=layers, real=count, descent=descent)


CALIBRATIONS: dict[str, Callable[..., Calibration]] = {"ccvr": ccvr, "uscc": uscc, "lda": lda, "oracle": oracle}


def parse_calibration(source: str) -> Calibration:
    """The calibration that a text such as ``ccvr(per_class=500)`` stands for."""
    if not isinstance(source, str):
        raise UserError(f"a calibration is named by a text such as ccvr(per_class=500), this is {source!r}")
    calls = text.parse_calls(source, "calibration")
    if len(calls) > 1:
        raise text.complain(
            source, calls[1].start, "name one calibration alone; methods and protections beside it are for runs"
        )
    build = CALIBRATIONS.get(calls[0].name)
    if build is None:
        hint = nearest(calls[0].name, CALIBRATIONS)
        raise text.complain(source, calls[0].start, f"no calibration is called {calls[0].name!r}; {hint}")
    found: Calibration = text.apply(calls[0], build, "calibration")
    return found


def calibrate(
    classifier: nn.Module, statistics: ClassStatistics, method: str = "ccvr", seed: int = 0
) -> CalibratedClassifier:
    """A module to put in the classifier's place, made from the statistics alone; the classifier is left as it was.

    ``classifier`` is an ``nn.Linear``, or a module that ends in one where ``layers`` says that more is made anew: it
    takes the features that the statistics are of.
    """
    calibration = parse_calibration(method)
    if calibration.make is None:
        raise UserError(f"{method} needs the clients' real features, which only a simulation has; unskew calibrate RUN")
    classes = _fitting(classifier, statistics, calibration)
    held = {label // calibration.components for label in statistics.held.tolist()}
    absent = tuple(label for label in range(classes) if label not in held)
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # a new layer draws weights that are overwritten, and disturbs nobody
        head, before, after, reports = calibration.make(classifier, statistics, classes, Key(seed).fold("calibrate"))
    report = Report(method, reports, absent, before, after, time.perf_counter() - began)
    if absent:
        words = ", ".join(map(str, absent[:10])) + (" …" if len(absent) > 10 else "")
        anew = isinstance(head, nn.Linear) and (calibration.expand > 0 or not isinstance(classifier, nn.Linear))
        fate = "is never answered" if anew else "keeps its row of the classifier"
        warnings.warn(f"nobody holds class {words}: it {fate}", stacklevel=2)
    width = statistics.width - calibration.expand
    first = Lift.of(width, calibration.expand) if calibration.expand else calibration.transformation
    return CalibratedClassifier(first, head, report, calibration.layers)


def retrained_on(
    classifier: nn.Module, features: Tensor, labels: Tensor, method: str, seed: int = 0
) -> CalibratedClassifier:
    """The oracle: a classifier trained on these real features [n, d]; refused where there is nothing to train on."""
    calibration, began = parse_calibration(method), time.perf_counter()
    if not len(labels):
        raise UserError(f"{method}: there is no feature to train on")
    classes = last_linear(classifier).out_features
    absent = tuple(sorted(set(range(classes)) - set(labels.tolist())))
    with torch.random.fork_rng(devices=[]):
        head, before, after = retrained(
            classifier, features, labels, calibration.descent, Key(seed).fold("oracle"), absent
        )
    counts = torch.bincount(labels, minlength=classes).tolist()
    reports = tuple(ClassReport(label, count) for label, count in enumerate(counts) if count)
    report = Report(method, reports, absent, before, after, time.perf_counter() - began)
    return CalibratedClassifier(Transformation(), head, report, calibration.layers)


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
    needed, there = 4 * int(counts.sum()) * statistics.width, 0.8 * physical_memory()
    if needed > there:
        raise UserError(
            f"{int(counts.sum()):,} virtual features take {needed / 1e9:.1f} GB, this machine has {there / 1e9:.1f} GB "
            f"for them; give per_class={max(1, int(per_class * there / needed))} or less"
        )
    features = torch.empty(int(counts.sum()), statistics.width)
    reports = []
    for place, rows in enumerate(torch.split_with_sizes(features, counts.tolist())):
        drawn, report = gaussians.draw(place, len(rows), key)
        rows.copy_(drawn)
        reports.append(replace(report, label=int(owner[place])))
    return features, torch.repeat_interleave(owner, counts), tuple(reports)


def _fitting(classifier: nn.Module, statistics: ClassStatistics, calibration: Calibration) -> int:
    """How many classes there are, if classifier, statistics and calibration belong together."""
    if not isinstance(classifier, nn.Module):
        raise UserError(f"the classifier must be a torch module, this is a {type(classifier).__name__}")
    if not isinstance(statistics, ClassStatistics):
        raise UserError(f"the statistics must be ClassStatistics, this is a {type(statistics).__name__}")
    if calibration.layers == 1 and not isinstance(classifier, nn.Linear):
        raise UserError(f"the classifier must be an nn.Linear, this is a {type(classifier).__name__}; or give layers")
    classes = last_linear(classifier).out_features
    layers = [part for part in classifier.modules() if isinstance(part, nn.Linear)]
    if len(layers) != calibration.layers:
        raise UserError(f"layers={calibration.layers}, but this classifier has {len(layers)} linear layers; say so")
    wanted = (classes * calibration.components, layers[0].in_features + calibration.expand)
    if (statistics.classes, statistics.width) != wanted:
        raise UserError(
            f"the classifier takes {layers[0].in_features} features to {classes} classes and so wants statistics of "
            f"{wanted[1]} features and {wanted[0]} classes; these are {statistics.about()}{_how(calibration)}"
        )
    if not len(statistics.held):
        raise UserError("the statistics are of nobody: no class is held")
    if not all(bool(value.isfinite().all()) for value in classifier.parameters()):
        raise UserError("the classifier holds NaN or infinity; give one that was trained to its end")
    return classes


def _how(calibration: Calibration) -> str:
    """What to do for statistics that are of more than a network's features and classes."""
    if calibration.expand:
        return f"; with expand={calibration.expand} measure behind unskew.Lift.of(features, {calibration.expand})"
    if calibration.components > 1:
        return "; with components a part of a class has a label of its own, which unskew calibrate RUN does"
    return ""


def _descent(name: str, epochs: int, batch: int, lr: float, momentum: float, weight_decay: float) -> Descent:
    _positive(name, epochs=epochs, batch=batch, lr=lr)
    if not 0 <= momentum < 1:
        raise ValueError(f"{name}(momentum={momentum}): give 0 or more and less than 1")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"{name}(weight_decay={weight_decay}): give 0 or more")
    return Descent(epochs, batch, lr, momentum, weight_decay)


def _positive(name: str, **values: float) -> None:
    for knob, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}({knob}={value}): give a number above 0")
