"""The classifier after calibration: what features pass first, then the new linear layers; and what was done.

Shapes: n features of d dimensions, C classes.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.calibration.gaussians import CLIPPED, ClassReport
from unskew.calibration.heads import blank, copy_of, device_of
from unskew.calibration.transformations import Lift, Transformation, shortened
from unskew.core import tensors
from unskew.core.context import neutral
from unskew.core.errors import UserError
from unskew.core.types import Tensors
from unskew.privacy.ledger import Release


@dataclass(frozen=True)
class Report:
    """What calibration did: how each class's Gaussian was made, which classes kept their row, how long it took."""

    method: str
    classes: tuple[ClassReport, ...]
    kept_rows: tuple[int, ...]
    loss_before: float
    loss_after: float
    seconds: float
    remarks: tuple[str, ...] = ()  # the calibration's own
    release: Release | None = None  # the private release that it was made from

    def notes(self) -> list[str]:
        """The calibration's own remarks, and what had to be done to covariances; empty where there is nothing."""
        notes = list(self.remarks)
        kind = "class" if len({row.label for row in self.classes}) == len(self.classes) else "part of a class"
        every = f"{len(self.classes)} {'classes' if kind == 'class' else 'parts of classes'}"
        if shrunk := [row.shrunk for row in self.classes if 0 < row.shrunk < 1]:
            notes.append(
                f"{len(shrunk)} of {every} with fewer examples than features: the covariance is mixed with the pooled "
                f"one, its weight up to {max(shrunk):.2f}"
            )
        if alone := sum(row.count == 1 and row.shrunk == 1 for row in self.classes):
            notes.append(f"{alone} of {every} with one example: the covariance is the pooled one")
        if (clipped := max((row.clipped for row in self.classes), default=0.0)) > CLIPPED:
            notes.append(f"negative eigenvalues were set to zero, at most {clipped:.2g} of a covariance")
        if (rest := max((row.left_over for row in self.classes), default=0.0)) > 0:
            notes.append(f"low rank leaves at most {rest:.0%} of a class's variance to the diagonal")
        return notes


class CalibratedClassifier(nn.Module):
    """Takes the classifier's place: what features pass first, then the new linear layers.

    It can be scripted, traced and exported, alone or inside a model.
    """

    def __init__(
        self, before: Transformation | Lift, head: nn.Module, report: Report, layers: int = 1, clip: float = 0.0
    ) -> None:
        super().__init__()
        self.before = before
        self.head = head
        self.report = report
        self.layers = layers
        self.clip = float(clip)  # the longest feature when statistics were taken; 0: no limit
        self.lifted = isinstance(before, Lift)

    @neutral()
    def tensors(self) -> Tensors:
        """All its values by name, on the CPU: what ``load_calibrated`` takes."""
        steps = [float(self.layers), 0.0, 1.0, self.clip]
        if isinstance(self.before, Transformation):
            steps[1:3] = [float(self.before.relu), self.before.tukey]
        lift = {"lift": self.before.weight.cpu()} if isinstance(self.before, Lift) else {}
        head = {f"head.{name}": value.detach().cpu() for name, value in self.head.state_dict().items()}
        return {"steps": torch.tensor(steps, dtype=torch.float64), **lift, **head}

    @neutral()
    def linear(self) -> nn.Linear:
        """A plain ``nn.Linear`` with the same values: ``model.fc = calibrated.linear()``.

        Refused where features pass something else first, or more than one layer: keep this module in place then.
        """
        because = ""
        if self.lifted:
            because = "it sees random features beside the network's own (expand)"
        elif isinstance(self.before, Transformation) and (self.before.relu or self.before.tukey != 1):
            because = "features pass a transformation first (relu, tukey)"
        elif self.clip:
            because = f"features are clipped to a length of {self.clip:g} first (private)"
        elif not isinstance(self.head, nn.Linear):
            because = f"it has several layers ({type(self.head).__name__})"
        if because:
            raise UserError(
                f"{self.report.method} is not one linear layer: {because}; use the calibrated module itself"
            )
        layer = copy_of(self.head)
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, C]."""
        if self.lifted:  # statistics are of the lifted features, and those were clipped
            features = shortened(self.before(features), self.clip)
        else:
            features = self.before(shortened(features, self.clip))
        logits: Tensor = self.head(features)
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
    report = Report("this calibration", (), (), float("nan"), float("nan"), 0.0)
    classifier = CalibratedClassifier(before, head, report, int(layers), clip)
    return encoder, classifier.to(device_of(plain)).eval()
