"""Networks that live outside the package, named ``outside_models:function`` in tests."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from unskew.models.networks import Network


def linear(shape, classes) -> Network:
    """Pixels straight into the classifier: small enough to be worked out by hand."""
    return Network(nn.Flatten(), nn.Linear(math.prod(shape), classes))


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
    size = math.prod(shape)
    parts = nn.GroupNorm(1, shape[0]), nn.BatchNorm2d(shape[0]), nn.Flatten(), nn.LayerNorm(size)
    return Network(nn.Sequential(*parts), nn.Linear(size, classes))


class Shift(nn.Module):
    """Adds a constant that its constructor sets."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.full((1,), 3.0))

    def forward(self, images):
        return images + self.shift


def constant(shape, classes) -> Network:
    """A network with a constant of its own among its buffers."""
    return Network(nn.Sequential(Shift(), nn.Flatten()), nn.Linear(math.prod(shape), classes))


number = 3  # no function


class Block(nn.Module):
    """A basic residual block, as torchvision names its parts."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + identity)


class ResNet(nn.Module):
    """A small torchvision-style ResNet with its own initialisation."""

    def __init__(self, channels, classes, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(width, width))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


def resnet(shape, classes, width: int = 8):
    return ResNet(shape[0], classes, width)


class ViT(nn.Module):
    """A small vision transformer: attention with dropout, a class token, LayerNorm; parts named encoder and heads."""

    def __init__(self, shape, classes, patch=4, width=16, dropout=0.1):
        super().__init__()
        channels, height, side = shape
        self.conv_proj = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        places = (height // patch) * (side // patch) + 1
        self.pos_embedding = nn.Parameter(torch.empty(1, places, width).normal_(std=0.02))
        self.register_buffer("mask", torch.zeros(places, places, dtype=torch.bool), persistent=False)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.heads = nn.Sequential(nn.Linear(width, classes))
        nn.init.zeros_(self.heads[0].weight)

    def forward(self, images):
        x = self.conv_proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        return self.heads(self.norm(self.encoder(x, mask=self.mask))[:, 0])


def vit(shape, classes):
    return ViT(shape, classes)


class Palette(nn.Module):
    """An embedding, a free parameter, one that is not used, a frozen one, a count, functional dropout."""

    def __init__(self, shape, classes):
        super().__init__()
        self.colours = nn.Embedding(16, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("images_seen", torch.zeros((), dtype=torch.int64))
        self.out = nn.Linear(3 * math.prod(shape), classes, bias=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.full((1,), 2.0), requires_grad=False)

    def forward(self, images):
        if self.training:
            self.images_seen += len(images)
        levels = ((images.clamp(-2, 2) + 2) * 3.75).long()
        features = (self.colours(levels) * self.scale * self.frozen).flatten(1)
        return self.out(F.dropout(features, 0.2, self.training))


def palette(shape, classes):
    return Palette(shape, classes)


def trained(shape, classes):
    """A linear network that comes with weights: those of the class means of the digits, far better than chance."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images.reshape(len(digits.images), -1)).float() / 16
    labels = torch.from_numpy(digits.target)
    images = (images - images.mean()) / images.std()
    means = torch.stack([images[labels == label].mean(0) for label in range(classes)])
    network = nn.Sequential(nn.Flatten(), nn.Linear(images.shape[1], classes))
    network.load_state_dict({"1.weight": means, "1.bias": -0.5 * means.square().sum(1)})
    return network


def trained_network(shape, classes):
    """The same weights in our own Network."""
    made = trained(shape, classes)
    network = Network(nn.Flatten(), nn.Linear(made[1].in_features, classes))
    network.classifier.weight.data = made[1].weight.data
    network.classifier.bias.data.copy_(made[1].bias.data)
    return network


def vgg(num_classes: int = 1000, width: int = 12):
    """Ends in three linear layers with ReLU in place and dropout, as VGG does; takes the number of classes alone."""
    return nn.Sequential(
        nn.Flatten(),
        nn.LazyLinear(width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(width, num_classes),
    )
