"""The registry of networks, and how one is built: the same key gives the same weights everywhere."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unskew.core import tensors
from unskew.core.errors import UserError, brief, nearest
from unskew.core.key import Key
from unskew.core.language import apply, parse_call
from unskew.core.plugins import load_function, require_extra
from unskew.core.units import counted
from unskew.models.any_module import (
    AnyNetwork,
    bind_factory,
    check_forward,
    find_classifier,
    find_default_weights,
    make_module,
)
from unskew.models.imagenet import efficientnet_lite0, mobilenet_v2, resnet_18, resnet_50
from unskew.models.networks import Network, Origin, Shape, lenet_64, simple_cnn, tiny_cnn

NETWORKS: dict[str, Callable[[Shape, int], Network]] = {
    "simple-cnn": simple_cnn,
    "lenet-64": lenet_64,
    "tiny-cnn": tiny_cnn,
}
# with knobs, and the parameter names of their public checkpoints
PUBLIC: dict[str, Callable[..., nn.Module]] = {
    "mobilenet-v2": mobilenet_v2,
    "resnet-18": resnet_18,
    "resnet-50": resnet_50,
    "efficientnet-lite0": efficientnet_lite0,
}
TIMM = "timm:"  # followed by the name of a network in that package, which is created without weights


def build(model: str | nn.Module | Callable[..., Any], shape: Shape, classes: int) -> Network:
    """Build a network from a name, ``timm:NAME``, ``package.module:function(knobs)``, a factory or a module.

    ``initialise`` sets the weights for a key.
    """
    if isinstance(model, str) and model in NETWORKS:
        with torch.random.fork_rng(devices=[]):  # the layers' own draws are overwritten later
            return NETWORKS[model](shape, classes)
    name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    if isinstance(model, str) and model.startswith(TIMM):
        call = _parse_timm(model, shape, classes)
    elif isinstance(model, str) and ":" not in model:
        call = _parse_public(name, shape, classes)
    else:
        call = bind_factory(model, shape, classes)
    remake = partial(make_module, call, name, shape)
    module = remake(Key(0))
    if isinstance(module, Network):
        check_forward(module, name, shape, classes)
        module.origin = Origin(remake, find_default_weights(call, Key(0)))
        return module
    network = AnyNetwork(module, find_classifier(module, name, shape, classes), shape)
    network.origin = Origin(remake)
    return network


def _parse_public(text: str, shape: Shape, classes: int) -> Callable[[], nn.Module]:
    call = parse_call(text, "model")
    if text != text.strip() or call.name not in {**NETWORKS, **PUBLIC}:
        hint = nearest(call.name, [*NETWORKS, *PUBLIC])
        raise UserError(f"no model is called {brief(text)}; {hint}; name your own as package.module:function")
    if call.name in NETWORKS:
        raise UserError(f"model {call.name} has no knobs; write only {call.name}")
    function = bind_factory(PUBLIC[call.name], shape, classes)
    return lambda: apply(call, function, "model")


def _parse_timm(text: str, shape: Shape, classes: int) -> Callable[[], nn.Module]:
    timm = require_extra("timm", "timm")
    call = parse_call(text.removeprefix(TIMM), "model")
    if call.values or "pretrained" in call.knobs:
        raise UserError(f"{text}: pass knobs by name, and weights with --pretrained FILE")
    if not timm.is_model(call.name):
        raise UserError(f"{text}: timm has no such network; {nearest(call.name, timm.list_models())}")
    return lambda: timm.create_model(call.name, num_classes=classes, in_chans=shape[0], **call.knobs)


SIDE = 224  # pixels, of ImageNet networks


def input_size(model: Any) -> int:
    """The side of the images that a network expects; photographs of different sizes are scaled to it.

    A function or module may have an attribute ``input_size``, a number or a shape that ends with it; timm's modules
    have it in ``default_cfg``. The default is 224.
    """
    if model is None or model in NETWORKS:
        return 32
    if isinstance(model, str):
        if ":" not in model:
            return SIDE
        try:
            model = load_function(parse_call(model, "model").name, "model")
        except UserError:  # building it will report the mistake
            return SIDE
    size = getattr(model, "input_size", None) or getattr(model, "default_cfg", {}).get("input_size", SIDE)
    return int(size if isinstance(size, int) else size[-1])


def choose_model(shape: Shape) -> str:
    """The default network for images of this shape."""
    return "simple-cnn" if min(shape[1:]) >= 16 else "tiny-cnn"


def initialise(network: Network, key: Key) -> None:
    """Set the weights that belong to the key.

    In our own networks every weight is drawn by its layer's name, uniform in ±1/√(inputs), which is PyTorch's default.
    An external network is built again by its factory under the key, which keeps what the factory draws or loads; if it
    is a ``Network``, convolutions and linear layers with PyTorch's default weights are drawn by name, like ours.
    """
    if (origin := network.origin) is not None:
        fresh, current = tensors.of_module(origin.make(key)), tensors.of_module(network)
        if {n: value.shape for n, value in fresh.items()} != {n: value.shape for n, value in current.items()}:
            raise UserError("the model's factory returned different layers when called again; make it deterministic")
        tensors.overwrite(network, fresh)
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(max(layer.weight[0].numel(), 1))
            generator = key.fold("init", name).torch()
            for part in ("weight", "bias"):
                value = getattr(layer, part)
                if value is not None and (origin is None or f"{name}.{part}" in origin.drawn):
                    drawn = torch.empty_like(value, device="cpu")  # keys draw on the CPU, whatever the device
                    nn.init.uniform_(drawn, -bound, bound, generator=generator)
                    value.detach().copy_(drawn)


def batch_norm_policy(network: nn.Module) -> str:
    """How the running statistics of the network's BatchNorm layers are handled; "" if it has none."""
    parts = getattr(network, "trained", None) or network.modules()  # frozen layers do not change
    count = sum(isinstance(part, _BatchNorm) and part.track_running_stats for part in parts)
    if not count:
        return ""
    averaged = "running statistics are averaged over the clients, by weight"
    return f"{counted(count, 'BatchNorm layer')}: {averaged}; the server optimizer does not change them"
