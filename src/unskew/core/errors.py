"""The exceptions, the parts of their messages, and ``accepts``, which checks the arguments of public functions."""

import functools
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

LONGEST_NAME = 100  # characters; a longer name resembles no known one, and comparing it is slow


class UserError(Exception):
    """A mistake that the user can correct: the message states what was given, what is expected, what to do."""


class Missing(UserError):
    """Something that a measure needs is missing; the message names it and the reason."""


class MissingExtra(UserError):
    """A package that comes with one of our extras is not installed."""


class StorageFailure(UserError):
    """Saved client states cannot be written: the machine failed, so no client is skipped for it."""


class LostMemory(StorageFailure):
    """A client's saved state is missing or damaged: resuming cannot help."""


class Ended(BaseException):
    """The process was asked to exit with this code; handlers for errors in plug-ins do not catch it."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
        self.code = code


class ClientFailure(Exception):
    """A client's work failed or returned NaN or infinity; ``skippable``: the run can continue without this client."""

    def __init__(self, message: str, *, skippable: bool = False) -> None:
        super().__init__(message)
        self.skippable = skippable


LIBRARIES = ("unskew", "torch", "torchvision", "numpy", "scipy", "sklearn", "PIL", "msgspec", "pyarrow", "flwr")
IN_PLUGIN = "\n  File "  # begins the location in a plug-in


def describe_error(error: BaseException) -> str:
    """An error for a message, with file, line and code if it passed through a plug-in."""
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
    """A value's repr, shortened for a message."""
    try:
        shown = repr(value[: most + 1] if isinstance(value, str) else value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= most + 2 else f"{shown[:most]}…"


def a_kind(value: object) -> str:
    """A value's type for a message: "an int", "a list", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or the list of all."""
    known = list(names)
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.5) if len(name) <= LONGEST_NAME else []
    return f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(known)}"


def whole_number(value: Any, name: str, least: int, most: int) -> int:
    """The value, possibly a NumPy integer, as an int within the limits; else a UserError."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most:
        return int(value)
    raise UserError(f"{name}={value!r}: give a whole number from {least:,} to {most:,}")


Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def _names_file(value: Any) -> bool:
    with suppress(Exception):  # a caller's class may raise anything
        name = fspath(value)
        return isinstance(name, str) and name != "" and "\0" not in name
    return False


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, bytes | dict) and not hasattr(value, "ndim")


_KINDS: list[tuple[str, Callable[[Any], bool], list[set[Any]]]] = [  # name, test, annotations
    ("a path such as runs/a", _names_file, [{str, Path}, {str, PathLike}]),
    ("a list", _is_list, [{Sequence}, {Iterable}, {str, Sequence}, {str, Iterable}]),
    ("a string", lambda value: isinstance(value, str), [{str}]),
    ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool), [{int}]),
    ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool), [{float}]),
    ("True or False", lambda value: isinstance(value, bool), [{bool}]),
    ("a function", callable, [{Callable}]),
]


def accepts(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Decorate a function to check its arguments, and every one of ``*values``, against their annotations."""
    signature = inspect.signature(function)
    tests: dict[str, tuple[str, Callable[[Any], bool], bool]] = {}
    for name, parameter in signature.parameters.items():
        annotation = parameter.annotation
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        types, optional = {get_origin(member) or member for member in members}, NoneType in members
        for wanted, fits, annotations in _KINDS:
            if types - {NoneType} in annotations:
                tests[name] = f"{wanted}, or None" if optional else wanted, fits, optional

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        arguments = signature.bind(*args, **kwargs).arguments
        for name, (wanted, fits, optional) in tests.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for value in arguments.get(name, ()) if several else [arguments[name]] if name in arguments else []:
                if not fits(value) and not (optional and value is None):
                    plain = isinstance(value, str | bytes | int | float | NoneType)
                    given = brief(value, 60) if plain else a_kind(value)
                    raise UserError(f"{function.__name__}: {name} must be {wanted}, not {given}")
        return function(*args, **kwargs)

    return checked
