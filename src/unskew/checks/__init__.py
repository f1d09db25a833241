"""The laws that every method obeys, ours and yours: ``check_method("package.module:method(knob=1)")``.

``LAWS`` lists each law with the function that tests it.
"""

from collections.abc import Callable, Iterable

from unskew.checks import laws
from unskew.checks.laws import Candidate, Source, candidate
from unskew.core import machine
from unskew.core.errors import ClientFailure, MissingExtra
from unskew.methods import METHODS

QUICK = {"fedvc": "fedvc(16)"}  # methods whose defaults are too slow for a test

LAWS: dict[str, Callable[[Candidate], str | None]] = {
    "three rounds run and the result is finite, even with a client that has one example": laws.finite,
    "it does not modify its arguments": laws.leaves_arguments,
    "it does not use the global random generators": laws.leaves_generators,
    "the same seed gives the same weights, another seed different ones": laws.seeded,
    "margins, blend and terms keep to their slots": laws.keeps_to_its_slots,
    "a run that was stopped and resumed equals one that never stopped": laws.resumes,
    "the state of the server and the clients does not grow with the rounds": laws.bounded,
    "loop and pool agree bit for bit": laws.engines_agree,
}
COMMUTES = "with every other method, both orders give the same result, or an error names both"
NEUTRAL = "with its knob at its neutral value it is FedAvg"


class LawBroken(Exception):
    """A method breaks a law; the message names the method, the law and what happened."""


@machine.neutral()
def check_method(method: Source, *, neutral: Source | None = None, beside: Iterable[str] | None = None) -> list[str]:
    """Test a method against every law.

    Parameters
    ----------
    method
        Its text, a function from Algorithm to Algorithm, a function that returns one, or an Algorithm. What another
        process cannot import (a lambda, an Algorithm) is not tested in the pool.
    neutral
        The method with its knob at zero, if it has one: it must be FedAvg to the last bit.
    beside
        The methods that it is composed with. None: all of them, except those that need a package that is not
        installed.

    Returns
    -------
    list of str
        The laws that were tested, and the methods that were skipped.

    Raises
    ------
    LawBroken
        At the first law that is broken.
    """
    tried = candidate(method)
    names = []
    for name, law in LAWS.items():
        if law is laws.engines_agree and tried.text is None:
            continue
        _test(tried, name, law, tried)
        names.append(name)
    others = [QUICK.get(name, name) for name in METHODS] if beside is None else list(beside)
    names += [COMMUTES] if others else []
    for other in map(candidate, others):
        if not set(other.names) & set(tried.names):
            try:
                _test(tried, f"{COMMUTES}: {other.name}", laws.commutes, tried, other)
            except MissingExtra as error:
                names.append(f"skipped: with {other.name}; {error}")
    if neutral is not None:
        _test(tried, NEUTRAL, laws.is_fedavg, candidate(neutral))
        names.append(NEUTRAL)
    return names


def _test(method: Candidate, name: str, law: Callable[..., str | None], *candidates: Candidate) -> None:
    try:
        complaint = law(*candidates)
    except ClientFailure as failure:
        complaint = str(failure)
    if complaint is not None:
        raise LawBroken(f"{method.name} breaks a law ({name}): {complaint}")
