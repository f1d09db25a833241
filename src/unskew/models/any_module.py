"""Splits any module from images to logits into its last linear layer and the features that enter it.

Shapes: B images [B, ch, H, W], features [B, d], logits [B, C].
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from unskew.core.errors import UserError, a_kind, describe_error
from unskew.core.key import Key, seeded
from unskew.core.language import apply, parse_call
from unskew.core.plugins import load_function
from unskew.models.networks import Network, Shape

CLASS_KNOBS = ("classes", "num_classes", "n_classes", "nclasses")
CHANNEL_KNOBS = ("in_channels", "in_chans")
SHAPE_KNOBS = ("shape", "input_shape", "image_shape")
TRIED = "a factory takes (shape, classes), (classes), a knob num_classes=, or nothing"
TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def bind_factory(model: str | nn.Module | Callable[..., Any], shape: Shape, classes: int) -> Callable[[], Any]:
    """A call that makes the network, from ``package.module:function(knobs)``, a factory or a module."""
    if isinstance(model, nn.Module):
        return lambda: model
    if not isinstance(model, str):
        return _bind(model, shape, classes)
    call = parse_call(model, "model")
    function = _bind(load_function(call.name, "model"), shape, classes)
    return lambda: apply(call, function, "model")


def _bind(function: Callable[..., Any], shape: Shape, classes: int) -> Callable[..., Any]:
    """Bind a factory's parameters for shape and classes, if it has them; other knobs stay open."""
    try:
        knobs = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return partial(function, shape, classes)
    plain = [n for n, p in knobs.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = any(p.kind == p.VAR_KEYWORD for p in knobs.values())
    values: dict[str, Any] = dict.fromkeys(SHAPE_KNOBS, shape) | dict.fromkeys(CHANNEL_KNOBS, shape[0])
    values |= dict.fromkeys(CLASS_KNOBS, classes)
    filled = {name: value for name, value in values.items() if name in knobs}
    needed = [n for n in plain if n not in filled and knobs[n].default is inspect.Parameter.empty]
    if not any(n in filled for n in CLASS_KNOBS) and needed:
        filled |= dict(zip(needed, (classes,) if len(needed) == 1 else (shape, classes), strict=False))
    elif not filled and any(p.kind == p.VAR_POSITIONAL for p in knobs.values()):
        return partial(function, shape, classes)
    elif not filled and rest:
        filled["num_classes"] = classes
    bound = partial(function, **filled)
    bound.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p for n, p in knobs.items() if n not in filled and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    )
    return bound


def make_module(call: Callable[[], Any], name: str, shape: Shape, key: Key) -> nn.Module:
    """Make the network, in float32 on the CPU, with the weights that its factory draws or loads under this key."""
    with seeded(key.fold("make")):  # a copy, because training must not overwrite a module that the factory keeps
        module = run_guarded(lambda: copy.deepcopy(call()), f"model {name!r} cannot be built", TRIED)
        if not isinstance(module, nn.Module):
            raise UserError(f"model {name!r} returns {a_kind(module)}; it must return a torch.nn.Module")
        if any(isinstance(value, UninitializedParameter) for value in module.parameters()):
            with torch.no_grad():  # lazy layers take their sizes from the first batch
                run_guarded(lambda: module.eval()(torch.zeros(2, *shape)), f"model {name!r} fails on its first images")
            module.train()
    for weight, value in (*module.named_parameters(), *module.named_buffers()):
        whole = isinstance(value, nn.Parameter) and not value.is_floating_point()
        if whole or value.is_complex() or value.is_quantized:
            raise UserError(f"model {name!r}: {weight} is {value.dtype}; weights must be floating-point numbers")
        if value.is_meta:
            raise UserError(f"model {name!r}: {weight} is on the device meta, which stores no values; use another")
    if not any(value.requires_grad for value in module.parameters()):
        raise UserError(f"model {name!r} has no parameter with requires_grad, so nothing could be trained")
    return module.to("cpu", torch.float32)


def run_guarded(work: Callable[[], Any], what: str, hint: str = "") -> Any:
    """Run user code; whatever it raises becomes one message with the location in that code."""
    try:
        return work()
    except UserError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        advice = f"; {hint}" if hint and isinstance(error, TypeError) else ""
        raise UserError(f"{what}: {describe_error(error)}{advice}") from error


def find_default_weights(call: Callable[[], Any], key: Key) -> frozenset[str]:
    """The names of weights in convolutions and linear layers that are unchanged since the layer's constructor.

    Weights that the factory loaded or drew differently are not among them.
    """
    drawn: dict[nn.Module, dict[str, Tensor]] = {}

    def recording(reset: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset_parameters(layer: Any) -> None:
            reset(layer)
            drawn[layer] = {part: value.detach().clone() for part, value in layer.named_parameters(recurse=False)}

        return reset_parameters

    with ExitStack() as stack:
        for kind in (_ConvNd, nn.Linear):
            stack.callback(setattr, kind, "reset_parameters", kind.reset_parameters)
            setattr(kind, "reset_parameters", recording(kind.reset_parameters))  # noqa: B010  mypy forbids assigning
        stack.enter_context(seeded(key))
        module = run_guarded(call, "the model cannot be built a second time")
    return frozenset(
        f"{path}.{part}" if path else part
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
        for part, value in drawn.get(layer, {}).items()
        if torch.equal(getattr(layer, part), value)
    )


REQUIRED = (
    "a model must end in one nn.Linear that runs once, takes features [B, d] and returns the logits [B, C], which "
    "nothing changes afterwards (no softmax)"
)


class Features(nn.Module):
    """The input of one layer of a module, [B, ch, H, W] -> [B, d], with gradients; the module runs unchanged."""

    layer: nn.Module

    def __init__(self, module: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.__dict__["layer"] = layer  # a part of the module, not a second child

    def forward(self, images: Tensor) -> Tensor:
        """Run the module and return the layer's input."""
        inputs: list[Tensor] = []

        def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
            features: Tensor = args[0] if args else kwargs["input"]
            inputs.append(features.clone() if getattr(self.layer, "inplace", False) else features)

        handle = self.layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            self.module(images)
        finally:
            handle.remove()
        return inputs[-1].flatten(1)


class AnyNetwork(Network):
    """A user's module as an ``encoder`` and a ``classifier``; its parameters keep the module's names."""

    module: nn.Module
    shape: Shape  # of its images

    def __init__(self, module: nn.Module, classifier: nn.Linear, shape: Shape) -> None:
        nn.Module.__init__(self)
        self.shape = shape
        attributes = self.__dict__  # not setattr, which would register modules
        attributes |= {"module": module, "classifier": classifier, "encoder": Features(module, classifier)}
        attributes |= {table: module.__dict__[table] for table in TABLES}  # shared, so names and values are the same
        self.train(module.training)

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C], the module's own forward."""
        logits: Tensor = self.module(images)
        return logits

    def train(self, mode: bool = True) -> "AnyNetwork":
        """Set the mode of the module and of all its parts."""
        self.training = mode
        self.encoder.train(mode)
        return self


def check_forward(module: nn.Module, name: str, shape: Shape, classes: int) -> None:
    """Reject a module that does not return logits."""
    logits = run_probe(module, name, shape)
    if not isinstance(logits, Tensor) or tuple(logits.shape) != (2, classes):
        output = list(logits.shape) if isinstance(logits, Tensor) else a_kind(logits)
        given = f"2 images of {list(shape)} and {classes} classes"
        raise UserError(f"model {name!r} returns {output} for {given}; it must return logits [2, {classes}]")


def find_classifier(module: nn.Module, name: str, shape: Shape, classes: int) -> nn.Linear:
    """The linear layer whose output is always the module's output.

    This is tested: if the layer's output is replaced by random numbers, the module must return them unchanged.
    """
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []  # the linear layers that ran, with input and output

    def note(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((layer, args[0] if args else kwargs["input"], output))

    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    with ExitStack() as stack:
        for part in linear:
            stack.callback(part.register_forward_hook(note, with_kwargs=True).remove)
        check_forward(module, name, shape, classes)
    own = {id(value) for value in module.parameters()}  # without weights that are computed from others
    for layer, x, out in reversed(calls):
        once = sum(other is layer for other, _, _ in calls) == 1
        if once and id(layer.weight) in own and out.numel() == 2 * classes and x.numel() == 2 * layer.in_features:
            replaced = 1000 * torch.randn(out.shape, generator=Key(1).fold("probe").torch())
            handle = layer.register_forward_hook(lambda *_, replaced=replaced: replaced.clone())
            result = run_probe(module, name, shape)
            handle.remove()
            same = isinstance(result, Tensor) and torch.equal(result.flatten(), replaced.flatten())
            if same and torch.allclose(F.linear(x, layer.weight, layer.bias), out, rtol=1e-3, atol=1e-5):
                return layer
    raise UserError(f"model {name!r} has no classifier that can be calibrated; {REQUIRED}")


def same_output(module: nn.Module, encoder: nn.Module, head: nn.Module, shape: Shape) -> bool:
    """Whether the two parts together compute what the module does."""
    expected, output = (run_probe(part, "in parts", shape) for part in (module, nn.Sequential(encoder, head)))
    return expected.shape == output.shape and torch.allclose(expected, output, rtol=1e-3, atol=1e-5)


def run_probe(module: nn.Module, name: str, shape: Shape) -> Any:
    """The module's output for two random images in eval mode; all modes are restored."""
    like = next((value for value in module.parameters() if value.is_floating_point()), torch.zeros(()))
    images = torch.randn(2, *shape, generator=Key(0).fold("probe").torch()).to(like.device, like.dtype)
    with evaluating(module), torch.no_grad(), seeded(Key(0)):
        return run_guarded(lambda: module(images), f"model {name!r} fails on images {[2, *shape]}")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set the module to eval mode inside, and restore the mode of every part."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
