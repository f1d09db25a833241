"""The oracle: the classifier retrained on real features, for study."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unskew.calibration.ccvr import mean_loss, retrain, training_settings
from unskew.calibration.classifier import copy_head, last_linear, require_finite
from unskew.calibration.covariances import ClassReport
from unskew.calibration.finisher import Finisher, Made, RealFeatures, finisher
from unskew.core.key import Key
from unskew.core.language import check_positive
from unskew.core.tensors import one_thread

TOLERANCE = 1e-8  # of f above its minimum, in nats
MAX_STEPS = 100
MAX_PRODUCTS = 500  # Hessian-vector products per step
HALVINGS = 40  # of a step that does not decrease f


def minimise(
    head: nn.Linear, features: Tensor, labels: Tensor, penalty: float, frozen: Sequence[int] = ()
) -> tuple[nn.Linear, float, int]:
    """Minimise f = mean cross-entropy + penalty/2·‖W‖² by Newton's method; rows of ``frozen`` classes do not change.

    Returns the classifier, an upper bound on the gap of f to its minimum, and the number of steps.
    Newton-CG with line search. On a trial problem scipy.optimize stopped with a gap of 1e-7, this one with 1e-11.

    Reference: Nocedal, Wright, "Numerical Optimization", 2006, Algorithm 7.1.
    """
    linear = copy_head(head)
    assert isinstance(linear, nn.Linear)
    free = torch.tensor([label for label in range(linear.out_features) if label not in set(frozen)])
    values = features.detach().cpu().double()
    require_finite(values)
    bordered = torch.cat([values, values.new_ones(len(values), 1)], 1)  # [n, D], the last column is for the bias
    constant = values.new_full((len(values),), float("-inf"))  # [n], log Σ exp of the frozen classes' logits
    if len(frozen):
        rows = torch.cat([linear.weight, linear.bias[:, None]], 1).detach().cpu().double()[list(frozen)]
        constant = torch.logsumexp(bordered @ rows.t(), 1)
    target = torch.searchsorted(free, labels.cpu().long())
    with one_thread():
        weights, gap, steps = _newton(bordered, target, constant, penalty, len(free))
    with torch.no_grad():
        linear.weight[free.to(linear.weight.device)] = weights[:, :-1].to(linear.weight)
        linear.bias[free.to(linear.bias.device)] = weights[:, -1].to(linear.bias)
    return linear, gap, steps


def _newton(
    features: Tensor, target: Tensor, constant: Tensor, penalty: float, classes: int
) -> tuple[Tensor, float, int]:
    """The weights [K, D] of the K classes that are not frozen, an upper bound on the gap, and the number of steps.

    ``target`` [n] is each label's index among the K classes.
    """
    rounded = features.float()  # for the curvature: the gradient must be exact, a step need not

    def value(weights: Tensor) -> tuple[float, Tensor]:
        """f, and the probabilities [n, K]."""
        logits = features @ weights.t()
        total = torch.logaddexp(torch.logsumexp(logits, 1), constant)
        loss = (total - logits.gather(1, target[:, None])[:, 0]).mean()
        return float(loss + penalty / 2 * weights.square().sum()), (logits - total[:, None]).exp()

    def curvature(probabilities: Tensor, direction: Tensor) -> Tensor:
        """The Hessian times a direction [K, D]."""
        change = (rounded @ direction.float().t()).mul_(probabilities)  # [n, K]
        change = change.addcmul_(probabilities, change.sum(1, keepdim=True), value=-1)
        product: Tensor = (change.t() @ rounded).double() / len(probabilities) + penalty * direction
        return product

    def precondition(inverse: Tensor, residual: Tensor) -> Tensor:
        scaled: Tensor = (residual @ eigenvectors * inverse) @ eigenvectors.t()
        return scaled

    eigenvalues, eigenvectors = torch.linalg.eigh(features.t() @ features / len(features))
    weights = features.new_zeros(classes, features.shape[1])
    loss, probabilities = value(weights)
    for step in range(MAX_STEPS + 1):
        error = probabilities.clone()
        error[torch.arange(len(error)), target] -= 1
        gradient = error.t() @ features / len(error) + penalty * weights
        gap = float(gradient.square().sum()) / (2 * penalty)
        if gap <= TOLERANCE or step == MAX_STEPS:
            break
        mean_curvature = float((probabilities * (1 - probabilities)).mean())
        inverse = 1 / (mean_curvature * eigenvalues.clamp(min=0) + penalty)
        multiply = partial(curvature, probabilities.float())
        direction = _conjugate_gradients(multiply, -gradient, partial(precondition, inverse))
        slope = float((gradient * direction).sum())
        for rate in (0.5**halving for halving in range(HALVINGS)):
            new_loss, new_probabilities = value(weights + rate * direction)
            if new_loss <= loss + 1e-4 * rate * slope:
                break
        else:
            break  # f cannot decrease further in float64
        weights, loss, probabilities = weights + rate * direction, new_loss, new_probabilities
    return weights, gap, step


def _conjugate_gradients(
    curvature: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor]
) -> Tensor:
    """Solve H·x = right with a preconditioner, more accurately closer to the minimum."""
    solution, residual = torch.zeros_like(right), right
    tolerance = min(0.1, float(right.norm()) ** 0.5) * float(right.norm())
    preconditioned = precondition(residual)
    direction, product = preconditioned, float((residual * preconditioned).sum())
    for _ in range(MAX_PRODUCTS):
        curved = curvature(direction)
        if not 0 < (along := float((direction * curved).sum())) < float("inf"):
            break  # too flat for float32
        step = product / along
        solution, residual = solution + step * direction, residual - step * curved
        if float(residual.norm()) <= tolerance:
            break
        preconditioned = precondition(residual)
        before, product = product, float((residual * preconditioned).sum())
        direction = preconditioned + product / before * direction
    return solution


@finisher
def oracle(
    per_class: str | int = "all",
    epochs: int | None = None,
    lr: float | None = None,
    batch: int | None = None,
    momentum: float | None = None,
    weight_decay: float = 1e-5,
    layers: int = 1,
    paper: bool = False,
) -> Finisher:
    """Retrains the classifier on real features: a bound for study.

    The last layer is set to the minimum of mean cross-entropy + ``weight_decay``/2·‖W‖², which is convex. It bounds the
    training loss of a linear classifier on these features; on test images another may still be better. A knob of SGD
    (``epochs``, ``lr``, ``batch``, ``momentum``) selects SGD on the same objective, and so do several ``layers``, for
    which it is not convex.

    Parameters
    ----------
    per_class
        The number of features per class; by default ``all`` of the clients'.
    epochs, lr, batch, momentum
        Of SGD; by default 50, 0.001, 64 and 0.9.
    weight_decay
        The weight of the penalty.
    layers
        The number of linear layers to retrain.
    paper
        Uses the paper's SGD.

    Reference: Luo et al., NeurIPS 2021, Table 5.
    """
    count = 0 if per_class == "all" else per_class
    if type(count) is not int or (count < 1 and per_class != "all"):
        raise ValueError(f"oracle(per_class={per_class}): give all, or the number of features per class")
    check_positive("oracle", layers=layers)
    sgd: dict[str, Any] = {"epochs": epochs, "batch": batch, "lr": lr, "momentum": momentum}
    given = {knob: value for knob, value in sgd.items() if value is not None}
    defaults = {"epochs": 50, "batch": 64, "lr": 0.001, "momentum": 0.9}
    local = training_settings("oracle", **defaults | given, weight_decay=weight_decay)
    stepwise = paper or bool(given)
    if weight_decay == 0 and not stepwise and layers == 1:
        raise ValueError("oracle(weight_decay=0): there may be no minimum; give a number above 0, or paper=true")

    def make(head: nn.Module, features: Tensor, labels: Tensor, key: Key) -> Made:
        counts = torch.bincount(labels.cpu(), minlength=last_linear(head).out_features).tolist()
        absent = [label for label, count in enumerate(counts) if not count]
        reports = tuple(ClassReport(label, count) for label, count in enumerate(counts) if count)
        if stepwise or not isinstance(head, nn.Linear):
            return Made(*retrain(head, features, labels, local, key, absent), reports)
        linear, gap, steps = minimise(head, features, labels, weight_decay, absent)
        before, after = (mean_loss(layer, features, labels) for layer in (head, linear))
        least = f"the smallest training loss with penalty {weight_decay:g}"
        note = f"at most {gap:.1g} above {least}, in {steps} steps"
        if gap > TOLERANCE:
            note = f"not converged: {note}; a larger weight_decay converges sooner"
        return Made(linear, before, after, reports, notes=(note,))

    return Finisher(make, RealFeatures(layers, count), bound=True)
