"""A classifier re-trained on features of every class, or solved for in closed form.

It computes where the classifier is: features and the order of the batches are made on the CPU, then moved there.

Shapes: n features of d dimensions, C classes.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.calibration.classifier import copy_of, device_of, last_linear, with_rows
from unskew.calibration.gaussians import without_negative
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.tensors import one_thread
from unskew.core.text import MAX_COUNT


@dataclass(frozen=True)
class Descent:
    """How a head is trained: SGD with momentum; the CCVR paper's Table 8."""

    epochs: int = 10
    batch: int = 64
    lr: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 1e-5


def retrained(
    head: nn.Module, features: Tensor, labels: Tensor, descent: Descent, key: Key, frozen: Sequence[int] = ()
) -> tuple[nn.Module, float, float]:
    """A copy trained on these features with cross-entropy, and the mean loss before and after.

    The last layer's rows of ``frozen`` classes do not change by a bit.
    """
    head = copy_of(head)
    linear = [part for part in head.modules() if isinstance(part, nn.Linear)]  # norms between them stay as they are
    values: list[Tensor] = [value for part in linear for value in part.parameters(recurse=False)]
    device = device_of(head)
    features, labels = features.to(device, values[0].dtype), labels.to(device)
    before = mean_loss(head, features, labels)
    rows = [value for value in (last_linear(head).weight, last_linear(head).bias) if value is not None]
    kept = [value.detach()[list(frozen)].clone() for value in rows]
    velocity = [torch.empty_like(value) for value in values]
    first = True
    with one_thread():  # steps of 64 features: a second thread would only wait
        for epoch in range(descent.epochs):
            order = torch.randperm(len(labels), generator=key.fold("epoch", epoch).torch())
            for some in torch.split(order.to(device), descent.batch):
                loss = F.cross_entropy(head(features[some]), labels[some])
                gradients = torch.autograd.grad(loss, values)
                with torch.no_grad():
                    torch._fused_sgd_(
                        values, [gradient.contiguous() for gradient in gradients], velocity if descent.momentum else [],
                        weight_decay=descent.weight_decay, momentum=descent.momentum, lr=descent.lr, dampening=0.0,
                        nesterov=False, maximize=False, is_first_step=first,
                    )  # fmt: skip
                    if frozen:
                        for value, old in zip(rows, kept, strict=True):
                            value[list(frozen)] = old
                first = False
    after = mean_loss(head, features, labels)
    if not math.isfinite(after):
        raise UserError(f"re-training with lr={descent.lr:g} ended in NaN or infinity; give a smaller lr")
    return head, before, after


def discriminant(
    head: nn.Module | None, means: Tensor, within: Tensor, held: Tensor, ridge: float, classes: int
) -> nn.Linear:
    """The linear discriminant of Gaussians with one covariance, all classes equally likely.

    w_c = (Σ + ρ·tr(Σ)/d·I)⁻¹·μ_c, b_c = −½·μ_cᵀw_c for the classes held. The others keep the rows of a linear head of
    the same width; where there is no such head they are never predicted.
    """
    if not varied(means, within):
        raise UserError("lda has no solution: within their classes the features do not vary; look at the encoder")
    regular = _regular(within, ridge)
    if bool(torch.linalg.cholesky_ex(regular).info):  # not positive definite: no features have these moments
        positive, share = without_negative(within)
        if share:
            words = "lda: negative eigenvalues of the pooled covariance were set to zero"
            warnings.warn(f"{words}, {share:.2g} of it; some client's moments are not those of features", stacklevel=2)
            regular = _regular(positive, ridge)
    solved, failed = torch.linalg.solve_ex(regular, means.t())
    weight = solved.t()  # [P, d]
    if bool(failed) or not bool(weight.isfinite().all()):
        raise UserError(f"lda(ridge={ridge:g}) has no solution; give a larger ridge")
    return with_rows(head, weight, -0.5 * (weight * means).sum(1), held, classes)


def _regular(within: Tensor, ridge: float) -> Tensor:
    return within + (ridge * within.diagonal().mean()) * torch.eye(len(within), dtype=torch.float64)


def varied(means: Tensor, within: Tensor) -> bool:
    """Whether features vary within their classes, beyond what rounding leaves of their squares."""
    return bool(within.diagonal().mean() > 1e-14 * means.square().mean())


def mean_loss(head: nn.Module, features: Tensor, labels: Tensor) -> float:
    """The mean cross-entropy of the head on features of its type, where it computes."""
    weight = last_linear(head).weight
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(labels), 4096):
            some = features[start : start + 4096].to(weight.device, weight.dtype)
            total += float(F.cross_entropy(head(some), labels[start : start + 4096].to(weight.device), reduction="sum"))
    return total / max(len(labels), 1)


def check_positive(name: str, **values: float) -> None:
    """Refuse a value that is not above zero and finite, and a count beyond all that can be counted."""
    for knob, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}({knob}={value}): give a number above 0")
        if isinstance(value, int) and value > MAX_COUNT:
            raise ValueError(f"{name}({knob}=…): give at most {MAX_COUNT:,}")


def descent_of(name: str, epochs: int, batch: int, lr: float, momentum: float, weight_decay: float) -> Descent:
    """How the classifier is trained, if the knobs allow it."""
    check_positive(name, epochs=epochs, batch=batch, lr=lr)
    if not 0 <= momentum < 1:
        raise ValueError(f"{name}(momentum={momentum}): give 0 or more and less than 1")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"{name}(weight_decay={weight_decay}): give 0 or more")
    return Descent(epochs, batch, lr, momentum, weight_decay)
