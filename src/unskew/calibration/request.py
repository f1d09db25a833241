"""What clients are asked to measure: from which layer on, how much of a covariance, what they keep to themselves."""

import json
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from unskew.calibration.covariances import Full, parse_form
from unskew.calibration.forms import Form
from unskew.calibration.heads import device_of
from unskew.calibration.transformations import Lift, shortened
from unskew.models.cut import cut
from unskew.models.layers import Network


@dataclass(frozen=True)
class StatisticsRequest:
    """A question to every client; a job's name carries it as JSON."""

    form: Form = field(default_factory=Full)  # how much of each covariance
    layers: int = 1  # linear layers behind the features
    expand: int = 0  # random features beside them
    components: int = 1  # Gaussians a class; above 1, centres are sent along
    min_count: int = 0  # a class with fewer examples on a client is left out
    clip: float = 0.0  # the longest feature; 0: no limit

    def to_text(self) -> str:
        """What ``from_text`` takes."""
        return json.dumps(asdict(self) | {"form": str(self.form)})

    @staticmethod
    def from_text(source: str) -> "StatisticsRequest":
        """What ``to_text`` gave."""
        values = json.loads(source)
        return StatisticsRequest(**values | {"form": parse_form(values["form"])})

    def encoder(self, network: Network, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
        """Images to the features asked for, and how many these are."""
        first, _ = cut(network, self.layers)
        parts = [first]
        width = width_of(first, shape)
        if self.expand:
            parts.append(Lift.of(width, self.expand).to(device_of(first)))
            width += self.expand
        if self.clip:
            parts.append(_Clip(self.clip))
        return nn.Sequential(*parts), width


def width_of(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """How many features the encoder gives for images of this shape."""
    part = next(encoder.parameters(), torch.zeros(0))
    training = encoder.training
    with torch.no_grad():
        features: Tensor = encoder.eval()(torch.zeros(1, *shape, dtype=part.dtype, device=device_of(encoder)))
    encoder.train(training)
    return features.shape[1]


class _Clip(nn.Module):
    """Features on the CPU, no longer than the radius: lengths are float64, which not every device has."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, features: Tensor) -> Tensor:
        return shortened(features.cpu(), self.radius)
