"""A curve over rounds in a terminal's characters: braille dots, or ASCII where there are none."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

Point = tuple[float, float]  # round, value

MAX_POINTS = 2048  # kept of a series: more than a terminal has dots
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: left and right column, downwards
_MARKS = ".-'"  # of an ASCII character: the lowest third of its line, the middle, the highest


class Series:
    """Values over rounds. Many are thinned out: neighbours become their mean, the first and the last stay."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, number: int, value: float) -> None:
        """Add a round's value; one that is not finite cannot be drawn and is left out."""
        if not math.isfinite(value):
            return
        self.points = [*_thinned(self.points)] if len(self.points) >= MAX_POINTS else self.points
        self.points.append((number, value))


def curve(
    points: Sequence[Point], width: int, height: int, label: Callable[[float], str], ascii_only: bool
) -> list[str]:
    """The points as ``height`` lines and one for the rounds, none longer than ``width``; ``label`` spells a value."""
    low, high = min(value for _, value in points), max(value for _, value in points)
    margin = max(len(label(low)), len(label(high)))
    across, down = (1, len(_MARKS)) if ascii_only else (len(_DOTS), len(_DOTS[0]))
    columns = width - margin - 2
    levels = _levels(points, columns * across, height * down, low, high)
    rows = [[0] * columns for _ in range(height)]  # of each character, its dots or the highest of its marks
    for x, (bottom, top) in enumerate(levels):
        for level in range(bottom, top + 1):
            row, part = divmod(height * down - 1 - level, down)
            if ascii_only:
                rows[row][x] = max(rows[row][x], down - part)
            else:
                rows[row][x // across] |= _DOTS[x % across][part]
    names = {0: label(high), height - 1: label(low)} if high > low else {height // 2: label(low)}
    side, corner = ("|", "+") if ascii_only else ("│", "└")
    lines = [
        f"{names.get(place, ''):>{margin}} {side}{''.join(_character(dots, ascii_only) for dots in row).rstrip()}"
        for place, row in enumerate(rows)
    ]
    first, last = f"round {points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    end = last if len(points) > 1 else ""
    return [*lines, f"{'':>{margin}} {corner}{first}{end:>{max(1, columns - len(first))}}".rstrip()]


def _levels(points: Sequence[Point], columns: int, levels: int, low: float, high: float) -> list[tuple[int, int]]:
    """For each column of dots the lowest and the highest that is set: columns that touch make a line.

    A column shows the mean of its rounds; one without rounds is interpolated between its neighbours.
    """
    first, last = points[0][0], points[-1][0]
    if last <= first:
        return [(levels // 2, levels // 2)]
    sums, counts = [0.0] * columns, [0] * columns
    for number, value in points:
        place = round((number - first) / (last - first) * (columns - 1))
        sums[place] += value
        counts[place] += 1
    known = [place for place in range(columns) if counts[place]]
    means = [0.0] * columns
    for left, right in pairwise(known):
        start, end = sums[left] / counts[left], sums[right] / counts[right]
        for place in range(left, right + 1):
            means[place] = start + (end - start) * (place - left) / (right - left)
    span = high - low
    heights = [round((mean - low) / span * (levels - 1)) if span else levels // 2 for mean in means]
    reach = [heights[0], *heights]  # each column begins beside the one before it
    return [
        (here, here) if abs(here - before) <= 1 else (min(here, before + 1), max(here, before - 1))
        for before, here in zip(reach, heights, strict=False)
    ]


def _character(dots: int, ascii_only: bool) -> str:
    if not dots:
        return " "
    return _MARKS[dots - 1] if ascii_only else chr(0x2800 + dots)


def _thinned(points: Sequence[Point]) -> list[Point]:
    inner = points[1:-1]
    pairs = zip(inner[::2], inner[1::2], strict=False)
    return [points[0], *(((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs), points[-1]]
