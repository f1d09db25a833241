"""From numbers to positions and texts: the ends of an axis, round ticks, number formats, the width of a text.

Lengths are in units of the picture; by default a chart is 440 units wide.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unskew.charts import Axis, Numbers
from unskew.core.errors import UserError, nearest

KINDS = ("number", "percent", "count", "bytes", "seconds")
HUGE = 1e300  # larger numbers are not drawn, because their sums could overflow
FAR = 20.0  # axis lengths, beyond which the exact position does not matter
CLOCK = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)  # seconds
DAY = 86400
UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
Floats = npt.NDArray[np.float64]

# widths of characters in em, rather too wide than too narrow because fonts differ
NARROW, BROAD = frozenset("fijlrtI.,:;|!'()[]/ "), frozenset("mwMW@%+=<>")


def to_array(values: Numbers | Floats) -> Floats:
    """The numbers; NaN for None, infinity and numbers too large to draw."""
    array = np.array(values, np.float64)
    return np.where(np.abs(array) <= HUGE, array, np.nan)


@dataclass(frozen=True)
class Scale:
    """Maps numbers from ``low`` to ``high`` to positions from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, values: Numbers | Floats) -> Floats:
        """The positions of numbers; NaN if unknown, or not positive on a logarithmic axis."""
        low, high, numbers = self.low, self.high, to_array(values)
        if self.log:
            low, high = math.log10(low), math.log10(high)
            numbers = np.log10(np.where(numbers > 0, numbers, np.nan))
        share = np.clip((numbers - low) / (high - low), -FAR, FAR)
        return self.start + share * (self.end - self.start)

    def at(self, value: float | None) -> float:
        """The position of one number."""
        return float(self.place([value])[0])

    def clip(self, positions: Floats) -> Floats:
        """Positions beyond an end of the axis are moved to it."""
        return np.clip(positions, min(self.start, self.end), max(self.start, self.end))

    def inside(self, positions: Floats) -> npt.NDArray[np.bool_]:
        """Whether positions are known and on the axis."""
        return np.abs(positions - self.clip(positions)) <= 0.01


def ends(values: Numbers, axis: Axis, *, room: float = 0.0, zero: bool = False) -> tuple[float, float]:
    """The ends of an axis: its own, or such that these values fit.

    ``room`` is the share of the span left free on either side; with ``zero`` the axis includes zero. Free room does not
    extend beyond zero or 100 %.
    """
    if axis.kind not in KINDS:
        raise UserError(f"unknown kind of axis {axis.kind!r}; {nearest(axis.kind, KINDS)}")
    numbers, given = to_array(values), to_array([axis.low, axis.high])
    if axis.log:
        numbers, given = (np.log10(part, where=part > 0, out=np.full_like(part, np.nan)) for part in (numbers, given))
    low, high = given.tolist()
    if axis.log and zero and math.isnan(low) and not np.isnan(numbers).all():
        low = math.floor(np.nanmin(numbers) - 1e-9)  # bars start from the power of ten below the shortest
    within = numbers[~(numbers < low) & ~(numbers > high) & ~np.isnan(numbers)].tolist()
    zeros = [0.0] if zero and not axis.log else []
    included = [*within, *zeros, *(end for end in (low, high) if not math.isnan(end))]
    least, most = min(included, default=0.0), max(included, default=1.0)
    plain = axis.ticks is None and not axis.log
    if plain and 0 < least < 0.25 * most:
        least = 0.0  # close enough to zero to show it
    single = most - least <= max(1e-9 * max(abs(least), abs(most)), 1 / HUGE)
    free = room * (most - least)
    if single:
        free = 1.0 if zero else max(0.1 * abs(least), 0.5 if not plain or least == 0 or axis.kind == "count" else 0.0)
    below = least - free if least or not zero else 0.0
    above = most + free if most or not zero or single else 0.0
    if plain:
        below = max(below, 0.0) if least >= 0 else below
        above = min(above, 1.0) if most <= 1 and axis.kind == "percent" else above
    bottom, top = below if math.isnan(low) else low, above if math.isnan(high) else high
    if bottom >= top:
        bottom, top = (top - (free or 1.0), top) if math.isnan(low) else (bottom, bottom + (free or 1.0))
    return (10.0 ** max(bottom, -300.0), 10.0 ** min(top, 300.0)) if axis.log else (bottom, top)


def ticks(low: float, high: float, *, most: int, kind: str = "number", log: bool = False) -> list[tuple[float, str]]:
    """About ``most`` round numbers from ``low`` to ``high`` and their labels: 1, 2, 5, 10 … or powers of ten."""
    if log:
        first, last = math.log10(low) - 1e-9, math.log10(high) + 1e-9
        decades = range(math.floor(first + 2e-9), math.floor(last) + 1)
        parts = (1, 2, 5) if 3 * len(decades) <= most else (1,)
        values = [part * 10.0**power for power in decades[:: math.ceil(len(decades) / most)] for part in parts]
        chosen = [float(f"{value:.15g}") for value in values if first <= math.log10(value) <= last]
        chosen = [value for value in chosen if value >= 1 or kind != "count"]
        if len(chosen) > 1:  # formatted one by one; no power of ten is a round number of minutes
            labels = [f"{_plain([v])[0]} s" if kind == "seconds" else format_numbers([v], kind)[0] for v in chosen]
            return list(zip(chosen, labels, strict=True))
    step = _step((high - low) / most, kind)
    steps = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    chosen = [value for value in dict.fromkeys(float(f"{n * step:.15g}") for n in steps) if value > 0 or not log]
    return list(zip(chosen, format_numbers(chosen, kind), strict=True))


def _step(least: float, kind: str) -> float:
    """The smallest round step that is not below ``least``."""
    if kind == "seconds" and least > 1:
        return next((step for step in CLOCK if step >= least), DAY * math.ceil(least / DAY))
    if kind == "count":
        least = max(least, 1.0)
    power = 10.0 ** math.floor(math.log10(least))
    return next(part * power for part in (1, 2, 5, 10, 20) if part * power >= least * (1 - 1e-9))


def format_numbers(values: Sequence[float], kind: str = "number") -> list[str]:
    """Format the numbers of an axis, with as many decimals as they need."""
    if kind == "percent":
        return [f"{text}%" for text in _plain([100 * value for value in values])]
    if kind == "bytes":
        powers = [0 if abs(v) < 1000 else min(int(math.log10(abs(v)) / 3 + 1e-9), len(UNITS) - 1) for v in values]
        scaled = [float(f"{value / 1000**power:.6g}") for value, power in zip(values, powers, strict=True)]
        return [f"{_plain([value])[0]} {UNITS[power]}" for value, power in zip(scaled, powers, strict=True)]
    if kind == "seconds":
        most = max(map(abs, values), default=0.0)
        unit, name = (3600, "h") if most >= 7200 else (60, "min") if most >= 120 else (1, "s")
        return [f"{text} {name}" for text in _plain([value / unit for value in values])]
    return _plain(values)


def _plain(values: Sequence[float]) -> list[str]:
    most = max(map(abs, values), default=0.0)
    if most >= 1e10 or 0 < most < 1e-4:
        return [re.sub(r"e\+?(-?)0*", r"e\1", f"{value + 0.0:,.6g}") for value in values]
    least = 1e-9 * max(most, 1e-3)
    exact = (count for count in range(7) if all(abs(round(value, count) - value) <= least for value in values))
    decimals = next(exact, 6)
    return [f"{value + 0.0:,.{decimals}f}" for value in values]


def text_width(text: str, size: float = 12.0) -> float:
    """The approximate width of a text at this font size."""
    return size * sum(map(_character_width, text))


def _character_width(letter: str) -> float:
    if letter in NARROW:
        return 0.34
    if letter in BROAD:
        return 0.88
    if letter.isupper():
        return 0.68
    return 0.64 if letter < "\u2e80" else 1.3  # Chinese, Japanese, Korean, emoji


def fit(text: str, room: float, size: float = 12.0) -> str:
    """The text if it fits in ``room``, otherwise its beginning and an ellipsis."""
    text = " ".join(text.split())
    if text_width(text, size) <= room:
        return text
    left, end = room - text_width("…", size), 0
    while end < len(text) and (left := left - text_width(text[end], size)) >= 0:
        end += 1
    return text[:end].rstrip() + "…"


def wrap(text: str, room: float, size: float = 12.0, *, most: int = 1000) -> list[str]:
    """The text in lines no wider than ``room``, at most ``most`` of them; wider words are broken."""
    lines = [""]
    for word in text.split():
        if lines[-1] and text_width(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:
            if lines[-1] and text_width(lines[-1] + letter, size) > room:
                lines.append("")
            lines[-1] += letter
    lines = lines[1:]
    return lines if len(lines) <= most else [*lines[: most - 1], fit(" ".join(lines[most - 1 :]), room, size)]
