"""A classifier trained again on features of every class: virtual ones, or real ones where nobody minds.

Shapes: n features of d dimensions, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.calibration.head import copy_of
from unskew.key import Key
from unskew.tensors import one_thread


@dataclass(frozen=True)
class Descent:
    """How the classifier is trained: SGD with momentum; the CCVR paper's Table 8."""

    epochs: int = 10
    batch: int = 64
    lr: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 1e-5


def retrained(
    classifier: nn.Linear, features: Tensor, labels: Tensor, descent: Descent, key: Key, frozen: Sequence[int] = ()
) -> tuple[nn.Linear, float, float]:
    """A copy trained on these features with cross-entropy, and the mean loss before and after.

    The rows of ``frozen`` classes stay as they are, to the last bit.
    """
    linear = copy_of(classifier)
    features = features.to(linear.weight.dtype)
    before = _loss(linear, features, labels)
    values = [linear.weight, linear.bias]
    kept = [value.detach()[list(frozen)].clone() for value in values]
    velocity = [torch.empty_like(value) for value in values]
    first = True
    with one_thread():  # steps of 64 features: a second thread would only wait
        for epoch in range(descent.epochs):
            order = torch.randperm(len(labels), generator=key.fold("epoch", epoch).torch())
            for rows in torch.split(order, descent.batch):
                loss = F.cross_entropy(linear(features[rows]), labels[rows])
                gradients = torch.autograd.grad(loss, values)
                with torch.no_grad():
                    torch._fused_sgd_(
                        values, [gradient.contiguous() for gradient in gradients], velocity if descent.momentum else [],
                        weight_decay=descent.weight_decay, momentum=descent.momentum, lr=descent.lr, dampening=0.0,
                        nesterov=False, maximize=False, is_first_step=first,
                    )  # fmt: skip
                    if frozen:
                        for value, old in zip(values, kept, strict=True):
                            value[list(frozen)] = old
                first = False
    return linear, before, _loss(linear, features, labels)


def discriminant(classifier: nn.Linear, means: Tensor, within: Tensor, held: Tensor, ridge: float) -> nn.Linear:
    """The linear discriminant of Gaussians with one covariance, all classes equally likely; other rows stay.

    w_c = (Σ + ρ·tr(Σ)/d·I)⁻¹·μ_c, b_c = −½·μ_cᵀw_c.
    """
    width = within.shape[0]
    regular = within + (ridge * within.diagonal().mean()) * torch.eye(width, dtype=torch.float64)
    weight = torch.linalg.solve(regular, means.t()).t()  # [P, d]
    linear = copy_of(classifier)
    with torch.no_grad():
        linear.weight[held] = weight.to(linear.weight.dtype)
        linear.bias[held] = (-0.5 * (weight * means).sum(1)).to(linear.bias.dtype)
    return linear


def _loss(linear: nn.Linear, features: Tensor, labels: Tensor) -> float:
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(labels), 4096):
            some = slice(start, start + 4096)
            total += float(F.cross_entropy(linear(features[some]), labels[some], reduction="sum"))
    return total / max(len(labels), 1)
