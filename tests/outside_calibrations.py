"""Calibrations that live outside the package: two that work, and some that do what they should not."""

import copy

import torch
from torch import nn

from unskew.calibration.covariances import Diagonal
from unskew.calibration.finisher import Finisher, RealFeatures, StatisticsRequest, finisher


def filled(head, statistics, weight=1.0):
    """The head with each class's row at its mean: w_c = μ_c, b_c = −½·‖μ_c‖²."""
    linear, means = copy.deepcopy(head), statistics.means().to(head.weight)
    with torch.no_grad():
        linear.weight[statistics.held] = weight * means
        linear.bias[statistics.held] = -0.5 * weight * means.square().sum(1)
    return linear


@finisher
def shrink(weight: float = 0.5) -> Finisher:
    """Mixes the classifier with that of the nearest class mean: w_c ← (1 − ρ)·w_c + ρ·μ_c."""

    def make(head, statistics, key):
        linear, mean = copy.deepcopy(head), filled(head, statistics)
        with torch.no_grad():
            linear.weight.lerp_(mean.weight, weight)
            linear.bias.lerp_(mean.bias, weight)
        return linear

    return Finisher(make, StatisticsRequest(Diagonal()))


class Cosine(nn.Module):
    """A class that only this file has: cosines with the class means, sharpened."""

    def __init__(self, means):
        super().__init__()
        self.means = nn.Parameter(means)
        self.sharpness = 8.0

    def forward(self, features):
        return self.sharpness * nn.functional.normalize(features) @ nn.functional.normalize(self.means).t()


class Branching(nn.Module):
    """Its forward depends on values, which no graph can show."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, features):
        return self.head(features) if features.sum() > 0 else -self.head(features)


@finisher
def cosine() -> Finisher:
    """Answers with the class whose mean has the smallest angle to the feature."""

    def make(head, statistics, key):
        means = torch.zeros_like(head.weight)
        means[statistics.held] = statistics.means().to(means)
        return nn.Sequential(nn.LayerNorm(head.in_features), nn.GELU(), Cosine(means))

    return Finisher(make, StatisticsRequest(Diagonal()))


@finisher
def peek() -> Finisher:
    """Sees real features: a bound for study, which answers with the class whose real mean is nearest."""

    def make(head, features, labels, key):
        linear = copy.deepcopy(head)
        means = torch.stack([features[labels == label].mean(0) for label in range(head.out_features)])
        with torch.no_grad():
            linear.weight.copy_(means)
            linear.bias.copy_(-0.5 * means.square().sum(1))
        return linear

    return Finisher(make, RealFeatures(), bound=True)


def nameless() -> Finisher:
    """Without the decorator."""
    return Finisher(filled)


@finisher
def wrong(kind: str = "raises") -> Finisher:
    """Does what it should not."""
    heads = {
        "bare": lambda head: nn.Linear(head.in_features, head.out_features, bias=False),
        "narrow": lambda head: nn.Linear(3, head.out_features),
        "flat": lambda head: nn.Sequential(head, nn.Flatten(0)),
        "branching": lambda head: Branching(head),
        "number": lambda head: 7,
        "nan": lambda head: nn.Linear(head.in_features, head.out_features).apply(
            lambda part: nn.init.constant_(part.weight, float("nan"))
        ),
        "raises": lambda head: head.no_such_thing,
    }
    return Finisher(lambda head, statistics, key: heads[kind](head))


@finisher
def number() -> Finisher:
    """Gives no Finisher."""
    return 7


def method():
    """A method, not a calibration."""
    return lambda algorithm: algorithm
