"""Splits any module from images to logits into its last linear layer and the features that enter it.

Shapes: B images [B, ch, H, W], features [B, d], logits [B, C].
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from unskew.core.errors import UserError, a_kind, describe_error
from unskew.core.key import Key, seeded
from unskew.core.plugins import load_function
from unskew.core.text import apply, parse_call
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
    if "(" not in model:
        return _bind(load_function(model, "model"), shape, classes)
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
    with seeded(key.fold("make")):
        module = run_guarded(call, f"model {name!r} cannot be built", TRIED)
        if not isinstance(module, nn.Module):
            raise UserError(f"model {name!r} returns {a_kind(module)}; it must return a torch.nn.Module")
        try:
            module = copy.deepcopy(module)  # training must not overwrite a module that the factory keeps
        except Exception as error:
            raise UserError(f"model {name!r} cannot be copied: {type(error).__name__}: {error}") from error
        if any(isinstance(value, UninitializedParameter) for value in module.parameters()):
            with torch.no_grad():  # lazy layers take their sizes from the first batch
                run_guarded(lambda: module.eval()(torch.zeros(2, *shape)), f"model {name!r} fails on its first images")
            module.train()
    _check_tensors(module, name)
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


def _check_tensors(module: nn.Module, name: str) -> None:
    for key, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_complex():
            raise UserError(f"model {name!r}: {key} is complex; the weights must be real")
        if value.is_meta:
            raise UserError(f"model {name!r}: {key} has no values (device meta); initialise it")
        if value.is_quantized or (isinstance(value, nn.Parameter) and not value.is_floating_point()):
            raise UserError(f"model {name!r}: {key} is {value.dtype}; weights must be floating-point")
    if not any(value.requires_grad for value in module.parameters()):
        raise UserError(f"model {name!r} has no parameter with requires_grad, so nothing could be trained")


def find_default_weights(call: Callable[[], Any], key: Key) -> frozenset[str]:
    """The names of weights in convolutions and linear layers that are unchanged since the layer's constructor.

    Weights that the factory loaded or drew differently are not among them: every write to memory is recorded.
    """
    with seeded(key), _Writes() as log:
        module = run_guarded(call, "the model cannot be built a second time")
    names = []
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(max(layer.weight[0].numel(), 1))
            for part in ("weight", "bias"):
                value = getattr(layer, part)
                if value is not None and log.only_uniform(value, bound):
                    names.append(f"{path}.{part}" if path else part)
    return frozenset(names)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_memory: dict[int, list[tuple[Any, ...]]] = {}
        self._alive: list[Tensor] = []  # otherwise another tensor might reuse freed memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            targets = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
            for value in (*targets, *(kwargs or {}).values()):
                if isinstance(value, Tensor):
                    self._alive.append(value)
                    self._by_memory.setdefault(_memory(value), []).append((str(func), *args[1:3]))
        return result

    def only_uniform(self, value: Tensor, bound: float) -> bool:
        """Whether the only write to this memory was a uniform draw within the bound."""
        writes = self._by_memory.get(_memory(value), [])
        if len(writes) != 1 or not writes[0][0].startswith("aten.uniform_"):
            return False
        low, high = (*writes[0][1:], 0.0, 1.0)[:2] if len(writes[0]) < 3 else writes[0][1:3]
        return math.isclose(low, -bound, rel_tol=1e-6) and math.isclose(high, bound, rel_tol=1e-6)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


REQUIRED = "a model must end in one nn.Linear that runs once, takes features [B, d] and returns the logits [B, C]"
MAX_NAMED = 6  # layers named in a message

Call = tuple[str, nn.Module, Any, Any]  # a layer that ran: its name, the layer, its input, its output


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


def check_forward(module: nn.Module, name: str, shape: Shape, classes: int) -> list[Call]:
    """Run two images and refuse a module that does not return logits; the layers that ran, and the module last."""
    calls: list[Call] = []

    def note(path: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((path, layer, args[0] if args else next(iter(kwargs.values()), None), output))

    handles = [
        part.register_forward_hook(partial(note, path), with_kwargs=True)
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Conv2d)
    ]
    try:
        logits = run_probe(module, name, shape)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(logits, Tensor):
        raise UserError(f"model {name!r} returns {a_kind(logits)}; it must return its logits [B, C] as one tensor")
    if tuple(logits.shape) != (2, classes):
        output = f"{list(logits.shape)} for 2 images of {list(shape)} and {classes} classes"
        raise UserError(f"model {name!r} returns {output}; it must return logits [2, {classes}]")
    return [*calls, ("", module, torch.zeros(0), logits)]


def find_classifier(module: nn.Module, name: str, shape: Shape, classes: int) -> nn.Linear:
    """The linear layer whose output is always the module's output.

    This is tested: if the layer's output is replaced by random numbers, the module must return them unchanged.
    """
    *calls, (_, _, _, logits) = check_forward(module, name, shape, classes)
    linear = [(path, layer, x, out) for path, layer, x, out in calls if isinstance(layer, nn.Linear)]
    for path, layer, x, out in reversed(linear):
        if layer.out_features != classes or not _comes_out(module, layer, out, name, shape):
            continue
        if sum(other is layer for _, other, _, _ in linear) > 1:
            raise _refuse(name, f"{path!r} returns the logits, but runs more than once")
        if x.numel() != 2 * layer.in_features:
            raise _refuse(name, f"{path!r} returns the logits, but takes features {list(x.shape)}")
        if not torch.allclose(F.linear(x, layer.weight, layer.bias), out, rtol=1e-3, atol=1e-5):
            raise _refuse(name, f"{path!r} returns the logits, but not as weight·features + bias")
        if id(layer.weight) not in {id(value) for value in module.parameters()}:
            raise _refuse(name, f"{path!r} returns the logits, but its weight is computed from others")
        return layer
    raise _refuse(name, _explain(calls, linear, logits, classes))


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


def _comes_out(module: nn.Module, layer: nn.Module, out: Tensor, name: str, shape: Shape) -> bool:
    """Whether the module returns the numbers that replace the layer's output, whatever the shape."""
    other = 1000 * torch.randn(out.shape, generator=Key(1).fold("probe").torch())
    handle = layer.register_forward_hook(lambda *_: other.clone())
    try:
        result = run_probe(module, name, shape)
    finally:
        handle.remove()
    return isinstance(result, Tensor) and torch.equal(result.flatten(), other.flatten())


def _explain(calls: list[Call], linear: list[tuple[str, nn.Linear, Any, Any]], logits: Tensor, classes: int) -> str:
    if bool((logits >= 0).all()) and torch.allclose(logits.sum(1), torch.ones(2), atol=1e-4):
        return "it returns probabilities that add up to 1; remove the softmax"
    if torch.allclose(logits.exp().sum(1), torch.ones(2), atol=1e-4):
        return "it returns log-probabilities; remove the log-softmax"
    for path, layer, _, out in calls:
        if isinstance(layer, nn.Conv2d) and isinstance(out, Tensor) and out.shape[1] == classes:
            return f"the convolution {path!r} outputs {classes} channels; end in nn.Flatten and nn.Linear instead"
    if wide := [path for path, layer, _, _ in linear if layer.out_features == classes]:
        return f"the output of {', '.join(map(repr, wide[-MAX_NAMED:]))} is changed afterwards; return it unchanged"
    ran = [f"{path!r} ({layer.in_features} to {layer.out_features})" for path, layer, _, _ in linear[-MAX_NAMED:]]
    return f"the linear layers that ran are {', '.join(ran)}" if ran else "no nn.Linear ran"


def _refuse(name: str, reason: str) -> UserError:
    return UserError(f"model {name!r} has no classifier that can be calibrated: {reason}; {REQUIRED}")
