"""Variants of the papers' setups: networks that show the effect of a difference, and a partition of few examples."""

from collections import OrderedDict

import numpy as np
from torch import nn

from unskew.core.key import Key
from unskew.data.partition import Dirichlet
from unskew.data.population import Ints
from unskew.models.networks import Network, Shape, simple_cnn

HEAD = ("fc3", "fc3_relu", "fc4")  # MOON's projection head: the last two layers of simple-cnn's encoder


def no_head(shape: Shape, classes: int) -> Network:
    """simple-cnn without its projection head: the classifier's input is the 84 features before it."""
    layers = simple_cnn(shape, classes).encoder.named_children()
    encoder = nn.Sequential(OrderedDict((name, layer) for name, layer in layers if name not in HEAD))
    return Network(encoder, nn.Linear(84, classes))


def kaiming(shape: Shape, classes: int) -> nn.Module:
    """simple-cnn initialized as in He et al. (2015): normal weights for ReLU, zero biases."""
    network = simple_cnn(shape, classes)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


def moderate_cnn(shape: Shape, classes: int) -> nn.Module:
    """The network of NVFlare's CIFAR-10 example: three pairs of 3×3 convolutions, up to 256 channels, then 1024-512."""
    layers: list[nn.Module] = []
    inputs = shape[0]
    for number, outputs in enumerate((64, 128, 256)):
        first = 32 if number == 0 else outputs
        layers += [nn.Conv2d(inputs, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU()]
        layers += [nn.Conv2d(first, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Dropout2d(0.05)] if number == 1 else []
        inputs = outputs
    flat = inputs * (shape[1] // 8) * (shape[2] // 8)
    layers += [nn.Flatten(), nn.Dropout(0.1), nn.Linear(flat, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(512, classes))


def few_examples(labels: Ints, clients: int, key: Key, examples: int = 1000, alpha: float = 0.5) -> Ints:
    """A Dirichlet partition of ``examples`` random training examples; no client has the others."""
    drawn = np.sort(key.fold("kept").numpy().permutation(len(labels))[:examples])
    client = np.full(len(labels), -1, np.int64)
    client[drawn], _ = Dirichlet(alpha=alpha, min_size=1).deal(labels[drawn], clients, key)
    return client
