"""What a run has released under differential privacy, and the (ε, δ) of all of it.

Every release of statistics is a Gaussian mechanism. Several of them on the same examples, chosen one after another, are
exactly one with 1/r² = Σ 1/r_i², r being noise over sensitivity, so their total is tight: no other accountant gives a
smaller one. It is reported at the largest δ among them. Where clients added discrete noise, concentrations add up.

Rounds of private updates guarantee more: they protect a client with all its examples. A client with or without one
example is a client whose data are replaced; the ε for that is added to the ε of the statistics, and so are the δ.

References: Dong, Roth, Su, "Gaussian Differential Privacy", JRSS B 2022, corollary 3.3 (composition). Bun, Steinke,
"Concentrated Differential Privacy", TCC 2016.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unskew.core.plugins import require_extra
from unskew.core.units import counted

EXAMPLE, CLIENT, REPLACED_CLIENT = "example", "client", "client whose data are replaced"  # whom ε protects
SEEDED = "the noise follows from the seed: ε holds only for those who do not know it; release=true is for a release"


@dataclass(frozen=True)
class Release:
    """One release of class statistics: its guarantee, and the calibrations made from it."""

    id: str  # a hash of what was released: the same numbers a second time reveal nothing new
    epsilon: float
    delta: float
    clip: float
    calibrations: tuple[str, ...] = ()
    unit: str = EXAMPLE
    released: bool = False  # the noise came from the operating system, not from the run's seed
    in_masks: bool = False  # the clients added it, inside the masks of secure aggregation


@dataclass(frozen=True)
class PrivateRounds:
    """The private updates of a run's rounds, and their guarantee to every client."""

    epsilon: float
    delta: float
    rounds: int  # that were begun: one that was trained again after a crash counts twice
    clip: float
    noise: float
    sampling: str  # everyone, poisson or fixed
    replaced: bool  # for a client whose data are replaced; otherwise for one that takes part or does not
    example_epsilon: float  # for one example more or less
    unit: str = CLIENT
    released: bool = False  # noise and participation came from the operating system, not from the run's seed
    in_masks: bool = False  # the clients added the noise, inside the masks of secure aggregation

    def describe(self) -> str:
        """The guarantee in words."""
        unit = REPLACED_CLIENT if self.replaced else CLIENT
        return f"ε {self.epsilon:.4g} at δ {self.delta:g} for every {unit}, over {counted(self.rounds, 'round')}"


@dataclass(frozen=True)
class Spent:
    """All that a run has released, and the (ε, δ) that it promises together.

    To every example; where private updates are all there is, to every client.
    """

    epsilon: float
    delta: float
    releases: tuple[Release, ...]
    updates: PrivateRounds | None = None
    unit: str = EXAMPLE

    @property
    def seeded(self) -> bool:
        """Whether any of the noise follows from the run's seed."""
        updates = self.updates is not None and not self.updates.released
        return updates or not all(release.released for release in self.releases)

    def describe(self) -> str:
        """The total in words."""
        count = len(self.releases)
        if self.updates is not None and not count:
            return f"{self.updates.describe()} of updates"
        over = f"{count} releases" if count > 1 else "one release"
        total = f"ε {self.epsilon:.4g} at δ {self.delta:g} for every example, over {over} of statistics"
        return (
            total if self.updates is None else f"{total} and all updates; the updates alone: {self.updates.describe()}"
        )


def add_release(spent: Spent | None, release: Release | None) -> Spent | None:
    """The same with one release more, unless it is there already; what is there is never taken back."""
    if release is None:
        return spent
    known = {one.id: one for one in (() if spent is None else spent.releases)}
    before = known.get(release.id)
    if before is None:
        known[release.id] = release
    else:
        names = dict.fromkeys([*before.calibrations, *release.calibrations])
        known[release.id] = replace(before, calibrations=tuple(names))
    return add_up(tuple(known.values()), None if spent is None else spent.updates)


def add_up(releases: Sequence[Release], updates: PrivateRounds | None = None) -> Spent | None:
    """What these releases of statistics and these rounds of updates promise together; None where there are none."""
    if updates is None:
        return Spent(*total(releases), tuple(releases)) if releases else None
    if not releases:
        return Spent(updates.epsilon, updates.delta, (), updates, updates.unit)
    epsilon, delta = total(releases)
    return Spent(epsilon + updates.example_epsilon, delta + updates.delta, tuple(releases), updates)


def total(releases: Sequence[Release]) -> tuple[float, float]:
    """(ε, δ) of all these releases together."""
    delta = max(release.delta for release in releases)
    if len(releases) == 1:
        return releases[0].epsilon, delta
    if any(release.in_masks for release in releases):
        rho = sum(concentration(release.epsilon, release.delta, release.in_masks) for release in releases)
        return epsilon_of_concentration(rho, delta), delta
    accounting = require_extra("dp_accounting")
    ratios = [float(accounting.get_sigma_gaussian(release.epsilon, release.delta)) for release in releases]
    return float(accounting.get_epsilon_gaussian(sum(ratio**-2 for ratio in ratios) ** -0.5, delta)), delta


# Discrete Gaussian noise has no exact formula as the Gaussian has. Its concentration ρ is the Gaussian's, ½/r².


def epsilon_of_concentration(rho: float, delta: float) -> float:
    """ε at δ of whatever is ρ-concentrated."""
    event = require_extra("dp_accounting").ZCDpEvent(rho, 0.0)
    return float(require_extra("dp_accounting.rdp").RdpAccountant().compose(event).get_epsilon(delta))


def concentration(epsilon: float, delta: float, in_masks: bool = True) -> float:
    """The ρ of a release with this (ε, δ): the largest that is enough for discrete noise, exact for Gaussian noise."""
    if not in_masks:
        return 0.5 * float(require_extra("dp_accounting").get_sigma_gaussian(epsilon, delta)) ** -2
    low, high = 0.0, epsilon  # ε(ρ) is ρ and more
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of_concentration(middle, delta) <= epsilon else (low, middle)
    return low
