"""Networks that live outside the package, named ``outside_models:function`` in tests."""

import torch
from torch import nn

from unskew.models.layers import Network


def linear(shape, classes) -> Network:
    """Pixels straight into the classifier: small enough to be worked out by hand."""
    channels, height, width = shape
    return Network(nn.Flatten(), nn.Linear(channels * height * width, classes))


def batch_norm(shape, classes) -> Network:
    """One convolution with BatchNorm: a network whose buffers move as it trains."""
    channels, height, width = shape
    encoder = nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    )
    return Network(encoder, nn.Linear(4 * height * width, classes))


def norm_and_dropout(shape, classes) -> Network:
    """Two linear layers behind parts that work otherwise while they are trained."""
    channels, height, width = shape
    convolution = [nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    linear = [nn.Linear(4 * height * width, 16), nn.Dropout(0.5), nn.ReLU()]
    return Network(nn.Sequential(*convolution, *linear), nn.Linear(16, classes))


def norms(shape, classes) -> Network:
    """Every norm that needs no draw."""
    channels, height, width = shape
    encoder = nn.Sequential(
        nn.GroupNorm(1, channels), nn.BatchNorm2d(channels), nn.Flatten(), nn.LayerNorm(channels * height * width)
    )
    return Network(encoder, nn.Linear(channels * height * width, classes))


def embedding(shape, classes) -> Network:
    """Weights that nobody knows how to draw."""
    return Network(nn.Sequential(nn.Flatten(), nn.Embedding(3, 4)), nn.Linear(4, classes))


class Shift(nn.Module):
    """Adds a constant that its constructor sets."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.full((1,), 3.0))

    def forward(self, images):
        return images + self.shift


def constant(shape, classes) -> Network:
    """A network with a constant of its own among its buffers."""
    channels, height, width = shape
    return Network(nn.Sequential(Shift(), nn.Flatten()), nn.Linear(channels * height * width, classes))


number = 3  # no function
