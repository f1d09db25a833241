"""MobileNetV2 (Sandler et al. 2018), with the parameter names of torchvision's checkpoint.

Images of less than 64 pixels get CCVR's CIFAR form (its Table 7): stride 1 in the first convolution and in block 2.
"""

from torch import Tensor, nn

from unskew.core.errors import UserError
from unskew.models.networks import Shape
from unskew.models.norms import Norm, norm_layer
from unskew.models.resnet import SMALL

BLOCKS = (  # expansion, channels, how many, stride of the first
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
FIRST, LAST = 32, 1280  # channels


class InvertedResidual(nn.Module):
    """Wider by a 1×1 convolution, depthwise 3×3, narrower by 1×1; added to what came in where the shapes agree."""

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
    """Convolutions, the mean over the picture, an optional bottleneck, one linear layer."""

    def __init__(self, shape: Shape, classes: int, norm: Norm, bottleneck: int) -> None:
        super().__init__()
        small = min(shape[1:]) < SMALL
        layers: list[nn.Module] = [_convolution(shape[0], FIRST, 3, 1 if small else 2, norm)]
        inputs = FIRST
        for block, (expansion, channels, count, stride) in enumerate(BLOCKS, 1):
            for place in range(count):
                first = 1 if place or (small and block == 2) else stride
                layers.append(InvertedResidual(inputs, channels, first, expansion, norm))
                inputs = channels
        layers.append(_convolution(inputs, LAST, 1, 1, norm))
        self.features = nn.Sequential(*layers)
        self.bottleneck = nn.Linear(LAST, bottleneck) if bottleneck else nn.Identity()
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(bottleneck or LAST, classes))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0, 0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C]."""
        features = self.bottleneck(self.features(images).mean((2, 3)))
        logits: Tensor = self.classifier(features)
        return logits


def mobilenet_v2(shape: Shape, classes: int, *, norm: str = "batch", bottleneck: int = 0) -> MobileNetV2:
    """MobileNetV2: 1,280 features, 2 million weights. norm=batch|group; bottleneck=64 gives that many features."""
    if not 0 <= bottleneck <= 2**16:
        raise UserError(f"bottleneck={bottleneck}: give the number of features, such as 64, or 0 for none")
    return MobileNetV2(shape, classes, norm_layer(norm), bottleneck)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, norm: Norm, *, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, norm(outputs), nn.ReLU6())
