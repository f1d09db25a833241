"""The oracle: the classifier re-trained on real features, for study."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.calibration.ccvr import check_positive, descent_of, mean_loss, retrain
from unskew.calibration.classifier import copy_head, last_linear
from unskew.calibration.covariances import ClassReport
from unskew.calibration.finisher import Finisher, Made, RealFeatures, finisher
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.tensors import one_thread

TOLERANCE = 1e-8  # how far f may be above its minimum, in nats
MAX_STEPS = 100
MAX_PRODUCTS = 500  # Hessian times vector, of one step
HALVINGS = 40  # of a step that does not lower f


@dataclass(frozen=True, eq=False)
class Minimum:
    """A classifier at the minimum, and how near it is."""

    linear: nn.Linear
    gap: float  # f is at most this far above its minimum, in nats
    steps: int

    @property
    def reached(self) -> bool:
        """Whether the tolerance was reached."""
        return self.gap <= TOLERANCE


@dataclass(frozen=True, eq=False)
class _LogisticLoss:
    """f, its gradient and its curvature."""

    features: Tensor  # [n, D], the last column is 1
    rounded: Tensor  # the same in float32
    place: Tensor  # [n], each label's place among the free classes
    constant: Tensor  # [n], log Σ exp of the other classes' logits; −∞ where there are none
    penalty: float

    def value(self, weights: Tensor) -> tuple[float, Tensor]:
        """f, and the probabilities [n, K] of the free classes."""
        logits = self.features @ weights.t()
        total = torch.logaddexp(torch.logsumexp(logits, 1), self.constant)
        loss = (total - logits.gather(1, self.place[:, None])[:, 0]).mean()
        return float(loss + self.penalty / 2 * weights.square().sum()), (logits - total[:, None]).exp()

    def gradient(self, weights: Tensor, shares: Tensor) -> Tensor:
        """[K, D]."""
        error = shares.clone()
        error[torch.arange(len(error)), self.place] -= 1
        return error.t() @ self.features / len(error) + self.penalty * weights

    def curvature(self, shares: Tensor) -> Callable[[Tensor], Tensor]:
        """The Hessian times a direction [K, D], in float32: a step need not be exact, the gradient is."""
        shares = shares.float()

        def along(direction: Tensor) -> Tensor:
            moved = (self.rounded @ direction.float().t()).mul_(shares)
            bent = moved.addcmul_(shares, moved.sum(1, keepdim=True), value=-1)
            return (bent.t() @ self.rounded).double() / len(shares) + self.penalty * direction

        return along


def minimise(head: nn.Linear, features: Tensor, labels: Tensor, penalty: float, frozen: Sequence[int] = ()) -> Minimum:
    """A copy of the head at the minimum of f on these features; rows of ``frozen`` classes stay as they are."""
    linear = copy_head(head)
    assert isinstance(linear, nn.Linear)
    free = torch.tensor([label for label in range(linear.out_features) if label not in set(frozen)])
    values = features.detach().cpu().double()
    if not bool(values.isfinite().all()):
        raise UserError("features hold NaN or infinity; the encoder or its images are broken")
    bordered = torch.cat([values, values.new_ones(len(values), 1)], 1)
    constant = values.new_full((len(values),), float("-inf"))
    if len(frozen):
        rows = torch.cat([linear.weight, linear.bias[:, None]], 1).detach().cpu().double()[list(frozen)]
        constant = torch.logsumexp(bordered @ rows.t(), 1)
    problem = _LogisticLoss(
        bordered, bordered.float(), torch.searchsorted(free, labels.cpu().long()), constant, penalty
    )
    with one_thread():
        weights, gap, steps = _newton(problem, len(free))
    with torch.no_grad():
        linear.weight[free.to(linear.weight.device)] = weights[:, :-1].to(linear.weight)
        linear.bias[free.to(linear.bias.device)] = weights[:, -1].to(linear.bias)
    return Minimum(linear, gap, steps)


def _newton(problem: _LogisticLoss, classes: int) -> tuple[Tensor, float, int]:
    features = problem.features
    scales, axes = torch.linalg.eigh(features.t() @ features / len(features))
    weights = features.new_zeros(classes, features.shape[1])
    value, shares = problem.value(weights)
    gradient = problem.gradient(weights, shares)
    for step in range(MAX_STEPS + 1):
        gap = float(gradient.square().sum()) / (2 * problem.penalty)
        if gap <= TOLERANCE or step == MAX_STEPS:
            break
        bend = float((shares * (1 - shares)).mean())
        inverse = 1 / (bend * scales.clamp(min=0) + problem.penalty)
        way = _conjugate_gradients(
            problem.curvature(shares),
            -gradient,
            lambda right, inverse=inverse: (right @ axes * inverse) @ axes.t(),  # type: ignore[misc]
        )
        downhill = float((gradient * way).sum())
        for halving in range(HALVINGS):
            share = 0.5**halving
            new_value, new_shares = problem.value(weights + share * way)
            if new_value <= value + 1e-4 * share * downhill:
                break
        else:
            break  # f is as low as float64 can tell
        weights, value, shares = weights + share * way, new_value, new_shares
        gradient = problem.gradient(weights, shares)
    return weights, gap, step


def _conjugate_gradients(
    curvature: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor]
) -> Tensor:
    """H⁻¹·right by preconditioned conjugate gradients, more exactly the nearer the minimum is."""
    found, residual = torch.zeros_like(right), right
    enough = min(0.1, float(right.norm()) ** 0.5) * float(right.norm())
    turned = precondition(residual)
    along, product = turned, float((residual * turned).sum())
    for _ in range(MAX_PRODUCTS):
        bent = curvature(along)
        if not 0 < (bend := float((along * bent).sum())) < float("inf"):
            break  # flatter than float32 can tell
        step = product / bend
        found, residual = found + step * along, residual - step * bent
        if float(residual.norm()) <= enough:
            break
        turned = precondition(residual)
        before, product = product, float((residual * turned).sum())
        along = turned + product / before * along
    return found


SEVERAL = (
    "several layers are not a convex problem: trained by the paper's SGD, and another rate or more epochs may do better"
)


@finisher
def oracle(
    per_class: str | int = "all", epochs: int | None = None, lr: float | None = None, batch: int | None = None,
    momentum: float | None = None, weight_decay: float = 1e-5, layers: int = 1, paper: bool = False,
) -> Finisher:  # fmt: skip
    """Re-trains the classifier on real features: a bound for study.

    On all features of the clients, or on ``per_class`` of each class.

    The last layer goes to the minimum of mean cross-entropy + ``weight_decay``/2·‖W‖², which is convex. It bounds the
    training loss of a linear classifier of these features; on test images another may still be better. With
    ``paper`` it is the paper's SGD on the same objective instead: 50 epochs, rate 0.001, batch 64, momentum 0.9. A knob
    of SGD (``epochs``, ``lr``, ``batch``, ``momentum``) chooses SGD too, and so do several ``layers``, which are not
    convex.

    Reference: Luo et al., NeurIPS 2021, Table 5.
    """
    count = 0 if per_class == "all" else per_class
    if type(count) is not int or (count < 1 and per_class != "all"):
        raise ValueError(f"oracle(per_class={per_class}): give all, or how many features of each class")
    check_positive("oracle", layers=layers)
    stepwise = paper or any(knob is not None for knob in (epochs, lr, batch, momentum))
    descent = descent_of(
        "oracle", 50 if epochs is None else epochs, 64 if batch is None else batch, 0.001 if lr is None else lr,
        0.9 if momentum is None else momentum, weight_decay,
    )  # fmt: skip
    if weight_decay == 0 and not stepwise and layers == 1:
        raise ValueError(
            "oracle(weight_decay=0): without a penalty there may be no minimum; give a number above 0, or paper=true"
        )

    def make(head: nn.Module, features: Tensor, labels: Tensor, key: Key) -> Made:
        counts = torch.bincount(labels.cpu(), minlength=last_linear(head).out_features).tolist()
        absent = [label for label, count in enumerate(counts) if not count]
        reports = tuple(ClassReport(label, count) for label, count in enumerate(counts) if count)
        if stepwise or not isinstance(head, nn.Linear):
            notes = () if stepwise else (SEVERAL,)
            return Made(*retrain(head, features, labels, descent, key, absent), reports, notes=notes)
        found = minimise(head, features, labels, weight_decay, absent)
        before, after = (mean_loss(each, features, labels) for each in (head, found.linear))
        return Made(found.linear, before, after, reports, notes=(_describe(found, weight_decay),))

    return Finisher(make, RealFeatures(layers, count), bound=True)


def _describe(found: Minimum, penalty: float) -> str:
    """How near the minimum is, in words."""
    if found.reached:
        return f"at most {found.gap:.1g} above the least training loss with penalty {penalty:g}, in {found.steps} steps"
    return (
        f"not converged: up to {found.gap:.1g} above the least training loss after {found.steps} steps, where "
        f"{TOLERANCE:g} is wanted; a larger weight_decay converges sooner"
    )
