"""The oracle: the classifier re-trained on real features, a bound for study."""

import torch
from torch import Tensor, nn

from unskew.calibration.finisher import Finisher, Made, RealFeatures, finisher
from unskew.calibration.gaussians import ClassReport
from unskew.calibration.heads import last_linear
from unskew.calibration.knobs import check_positive, descent_of
from unskew.calibration.retraining import retrained
from unskew.core.key import Key


@finisher
def oracle(
    per_class: str | int = "all", epochs: int = 50, lr: float = 0.001, batch: int = 64, momentum: float = 0.9,
    weight_decay: float = 1e-5, layers: int = 1,
) -> Finisher:  # fmt: skip
    """Re-trains the classifier on real features: a bound for study.

    On all features of the clients, or on ``per_class`` of each class.

    What calibration could reach at most with these features, if they could be pooled.

    Reference: Luo et al., NeurIPS 2021, Table 5.
    """
    count = 0 if per_class == "all" else per_class
    if type(count) is not int or (count < 1 and per_class != "all"):
        raise ValueError(f"oracle(per_class={per_class}): give all, or how many features of each class")
    check_positive("oracle", layers=layers)
    descent = descent_of("oracle", epochs, batch, lr, momentum, weight_decay)

    def make(head: nn.Module, features: Tensor, labels: Tensor, key: Key) -> Made:
        counts = torch.bincount(labels.cpu(), minlength=last_linear(head).out_features).tolist()
        absent = [label for label, count in enumerate(counts) if not count]
        reports = tuple(ClassReport(label, count) for label, count in enumerate(counts) if count)
        return Made(*retrained(head, features, labels, descent, key, absent), reports)

    return Finisher(make, RealFeatures(layers, count), bound=True)
