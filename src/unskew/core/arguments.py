"""Arguments of public functions checked by kind: a wrong type is one clear sentence, before anything is done.

@accepts(path=PATH, workers=optional(COUNT))
def load(path, *, workers=None): ...
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from typing import Any, ParamSpec, TypeVar

from unskew.core.errors import UserError, a_kind

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True)
class Kind:
    """What an argument may be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


PATH = Kind(
    "a path such as runs/a",
    lambda value: isinstance(value, str | PathLike) and str(value).strip("\0") != "" and "\0" not in str(value),
)
TEXT = Kind("a text", lambda value: isinstance(value, str))
COUNT = Kind("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool))
NUMBER = Kind("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool))
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
FUNCTION = Kind("a function", callable)
SEVERAL = Kind(
    "a list",
    lambda value: isinstance(value, Iterable) and not isinstance(value, bytes | dict) and not hasattr(value, "ndim"),
)


def optional(kind: Kind) -> Kind:
    """The same kind, or None."""
    return Kind(f"{kind.words}, or None", lambda value: value is None or kind.fits(value))


def accepts(**kinds: Kind) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """A decorator: these parameters must be of these kinds; each of ``*values`` is checked by itself."""

    def wrap(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        signature = inspect.signature(function)
        many = {name for name, each in signature.parameters.items() if each.kind is each.VAR_POSITIONAL}

        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            given = signature.bind(*args, **kwargs).arguments
            for name, kind in kinds.items():
                for value in given.get(name, ()) if name in many else [given[name]] if name in given else []:
                    if not kind.fits(value):
                        raise UserError(f"{function.__name__}: {name} must be {kind.words}, this is {_shown(value)}")
            return function(*args, **kwargs)

        return checked

    return wrap


def _shown(value: Any) -> str:
    words = repr(value) if isinstance(value, str | bytes | int | float | type(None)) else a_kind(value)
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}…"
