"""What the laws are tried on: a method by its text, a function, or an Algorithm."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from unskew import methods
from unskew.core.errors import UserError, a_kind
from unskew.core.types import Local
from unskew.round.algorithm import SHARED_SLOTS, Algorithm, Method, Named, compose

AFTER_TRAINING = ("finish", "withhold", "secure", "private")  # slots that no round looks at

Source = str | Algorithm | Callable[..., Any]


@dataclass(frozen=True)
class Candidate:
    """Methods to be composed, in order. ``text`` is what another process can parse; None: it cannot."""

    methods: tuple[Named, ...]
    text: str | None

    def __add__(self, other: "Candidate") -> "Candidate":
        text = None if self.text is None or other.text is None else f"{self.text} + {other.text}"
        return Candidate(self.methods + other.methods, text)

    @property
    def name(self) -> str:
        """As messages say it."""
        return " + ".join(named.name for named in self.methods)

    @property
    def words(self) -> tuple[str, ...]:
        """The names of its methods, without knobs."""
        return tuple(named.name.partition("(")[0] for named in self.methods)

    def algorithm(self, local: Local | None = None) -> Algorithm:
        """All of it on top of FedAvg with these local settings."""
        return compose(self.methods, Algorithm(local=local or Local()))

    def trains(self) -> bool:
        """Whether it changes anything that a round looks at."""
        base = Algorithm()
        changed = compose(self.methods, base)
        slots = [slot.name for slot in fields(Algorithm) if slot.name not in AFTER_TRAINING]
        return any(getattr(changed, slot) is not getattr(base, slot) for slot in slots)


def candidate(source: Source) -> Candidate:
    """A text, a function from Algorithm to Algorithm, a function whose knobs give one, or an Algorithm."""
    if isinstance(source, str):
        return Candidate(tuple(methods.parse_methods(source)), source)
    if isinstance(source, Algorithm):
        return Candidate((Named("the algorithm", _as_method(source)),), None)
    if not callable(source):
        raise UserError(
            f"{a_kind(source)} is not a method; give its text, a function from Algorithm to Algorithm, or an Algorithm"
        )
    name = getattr(source, "__name__", type(source).__name__)
    if _needs_an_argument(source):
        return Candidate((Named(name, source),), None)
    text = _text(source)
    return Candidate((Named(text or name, source()),), text)


def _needs_an_argument(function: Callable[..., Any]) -> bool:
    """Whether it takes the Algorithm itself: knobs have defaults."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is inspect.Parameter.empty and p.kind not in kinds for p in parameters)


def _text(build: Callable[..., Any]) -> str | None:
    """``package.module:function`` where another process can import it."""
    module, name = getattr(build, "__module__", "__main__"), getattr(build, "__qualname__", "")
    importable = module != "__main__" and getattr(sys.modules.get(module), name, None) is build
    return f"{module}:{name}" if importable else None


def _as_method(value: Algorithm) -> Method:
    """The method that fills the slots in which the algorithm differs from FedAvg."""
    plain = Algorithm()
    own = {
        slot.name: getattr(value, slot.name)
        for slot in fields(Algorithm)
        if getattr(value, slot.name) is not getattr(plain, slot.name)
    }
    own = {name: slot for name, slot in own.items() if name != "local" or slot != plain.local}

    def method(algorithm: Algorithm) -> Algorithm:
        appended = {name: (*getattr(algorithm, name), *slot) for name, slot in own.items() if name in SHARED_SLOTS}
        return replace(algorithm, **(own | appended))

    return method
