"""Options passed from Python as objects, and their text in config.toml.

An importable function becomes ``package.module:function``, anything else a description after ``python:``."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from unskew import methods
from unskew.calibration.finisher import Finisher
from unskew.core.errors import UserError, a_kind
from unskew.core.types import Engine, ImageSet, Local
from unskew.data.arrays import image_set_from
from unskew.data.population import Partition, check_clients
from unskew.engines import EngineSetup
from unskew.round.algorithm import Algorithm, Named, compose
from unskew.runs.config import FROM_PYTHON, Config, from_python

Factory = Callable[..., nn.Module]  # (shape, classes) -> the network

PLAIN = (int, float, bool, str, type(None))  # values that a description spells out


@dataclass(frozen=True, eq=False)
class Nodes:
    """A federation whose images stay at its nodes: the clients' sizes, and the engine that reaches them."""

    partition: Partition  # examples are numbered client by client; the server does not know their labels
    open_engine: Callable[[EngineSetup], Engine]


@dataclass(frozen=True, eq=False)
class PythonValues:
    """The options that have no text of their own; None if the configuration has one."""

    data: ImageSet | None = None
    model: Factory | None = None
    method: Algorithm | tuple[str | Callable[..., Any], ...] | None = None
    partition: Partition | npt.NDArray[np.int64] | None = None
    nodes: Nodes | None = None

    @property
    def crosses(self) -> bool:
        """Whether another process can rebuild them; data and partitions go through shared memory."""
        return self.model is None and self.method is None


def split_values(options: Mapping[str, Any]) -> tuple[dict[str, Any], PythonValues]:
    """The options with a text for every value, and the values that no text can replace."""
    texts, values = dict(options), dict[str, Any]()
    for name, describe in (("data", _data), ("model", _model), ("method", _method), ("partition", _partition)):
        if not isinstance(value := options.get(name), str | PathLike | None):
            texts[name], values[name] = describe(value)
    if not isinstance(engine := options.get("engine"), str | None):
        texts["engine"] = import_name(engine)
        if texts["engine"] is None:
            raise UserError(
                f"engine must be a name, or an importable function that takes an EngineSetup, not {engine!r}"
            )
    return texts, PythonValues(**values)


def match_values(values: Mapping[str, Any], config: Config) -> PythonValues:
    """The values for a run that has begun; their descriptions must match those in its configuration."""
    texts, objects = split_values(values)
    for name, text in texts.items():
        before = getattr(config, name)
        if text not in (None, before):
            hint = "pass that, or start another run"
            raise UserError(f"{name} is {text!r}, but the run was started with {before!r}; {hint}")
    return objects


def require_values(values: PythonValues, config: Config, names: Iterable[str]) -> None:
    """Refuse a configuration that only describes one of these options if its value was not passed."""
    for name in names:
        text = getattr(config, name)
        if from_python(text) and getattr(values, name) is None:
            value = text.removeprefix(FROM_PYTHON)
            raise UserError(f"{name} was passed from Python ({value}); pass it again as {name}=…")


def parse_method_value(values: PythonValues, method: str) -> tuple[str, Callable[[Local], Algorithm]]:
    """The method's canonical spelling, and a function from the clients' training settings to the algorithm."""
    algorithm = values.method
    if isinstance(algorithm, Algorithm):
        own, standard = vars(algorithm.local), vars(Local())
        changed = {name: value for name, value in own.items() if value != standard[name]}
        return method, lambda local: replace(algorithm, local=replace(local, **changed))
    if algorithm is None:
        named = methods.parse_methods(method)
        method = " + ".join(part.name for part in named)
    else:
        named = []
        for part in algorithm:
            if isinstance(part, str):
                named += methods.parse_methods(part)
            else:  # a method takes the algorithm; a function without required parameters returns a method
                named.append(Named(describe_function(part), part if methods.required_parameters(part) else part()))
    return method, lambda local: compose(named, Algorithm(local=local))


def import_name(function: Any) -> str | None:
    """``package.module:function`` if another process can import the function by that name, otherwise None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return None
    try:
        same = getattr(importlib.import_module(module), name, None) is function
    except Exception:  # noqa: BLE001  a module may raise anything when it is imported
        return None
    return f"{module}:{name}" if same else None


def describe_function(value: Any, depth: int = 4) -> str:
    """A value's name with the plain values in its fields, partial, closure or defaults: the same text in every run."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(describe_function(part, depth) for part in value)})"
    name, knobs = type(value).__qualname__, dict[str, Any]()
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: (getattr(value, part.name), part.default) for part in fields(value)}
        knobs = {name: own for name, (own, default) in parts.items() if own != default}
    elif isinstance(value, functools.partial):
        name = describe_function(value.func)
        knobs = {str(index): argument for index, argument in enumerate(value.args)} | value.keywords
    else:
        module = getattr(value, "__module__", None) or type(value).__module__
        name = f"{module}.{getattr(value, '__qualname__', None) or name}"
        with suppress(TypeError, ValueError):  # not a Python function, or it captures what is not yet assigned
            defaults = {name: part.default for name, part in inspect.signature(value).parameters.items()}
            knobs = {**inspect.getclosurevars(value).nonlocals, **defaults}
    texts = {name: describe_function(knob, depth - 1) for name, knob in sorted(knobs.items()) if depth}
    shown = [f"{name}={text}" for name, text in texts.items() if isinstance(knobs[name], PLAIN) or "(" in text]
    return f"{name}({', '.join(shown)})" if shown else name


def _data(value: Any) -> tuple[str, ImageSet | None]:
    if callable(value) and (name := import_name(value)):
        return name, None
    images = image_set_from(value, name="data")
    if not isinstance(value, ImageSet):
        images = replace(images, name=type(value).__name__)
    _, height, width = images.shape
    sizes = f"{len(images.train):,} train and {len(images.test):,} test images of {width}x{height}"
    return f"{FROM_PYTHON}{images.name}, {sizes}", images


def _model(value: Any) -> tuple[str, Factory | None]:
    if isinstance(value, nn.Module) or not callable(value):
        needed = "a name, or a function from (shape, classes) to an nn.Module"
        raise UserError(f"model must be {needed}, not {a_kind(value)}")
    name = import_name(value)
    return (name, None) if name else (FROM_PYTHON + describe_function(value), value)


def _method(value: Any) -> tuple[str, Any]:
    if isinstance(value, Algorithm):
        return FROM_PYTHON + describe_function(value), value
    parts = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not parts or not all(isinstance(part, str) or callable(part) for part in parts):
        raise UserError(f"method must be an Algorithm, or names and functions that take one, not {value!r}")
    names = [part if isinstance(part, str) else _method_name(part) for part in parts]
    if None not in names:
        return " + ".join(name for name in names if name), None
    texts = [name or describe_function(part) for name, part in zip(names, parts, strict=True)]
    return FROM_PYTHON + " + ".join(texts), parts


def _partition(value: Any) -> tuple[str, Any]:
    if isinstance(value, Partition):
        check_clients(value.clients, len(value.client), "partition")
        return FROM_PYTHON + value.scheme.removeprefix(FROM_PYTHON), value
    if callable(value) and (name := import_name(value)):
        return name, None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        needed = "an importable function, or one client number per training example (-1: no client)"
        raise UserError(f"partition must be {needed}, not an array of {array.dtype} with shape {array.shape}")
    check_clients(int(array.max(initial=0)) + 1, len(array), "partition")
    return f"{FROM_PYTHON}array of {len(array):,} client numbers", array.astype(np.int64)


def _method_name(function: Callable[..., Any]) -> str | None:
    """The text from which another process can parse the same method, if there is one."""
    if isinstance(function, Finisher):
        with suppress(UserError):
            return function.text if len(methods.parse_methods(function.named().text)) == 1 else None
        return None
    name = import_name(function)
    return name if methods.takes_algorithm(function) or not methods.required_parameters(function) else None
