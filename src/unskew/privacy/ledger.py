"""What a run has released under differential privacy, and its total (ε, δ).

Several Gaussian releases on the same examples, even adaptively chosen, are exactly one with 1/r² = Σ 1/r_i², where r is
noise over sensitivity (Dong, Roth, Su, "Gaussian Differential Privacy", JRSS B 2022, corollary 3.3). If clients added
discrete noise, concentrations add up (Bun, Steinke, "Concentrated Differential Privacy", TCC 2016). Rounds of private
updates protect a client with all its examples: the ε for replacing one is added to that of the statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unskew.core.plugins import require_extra
from unskew.core.units import counted

EXAMPLE, CLIENT, REPLACED_CLIENT = "example", "client", "client whose data are replaced"  # whom ε protects
SEEDED = "the noise follows from the seed: ε holds only against those who do not know it; use release=true to publish"


@dataclass(frozen=True)
class Release:
    """One release of class statistics: its guarantee, and the calibrations made from it."""

    id: str  # a hash of what was released: releasing the same numbers again reveals nothing new
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
    rounds: int  # started: a round repeated after a crash counts twice
    clip: float
    noise: float
    sampling: str  # everyone, poisson or fixed
    replaced: bool  # whether ε is for replacing a client's data; otherwise for adding or removing a client
    example_epsilon: float  # for adding or removing one example
    unit: str = CLIENT
    released: bool = False  # noise and participation came from the operating system, not from the run's seed
    in_masks: bool = False  # the clients added the noise, inside the masks of secure aggregation

    def describe(self) -> str:
        """The guarantee as text."""
        unit = REPLACED_CLIENT if self.replaced else CLIENT
        return f"ε {self.epsilon:.4g} at δ {self.delta:g} for every {unit}, over {counted(self.rounds, 'round')}"


@dataclass(frozen=True)
class Spent:
    """Everything that a run has released, and its total (ε, δ) for every example.

    If only private updates were released, it is for every client.
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
        """The total as text."""
        count = len(self.releases)
        if self.updates is not None and not count:
            return f"{self.updates.describe()} of updates"
        over = f"{count} releases" if count > 1 else "one release"
        total = f"ε {self.epsilon:.4g} at δ {self.delta:g} for every example, over {over} of statistics"
        if self.updates is None:
            return total
        return f"{total} and all updates; the updates alone: {self.updates.describe()}"


def add_release(spent: Spent | None, release: Release | None) -> Spent | None:
    """Add a release, unless it is already included; nothing is ever removed."""
    if release is None:
        return spent
    known = {one.id: one for one in (() if spent is None else spent.releases)}
    before = known.get(release.id, release)
    names = dict.fromkeys([*before.calibrations, *release.calibrations])
    known[release.id] = replace(before, calibrations=tuple(names))
    return add_up(tuple(known.values()), None if spent is None else spent.updates)


def add_up(releases: Sequence[Release], updates: PrivateRounds | None = None) -> Spent | None:
    """The total of these releases of statistics and rounds of updates; None if there are none."""
    if updates is None:
        return Spent(*total(releases), tuple(releases)) if releases else None
    if not releases:
        return Spent(updates.epsilon, updates.delta, (), updates, updates.unit)
    epsilon, delta = total(releases)
    return Spent(epsilon + updates.example_epsilon, delta + updates.delta, tuple(releases), updates)


def total(releases: Sequence[Release]) -> tuple[float, float]:
    """The total (ε, δ) of these releases."""
    delta = max(release.delta for release in releases)
    if len(releases) == 1:
        return releases[0].epsilon, delta
    if any(release.in_masks for release in releases):
        rho = sum(concentration(release.epsilon, release.delta, release.in_masks) for release in releases)
        return epsilon_of_concentration(rho, delta), delta
    accounting = require_extra("dp_accounting")
    ratios = [float(accounting.get_sigma_gaussian(release.epsilon, release.delta)) for release in releases]
    return float(accounting.get_epsilon_gaussian(sum(ratio**-2 for ratio in ratios) ** -0.5, delta)), delta


# There is no exact formula for discrete Gaussian noise. Its concentration ρ is that of the Gaussian, ½/r².


def epsilon_of_concentration(rho: float, delta: float) -> float:
    """ε at δ of a ρ-concentrated mechanism."""
    event = require_extra("dp_accounting").ZCDpEvent(rho, 0.0)
    return float(require_extra("dp_accounting.rdp").RdpAccountant().compose(event).get_epsilon(delta))


def concentration(epsilon: float, delta: float, in_masks: bool = True) -> float:
    """The ρ of a release with this (ε, δ): the largest sufficient one for discrete noise, exact for Gaussian noise."""
    if not in_masks:
        return 0.5 * float(require_extra("dp_accounting").get_sigma_gaussian(epsilon, delta)) ** -2
    low, high = 0.0, epsilon  # ε(ρ) is at least ρ
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of_concentration(middle, delta) <= epsilon else (low, middle)
    return low
