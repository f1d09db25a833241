"""A method described from its signature and docstring, for people."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unskew.core import text
from unskew.core.errors import UserError
from unskew.methods import METHODS, required, takes_algorithm
from unskew.round.algorithm import Algorithm, Method, claimed_slots

PROTECTIONS = {"withhold", "secure", "private", "mechanism", "exchange"}  # slots that protect what clients send


@dataclass(frozen=True)
class Group:
    """Methods of one kind, under a title."""

    name: str
    title: str


GROUPS = (
    Group("training", "Training: what the clients do"),
    Group("server", "Server: how it moves"),
    Group("calibration", "Calibration: a new classifier after the last round"),
    Group("privacy", "Privacy: protection of what clients send"),
)


@dataclass(frozen=True)
class Description:
    """All about a method: its first sentence, the rest of its docstring, its knobs, the slots that it fills."""

    name: str
    call: str  # with its knobs at their defaults
    changes: str
    body: str  # formula and details
    knobs: tuple[str, ...]  # "mu: float = 0.01"
    slots: str
    group: Group
    reference: str


def describe() -> list[Description]:
    """Every method of the table."""
    return [describe_method(name, build) for name, build in METHODS.items()]


def describe_method(name: str, function: Callable[..., Any]) -> Description:
    """The description of a method, which may be a function from Algorithm to Algorithm or one that gives such."""
    itself = takes_algorithm(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is not a method: it does not say which knobs it takes") from error
    parameters = [] if itself else list(signature.parameters.values())
    doc, _, reference = (inspect.getdoc(function) or "").partition("Reference:")
    first, _, body = doc.strip().partition("\n")
    slots = filled_slots(function if itself else function()) if itself or not required(function) else []
    return Description(
        name=name,
        call=f"{name}({', '.join(map(_spelled, parameters))})" if parameters else name,
        changes=first.replace("``", "") or "It has no docstring.",
        body=body.strip().replace("``", ""),
        knobs=tuple(str(each) for each in parameters),
        slots=", ".join(slots),
        group=_group(set(slots)),
        reference=" ".join(reference.split()),
    )


def filled_slots(method: Method) -> list[str]:
    """The slots of the algorithm that a method fills."""
    base = Algorithm()
    changed = method(base) if callable(method) else None
    if not isinstance(changed, Algorithm):
        raise UserError("this is not a method: it must return a function from Algorithm to Algorithm")
    return claimed_slots(base, changed)


def _spelled(knob: inspect.Parameter) -> str:
    if knob.default is knob.empty:
        return f"{knob.name}=…"
    plain = isinstance(knob.default, int | float | bool | str)
    return f"{knob.name}={text.spell(knob.default) if plain else repr(knob.default)}"


def _group(slots: set[str]) -> Group:
    training, server, calibration, privacy = GROUPS
    if "finish" in slots:
        return calibration
    if (slots and slots <= PROTECTIONS) or "mechanism" in slots:
        return privacy
    return server if slots == {"server"} else training
