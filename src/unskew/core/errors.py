"""The exceptions: mistakes that a user can correct, failures of storage, failures inside a client."""

import functools
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

LONGEST_NAME = 100  # characters; a longer name is like no known one, and comparing it takes long


class UserError(Exception):
    """A mistake that the user can correct: the message states what was given, what is expected, what to do."""


class Missing(UserError):
    """Something that a measure needs is missing; the message says what and why."""


class MissingExtra(UserError):
    """A package is not installed that only one of our extras needs."""


class StorageFailure(UserError):
    """The clients' saved states cannot be written: the machine failed, so no client is skipped for it."""


class LostMemory(StorageFailure):
    """A client's saved state is missing or damaged: resuming cannot help."""


class Ended(BaseException):
    """The process was asked to end, with this exit code; no handler for errors of other people's code stops it."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
        self.code = code


class ClientFailure(Exception):
    """A client's work raised, or gave NaN or infinity; the message names client, round, job and seed.

    ``skippable``: other clients succeeded, so the run could continue without this one.
    """

    def __init__(self, message: str, *, skippable: bool = False) -> None:
        super().__init__(message)
        self.skippable = skippable


LIBRARIES = frozenset(
    ("unskew", "torch", "torchvision", "numpy", "scipy", "sklearn", "PIL", "msgspec", "pyarrow", "flwr")
)
IN_PLUGIN = "\n  File "  # how the location in a plug-in begins


def describe_error(error: BaseException) -> str:
    """An error as a message shows it, with file, line and code if a plug-in raised it or called what did."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in LIBRARIES and package not in sys.stdlib_module_names:
            location = frame.f_code.co_filename, line, frame.f_code.co_name
    if location is None or isinstance(error, UserError):
        return text
    file, line, function = location
    inside = file.startswith(os.getcwd() + os.sep)
    code = linecache.getline(file, line).strip()
    return f'{text}{IN_PLUGIN}"{os.path.relpath(file) if inside else file}", line {line}, in {function}\n    {code}'


def brief(value: object, most: int = 80) -> str:
    """A value as a message shows it: its repr, cut where it is long."""
    try:
        shown = repr(value[: most + 1] if isinstance(value, str) else value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= most + 2 else f"{shown[:most]}…"


def a_kind(value: object) -> str:
    """What a value is, for a message: "an int", "a list", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    known = list(names)
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.5) if len(name) <= LONGEST_NAME else []
    return f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(known)}"


def whole_number(value: Any, name: str, least: int, most: int) -> int:
    """The value as an int, NumPy's whole numbers too; a UserError for another type or a number outside the limits."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most:
        return int(value)
    raise UserError(f"{name}={value!r}: give a whole number from {least:,} to {most:,}")


Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True)
class Kind:
    """What an argument may be, in words and as a test."""

    name: str
    fits: Callable[[Any], bool]


def _names_file(value: Any) -> bool:
    try:
        name = fspath(value)
    except Exception:  # noqa: BLE001  whatever a class of the caller's raises
        return False
    return isinstance(name, str) and name != "" and "\0" not in name


PATH = Kind("a path such as runs/a", _names_file)
SEVERAL = Kind(
    "a list",
    lambda value: isinstance(value, Iterable) and not isinstance(value, bytes | dict) and not hasattr(value, "ndim"),
)
_KINDS: list[tuple[Kind, list[set[Any]]]] = [  # with the types of an annotation; with another it is not checked
    (PATH, [{str, Path}, {str, PathLike}]),
    (SEVERAL, [{Sequence}, {Iterable}, {str, Sequence}, {str, Iterable}]),
    (Kind("a text", lambda value: isinstance(value, str)), [{str}]),
    (Kind("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)), [{int}]),
    (Kind("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)), [{float}]),
    (Kind("True or False", lambda value: isinstance(value, bool)), [{bool}]),
    (Kind("a function", callable), [{Callable}]),
]


def accepts(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """A decorator: arguments must be what their annotations say; each of ``*values`` is checked by itself."""
    signature = inspect.signature(function)
    kinds: dict[str, tuple[Kind, bool]] = {}
    for name, parameter in signature.parameters.items():
        members = (
            get_args(parameter.annotation)
            if get_origin(parameter.annotation) in (Union, UnionType)
            else (parameter.annotation,)
        )
        types = {get_origin(member) or member for member in members if member is not NoneType}
        for kind, accepted in _KINDS:
            if types in accepted:
                kinds[name] = kind, NoneType in members

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        given = signature.bind(*args, **kwargs).arguments
        for name, (kind, optional) in kinds.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for value in given.get(name, ()) if several else [given[name]] if name in given else []:
                if not kind.fits(value) and not (optional and value is None):
                    wanted = f"{kind.name}, or None" if optional else kind.name
                    raise UserError(f"{function.__name__}: {name} must be {wanted}, not {_shown(value)}")
        return function(*args, **kwargs)

    return checked


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes | int | float | type(None)) else a_kind(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
