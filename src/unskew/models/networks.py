"""Networks in two parts, the names of their layers, and the papers' networks, sized by the images' shape."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import physical_memory
from unskew.core.units import format_bytes
from unskew.models.conv_pool import ConvPool


@dataclass(frozen=True)
class Origin:
    """How an external network is made for a key, and which of its weights we draw by name."""

    make: Callable[[Key], nn.Module]
    drawn: frozenset[str] = frozenset()


class Network(nn.Module):
    """A network in two parts: ``classifier(encoder(images))``."""

    origin: Origin | None = None  # of an external one, whose layers may draw during training, as dropout does

    def __init__(self, encoder: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C]."""
        logits: Tensor = self.classifier(self.encoder(images))
        return logits

    @property
    def classifier_names(self) -> tuple[str, ...]:
        """The full names of the classifier's weight and, if it has one, its bias."""
        names = {id(value): f"params/{name}" for name, value in self.named_parameters()}
        values = (self.classifier.weight, self.classifier.bias)
        return tuple(names[id(value)] for value in values if value is not None)


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameters such as ``params/encoder.fc1.weight`` by layer (``fc1``), in the order of the network.

    A parameter without a layer, such as ``params/cls_token``, counts as a layer of its own.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        plain = name.partition("/")[2]
        layers.setdefault(plain.rpartition(".")[0] or plain, []).append(name)
    short = shorten_layer_names(layers)
    return {short[layer]: parameters for layer, parameters in layers.items()}


def shorten_layer_names(modules: Iterable[str]) -> dict[str, str]:
    """Drop the prefix ``encoder.`` from layer names, unless two would become equal."""
    short = {name: name.removeprefix("encoder.") or name for name in modules}
    return short if len(set(short.values())) == len(short) else {name: name for name in short}


Shape = tuple[int, int, int]

SMALLEST = 4  # the shortest side for tiny-cnn
COPIES = 4  # of the weights during training, at least: the model, gradients, momentum, the update


def simple_cnn(shape: Shape, classes: int) -> Network:
    """Two 5×5 convolutions of 6 and 16 channels with pooling, 120-84-84 with ReLU, 256 features without.

    The network of MOON and of CCVR's Table 6; the last two layers of the encoder are MOON's projection head.
    """
    channels, height, width = shape
    convolutions = {"conv1": ConvPool(channels, 6, 5), "relu1": nn.ReLU(), "conv2": ConvPool(6, 16, 5)}
    encoder = nn.Sequential(OrderedDict(convolutions | {"relu2": nn.ReLU()}))
    sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    flat = 16 * sides[0] * sides[1]
    _check_size("simple-cnn", shape, 16, flat * 120)
    _add_linear(encoder, (flat, 120, 84, 84))
    encoder.add_module("fc4", nn.Linear(84, 256))
    return Network(encoder, nn.Linear(256, classes))


def lenet_64(shape: Shape, classes: int) -> Network:
    """Two 5×5 convolutions of 64 channels with 2×2 max-pooling, then 384 and 192 features (Hsu et al. 2020)."""
    return _padded_cnn("lenet-64", shape, classes, channels=(64, 64), kernel=5, features=(384, 192))


def tiny_cnn(shape: Shape, classes: int) -> Network:
    """Two 3×3 convolutions of 16 and 32 channels with pooling, then 64 features: for images as small as 4×4."""
    return _padded_cnn("tiny-cnn", shape, classes, channels=(16, 32), kernel=3, features=(64,))


def _padded_cnn(
    name: str, shape: Shape, classes: int, *, channels: tuple[int, int], kernel: int, features: tuple[int, ...]
) -> Network:
    encoder = nn.Sequential()
    for number, (inputs, outputs) in enumerate(pairwise((shape[0], *channels)), 1):
        encoder.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2))
        encoder.add_module(f"pool{number}", nn.MaxPool2d(2))
        encoder.add_module(f"relu{number}", nn.ReLU())
    flat = channels[-1] * (shape[1] // 4) * (shape[2] // 4)
    _check_size(name, shape, SMALLEST, flat * features[0])
    _add_linear(encoder, (flat, *features))
    return Network(encoder, nn.Linear(features[-1], classes))


def _add_linear(encoder: nn.Sequential, sizes: Sequence[int]) -> None:
    encoder.add_module("flatten", nn.Flatten())
    for number, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        encoder.add_module(f"fc{number}", nn.Linear(inputs, outputs))
        encoder.add_module(f"fc{number}_relu", nn.ReLU())


def _check_size(name: str, shape: Shape, least: int, weights: int) -> None:
    size = f"{shape[2]}x{shape[1]} pixels"
    if min(shape[1:]) < least:
        instead = "tiny-cnn" if least > SMALLEST else "larger images"
        raise UserError(f"{name} needs images of {least}x{least} pixels or more, not {size}; use {instead}")
    if COPIES * 4 * weights > physical_memory():
        layer = f"{name} for images of {size} has a layer of {format_bytes(4 * weights)}"
        raise UserError(f"{layer}, too large for this machine's memory; use smaller images (--resize) or resnet-18")


PART = 50  # images


class InParts(nn.Module):
    """Runs a module on a few images at a time, without gradients: large outputs cost a CPU more than the arithmetic.

    glibc maps blocks above 32 MB anew for every layer, and the kernel clears each of their pages.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # otherwise restoring its mode later would change the module's

    def forward(self, images: Tensor) -> Tensor:
        """The module's output for all images."""
        if len(images) <= PART or images.device.type != "cpu":
            whole: Tensor = self.module(images)
            return whole
        parts = images.tensor_split(-(-len(images) // PART))  # of about equal size: one image alone gives other bits
        return torch.cat([self.module(part) for part in parts])


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter or buffer; the CPU if it has none."""
    return next((value.device for value in (*module.parameters(), *module.buffers())), torch.device("cpu"))
