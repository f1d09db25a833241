"""The classifier after calibration: what features pass before it, and the linear layers made anew.

Shapes: n features of d dimensions, m random ones beside them, C classes.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from unskew.calibration.gaussians import ClassReport
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Tensors

NEVER = -1e9  # the logit of a class that a classifier made from nothing knows nothing of: below all others


class Transformation(nn.Module):
    """ReLU, then Tukey's power: x^λ for λ above 0, log x for 0. Features become more alike to Gaussian ones."""

    def __init__(self, relu: bool = False, tukey: float = 1.0) -> None:
        super().__init__()
        self.relu = relu
        self.tukey = tukey

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        found = features.clamp(min=0) if self.relu else features
        if self.tukey == 1:
            return found
        return found.clamp(min=1e-12).log() if self.tukey == 0 else found.pow(self.tukey)


class Lift(nn.Module):
    """ReLU of m random sums of the features, and of the features: [ReLU(z·W), ReLU(z)].

    A linear classifier behind it bends where the random sums change sign. W is the same for everybody who gives the
    same d and m, and no scale has to be known: ReLU keeps that of the features.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    @staticmethod
    def of(width: int, expand: int) -> "Lift":
        """The one that everybody has for so many features."""
        return Lift(_random_sums(width, expand).clone())

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, m + d]."""
        return torch.cat([features @ self.get_buffer("weight").to(features.dtype), features], dim=1).relu()


@dataclass(frozen=True)
class Report:
    """What calibration did: how each class's Gaussian was made, which classes kept their row, how long it took."""

    method: str
    classes: tuple[ClassReport, ...]
    kept_rows: tuple[int, ...]
    loss_before: float
    loss_after: float
    seconds: float

    def notes(self) -> list[str]:
        """What had to be done to covariances, in words; empty where they were used as they are."""
        found = []
        kind = "class" if len({row.label for row in self.classes}) == len(self.classes) else "part of a class"
        every = f"{len(self.classes)} {'classes' if kind == 'class' else 'parts of classes'}"
        if shrunk := [row.shrunk for row in self.classes if 0 < row.shrunk < 1]:
            found.append(
                f"{len(shrunk)} of {every} with fewer examples than features: the covariance is mixed with the pooled "
                f"one, its weight up to {max(shrunk):.2f}"
            )
        if alone := sum(row.count == 1 and row.shrunk == 1 for row in self.classes):
            found.append(f"{alone} of {every} with one example: the covariance is the pooled one")
        if (clipped := max((row.clipped for row in self.classes), default=0.0)) > 1e-6:
            found.append(f"negative eigenvalues were set to zero, at most {clipped:.2g} of a covariance")
        if (rest := max((row.left_over for row in self.classes), default=0.0)) > 0:
            found.append(f"low rank leaves at most {rest:.0%} of a class's variance to the diagonal")
        return found


class CalibratedClassifier(nn.Module):
    """To be put in the classifier's place: what features pass first, then the linear layers made anew."""

    def __init__(
        self, before: Transformation | Lift, head: nn.Module, report: Report, layers: int = 1, clip: float = 0.0
    ) -> None:
        super().__init__()
        self.before = before
        self.head = head
        self.report = report
        self.layers = layers
        self.clip = clip  # the length that features were cut to when statistics were taken; 0: none

    def tensors(self) -> Tensors:
        """All that it is, by name: what ``load_calibrated`` takes."""
        steps = [float(self.layers), 0.0, 1.0, self.clip]
        if isinstance(self.before, Transformation):
            steps[1:3] = [float(self.before.relu), self.before.tukey]
        lift = {"lift": self.before.get_buffer("weight")} if isinstance(self.before, Lift) else {}
        head = {f"head.{name}": value.detach() for name, value in self.head.state_dict().items()}
        return {"steps": torch.tensor(steps, dtype=torch.float64), **lift, **head}

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, C]."""
        if isinstance(self.before, Lift):  # statistics are of what it gives, and that is what was cut
            found = shortened(self.before(features), self.clip)
        else:
            found = self.before(shortened(features, self.clip))
        logits: Tensor = self.head(found)
        return logits


def load_calibrated(values: Tensors, cut: Callable[[int], tuple[nn.Module, nn.Module]]) -> tuple[nn.Module, nn.Module]:
    """Encoder and calibrated classifier, from ``CalibratedClassifier.tensors`` and the network that may be cut."""
    layers, relu, tukey, clip = values["steps"].tolist()
    encoder, plain = cut(int(layers))
    before = Lift(values["lift"]) if "lift" in values else Transformation(bool(relu), tukey)
    state = tensors.under(values, "head.")
    if set(state) == {"weight", "bias"}:
        head: nn.Module = blank(state["weight"].shape[1], state["weight"].shape[0], state["weight"].dtype)
    else:
        head = copy.deepcopy(plain)
    head.load_state_dict(state)
    report = Report("", (), (), float("nan"), float("nan"), 0.0)
    return encoder, CalibratedClassifier(before, head, report, int(layers), clip).eval()


def shortened(features: Tensor, clip: float) -> Tensor:
    """[n, d], features longer than ``clip`` (L2) drawn back to it, a rounding error below; 0: as they are."""
    if not clip:
        return features
    length = features.double().norm(dim=1, keepdim=True)  # [n, 1]
    below = clip * (1 - 4 * torch.finfo(features.dtype).eps)
    return torch.where(length > clip, (features.double() * (below / length)).to(features.dtype), features)


def copy_of(head: nn.Module) -> nn.Module:
    """The same layers in memory of their own, in eval mode, to be trained even where the given ones are frozen.

    A single linear layer gets a bias where it had none.
    """
    if not isinstance(head, nn.Linear):
        return copy.deepcopy(head).eval().requires_grad_()
    made = blank(head.in_features, head.out_features, head.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(head.weight)
        if head.bias is None:
            made.bias.zero_()
        else:
            made.bias.copy_(head.bias)
    return made


def last_linear(head: nn.Module) -> nn.Linear:
    """The layer whose rows belong to the classes."""
    found = [part for part in head.modules() if isinstance(part, nn.Linear)]
    if not found:
        raise UserError(f"a classifier must end in an nn.Linear; this is a {type(head).__name__} without one")
    return found[-1]


def blank(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    """A layer that draws no weights: they are about to be overwritten."""
    return nn.Linear(inputs, outputs, dtype=dtype, device="meta").to_empty(device="cpu")


@lru_cache(maxsize=2)
def _random_sums(width: int, expand: int) -> Tensor:
    """[d, m] of standard deviation 1/√d: a random sum is about as large as one feature."""
    generator = Key(0).fold("lift", width).torch()
    return torch.randn(width, expand, generator=generator).div_(math.sqrt(width))
