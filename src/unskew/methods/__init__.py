"""The registry of methods, and parsing ``"fedavgm(0.9) + fedprox(0.01)"`` into an Algorithm."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from unskew.calibration import CALIBRATIONS
from unskew.core import language
from unskew.core.errors import UserError, nearest
from unskew.core.plugins import load_function
from unskew.core.types import Local
from unskew.methods.adaptive import fedadagrad, fedadam, fedyogi
from unskew.methods.attendance import absent, available
from unskew.methods.centralised import centralised
from unskew.methods.classifier import clsnorm, clsprox
from unskew.methods.fedavg import fedavg
from unskew.methods.fedavgm import fedavgm
from unskew.methods.feddecorr import feddecorr
from unskew.methods.feddyn import feddyn
from unskew.methods.fedetf import fedetf
from unskew.methods.fedir import fedir
from unskew.methods.fednova import fednova
from unskew.methods.fedntd import fedntd
from unskew.methods.fedprox import fedprox
from unskew.methods.fedvc import fedvc
from unskew.methods.margins import balanced, fedlc, fedrs
from unskew.methods.moon import moon
from unskew.methods.protections import private, private_updates, rounded, secure, withhold
from unskew.methods.prototypes import fedeccr, prototypes
from unskew.methods.robust import bounded, median, trimmed
from unskew.methods.scaffold import scaffold
from unskew.methods.sharpness import fedlesam, fedsam
from unskew.round.algorithm import AFTER_TRAINING, Algorithm, Method, Named, claimed_slots, compose

TRAINING = (
    *(fedavg, fedprox, moon, fedntd, feddecorr, clsprox, clsnorm, fedetf, prototypes),  # the loss
    *(fedlc, fedrs, balanced, fedir),  # margins and weights
    *(fedvc, available, absent),  # who takes part
    *(fedsam, fedlesam, scaffold, fednova, feddyn),  # gradients and updates
    *(fedavgm, fedadam, fedyogi, fedadagrad, trimmed, median, bounded, centralised),  # the server
)
METHODS: dict[str, Callable[..., Method]] = {
    **{build.__name__: build for build in TRAINING},
    **CALIBRATIONS,  # a Finisher is a method too
    **{build.__name__: build for build in (fedeccr, withhold, secure, private)},
    "private-updates": private_updates,
    "rounded": rounded,
}

RELEASING = {"private": 3, "private-updates": 4}  # the number of knobs before ``release``
ON_FEATURES = ("moon", "feddecorr", "fedetf", "prototypes", "fedeccr")  # their terms act only on the features


def parse_method(source: str, local: Local | None = None, base: Algorithm | None = None) -> Algorithm:
    """The algorithm of a method's text, on top of ``base`` or of FedAvg with these local settings.

    Methods from other packages are written ``package.module:function(…)``.
    """
    return compose(parse_methods(source), base or Algorithm(local=local or Local()))


def with_release(source: str) -> str:
    """The text with ``release=true`` where ``release`` is not given: in a federation others know the seed."""
    calls = []
    for call in language.parse_calls(source, "method"):
        before = RELEASING.get(call.name)
        if before is not None and "release" not in call.knobs and len(call.values) <= before:
            call = replace(call, knobs={**call.knobs, "release": True})
        calls.append(str(call))
    return " + ".join(calls)


def refuse_on_frozen_features(source: str) -> None:
    """Reject methods that act on the features, for a run that trains only the classifier."""
    for call in language.parse_calls(source, "method"):
        if call.name in ON_FEATURES:
            conflict = f"{call.name} has no effect with --train classifier: it acts on the features, which are frozen"
            raise UserError(f'{conflict}; train more layers, such as --train "last(2)", or leave out {call.name}')


def parse_calibrations(source: str) -> Algorithm:
    """The calibrations in a text and the protections of their statistics; methods that change training are rejected."""
    base = Algorithm()
    algorithm = parse_method(source, base=base)
    if not algorithm.finish or not set(claimed_slots(base, algorithm)) <= {*AFTER_TRAINING}:
        raise UserError(f"{source!r}: give only calibrations ({', '.join(CALIBRATIONS)}) and their protections")
    return algorithm


def parse_methods(source: str) -> list[Named]:
    """The methods in a text with their canonical spelling; a function from another package may be a method itself."""
    methods, names = [], set()
    for call in language.parse_calls(source, "method"):
        if call.name in names:
            raise call.error(f"method {call.name} is given twice; give it once")
        names.add(call.name)
        build = find_method(call.name)
        if build is None:
            raise call.error(f"no method is called {call.name!r}; {nearest(call.name, METHODS)}")
        itself = not call.values and not call.knobs and takes_algorithm(build)
        method = build if itself else language.apply(call, build, "method")
        methods.append(Named(getattr(method, "spelling", str(call)), method))
    return methods


def find_method(name: str) -> Callable[..., Any] | None:
    """The function behind a method's name or ``package.module:function``; None if no method has that name."""
    return load_function(name, "method") if ":" in name else METHODS.get(name)


def required_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The function's parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [knob for knob in parameters if knob.default is knob.empty and knob.kind not in many]


def takes_algorithm(function: Callable[..., Any]) -> bool:
    """Whether a function is a method itself: its only required parameter is an Algorithm."""
    needed = required_parameters(function)
    return len(needed) == 1 and (needed[0].name == "algorithm" or needed[0].annotation in (Algorithm, "Algorithm"))


GROUPS = (
    "Training: how clients train",
    "Server: how the model is updated",
    "Calibration: a new classifier after the last round",
    "Privacy: how what clients send is protected",
)


@dataclass(frozen=True)
class MethodDescription:
    """A method's docstring in parts, its knobs, and the slots that it fills."""

    name: str
    call: str  # with its knobs at their defaults
    changes: str
    body: str  # formula and details
    knobs: tuple[str, ...]  # "mu: float = 0.01  The weight of the term."
    slots: str
    group: str  # one of GROUPS
    reference: str


def describe() -> list[MethodDescription]:
    """Describe every method in the registry."""
    return [describe_method(name, build) for name, build in METHODS.items()]


def describe_method(name: str, function: Callable[..., Any]) -> MethodDescription:
    """Describe a method, which may be a function from Algorithm to Algorithm or one that returns such a function."""
    itself, slots = takes_algorithm(function), list[str]()
    if itself or not required_parameters(function):
        method, base = function if itself else function(), Algorithm()
        changed = method(base) if callable(method) else None
        if not isinstance(changed, Algorithm):
            raise UserError(f"{name} is not a method: it must return a function from Algorithm to Algorithm")
        slots = claimed_slots(base, changed)
    parameters = [] if itself else list(inspect.signature(function).parameters.values())
    doc, _, reference = (inspect.getdoc(function) or "").replace("``", "").partition("Reference:")
    doc, _, section = doc.partition("Parameters\n----------\n")
    first, _, body = doc.strip().partition("\n")
    meanings = {
        knob: " ".join(meaning.split())
        for knobs, meaning in re.findall(r"^(\w[\w, ]*)\n((?:    .*\n?)+)", section, re.MULTILINE)
        for knob in knobs.split(", ")
    }
    return MethodDescription(
        name=name,
        call=f"{name}({', '.join(map(_spell, parameters))})" if parameters else name,
        changes=first or "No description.",
        body=body.strip(),
        knobs=tuple(f"{knob}  {meanings.get(knob.name, '')}".rstrip() for knob in parameters),
        slots=", ".join(slots),
        group=_choose_group(set(slots)),
        reference=" ".join(reference.split()),
    )


def _spell(knob: inspect.Parameter) -> str:
    if knob.default is knob.empty:
        return f"{knob.name}=…"
    plain = isinstance(knob.default, int | float | bool | str)
    return f"{knob.name}={language.spell(knob.default) if plain else repr(knob.default)}"


def _choose_group(slots: set[str]) -> str:
    training, server, calibration, privacy = GROUPS
    if "finish" in slots:
        return calibration
    if (slots and slots <= {"withhold", "secure", "private", "exchange"}) or "mechanism" in slots:
        return privacy
    return server if slots in ({"server"}, {"exchange", "aggregate"}) else training
