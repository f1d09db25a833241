"""The table of methods, and the way from a text such as ``"fedavgm(0.9) + fedprox(0.01)"`` to an Algorithm."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields

from unskew.core import text
from unskew.core.errors import nearest
from unskew.core.plugins import load_function
from unskew.core.types import Local
from unskew.methods.adaptive import fedadagrad, fedadam, fedyogi
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
from unskew.methods.protections import private, secure, withhold
from unskew.methods.prototypes import prototypes
from unskew.methods.scaffold import scaffold
from unskew.round.algorithm import Algorithm, Method, Named, compose

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
}


@dataclass(frozen=True)
class Description:
    """A method as ``unskew methods`` shows it."""

    name: str
    changes: str
    slots: str
    knobs: str
    reference: str


def parse_method(source: str, local: Local | None = None, base: Algorithm | None = None) -> Algorithm:
    """The algorithm that a method's text stands for, on top of FedAvg with these local settings, or of ``base``.

    Methods of other packages are written ``package.module:function(…)``.
    """
    return compose(named_methods(source), base or Algorithm(local=local or Local()))


def named_methods(source: str) -> list[Named]:
    """The methods of a text, each with its own part of the text as its name."""
    methods = []
    seen = set()
    for call in text.parse_calls(source, "method"):
        if call.name in seen:
            raise text.complain(source, call.start, f"method {call.name} is given twice; give it once")
        seen.add(call.name)
        build = load_function(call.name, "method") if ":" in call.name else METHODS.get(call.name)
        if build is None:
            hint = nearest(call.name, METHODS)
            raise text.complain(source, call.start, f"no method is called {call.name!r}; {hint}")
        methods.append(Named(str(call), text.apply(call, build, "method")))
    return methods


def plain_spelling(source: str) -> str:
    """The text in its plainest spelling."""
    return " + ".join(map(str, text.parse_calls(source, "method")))


def describe() -> list[Description]:
    """Every method: what it changes, in which slots, its knobs with defaults, its reference."""
    rows = []
    for name, build in METHODS.items():
        doc = inspect.getdoc(build) or ""
        knobs = [f"{p.name}={text.spell(p.default)}" for p in inspect.signature(build).parameters.values()]
        reference = " ".join(doc.partition("Reference:")[2].split())
        rows.append(Description(name, doc.splitlines()[0], ", ".join(_slots(build())), ", ".join(knobs), reference))
    return rows


def _slots(method: Method) -> list[str]:
    """The slots of the algorithm that a method fills, with its knobs at their defaults."""
    base = Algorithm()
    changed = method(base)
    return [slot.name for slot in fields(Algorithm) if getattr(changed, slot.name) is not getattr(base, slot.name)]
