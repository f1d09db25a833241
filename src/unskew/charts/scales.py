"""From numbers to positions and texts: the ends of an axis, round ticks, number formats, the width of a text.

Lengths are in units of the picture; by default a chart is 440 units wide.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unskew.charts import Axis
from unskew.core.errors import UserError, nearest

KINDS = ("number", "percent", "count", "bytes", "seconds")
HUGE = 1e300  # larger numbers are not drawn, because their sums could overflow
POWER = 300  # of ten
FAR = 20.0  # axis lengths, beyond which the exact position does not matter
CLOCK = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # seconds
UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")

# widths of characters in em, rather too wide than too narrow because fonts differ
NARROW, BROAD = frozenset("fijlrtI.,:;|!'()[]/ "), frozenset("mwMW@%+=<>")


@dataclass(frozen=True)
class Scale:
    """Maps numbers from ``low`` to ``high`` to positions from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False


def to_number(value: float | None) -> float | None:
    """The number; None for None, NaN, infinity and numbers too large to draw."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return None
    return number if abs(number) <= HUGE else None


def locate(scale: Scale, value: float | None) -> float | None:
    """The position of a number; None if it is unknown, or not positive on a logarithmic axis."""
    number = to_number(value)
    low, high = scale.low, scale.high
    if number is None or (scale.log and number <= 0):
        return None
    if scale.log:
        low, high, number = math.log10(low), math.log10(high), math.log10(number)
    share = (number - low) / (high - low)
    return scale.start + min(max(share, -FAR), FAR) * (scale.end - scale.start)


def ends(values: Iterable[float | None], axis: Axis, *, room: float = 0.0, zero: bool = False) -> tuple[float, float]:
    """The ends of an axis: its own, or such that these values fit.

    ``room`` is the share of the span left free on either side; with ``zero`` the axis includes zero. Free room does not
    extend beyond zero or 100 %.
    """
    if axis.kind not in KINDS:
        raise UserError(f"unknown kind of axis {axis.kind!r}; {nearest(axis.kind, KINDS)}")
    if axis.low is not None and axis.high is not None and axis.low > axis.high:
        raise UserError(f"an axis from {axis.low} to {axis.high}: low must be below high; reverse=True flips the axis")
    numbers = [number for value in values if (number := to_number(value)) is not None]
    low, high = to_number(axis.low), to_number(axis.high)
    if not axis.log:
        return _ends(numbers, low, high, axis, room, zero)
    logs = [math.log10(number) for number in numbers if number > 0]
    low = math.log10(low) if low is not None and low > 0 else None
    high = math.log10(high) if high is not None and high > 0 else None
    if zero and logs and low is None:
        low = float(math.floor(min(logs) - 1e-9))  # bars start from the power of ten below the shortest
    low, high = _ends(logs, low, high, replace(axis, kind="number", ticks=None), room, False)
    return 10.0 ** max(low, -POWER), 10.0 ** min(high, POWER)


def _ends(
    numbers: Sequence[float], low: float | None, high: float | None, axis: Axis, room: float, zero: bool
) -> tuple[float, float]:
    within = [value for value in numbers if (low is None or value >= low) and (high is None or value <= high)]
    included = [*within, *([0.0] if zero else []), *(end for end in (low, high) if end is not None)]
    least, most = min(included, default=0.0), max(included, default=1.0)
    plain = axis.ticks is None and not axis.log
    if plain and 0 < least < 0.25 * most:
        least = 0.0  # close enough to zero to show it
    flat = not most - least > max(1e-9 * max(abs(least), abs(most)), 1 / HUGE)
    free = _half_length(least, axis, zero) if flat else room * (most - least)
    below = 0.0 if least == 0 and zero else least - free
    above = 0.0 if most == 0 and zero and not flat else most + free
    if plain:
        below = max(below, 0.0) if least >= 0 else below
        above = min(above, 1.0) if most <= 1 and axis.kind == "percent" else above
    bottom = below if low is None else low
    top = above if high is None or (flat and low is not None) else high
    if bottom < top:
        return bottom, top
    return (top - free, top) if low is None else (bottom, bottom + free)


def _half_length(value: float, axis: Axis, zero: bool) -> float:
    """Half the length of an axis with a single number."""
    if zero:
        return 1.0
    if axis.ticks is not None or axis.log or value == 0:
        return 0.5
    return max(0.1 * abs(value), 0.5 if axis.kind == "count" else 0.0)


def ticks(low: float, high: float, *, most: int, kind: str = "number", log: bool = False) -> list[tuple[float, str]]:
    """About ``most`` round numbers from ``low`` to ``high`` and their labels: 1, 2, 5, 10 … or powers of ten."""
    chosen = _powers(low, high, most) if log else []
    if kind == "count":
        chosen = [value for value in chosen if value >= 1]
    if len(chosen) > 1:  # formatted one by one; no power of ten is a round number of minutes
        labels = [f"{_plain([v])[0]} s" if kind == "seconds" else format_numbers([v], kind)[0] for v in chosen]
        return list(zip(chosen, labels, strict=True))
    step = _step((high - low) / max(1, most), kind)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    chosen = [float(f"{count * step:.15g}") for count in range(first, last + 1)]
    chosen = [value for value in dict.fromkeys(chosen) if value > 0 or not log]
    return list(zip(chosen, format_numbers(chosen, kind), strict=True))


def _powers(low: float, high: float, most: int) -> list[float]:
    first, last = math.log10(low) - 1e-9, math.log10(high) + 1e-9
    decades = range(math.floor(first + 2e-9), math.floor(last) + 1)
    stride = math.ceil(len(decades) / max(1, most))
    parts = (1, 2, 5) if 3 * len(decades) <= most else (1, 3) if 2 * len(decades) <= most else (1,)
    values = [part * 10.0**power for power in decades if power % stride == 0 for part in parts]
    return [float(f"{value:.15g}") for value in values if first <= math.log10(value) <= last]


def _step(least: float, kind: str) -> float:
    """The smallest round step that is not below ``least``."""
    if kind == "seconds" and least > 1:
        if least <= CLOCK[-1]:
            return float(next(step for step in CLOCK if step >= least))
        return CLOCK[-1] * _step(least / CLOCK[-1], "count")
    if kind == "count":
        least = max(least, 1.0)
    power = 10.0 ** math.floor(math.log10(least))
    return next(part * power for part in (1, 2, 5, 10, 20) if part * power >= least * (1 - 1e-9))


def format_numbers(values: Sequence[float], kind: str = "number") -> list[str]:
    """Format the numbers of an axis, with as many decimals as they need."""
    if kind == "percent":
        return [f"{text}%" for text in _plain([100 * value for value in values])]
    if kind == "bytes":
        return [_bytes(value) for value in values]
    if kind == "seconds":
        most = max(map(abs, values), default=0.0)
        unit, name = (3600, "h") if most >= 7200 else (60, "min") if most >= 120 else (1, "s")
        return [f"{text} {name}" for text in _plain([value / unit for value in values])]
    return _plain(values)


def _bytes(value: float) -> str:
    power = 0 if abs(value) < 1000 else min(int(math.log10(abs(value)) / 3 + 1e-9), len(UNITS) - 1)
    return f"{_plain([float(f'{value / 1000**power:.6g}')])[0]} {UNITS[power]}"


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
    if letter < "\x7f":
        return 0.68 if letter.isupper() else 0.62 if letter.isdigit() else 0.58
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Cf", "Mn"):
        return 0.0
    return 1.3 if unicodedata.east_asian_width(letter) in "WF" else 0.64


def fit(text: str, room: float, size: float = 12.0) -> str:
    """The text if it fits in ``room``, otherwise its beginning and an ellipsis."""
    text = " ".join(text.split())
    if text_width(text, size) <= room:
        return text
    left, end = room - text_width("…", size), 0
    while end < len(text) and (left := left - text_width(text[end], size)) >= 0:
        end += 1
    return text[:end].rstrip() + "…"


def break_lines(text: str, room: float) -> list[str]:
    """The text in lines no wider than ``room``; wider words are broken."""
    lines = [""]
    for word in text.split():
        if lines[-1] and text_width(f"{lines[-1]} {word}") <= room:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:
            if lines[-1] and text_width(lines[-1] + letter) > room:
                lines.append("")
            lines[-1] += letter
    return lines[1:] or [""]


def wrap(text: str, room: float, size: float = 12.0, *, most: int = 3) -> list[str]:
    """The text in at most ``most`` lines no wider than ``room``, cut off with an ellipsis if necessary."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and (text_width(longer, size) <= room or len(lines) == most):
            lines[-1] = longer
        else:
            lines.append(word)
    return [fit(line, room, size) for line in lines]
