"""What goes wrong by a user's hand, said in one line, and what goes wrong inside a client."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any


class UserError(Exception):
    """A mistake that its user can mend: the message says what was given, what was wanted, what to do."""


class Missing(UserError):
    """What a measure needs is not at hand; the message says what and why."""


class StorageFailure(UserError):
    """What clients remember cannot be written: the machine's failure, and no client is skipped for it."""


class LostMemory(StorageFailure):
    """What clients remember is gone or damaged: nothing that resuming could mend."""


class ClientFailure(Exception):
    """A client's work raised, or gave NaN or infinity; the message names client, round, job and seed."""


def nearest(name: str, names: Iterable[str]) -> str:
    """A closing remark for an unknown name: the nearest known one, or all of them."""
    known = list(names)
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"


def imported(name: str, what: str) -> Callable[..., Any]:
    """``package.module:function``, for methods and networks that live outside this package."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a file beside the user counts, after everything that is installed
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module may raise anything when it is imported
        raise UserError(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UserError(f"{what} {name!r} is not a function")
    result: Callable[..., Any] = found
    return result


def extra(module: str, name: str = "privacy") -> Any:
    """A module of the packages that only the extra of that name needs, imported where it is used."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f'{module.split(".")[0]} is not installed; pip install "unskew[{name}]"') from error
