"""The Algorithm record: one slot for each thing a paper may change, and how papers are put together.

``Algorithm()`` with its defaults is FedAvg (McMahan et al., AISTATS 2017): K clients drawn uniformly, cross-entropy,
local SGD, updates weighted n_k/n, the server takes their mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from unskew.core.errors import UserError
from unskew.core.types import (
    Aggregate,
    Arrive,
    Available,
    Blend,
    Correction,
    Exchange,
    Head,
    Local,
    Margin,
    Mechanism,
    Memory,
    PrivacyBudget,
    Sampler,
    Scale,
    SecureAggregation,
    ServerOptimizer,
    Statistic,
    Term,
)
from unskew.round.sampling import uniform
from unskew.round.server import sgd, weighted_mean

if TYPE_CHECKING:
    from unskew.calibration.finisher import Finisher

# slots that several methods may use: each appends to them
SHARED_SLOTS = ("margin", "terms", "statistics", "remember", "finish")


@dataclass(frozen=True)
class Algorithm:
    """What a federation does in a round, slot by slot."""

    available: Available | None = None  # who can be drawn in a round; None: everyone
    sampler: Sampler = uniform  # who is drawn
    arrive: Arrive | None = None  # who of them comes; None: everyone
    margin: tuple[Margin, ...] = ()  # what is added to the logits before cross-entropy
    blend: Blend | None = None  # what is minimised in place of each example's cross-entropy; None: nothing else
    terms: tuple[Term, ...] = ()  # weights that multiply, penalties that add up
    head: Head | None = None  # how the classifier's weights are used; None: as they are
    correction: Correction | None = None  # what is added to every gradient
    local: Local = field(default_factory=Local)  # how they descend
    scale: Scale | None = None  # what a client multiplies its update by; None: 1
    mechanism: Mechanism | None = None  # how updates are clipped, and their sum is given noise; None: not at all
    exchange: Exchange | None = None  # how the clients' sums reach the server; None: as they are
    aggregate: Aggregate = weighted_mean  # how updates become one
    server: ServerOptimizer = field(default_factory=sgd)  # how the server moves
    statistics: tuple[Statistic, ...] = ()  # what else travels
    remember: tuple[Memory, ...] = ()  # what clients keep between visits
    finish: "tuple[Finisher, ...]" = ()  # calibrations after the last round
    withhold: int = 0  # of a class's statistics: kept at home where a client has fewer examples
    secure: SecureAggregation | None = None  # statistics are masked, and only their sum is seen
    private: PrivacyBudget | None = None  # noise on the statistics' sum


Method = Callable[[Algorithm], Algorithm]


@dataclass(frozen=True)
class Named:
    """A method and its text."""

    name: str
    method: Method


def compose(methods: Sequence[Named], base: Algorithm) -> Algorithm:
    """Apply the methods in turn. Two claims on one slot are refused, and the error names both.

    Shared slots (``SHARED_SLOTS``) take any number of methods: each appends its own, in the text's order.
    """
    algorithm, owner = base, dict[str, str]()
    for named in methods:
        changed = named.method(algorithm) if callable(named.method) else None
        if not isinstance(changed, Algorithm):
            raise UserError(f"{named.name} is not a method: it must give a function from Algorithm to Algorithm")
        for slot in fields(Algorithm):
            before, after = getattr(algorithm, slot.name), getattr(changed, slot.name)
            if slot.name in SHARED_SLOTS:
                if after[: len(before)] != before:
                    others = ", ".join(other.name for other in methods[: methods.index(named)])
                    raise UserError(f"{named.name} drops {slot.name} of {others}; append to them, do not replace them")
                _claim_names(slot.name, after[len(before) :], named.name, owner)
                continue
            if after is before:
                continue
            if slot.name in owner:
                raise UserError(
                    f"{owner[slot.name]} and {named.name} both claim the {slot.name} slot; leave one of them out"
                )
            owner[slot.name] = named.name
        algorithm = changed
    _check_covered(algorithm, owner)
    return algorithm


def _check_covered(algorithm: Algorithm, owner: Mapping[str, str]) -> None:
    """Where updates are private, nothing may be sent beside them: noise covers the updates alone."""
    if algorithm.mechanism is None:
        return
    for each in algorithm.statistics:
        if each.measure is not None or each.survey is not None:
            other, private = owner.get(f"statistics/{each.name}", each.name), owner.get("mechanism", "private updates")
            raise UserError(
                f"{private} and {other}: clients would send {each.name} beside their updates, and no noise covers it; "
                "leave one of them out"
            )


def _claim_names(slot: str, added: tuple[Any, ...], method: str, owner: dict[str, str]) -> None:
    """Statistics and memories are stored by name: a second one of the same name would overwrite the first."""
    for each in added:
        if (name := getattr(each, "name", None)) is None:
            continue
        if (other := owner.setdefault(f"{slot}/{name}", method)) != method:
            raise UserError(f"{other} and {method} both put {name!r} in the {slot} slot; rename one of them")
