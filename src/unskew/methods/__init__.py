"""The table of methods, and the way from a text such as ``"fedavgm(0.9) + fedprox(0.01)"`` to an Algorithm."""

import inspect
from collections.abc import Callable
from typing import Any

from unskew.core import text
from unskew.core.errors import UserError, nearest
from unskew.core.plugins import load_function
from unskew.core.types import Local
from unskew.methods.adaptive import fedadagrad, fedadam, fedyogi
from unskew.methods.attendance import absent, available
from unskew.methods.centralised import centralised
from unskew.methods.classifier import clsnorm, clsprox
from unskew.methods.fedavgm import fedavg, fedavgm
from unskew.methods.feddyn import feddyn
from unskew.methods.fedir import fedir
from unskew.methods.fednova import fednova
from unskew.methods.fedprox import fedprox
from unskew.methods.fedvc import fedvc
from unskew.methods.finishers import FINISHERS
from unskew.methods.margins import balanced, fedlc, fedrs
from unskew.methods.moon import moon
from unskew.methods.protections import private, private_updates, rounded, secure, withhold
from unskew.methods.prototypes import prototypes
from unskew.methods.scaffold import scaffold
from unskew.round.algorithm import Algorithm, Method, Named, claimed_slots, compose

METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "moon": moon,
    "clsprox": clsprox,
    "clsnorm": clsnorm,
    "prototypes": prototypes,
    "fedlc": fedlc,
    "fedrs": fedrs,
    "balanced": balanced,
    "fedir": fedir,
    "fedvc": fedvc,
    "available": available,
    "absent": absent,
    "scaffold": scaffold,
    "fednova": fednova,
    "feddyn": feddyn,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
    "centralised": centralised,
    **FINISHERS,
    "withhold": withhold,
    "secure": secure,
    "private": private,
    "private-updates": private_updates,
    "rounded": rounded,
}

ON_FEATURES = ("moon", "prototypes", "fedeccr")  # whose terms act on the features and on nothing behind them
NEED_NO_TRAINING = ("finish", "withhold", "secure", "private")  # slots


def parse_method(source: str, local: Local | None = None, base: Algorithm | None = None) -> Algorithm:
    """The algorithm that a method's text describes, on top of FedAvg with these local settings, or of ``base``.

    Methods of other packages are written ``package.module:function(…)``.
    """
    return compose(parse_methods(source), base or Algorithm(local=local or Local()))


def refuse_on_frozen_features(source: str) -> None:
    """Refuse methods that act on the features, for a run that trains the classifier alone."""
    for call in text.parse_calls(source, "method"):
        if call.name in ON_FEATURES:
            raise UserError(
                f"{call.name} with --train classifier: it acts on the features, and these are frozen; train more "
                f'layers, such as --train "last(2)", or leave {call.name} out'
            )


def parse_calibrations(source: str) -> Algorithm:
    """The calibrations of a text and what protects their statistics; methods that change the training are refused."""
    base = Algorithm()
    algorithm = parse_method(source, base=base)
    for slot in claimed_slots(base, algorithm):
        if slot not in NEED_NO_TRAINING:
            raise UserError(f"{source!r} changes the training ({slot}); name only calibrations")
    if not algorithm.finish:
        raise UserError(f"{source!r} names no calibration; give ccvr, uscc, lda, ridge or oracle (unskew methods)")
    return algorithm


def parse_methods(source: str) -> list[Named]:
    """The methods of a text, each with its plainest spelling; a function of other packages may be a method itself."""
    methods = []
    seen = set()
    for call in text.parse_calls(source, "method"):
        if call.name in seen:
            raise text.complain(source, call.start, f"method {call.name} is given twice; give it once")
        seen.add(call.name)
        build = find_method(call.name)
        if build is None:
            hint = nearest(call.name, METHODS)
            raise text.complain(source, call.start, f"no method is called {call.name!r}; {hint}")
        itself = not call.values and not call.knobs and takes_algorithm(build)
        method = build if itself else text.apply(call, build, "method")
        methods.append(Named(getattr(method, "spelling", str(call)), method))
    return methods


def find_method(name: str) -> Callable[..., Any] | None:
    """The function behind a method's name or ``package.module:function``; None where no method has that name."""
    return load_function(name, "method") if ":" in name else METHODS.get(name)


def required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a call of the function must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each for each in parameters if each.default is each.empty and each.kind not in many]


def takes_algorithm(function: Callable[..., Any]) -> bool:
    """Whether a function is a method itself: all that it needs is an Algorithm."""
    needed = required(function)
    return len(needed) == 1 and (needed[0].name == "algorithm" or needed[0].annotation in (Algorithm, "Algorithm"))
