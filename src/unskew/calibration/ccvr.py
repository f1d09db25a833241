"""CCVR: the classifier retrained on virtual features drawn from each class's Gaussian.

Training runs on the classifier's device; features and the order of the batches are drawn on the CPU and copied there.

Shapes: n features of d dimensions, C classes.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.calibration.classifier import Transformation, copy_head, last_linear
from unskew.calibration.covariances import ClassReport, Gaussians, parse_form, require_memory
from unskew.calibration.finisher import Finisher, Made, StatisticsRequest, finisher
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.language import check_not_negative, check_positive
from unskew.core.tensors import one_thread
from unskew.core.types import Local
from unskew.models.networks import device_of
from unskew.round.local_optimizers import sgd


def check_virtual_memory(count: int, width: int) -> None:
    """Refuse more virtual features than fit in memory."""
    require_memory(4 * count * width, f"{count:,} virtual features", "give a smaller per_class")


def draw_virtual_features(
    statistics: ClassStatistics,
    per_class: int,
    key: Key,
    *,
    proportional: bool = False,
    components: int = 1,
    mix: bool = True,
) -> tuple[Tensor, Tensor, tuple[ClassReport, ...]]:
    """Draw features [n, d] from every class's Gaussian in float32; their labels [n], and a report for each class.

    Components of a class have features in proportion to their examples. With ``mix`` the covariance of a class with no
    more examples than features is mixed with the pooled one.
    """
    gaussians = Gaussians(statistics, mix=mix)
    owner = statistics.held // components
    held, position = torch.unique(owner, return_inverse=True)
    size = torch.zeros(len(held), dtype=torch.float64).index_add_(0, position, statistics.number.double())
    share = statistics.number / (statistics.number.sum() / len(held) if proportional else size[position])
    counts = (per_class * share).round().clamp(min=1).long()
    check_virtual_memory(int(counts.sum()), statistics.width)
    features = torch.empty(int(counts.sum()), statistics.width)
    reports = []
    for row, part in enumerate(torch.split_with_sizes(features, counts.tolist())):
        drawn, report = gaussians.draw(row, len(part), key)
        part.copy_(drawn)
        reports.append(replace(report, label=int(owner[row])))
    return features, torch.repeat_interleave(owner, counts), tuple(reports)


def retrain(
    head: nn.Module,
    features: Tensor,
    labels: Tensor,
    local: Local,
    key: Key,
    frozen: Sequence[int] = (),
    held_out: float = 0.0,
) -> tuple[nn.Module, float, float]:
    """Train a copy of the head on features [n, d] with cross-entropy and SGD; also the mean loss before and after.

    The rows of ``frozen`` classes do not change. A share ``held_out`` of the features is not used for training: the
    epoch with the lowest loss on them is kept.
    """
    head = copy_head(head)
    linear = [part for part in head.modules() if isinstance(part, nn.Linear)]  # norms between them are not trained
    values: list[Tensor] = [value for part in linear for value in part.parameters(recurse=False)]
    device = device_of(head)
    features, labels = features.to(device, values[0].dtype), labels.to(device)
    order = torch.randperm(len(labels), generator=key.fold("held out").torch()).to(device)
    judged, used = order.tensor_split([round(held_out * len(order))])
    unseen = features[judged], labels[judged]
    if held_out:
        features, labels = features[used], labels[used]
    before = mean_loss(head, features, labels)
    best, best_epoch = mean_loss(head, *unseen) if held_out else math.inf, copy.deepcopy(head.state_dict())
    rows = [value for value in (last_linear(head).weight, last_linear(head).bias) if value is not None]
    originals = [value.detach()[list(frozen)].clone() for value in rows]
    update = sgd(values, local)
    with one_thread():  # steps of 64 features are too small for a second thread
        for epoch in range(local.epochs):
            order = torch.randperm(len(labels), generator=key.fold("epoch", epoch).torch())
            for some in torch.split(order.to(device), local.batch):
                loss = F.cross_entropy(head(features[some]), labels[some])
                update(torch.autograd.grad(loss, values))
                if frozen:
                    with torch.no_grad():
                        for value, original in zip(rows, originals, strict=True):
                            value[list(frozen)] = original
            if held_out and (loss_unseen := mean_loss(head, *unseen)) < best:
                best, best_epoch = loss_unseen, copy.deepcopy(head.state_dict())
    if held_out:
        head.load_state_dict(best_epoch)
    after = mean_loss(head, features, labels)
    if not math.isfinite(after):
        raise UserError(f"retraining with lr={local.lr:g} diverged to NaN or infinity; give a smaller lr")
    return head, before, after


def mean_loss(head: nn.Module, features: Tensor, labels: Tensor) -> float:
    """The mean cross-entropy of the head on features, in its dtype and on its device."""
    weight = last_linear(head).weight
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(labels), 4096):
            some = features[start : start + 4096].to(weight.device, weight.dtype)
            total += float(F.cross_entropy(head(some), labels[start : start + 4096].to(weight.device), reduction="sum"))
    return total / max(len(labels), 1)


def training_settings(name: str, epochs: int, batch: int, lr: float, momentum: float, weight_decay: float) -> Local:
    """Check the knobs of a calibration that trains the classifier, and turn them into settings."""
    check_positive(name, epochs=epochs, batch=batch, lr=lr)
    if not 0 <= momentum < 1:
        raise ValueError(f"{name}(momentum={momentum}): give at least 0 and less than 1")
    check_not_negative(name, weight_decay=weight_decay)
    return Local(epochs, batch, lr, momentum, weight_decay)


@finisher
def ccvr(
    per_class: int = 2000,
    epochs: int = 10,
    lr: float = 0.001,
    batch: int = 64,
    momentum: float = 0.9,
    weight_decay: float = 1e-5,
    relu: bool = False,
    tukey: float = 1.0,
    proportional: bool = False,
    covariance: str = "full",
    layers: int = 1,
    components: int = 1,
    mix: bool = True,
    held_out: float = 0.0,
) -> Finisher:
    """Retrains the classifier on features drawn from class Gaussians.

    M_c features from N(μ_c, Σ_c) for every class, then SGD on the classifier only, starting from the trained one. The
    defaults are those of Table 8 for CIFAR-10 with α = 0.1 and 0.05.

    Departs from the paper: it applies ReLU and Tukey's transformation (λ 0.5) and does not say whether before or after
    measuring the statistics; ours are off by default (``relu=true, tukey=0.5`` turns them on), follow the statistics,
    and also apply to real features at inference.

    Parameters
    ----------
    per_class
        M_c, the number of virtual features per class.
    epochs, lr, batch, momentum, weight_decay
        Of SGD.
    relu
        Applies ReLU to the features.
    tukey
        Tukey's power λ: 1 changes nothing, 0 is the logarithm. Needs relu.
    proportional
        M_c ∝ N_c, with ``per_class`` features on average.
    covariance
        How much of Σ_c the clients send: full, diagonal, shared, "low-rank(32)".
    layers
        Beyond the paper: the number of linear layers to retrain.
    components
        Beyond the paper: Gaussians per class, found by k-means over the federation.
    mix
        Beyond the paper: mixes the pooled covariance into that of a class with N_c ≤ d examples, with the weight
        1 − (N_c − 1)/d. With false, features come from N(μ_c, Σ_c) exactly as in eq. 4.
    held_out
        Beyond the paper, against overfitting: the share of the virtual features that is not used for training; the
        epoch with the lowest loss on them is kept. 0: the last epoch.

    Reference: Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data",
    NeurIPS 2021, Algorithm 1.
    """
    form = parse_form(covariance)
    check_positive("ccvr", per_class=per_class, layers=layers, components=components)
    local = training_settings("ccvr", epochs, batch, lr, momentum, weight_decay)
    if not 0 <= tukey <= 1 or (tukey < 1 and not relu):
        raise ValueError(f"ccvr(tukey={tukey}): give a power from 0 (the logarithm) to 1; below 1 it needs relu=true")
    if not 0 <= held_out <= 0.5:
        raise ValueError(f"ccvr(held_out={held_out}): give a share of the virtual features from 0 to 0.5")
    transformation = Transformation(relu, tukey)

    def make(head: nn.Module, statistics: ClassStatistics, key: Key) -> Made:
        features, labels, reports = draw_virtual_features(
            statistics, per_class, key, proportional=proportional, components=components, mix=mix
        )
        absent = sorted(set(range(last_linear(head).out_features)) - set(labels.tolist()))
        trained = retrain(head, transformation(features), labels, local, key, absent, held_out)
        return Made(*trained, reports, transformation)

    return Finisher(make, StatisticsRequest(form, layers, components=components), virtual=per_class, bends=relu)


@finisher
def uscc(
    per_class: int = 400,
    epochs: int = 20,
    lr: float = 0.01,
    batch: int = 64,
    covariance: str = "full",
    mix: bool = True,
    held_out: float = 0.0,
) -> Finisher:
    """Retrains like ccvr, with FedECCR's settings: its second stage.

    The same number of virtual features per class, no transformation. Momentum and weight decay, on which the paper is
    silent, are ccvr's.

    Parameters
    ----------
    per_class, epochs, lr, batch, covariance, mix, held_out
        As in ccvr.

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023, sections 3.3 and 4.1, Algorithm 2.
    """
    return ccvr(per_class, epochs, lr, batch, covariance=covariance, mix=mix, held_out=held_out)
