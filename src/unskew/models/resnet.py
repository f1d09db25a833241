"""ResNet-18 and ResNet-50 (He et al. 2016), with the parameter names of torchvision's checkpoints.

Images of less than 64 pixels get the form that is usual for CIFAR: a first convolution of 3×3 with stride 1, and no
pooling after it. The parameters' names are the same.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from unskew.models.networks import Shape
from unskew.models.norms import Norm, norm_layer

SMALL = 64  # pixels of the shorter side below which the first layers keep the size


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a way around them."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, width, H/stride, W/stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 (which has the stride) and 1×1 convolutions, and a way around them."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = norm(outputs)
        self.downsample = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, 4·width, H/stride, W/stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Four stages of blocks, the mean over the picture, one linear layer."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], depths: Sequence[int], shape: Shape, classes: int, norm: Norm
    ) -> None:
        super().__init__()
        self.small = min(shape[1:]) < SMALL
        kernel, stride, padding = (3, 1, 1) if self.small else (7, 2, 3)
        self.conv1 = nn.Conv2d(shape[0], 64, kernel, stride, padding, bias=False)
        self.bn1 = norm(64)
        inputs = 64
        for stage, depth in enumerate(depths):
            blocks = []
            for place in range(depth):
                blocks.append(block(inputs, 64 * 2**stage, 2 if stage and not place else 1, norm))
                inputs = 64 * 2**stage * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

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
    return ResNet(BasicBlock, (2, 2, 2, 2), shape, classes, norm_layer(norm))


def resnet_50(shape: Shape, classes: int, *, norm: str = "batch") -> ResNet:
    """ResNet-50: 2,048 features, 24 million weights. norm=batch|group."""
    return ResNet(Bottleneck, (3, 4, 6, 3), shape, classes, norm_layer(norm))


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
