"""A user's network: its factory called under a key, its weights kept as the factory left them.

What a factory draws is drawn from torch's global generator, which is seeded from the key for that time; so the same
seed gives the same weights, and weights that it loads stay as they are.
"""

import copy
import inspect
import math
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from unskew.core.errors import UserError, a_kind
from unskew.core.key import Key, seeded
from unskew.core.plugins import load_function
from unskew.core.text import apply, parse_calls
from unskew.models.networks import Shape

CLASS_KNOBS = ("classes", "num_classes", "n_classes", "nclasses")
CHANNEL_KNOBS = ("in_channels", "in_chans")
SHAPE_KNOBS = ("shape", "input_shape", "image_shape")
TRIED = "a factory takes (shape, classes), (classes), a knob num_classes=, or nothing"
TORCH = Path(torch.__file__).parent


def maker(model: str | nn.Module | Callable[..., Any], shape: Shape, classes: int) -> Callable[[], Any]:
    """A call that makes the network: from ``package.module:function(knobs)``, from a factory, or from a module."""
    if isinstance(model, nn.Module):
        return lambda: model
    if not isinstance(model, str):
        return _bound(model, shape, classes)
    if "(" not in model:
        return _bound(load_function(model, "model"), shape, classes)
    calls = parse_calls(model, "model")
    if len(calls) > 1:
        raise UserError(f"model {model!r}: give one network; networks cannot be added")
    function = _bound(load_function(calls[0].name, "model"), shape, classes)
    return lambda: apply(calls[0], function, "model")


def _bound(function: Callable[..., Any], shape: Shape, classes: int) -> Callable[..., Any]:
    """The factory with shape and classes filled in where it takes them; its other knobs stay open."""
    try:
        knobs = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin that does not say what it takes
        return partial(function, shape, classes)
    plain = [n for n, p in knobs.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = any(p.kind == p.VAR_KEYWORD for p in knobs.values())
    values = (
        dict.fromkeys(SHAPE_KNOBS, shape) | dict.fromkeys(CHANNEL_KNOBS, shape[0]) | dict.fromkeys(CLASS_KNOBS, classes)
    )
    given: dict[str, Any] = {name: value for name, value in values.items() if name in knobs}
    needed = [n for n in plain if n not in given and knobs[n].default is inspect.Parameter.empty]
    if not any(n in given for n in CLASS_KNOBS) and needed:
        given |= dict(zip(needed, (classes,) if len(needed) == 1 else (shape, classes), strict=False))
    elif not given and any(p.kind == p.VAR_POSITIONAL for p in knobs.values()):
        return partial(function, shape, classes)
    elif not given and rest:
        given["num_classes"] = classes
    bound = partial(function, **given)
    bound.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p for n, p in knobs.items() if n not in given and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    )
    return bound


def make(call: Callable[[], Any], name: str, shape: Shape, key: Key) -> nn.Module:
    """The network in float32 on the CPU, its weights those that its factory gives under this key."""
    with seeded(key.fold("make")):
        module = guarded(call, f"model {name!r} cannot be made", TRIED)
        if not isinstance(module, nn.Module):
            raise UserError(f"model {name!r} gives {a_kind(module)}; give a torch.nn.Module")
        try:
            module = copy.deepcopy(module)  # the factory may keep its own, and training overwrites this one
        except Exception as error:
            raise UserError(f"model {name!r} cannot be copied: {type(error).__name__}: {error}") from error
        if any(isinstance(value, UninitializedParameter) for value in module.parameters()):
            with torch.no_grad():  # lazy layers take their sizes from the first batch
                guarded(lambda: module.eval()(torch.zeros(2, *shape)), f"model {name!r} fails on its first images")
            module.train()
    _refuse_odd_tensors(module, name)
    return module.to("cpu", torch.float32)


def guarded(work: Callable[[], Any], what: str, hint: str = "") -> Any:
    """What the work gives; whatever the user's code raises becomes one message with its place in that code."""
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if TORCH not in Path(f.filename).parents), frames[-1])
        where = f"{Path(place.filename).name}:{place.lineno}"
        said = " ".join(str(error).split()) or "no message"
        advice = f"; {hint}" if hint and isinstance(error, TypeError) else ""
        raise UserError(f"{what}: {type(error).__name__}: {said} ({where}){advice}") from error


def _refuse_odd_tensors(module: nn.Module, name: str) -> None:
    for key, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_complex():
            raise UserError(f"model {name!r}: {key} is complex; give real weights")
        if value.is_meta:
            raise UserError(f"model {name!r}: {key} has no values (device meta); give it weights")
        if value.is_quantized or (isinstance(value, nn.Parameter) and not value.is_floating_point()):
            raise UserError(f"model {name!r}: {key} is {value.dtype}; give weights in floating point")
    if not any(value.requires_grad for value in module.parameters()):
        raise UserError(f"model {name!r} has no parameter with requires_grad; nothing could be trained")


def as_pytorch_drew_them(call: Callable[[], Any], key: Key) -> frozenset[str]:
    """The weights of convolutions and linear layers that are as their layer's constructor drew them, by name.

    A weight that the factory wrote itself (loaded, or drawn another way) is not among them: every write into its
    memory is seen.
    """
    with seeded(key), _Writes() as log:
        module = guarded(call, "the model cannot be made a second time")
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
    """Every write into a tensor's memory while the mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_memory: dict[int, list[tuple[Any, ...]]] = {}
        self._kept: list[Tensor] = []  # memory that is freed could be used again by another tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            targets = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
            for value in (*targets, *(kwargs or {}).values()):
                if isinstance(value, Tensor):
                    self._kept.append(value)
                    self._by_memory.setdefault(_memory(value), []).append((str(func), *args[1:3]))
        return result

    def only_uniform(self, value: Tensor, bound: float) -> bool:
        """Whether all that was ever written there is one uniform draw within this bound."""
        writes = self._by_memory.get(_memory(value), [])
        if len(writes) != 1 or not writes[0][0].startswith("aten.uniform_"):
            return False
        low, high = (*writes[0][1:], 0.0, 1.0)[:2] if len(writes[0]) < 3 else writes[0][1:3]
        return math.isclose(low, -bound, rel_tol=1e-6) and math.isclose(high, bound, rel_tol=1e-6)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
