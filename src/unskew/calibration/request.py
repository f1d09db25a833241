"""What clients are asked to measure: from which layer on, how much of a covariance, what stays at home."""

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import Lift
from unskew.models.cut import cut
from unskew.models.layers import Network
from unskew.privacy.noise import clipped


@dataclass(frozen=True)
class StatisticsRequest:
    """A question to every client; a job's name carries it as JSON."""

    form: str
    layers: int = 1  # linear layers behind the features
    expand: int = 0  # random features beside them
    components: int = 1  # parts of a class, told apart by centres that are sent along
    min_count: int = 0  # classes with fewer examples on a client stay at home
    clip: float = 0.0  # the longest feature; 0: as long as they are

    def to_text(self) -> str:
        """What ``from_text`` takes."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(source: str) -> "StatisticsRequest":
        """What ``to_text`` gave."""
        return StatisticsRequest(**json.loads(source))

    def encoder(self, network: Network, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
        """Images to the features asked for, and how many these are."""
        first, _ = cut(network, self.layers)
        parts = [first]
        width = width_of(first, shape)
        if self.expand:
            parts.append(Lift.of(width, self.expand))
            width += self.expand
        if self.clip:
            parts.append(_Clip(self.clip))
        return nn.Sequential(*parts), width


def width_of(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """How many features the encoder gives for images of this shape."""
    part = next(encoder.parameters(), torch.zeros(0))
    training = encoder.training
    with torch.no_grad():
        found: Tensor = encoder.eval()(torch.zeros(1, *shape, dtype=part.dtype))
    encoder.train(training)
    return found.shape[1]


class _Clip(nn.Module):
    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, features: Tensor) -> Tensor:
        return clipped(features, self.radius)
