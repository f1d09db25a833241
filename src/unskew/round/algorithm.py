"""The Algorithm record: one slot for everything that a paper may change, and the composition of papers.

``Algorithm()`` with its defaults is FedAvg (McMahan et al., AISTATS 2017): K clients sampled uniformly, cross-entropy,
local SGD, and the mean of the updates, weighted n_k/n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from unskew.core import types
from unskew.core.errors import IN_PLUGIN, UserError, describe_error
from unskew.round.sampling import uniform
from unskew.round.server import sgd, weighted_mean

if TYPE_CHECKING:
    from unskew.calibration.finisher import Finisher
    from unskew.privacy.noise import PrivateUpdates

AFTER_TRAINING = ("finish", "withhold", "secure", "private")  # no round uses these
SHARED_SLOTS = ("margin", "terms", "statistics", "remember", "finish")  # any number of methods append to these


@dataclass(frozen=True)
class Algorithm:
    """What a federation does in a round, slot by slot.

    A method is a function from Algorithm to Algorithm. It claims every slot that it fills; two methods that claim the
    same slot are rejected by name, except in the shared slots, to which each appends.

    Parameters
    ----------
    available
        Which clients can be sampled in a round. None: all of them.
    sampler
        Which clients are sampled.
    arrive
        Which of the sampled clients take part. None: all of them.
    margin
        What is added to the logits before cross-entropy. Shared: margins add up.
    blend
        What is minimised instead of each example's cross-entropy. None: the cross-entropy itself.
    terms
        Example weights, which multiply, and penalties, which add up. Shared.
    head
        How the classifier's weights are used. None: as they are.
    perturbation
        Where each gradient is taken, relative to the client's model. None: at the model itself.
    correction
        What is added to every gradient. None: nothing.
    local
        How clients train: epochs, batch size, learning rate, optimizer.
    scale
        The factor on a client's update. None: 1.
    mechanism
        How updates are clipped and their sum is noised. None: neither.
    exchange
        How the clients' sums reach the server. None: unchanged.
    aggregate
        How the sums become one update.
    server
        How the server applies that update.
    statistics
        What is exchanged in addition to the model. Shared: each has its own name.
    remember
        What clients keep between visits. Shared: each has its own name.
    finish
        Calibrations after the last round. Shared.
    withhold
        The number of examples below which a client does not send a class's statistics.
    secure
        Masks the statistics, so that the server sees only their sum. None: they are not masked.
    private
        The privacy budget for noise on the sum of the statistics. None: no noise.
    claims
        Names of slots that a method relies on without filling them: ``claims=("sampler",)`` keeps any other method
        from changing the sampler. A filled slot need not be named.
    """

    available: types.Available | None = None
    sampler: types.Sampler = uniform
    arrive: types.Arrive | None = None
    margin: tuple[types.Margin, ...] = ()
    blend: types.Blend | None = None
    terms: tuple[types.Term, ...] = ()
    head: types.Head | None = None
    perturbation: types.Perturbation | None = None
    correction: types.Correction | None = None
    local: types.Local = field(default_factory=types.Local)
    scale: types.Scale | None = None
    mechanism: "PrivateUpdates | None" = None
    exchange: types.Exchange | None = None
    aggregate: types.Aggregate = weighted_mean
    server: types.ServerOptimizer = field(default_factory=sgd)
    statistics: tuple[types.Statistic, ...] = ()
    remember: tuple[types.Memory, ...] = ()
    finish: "tuple[Finisher, ...]" = ()
    withhold: int = 0
    secure: types.SecureAggregation | None = None
    private: types.PrivacyBudget | None = None
    claims: tuple[str, ...] = ()

    @property
    def released(self) -> bool:
        """Whether the result is to be published: everything that (ε, δ) does not cover is then left out."""
        updates = self.mechanism is not None and self.mechanism.release
        return updates or (self.private is not None and self.private.release)


Method = Callable[[Algorithm], Algorithm]
SLOTS = tuple(slot.name for slot in fields(Algorithm) if slot.name != "claims")


@dataclass(frozen=True)
class Named:
    """A method and its text."""

    name: str
    method: Method


def claimed_slots(before: Algorithm, after: Algorithm) -> list[str]:
    """List the slots that were filled between the two algorithms or that ``after`` claims by name."""
    return [slot for slot in SLOTS if slot in after.claims or getattr(after, slot) is not getattr(before, slot)]


def compose(methods: Sequence[Named], base: Algorithm) -> Algorithm:
    """Apply the methods in order to ``base``.

    A UserError names both methods if they claim the same slot, or put two things of the same name in a shared one.
    """
    algorithm, owner = base, dict[str, str]()
    for named in methods:
        unclaimed = replace(algorithm, claims=())
        try:
            changed = named.method(unclaimed) if callable(named.method) else None
        except Exception as error:
            if IN_PLUGIN not in (described := describe_error(error)):
                raise
            raise UserError(f"method {named.name} raises {described}") from error
        if not isinstance(changed, Algorithm):
            raise UserError(f"{named.name} is not a method: it must return a function from Algorithm to Algorithm")
        if unknown := [slot for slot in changed.claims if slot not in SLOTS or slot in SHARED_SLOTS]:
            known = ", ".join(slot for slot in SLOTS if slot not in SHARED_SLOTS)
            raise UserError(
                f"{named.name} claims {unknown[0]!r}, which is not a slot of one method; choose from: {known}"
            )
        for slot in claimed_slots(unclaimed, changed):
            before, after = getattr(unclaimed, slot), getattr(changed, slot)
            if slot not in SHARED_SLOTS:
                if slot in owner:
                    raise UserError(f"{owner[slot]} and {named.name} both claim the {slot} slot; leave out one of them")
                owner[slot] = named.name
                continue
            if after[: len(before)] != before:
                earlier = f"what earlier methods put in the {slot} slot"
                raise UserError(f"{named.name} drops {earlier}; append to that slot instead")
            for added in after[len(before) :]:  # statistics and memories are stored by name
                name = getattr(added, "name", None)
                if name is not None and (other := owner.setdefault(f"{slot}/{name}", named.name)) != named.name:
                    raise UserError(f"{other} and {named.name} both put {name!r} in the {slot} slot; rename one")
        algorithm = replace(changed, claims=(*algorithm.claims, *changed.claims))
    slot, uncovered = "exchange", getattr(algorithm.exchange, "uncovered", "")
    if algorithm.mechanism is not None:
        slot, uncovered = "mechanism", "no noise covers it"
    for statistic in algorithm.statistics if uncovered else ():
        if statistic.measure is not None or statistic.survey is not None:
            other = owner.get(f"statistics/{statistic.name}", statistic.name)
            raise UserError(
                f"{owner.get(slot, slot)} and {other}: clients would send {statistic.name} along with their updates, "
                f"and {uncovered}; leave out one of them"
            )
    if algorithm.mechanism is not None and algorithm.exchange is not None:
        algorithm = replace(algorithm, mechanism=algorithm.mechanism.through(algorithm.exchange))
    return algorithm
