"""Options passed from Python as objects: data sets, networks, methods, partitions; and their text in config.toml.

A function that another process can import becomes ``package.module:function``. Any other object stays as it is, and
the configuration contains a description that begins with ``python:``.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
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
from unskew.runs.config import FROM_PYTHON, Config

Factory = Callable[..., nn.Module]  # (shape, classes) -> the network

PLAIN = (int, float, bool, str, type(None))  # values that a description spells out


@dataclass(frozen=True, eq=False)
class Nodes:
    """A federation whose images stay at its nodes: the clients' sizes, and the engine that reaches them."""

    partition: Partition  # examples are numbered client by client; the server does not know their labels
    open_engine: Callable[[EngineSetup], Engine]
    name: str  # of the engine


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
    describe = {"data": _data, "model": _model, "method": _method, "partition": _partition, "engine": _engine}
    for name in describe:
        value = options.get(name)
        if value is not None and not isinstance(value, str | PathLike):
            texts[name], values[name] = describe[name](value)
    values.pop("engine", None)
    return texts, PythonValues(**values)


def match_values(values: Mapping[str, Any], config: Config) -> PythonValues:
    """The values for a run that has begun; their descriptions must match those in its configuration."""
    texts, objects = split_values(values)
    for name, text in texts.items():
        if text is not None and text != (before := getattr(config, name)):
            raise UserError(
                f"{name} is {text!r}, but the run was started with {before!r}; pass that, or start another run"
            )
    return objects


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


def describe_function(value: Any) -> str:
    """A function's name with the plain values in its partial or closure: the same text in every run."""
    if isinstance(value, functools.partial):
        arguments = {str(index): argument for index, argument in enumerate(value.args)} | value.keywords
        text = describe_function(value.func)
        knobs = {name: argument for name, argument in arguments.items() if isinstance(argument, PLAIN)}
    else:
        name = getattr(value, "__qualname__", None) or type(value).__qualname__
        text, knobs = f"{getattr(value, '__module__', None) or type(value).__module__}.{name}", dict(_captured(value))
    return f"{text}({', '.join(f'{name}={knob!r}' for name, knob in knobs.items())})" if knobs else text


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
        raise UserError(
            f"model must be a name, or a function from (shape, classes) to an nn.Module, not {a_kind(value)}"
        )
    if name := import_name(value):
        return name, None
    return FROM_PYTHON + describe_function(value), value


def _method(value: Any) -> tuple[str, Any]:
    if isinstance(value, Algorithm):
        base = Algorithm()
        slots = {slot.name: getattr(value, slot.name) for slot in fields(Algorithm)}
        changed = [f"{name}={_value_text(slot)}" for name, slot in slots.items() if slot != getattr(base, name)]
        return f"{FROM_PYTHON}Algorithm({', '.join(changed)})", value
    parts = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not parts:
        raise UserError("method is an empty list; pass a text such as fedavg, or a function")
    for part in parts:
        if not isinstance(part, str) and not callable(part):
            raise UserError(f"method must be an Algorithm, or texts and functions of an Algorithm, not {part!r}")
    names = [part if isinstance(part, str) else _method_name(part) for part in parts]
    if None not in names:
        return " + ".join(name for name in names if name), None
    texts = [name or describe_function(part) for name, part in zip(names, parts, strict=True)]
    return FROM_PYTHON + " + ".join(texts), parts


def _partition(value: Any) -> tuple[str, Any]:
    if isinstance(value, Partition):
        check_clients(value.clients, len(value.client), "partition")
        return FROM_PYTHON + value.scheme.removeprefix(FROM_PYTHON), value
    if callable(value):
        if name := import_name(value):
            return name, None
        raise UserError("partition: this function cannot be imported by name; pass the array that it returns")
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            "partition must have one client number per training example, or -1 for no client, not an array of "
            f"{array.dtype} with shape {array.shape}"
        )
    check_clients(int(array.max(initial=0)) + 1, len(array), "partition")
    return f"{FROM_PYTHON}array of {len(array):,} client numbers", array.astype(np.int64)


def _engine(value: Any) -> tuple[str, None]:
    if callable(value) and (name := import_name(value)):
        return name, None
    raise UserError(f"engine must be a name, or an importable function of an EngineSetup, not {value!r}")


def _method_name(function: Callable[..., Any]) -> str | None:
    """The text from which another process can parse the same method, if there is one."""
    if isinstance(function, Finisher):
        with suppress(UserError):
            return function.text if len(methods.parse_methods(function.named().text)) == 1 else None
        return None
    name = import_name(function)
    return name if methods.takes_algorithm(function) or not methods.required_parameters(function) else None


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_value_text, value))})"
    if isinstance(value, PLAIN):
        return repr(value)
    if is_dataclass(value):
        parts = [
            f"{part.name}={_value_text(getattr(value, part.name))}"
            for part in fields(value)
            if getattr(value, part.name) != part.default
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    return describe_function(value)


def _captured(value: Any, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """The plain values in a function's closure and defaults, and in those of the functions it captures."""
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is None or depth == 0:
        return
    cells = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    cells |= dict(zip(code.co_varnames[first : code.co_argcount], defaults, strict=True)) | (
        function.__kwdefaults__ or {}
    )
    for name, content in sorted(cells.items()):
        if isinstance(content, PLAIN):
            yield name, content
        else:
            yield from ((f"{name}.{inner}", captured) for inner, captured in _captured(content, depth - 1))
