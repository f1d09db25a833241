"""Any module from images to logits as a network in two parts: its last linear layer, and what enters it.

Shapes: B images [B, ch, H, W], features [B, d], logits [B, C].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.core.errors import UserError, a_kind
from unskew.core.key import Key, seeded
from unskew.models.factory import guarded
from unskew.models.layers import Network
from unskew.models.networks import Shape

LOOKED_FOR = "wanted: one nn.Linear that runs once, takes features [B, d] and gives the logits [B, C] as they are"
MAX_NAMED = 6  # layers named in a message

Call = tuple[str, nn.Module, Any, Any]  # a layer that ran: its name, the layer, its input, its output


class Features(nn.Module):
    """What enters one layer of a module, [B, ch, H, W] -> [B, d], with its gradients: the module runs as it is."""

    layer: nn.Module

    def __init__(self, module: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.__dict__["layer"] = layer  # a part of the module, not a second child

    def forward(self, images: Tensor) -> Tensor:
        """Run the module and keep what the layer was given."""
        seen: list[Tensor] = []

        def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
            features: Tensor = args[0] if args else kwargs["input"]
            seen.append(features.clone() if getattr(self.layer, "inplace", False) else features)

        handle = self.layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            self.module(images)
        finally:
            handle.remove()
        return seen[-1].flatten(1)


class AnyNetwork(Network):
    """A user's module with ``encoder`` and ``classifier``; its parameters have the module's own names."""

    module: nn.Module
    shape: Shape  # of its images

    def __init__(self, module: nn.Module, classifier: nn.Linear, shape: Shape) -> None:
        nn.Module.__init__(self)
        self.shape = shape
        own = self.__dict__
        own["module"], own["classifier"], own["encoder"] = module, classifier, Features(module, classifier)
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[table] = module.__dict__[table]  # the same tables, so names and values are the module's own
        self.train(module.training)

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C], as the module does it."""
        logits: Tensor = self.module(images)
        return logits

    def train(self, mode: bool = True) -> "AnyNetwork":
        """Set the mode of the module and of all its parts."""
        self.training = mode
        self.encoder.train(mode)
        return self


def check_forward(module: nn.Module, name: str, shape: Shape, classes: int) -> list[Call]:
    """Run two images; refuse what does not give logits; the layers that ran, and the whole module last."""
    calls: list[Call] = []
    handles = [
        part.register_forward_hook(
            lambda layer, args, kwargs, output, path=path: calls.append(
                (path, layer, args[0] if args else next(iter(kwargs.values()), None), output)
            ),
            with_kwargs=True,
        )
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Conv2d)
    ]
    try:
        logits = run_probe(module, name, shape)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(logits, Tensor):
        raise UserError(f"model {name!r} gives {a_kind(logits)}; it must give its logits [B, C] as one tensor")
    if tuple(logits.shape) != (2, classes):
        given = f"{list(logits.shape)} for 2 images of {list(shape)} and {classes} classes"
        raise UserError(f"model {name!r} gives {given}; it must give logits [2, {classes}]")
    return [*calls, ("", module, torch.zeros(0), logits)]


def find_classifier(module: nn.Module, name: str, shape: Shape, classes: int) -> nn.Linear:
    """The linear layer whose output is the module's output, whatever that output is.

    It is proven: the layer's output is replaced by other numbers, and these must come out of the module unchanged.
    """
    *calls, (_, _, _, logits) = check_forward(module, name, shape, classes)
    linear = [(path, layer, given, out) for path, layer, given, out in calls if isinstance(layer, nn.Linear)]
    for path, layer, given, out in reversed(linear):
        if layer.out_features != classes or not _comes_out(module, layer, out, name, shape):
            continue
        if sum(other is layer for _, other, _, _ in linear) > 1:
            raise _refused(name, f"{path!r} gives the logits, but runs more than once")
        if given.numel() != 2 * layer.in_features:
            raise _refused(name, f"{path!r} gives the logits, but takes features {list(given.shape)}")
        if not torch.allclose(F.linear(given, layer.weight, layer.bias), out, rtol=1e-3, atol=1e-5):
            raise _refused(name, f"{path!r} gives the logits, but not as weight·features + bias")
        if id(layer.weight) not in {id(value) for value in module.parameters()}:
            raise _refused(name, f"{path!r} gives the logits, but its weight is computed from others")
        return layer
    raise _refused(name, _what_instead(calls, linear, logits, classes))


def same_output(module: nn.Module, encoder: nn.Module, head: nn.Module, shape: Shape) -> bool:
    """Whether the two parts together do what the module does."""
    both = nn.Sequential(encoder, head)
    whole, parts = (run_probe(each, "in parts", shape) for each in (module, both))
    return whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-3, atol=1e-5)


def run_probe(module: nn.Module, name: str, shape: Shape) -> Any:
    """The module's output for two random images, in eval mode; modes are left as they were."""
    modes = {part: part.training for part in module.modules()}
    like = next((value for value in module.parameters() if value.is_floating_point()), torch.zeros(()))
    images = torch.randn(2, *shape, generator=Key(0).fold("probe").torch()).to(like.device, like.dtype)
    module.eval()
    try:
        with torch.no_grad(), seeded(Key(0)):
            return guarded(lambda: module(images), f"model {name!r} fails on images [2, {', '.join(map(str, shape))}]")
    finally:
        for part, mode in modes.items():
            part.training = mode


def _comes_out(module: nn.Module, layer: nn.Module, out: Tensor, name: str, shape: Shape) -> bool:
    """Whether numbers in the place of the layer's output are the module's output, shapes aside."""
    other = 1000 * torch.randn(out.shape, generator=Key(1).fold("probe").torch())
    handle = layer.register_forward_hook(lambda *_: other.clone())
    try:
        result = run_probe(module, name, shape)
    finally:
        handle.remove()
    return isinstance(result, Tensor) and torch.equal(result.flatten(), other.flatten())


def _what_instead(
    calls: list[Call], linear: list[tuple[str, nn.Linear, Any, Any]], logits: Tensor, classes: int
) -> str:
    if bool((logits >= 0).all()) and torch.allclose(logits.sum(1), torch.ones(2), atol=1e-4):
        return "its rows are probabilities that add up to 1: leave the softmax out"
    if torch.allclose(logits.exp().sum(1), torch.ones(2), atol=1e-4):
        return "its rows are log-probabilities: leave the log-softmax out"
    for path, layer, _, out in calls:
        if isinstance(layer, nn.Conv2d) and isinstance(out, Tensor) and out.shape[1] == classes:
            return f"the convolution {path!r} gives {classes} channels: end in nn.Flatten and nn.Linear instead"
    if wide := [path for path, layer, _, _ in linear if layer.out_features == classes]:
        return f"what follows {', '.join(map(repr, wide[-MAX_NAMED:]))} changes the output: give the logits as they are"
    ran = ", ".join(
        f"{path!r} ({layer.in_features} to {layer.out_features})" for path, layer, _, _ in linear[-MAX_NAMED:]
    )
    return f"the linear layers that ran are {ran}" if ran else "no nn.Linear ran"


def _refused(name: str, reason: str) -> UserError:
    return UserError(f"model {name!r} has no classifier that could be calibrated: {reason}; {LOOKED_FOR}")
