"""What features pass before the classifier: ReLU and Tukey's power, random features, a limit on their length.

Everything here is also TorchScript, so that a model with a calibrated classifier can be scripted and exported.

Shapes: n features of d dimensions, m random ones beside them.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from unskew.core.context import neutral
from unskew.core.errors import whole_number
from unskew.core.key import Key

MOST = 2**24  # features, random ones too


class Transformation(nn.Module):
    """ReLU, then Tukey's power: x^λ for λ above 0, log x for 0. The features become more Gaussian."""

    def __init__(self, relu: bool = False, tukey: float = 1.0) -> None:
        super().__init__()
        self.relu = relu
        self.tukey = float(tukey)

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        if self.relu:
            features = features.clamp(min=0)
        if self.tukey == 0.0:
            features = features.clamp(min=1e-12).log()
        elif self.tukey != 1.0:
            features = features.pow(self.tukey)
        return features


class Lift(nn.Module):
    """ReLU of m random sums of the features, and of the features: [ReLU(z·W), ReLU(z)].

    A linear classifier behind it bends where the random sums change sign. W depends on d and m alone, so every client
    has the same one. No scale has to be known: ReLU keeps that of the features.
    """

    weight: Tensor  # [d, m]

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    @staticmethod
    @neutral()
    def of(width: int, expand: int) -> "Lift":
        """The lift from ``width`` features to ``expand`` random ones beside them."""
        width, expand = whole_number(width, "width", 1, MOST), whole_number(expand, "expand", 0, MOST)
        return Lift(_random_sums(width, expand).clone())

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, m + d]."""
        return torch.cat([features @ self.weight.to(features.dtype), features], dim=1).relu()


def shortened(features: Tensor, clip: float) -> Tensor:
    """[n, d], features longer than ``clip`` (L2) scaled down to it, a rounding error below; 0: no limit."""
    if clip == 0.0:
        return features
    length = torch.linalg.vector_norm(features.double(), 2, dim=[1], keepdim=True)  # [n, 1]
    below = clip * (1 - 4 * _rounding(features))
    return torch.where(length > clip, (features.double() * (below / length)).to(features.dtype), features)


def _rounding(features: Tensor) -> float:
    """``torch.finfo(…).eps``, which TorchScript does not have."""
    if features.dtype == torch.float64:
        return 2.0**-52
    if features.dtype == torch.float32:
        return 2.0**-23
    return 2.0**-10 if features.dtype == torch.float16 else 2.0**-7


@lru_cache(maxsize=2)
def _random_sums(width: int, expand: int) -> Tensor:
    """[d, m] of standard deviation 1/√d: a random sum is about as large as one feature."""
    generator = Key(0).fold("lift", width).torch()
    return torch.randn(width, expand, generator=generator).div_(math.sqrt(width))
