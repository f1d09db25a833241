"""The laws that every method keeps, ours and yours: ``check_method("package.module:method(knob=1)")``.

``LAWS`` is the table: what each law says, and the function that tries it.
"""

from collections.abc import Callable, Iterable

from unskew.checks import laws
from unskew.checks.laws import Candidate, Source, candidate
from unskew.core import machine
from unskew.core.errors import ClientFailure
from unskew.methods import METHODS

QUICK = {"fedvc": "fedvc(16)"}  # methods whose defaults are too much work for a federation this small

LAWS: dict[str, Callable[[Candidate], str | None]] = {
    "three rounds run and the result is finite, also with a client of one example": laws.finite,
    "it leaves its arguments alone": laws.leaves_arguments,
    "it leaves the global random generators alone": laws.leaves_generators,
    "the same seed gives the same weights, another seed gives others": laws.seeded,
    "margins, blend and terms keep to their slots": laws.keeps_to_its_slots,
    "a run stopped and resumed equals one that never stopped": laws.resumes,
    "what the server and the clients keep does not grow with the rounds": laws.bounded,
    "loop and pool agree bit for bit": laws.engines_agree,
}
COMMUTES = "beside every other method either order gives the same result, or both are refused by name"
NEUTRAL = "with its knob at zero it is FedAvg"


class LawBroken(Exception):
    """A method does not do what every method must; the message names the method, the law, and what was seen."""


@machine.neutral()
def check_method(method: Source, *, neutral: Source | None = None, beside: Iterable[str] | None = None) -> list[str]:
    """Try every law: the names of the laws that were tried, or LawBroken at the first that is broken.

    ``method`` is a text, a function from Algorithm to Algorithm, a function whose knobs give one, or an Algorithm. What
    another process cannot import (a lambda, an Algorithm) is not tried in the pool. ``neutral`` is the method with its
    knob at zero, where it has one: it must be FedAvg to the last bit. ``beside`` names the methods that it is composed
    with; None: all that there are.
    """
    tried = candidate(method)
    names = []
    for name, law in LAWS.items():
        if law is laws.engines_agree and tried.text is None:
            continue
        _try(tried, name, lambda law=law: law(tried))  # type: ignore[misc]
        names.append(name)
    others = [QUICK.get(name, name) for name in METHODS] if beside is None else list(beside)
    for other in map(candidate, others):
        if not set(other.words) & set(tried.words):
            _try(tried, f"{COMMUTES}: {other.name}", lambda other=other: laws.commutes(tried, other))  # type: ignore[misc]
    names += [COMMUTES] if others else []
    if neutral is not None:
        zero = candidate(neutral)
        _try(tried, NEUTRAL, lambda: laws.is_fedavg(zero))
        names.append(NEUTRAL)
    return names


def _try(method: Candidate, name: str, law: Callable[[], str | None]) -> None:
    try:
        complaint = law()
    except ClientFailure as failure:
        complaint = str(failure)
    if complaint is not None:
        raise LawBroken(f"{method.name} breaks a law ({name}): {complaint}")
