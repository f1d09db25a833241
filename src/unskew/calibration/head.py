"""The classifier after calibration: a linear layer behind the transformation its features were given in re-training."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.calibration.gaussians import ClassReport
from unskew.types import Tensors


@dataclass(frozen=True)
class Transformation:
    """ReLU, then Tukey's power: x^λ for λ above 0, log x for 0. Features become more alike to Gaussian ones."""

    relu: bool = False
    tukey: float = 1.0

    def __call__(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        found = features.clamp(min=0) if self.relu else features
        if self.tukey == 1:
            return found
        return found.clamp(min=1e-12).log() if self.tukey == 0 else found.pow(self.tukey)


@dataclass(frozen=True)
class Report:
    """What calibration did: how each class's Gaussian was made, which classes kept their row, how long it took."""

    method: str
    classes: tuple[ClassReport, ...]
    kept_rows: tuple[int, ...]
    loss_before: float
    loss_after: float
    seconds: float


class CalibratedClassifier(nn.Module):
    """To be put in the classifier's place: transformation, then the re-trained linear layer."""

    def __init__(self, linear: nn.Linear, transformation: Transformation, report: Report) -> None:
        super().__init__()
        self.linear = linear
        self.transformation = transformation
        self.report = report

    def tensors(self) -> Tensors:
        """What ``calibrated`` takes."""
        steps = torch.tensor([float(self.transformation.relu), self.transformation.tukey], dtype=torch.float64)
        return {
            "calibrated/weight": self.linear.weight.detach(),
            "calibrated/bias": self.linear.bias.detach(),
            "calibrated/transformation": steps,
        }

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, C]."""
        logits: Tensor = self.linear(self.transformation(features))
        return logits


def calibrated(shared: Tensors) -> Callable[[Tensor], Tensor]:
    """The calibrated classifier that was sent, as a function of features."""
    relu, tukey = shared["calibrated/transformation"].tolist()
    transformation = Transformation(bool(relu), tukey)
    return lambda features: F.linear(transformation(features), shared["calibrated/weight"], shared["calibrated/bias"])


def copy_of(classifier: nn.Linear) -> nn.Linear:
    """The same layer in memory of its own, with a bias where it had none."""
    made = nn.Linear(classifier.in_features, classifier.out_features, dtype=classifier.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(classifier.weight)
        if classifier.bias is None:
            made.bias.zero_()
        else:
            made.bias.copy_(classifier.bias)
    return made
