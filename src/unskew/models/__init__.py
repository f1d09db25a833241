"""The table of networks, and how one is made: the same weights for the same key on any machine and in any engine."""

import math
from collections.abc import Callable

import torch
from torch import nn

from unskew.core.errors import UserError, nearest
from unskew.core.key import Key
from unskew.core.plugins import load_function
from unskew.models.layers import Network
from unskew.models.networks import Shape, lenet_64, simple_cnn, tiny_cnn

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)

NETWORKS: dict[str, Callable[[Shape, int], Network]] = {
    "simple-cnn": simple_cnn,
    "lenet-64": lenet_64,
    "tiny-cnn": tiny_cnn,
}


def build(name: str, shape: Shape, classes: int) -> Network:
    """The network of that name (or ``package.module:function``) for such images, its weights not yet ours."""
    make = load_function(name, "model") if ":" in name else NETWORKS.get(name)
    if make is None:
        raise UserError(f"no model is called {name!r}; {nearest(name, NETWORKS)}")
    with torch.random.fork_rng(devices=[]):  # what the layers draw for themselves is drawn over, and disturbs nobody
        try:
            network = make(shape, classes)
        except TypeError as error:
            raise UserError(f"model {name!r} does not take (shape, classes): {error}") from error
    if not isinstance(network, Network):
        raise UserError(f"model {name!r} gives a {type(network).__name__}, not an unskew.models.layers.Network")
    return network


def suited(shape: Shape) -> str:
    """The network a user probably wants who named none."""
    return "simple-cnn" if min(shape[1:]) >= 16 else "tiny-cnn"


def initialise(network: Network, key: Key) -> None:
    """Draw every weight from the key: uniform in ±1/√(inputs), PyTorch's own default for these layers."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())
            generator = key.fold("init", name).torch()
            for value in (module.weight, module.bias):
                if value is not None:
                    drawn = torch.empty_like(value, device="cpu")  # whatever the device, a key draws on the CPU
                    nn.init.uniform_(drawn, -bound, bound, generator=generator)
                    value.detach().copy_(drawn)
        elif isinstance(module, _NORMS):
            module.reset_parameters()  # ones and zeros: nothing is drawn
        elif any(True for _ in module.parameters(recurse=False)):
            raise UserError(f"{name} ({type(module).__name__}) has weights and no known way to draw them")
