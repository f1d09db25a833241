"""The oracle: the classifier re-trained on real features, for study."""

import torch
from torch import Tensor, nn

from unskew.calibration.finisher import Finisher, Made, RealFeatures, finisher
from unskew.calibration.gaussians import ClassReport
from unskew.calibration.heads import last_linear
from unskew.calibration.knobs import check_positive, descent_of
from unskew.calibration.logistic import TOLERANCE, Minimum, minimum
from unskew.calibration.retraining import mean_loss, retrained
from unskew.core.key import Key

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
            return Made(*retrained(head, features, labels, descent, key, absent), reports, notes=notes)
        found = minimum(head, features, labels, weight_decay, absent)
        before, after = (mean_loss(each, features, labels) for each in (head, found.linear))
        return Made(found.linear, before, after, reports, notes=(_said(found, weight_decay),))

    return Finisher(make, RealFeatures(layers, count), bound=True)


def _said(found: Minimum, penalty: float) -> str:
    """How near the minimum is, in words."""
    if found.reached:
        return f"at most {found.gap:.1g} above the least training loss with penalty {penalty:g}, in {found.steps} steps"
    return (
        f"not converged: up to {found.gap:.1g} above the least training loss after {found.steps} steps, where "
        f"{TOLERANCE:g} is wanted; a larger weight_decay converges sooner"
    )
