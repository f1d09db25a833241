"""The Algorithm record: one slot for each thing a paper may change, and how papers are put together.

``Algorithm()`` with its defaults is FedAvg (McMahan et al., AISTATS 2017): K clients drawn uniformly, cross-entropy,
local SGD, updates weighted n_k/n, the server takes their mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from unskew.errors import UserError
from unskew.round.aggregation import weighted_mean
from unskew.round.sampling import uniform
from unskew.round.server import sgd
from unskew.types import Aggregate, Local, Sampler, ServerOptimizer, Term


@dataclass(frozen=True)
class Algorithm:
    """What a federation does in a round, slot by slot."""

    sampler: Sampler = uniform
    terms: tuple[Term, ...] = ()
    local: Local = field(default_factory=Local)
    aggregate: Aggregate = weighted_mean
    server: ServerOptimizer = field(default_factory=sgd)


Method = Callable[[Algorithm], Algorithm]


@dataclass(frozen=True)
class Named:
    """A method and the text that stands for it."""

    name: str
    method: Method


def compose(methods: Sequence[Named], base: Algorithm) -> Algorithm:
    """Apply the methods in turn. Two claims on one slot are refused, and the error names both.

    ``terms`` is the slot that many may share: each appends its own, in the order of the text.
    """
    algorithm, owner = base, dict[str, str]()
    for named in methods:
        changed = named.method(algorithm) if callable(named.method) else None
        if not isinstance(changed, Algorithm):
            raise UserError(f"{named.name} is no method: it must give a function from Algorithm to Algorithm")
        for slot in fields(Algorithm):
            if slot.name == "terms" or getattr(changed, slot.name) is getattr(algorithm, slot.name):
                continue
            if slot.name in owner:
                raise UserError(
                    f"{owner[slot.name]} and {named.name} both want the {slot.name} slot; leave one of them out"
                )
            owner[slot.name] = named.name
        if changed.terms[: len(algorithm.terms)] != algorithm.terms:
            before = ", ".join(other.name for other in methods[: methods.index(named)])
            raise UserError(f"{named.name} drops a term of {before}; a method may only append its own")
        algorithm = changed
    return algorithm
