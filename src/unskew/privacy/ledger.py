"""What a run has released under differential privacy, and what it adds up to.

Every release is a Gaussian mechanism. Several of them on the same examples, chosen one after another, are exactly one
with 1/r² = Σ 1/r_i², r being noise over sensitivity, so the total is tight: no other accountant gives less for them.
It is said at the largest δ among them.

Reference: Dong, Roth, Su, "Gaussian Differential Privacy", JRSS B 2022, corollary 3.3 (composition).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unskew.core.plugins import require_extra
from unskew.core.records import record_from


@dataclass(frozen=True)
class Release:
    """One release of class statistics: what it promises, and the calibrations that were made from it."""

    id: str  # a hash of what was released: the same numbers a second time tell nothing new
    epsilon: float
    delta: float
    clip: float
    calibrations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spent:
    """All releases of a run, and the (ε, δ) that they promise together to every example."""

    epsilon: float
    delta: float
    releases: tuple[Release, ...]

    @staticmethod
    def of_json(values: Any) -> "Spent | None":
        """What result.json has, as a value. Raises ValueError."""
        if values is None:
            return None
        if not isinstance(values, Mapping) or not isinstance(values.get("releases"), list):
            raise ValueError("privacy has no list of releases")
        return record_from(Spent, values, releases=tuple(map(_release, values["releases"])))

    def words(self) -> str:
        """The total in words."""
        count = len(self.releases)
        over = f"{count} releases" if count > 1 else "one release"
        return f"ε {self.epsilon:.4g} at δ {self.delta:g} for every example, over {over} of statistics"


def _release(row: Any) -> Release:
    names = row.get("calibrations") if isinstance(row, Mapping) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("a release has no list of calibrations")
    return record_from(Release, row, calibrations=tuple(names))


def with_release(spent: Spent | None, release: Release | None) -> Spent | None:
    """The same with one release more, unless it is there already; what is there is never taken back."""
    if release is None:
        return spent
    known = {each.id: each for each in (() if spent is None else spent.releases)}
    before = known.get(release.id)
    if before is None:
        known[release.id] = release
    else:
        names = dict.fromkeys([*before.calibrations, *release.calibrations])
        known[release.id] = replace(before, calibrations=tuple(names))
    return Spent(*total(list(known.values())), tuple(known.values()))


def total(releases: Sequence[Release]) -> tuple[float, float]:
    """(ε, δ) of all these releases together."""
    delta = max(each.delta for each in releases)
    if len(releases) == 1:
        return releases[0].epsilon, delta
    accounting = require_extra("dp_accounting")
    ratios = [float(accounting.get_sigma_gaussian(each.epsilon, each.delta)) for each in releases]
    return float(accounting.get_epsilon_gaussian(sum(ratio**-2 for ratio in ratios) ** -0.5, delta)), delta
