"""Mean and sample deviation over seeds: what several runs of one setting come to."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev


@dataclass(frozen=True)
class Spread:
    """The mean of ``count`` values, and their sample deviation (n − 1); of a single value there is none."""

    mean: float
    deviation: float | None
    count: int

    def words(self, scale: float = 1.0, decimals: int = 2) -> str:
        """As people write it: ``91.23 ± 0.45``."""
        mean = f"{scale * self.mean:.{decimals}f}"
        return mean if self.deviation is None else f"{mean} ± {scale * self.deviation:.{decimals}f}"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Over the values that are known and finite; None where there is none."""
    known = [float(value) for value in values if value is not None and isfinite(value)]
    if not known:
        return None
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))
