"""The networks of the papers. Each takes the images' shape and the number of classes; sizes follow from them."""

from torch import nn

from unskew.errors import UserError
from unskew.models.layers import ConvPool, Network

Shape = tuple[int, int, int]


def simple_cnn(shape: Shape, classes: int) -> Network:
    """Conv(ch,6,5)-Pool-ReLU, Conv(6,16,5)-Pool-ReLU, 120-84-84 with ReLU, 256 features without; CCVR's Table 6, as in MOON."""
    channels, height, width = shape
    flat = 16 * _after(height, "simple-cnn", 16) * _after(width, "simple-cnn", 16)
    encoder = nn.Sequential()
    encoder.add_module("conv1", ConvPool(channels, 6, 5))
    encoder.add_module("relu1", nn.ReLU())
    encoder.add_module("conv2", ConvPool(6, 16, 5))
    encoder.add_module("relu2", nn.ReLU())
    encoder.add_module("flatten", nn.Flatten())
    sizes = (flat, 120, 84, 84)
    for place, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False), 1):
        encoder.add_module(f"fc{place}", nn.Linear(inputs, outputs))
        encoder.add_module(f"fc{place}_relu", nn.ReLU())
    encoder.add_module("fc4", nn.Linear(84, 256))
    return Network(encoder, nn.Linear(256, classes))


def lenet_64(shape: Shape, classes: int) -> Network:
    """Two 5×5 convolutions of 64 channels, each before 2×2 max-pooling, then 384 and 192 features; Hsu et al. on CIFAR."""
    channels, height, width = shape
    _at_least(height, "lenet-64", 4)
    _at_least(width, "lenet-64", 4)
    encoder = nn.Sequential()
    encoder.add_module("conv1", nn.Conv2d(channels, 64, 5, padding=2))
    encoder.add_module("pool1", nn.MaxPool2d(2))
    encoder.add_module("relu1", nn.ReLU())
    encoder.add_module("conv2", nn.Conv2d(64, 64, 5, padding=2))
    encoder.add_module("pool2", nn.MaxPool2d(2))
    encoder.add_module("relu2", nn.ReLU())
    encoder.add_module("flatten", nn.Flatten())
    encoder.add_module("fc1", nn.Linear(64 * (height // 4) * (width // 4), 384))
    encoder.add_module("fc1_relu", nn.ReLU())
    encoder.add_module("fc2", nn.Linear(384, 192))
    encoder.add_module("fc2_relu", nn.ReLU())
    return Network(encoder, nn.Linear(192, classes))


def tiny_cnn(shape: Shape, classes: int) -> Network:
    """Two 3×3 convolutions of 16 and 32 channels with pooling, then 64 features: for 8×8 digits, and anything from 4×4 on."""
    channels, height, width = shape
    _at_least(height, "tiny-cnn", 4)
    _at_least(width, "tiny-cnn", 4)
    encoder = nn.Sequential()
    encoder.add_module("conv1", nn.Conv2d(channels, 16, 3, padding=1))
    encoder.add_module("pool1", nn.MaxPool2d(2))
    encoder.add_module("relu1", nn.ReLU())
    encoder.add_module("conv2", nn.Conv2d(16, 32, 3, padding=1))
    encoder.add_module("pool2", nn.MaxPool2d(2))
    encoder.add_module("relu2", nn.ReLU())
    encoder.add_module("flatten", nn.Flatten())
    encoder.add_module("fc1", nn.Linear(32 * (height // 4) * (width // 4), 64))
    encoder.add_module("fc1_relu", nn.ReLU())
    return Network(encoder, nn.Linear(64, classes))


def _after(side: int, name: str, least: int) -> int:
    """A side's length after two rounds of 5×5 convolution and 2×2 pooling."""
    _at_least(side, name, least)
    return ((side - 4) // 2 - 4) // 2


def _at_least(side: int, name: str, least: int) -> None:
    if side < least:
        raise UserError(
            f"{name} needs images of at least {least}x{least} pixels, these have a side of {side}; take tiny-cnn"
        )
