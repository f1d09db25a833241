"""The exceptions: mistakes that a user can correct, failures of storage, failures inside a client."""

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any

LONGEST_NAME = 100  # characters; a longer name is like no known one, and comparing it takes long


class UserError(Exception):
    """A mistake that the user can correct: the message says what was given, what is wanted, what to do."""


class Missing(UserError):
    """Something that a measure needs is missing; the message says what and why."""


class StorageFailure(UserError):
    """The clients' saved states cannot be written: the machine failed, so no client is skipped for it."""


class LostMemory(StorageFailure):
    """A client's saved state is missing or damaged: resuming cannot help."""


class ClientFailure(Exception):
    """A client's work raised, or gave NaN or infinity; the message names client, round, job and seed."""


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
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"


def whole_number(value: Any, name: str, least: int, most: int) -> int:
    """The value as an int, NumPy's whole numbers too; a UserError for another type or a number outside the limits."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most:
        return int(value)
    raise UserError(f"{name}={value!r}: give a whole number from {least:,} to {most:,}")
