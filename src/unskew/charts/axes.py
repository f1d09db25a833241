"""The axes of a plot: its grid, the words along it, and how they are thinned out, slanted or cut to stay apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unskew.charts import Axis, Bars, Cells, Chart
from unskew.charts.marks import Plot
from unskew.charts.scales import Scale, breadth, fit, place, ticks, wrap
from unskew.charts.shapes import Layer, Path, Shape, Text

LINE = 16.0  # from one line of text to the next
SLANT = 0.72  # sine of 45 degrees, and a little
Placed = tuple[float, str]  # a tick's place and words


@dataclass(frozen=True)
class Row:
    """The words below a plot, those of a tick in lines: where each is, whether slanted, how deep they reach."""

    ticks: Sequence[Placed]
    slanted: bool
    depth: float


def overhang(row: Row) -> tuple[float, float]:
    """How far to the left and to the right the words below a plot reach."""
    lefts = [at - (SLANT if row.slanted else 0.5) * _widest(words) for at, words in row.ticks]
    rights = [at + (0.0 if row.slanted else 0.5) * _widest(words) for at, words in row.ticks]
    return min(lefts, default=1e9), max(rights, default=0.0)


def _widest(words: str) -> float:
    return max(map(breadth, words.split("\n")))


def column_width(column: Sequence[Placed]) -> float:
    """How much room the words beside a plot take."""
    return max((breadth(word) for _, word in column), default=0.0) + 6


def _marked(axis: Axis, scale: Scale, most: int) -> list[Placed]:
    """The ticks of an axis that are between its ends, in their order in the picture."""
    chosen = ticks(scale.low, scale.high, most=max(2, most), kind=axis.kind, log=axis.log)
    given = chosen if axis.ticks is None else axis.ticks
    first, last = sorted((scale.start, scale.end))
    placed = [(at, word) for value, word in given if (at := place(scale, value)) is not None]
    return sorted((at, word) for at, word in placed if first - 0.01 <= at <= last + 0.01)


def column(chart: Chart, plot: Plot) -> list[Placed]:
    """The ticks beside the plot, every second or third of them where they are too close."""
    every = _marked(chart.y, plot.y, int(plot.frame.height / 28))
    for stride in range(1, len(every) + 1):
        kept = every[::stride]
        if all(later[0] - earlier[0] >= 12.5 for earlier, later in pairwise(kept)):
            return [(at, fit(word, 0.33 * chart.width)) for at, word in kept]
    return []


def row(chart: Chart, plot: Plot) -> Row:
    """The ticks below the plot: side by side if they fit; else words in two lines or slanted, numbers thinned out."""
    longest = 0.6 * chart.width
    every = [(at, fit(word, longest)) for at, word in _marked(chart.x, plot.x, int(plot.frame.width / 62))]
    space = min((later[0] - earlier[0] for earlier, later in pairwise(every)), default=plot.frame.width)
    if chart.x.ticks is None or not any(letter.isalpha() for _, word in every for letter in word):
        fitting = (every[::stride] for stride in range(1, len(every) + 1) if _apart(every[::stride]))
        return Row(next(fitting, []), False, LINE + 2)
    if _apart(every):
        return Row(every, False, LINE + 2)
    lines = [(at, wrap(word, space - 6, most=2)) for at, word in every]
    if space >= 130 or (space >= 50 and not any(line.endswith("…") for _, pair in lines for line in pair)):
        return Row([(at, "\n".join(pair)) for at, pair in lines], False, 2 * LINE)
    kept = every[:: max(1, -(-15 // max(1, int(space))))]
    shorter = [(at, fit(word, min(0.3 * chart.height, 90.0))) for at, word in kept]
    return Row(shorter, True, SLANT * max(breadth(word) for _, word in shorter) + 10)


def _apart(row: Sequence[Placed]) -> bool:
    return all(b[0] - a[0] >= (breadth(a[1]) + breadth(b[1])) / 2 + 6 for a, b in pairwise(row))


def axes(chart: Chart, plot: Plot, below: Row) -> list[Layer]:
    """Grid, axes, ticks and what the axes are called."""
    frame, beside = plot.frame, column(chart, plot)
    right, bottom = frame.x + frame.width, frame.y + frame.height
    shaded = any(isinstance(mark, Cells) for mark in chart.marks)
    upright = any(isinstance(mark, Bars) and not mark.flat for mark in chart.marks)
    horizontal = any(isinstance(mark, Bars) and mark.flat for mark in chart.marks)
    across: list[Shape] = [Path(((frame.x, y), (right, y))) for y, _ in beside if not horizontal]
    down: list[Shape] = [Path(((x, frame.y), (x, bottom))) for x, _ in below.ticks if not upright]
    zero = place(plot.y, 0.0) if upright or (chart.y.ticks is None and plot.y.low < 0) else bottom
    level = zero if zero is not None and frame.y <= zero <= bottom else bottom
    upward = place(plot.x, 0.0) if horizontal else None
    solid: list[Shape] = [Path(((upward, frame.y), (upward, bottom)))] if upward is not None else []
    solid += [] if horizontal else [Path(((frame.x, level), (right, level)))]
    texts: list[Shape] = [
        Text(frame.x - 6, y + 4, word, anchor="end", whole=_whole(chart.y, word)) for y, word in beside
    ]
    for x, words in below.ticks:
        whole = _whole(chart.x, words)
        if below.slanted:
            texts.append(Text(x + 4, bottom + 12, words, anchor="end", turn=45, whole=whole))
        else:
            lines = enumerate(words.split("\n"))
            texts += [Text(x, bottom + LINE + 14 * i, line, anchor="middle", whole=whole) for i, line in lines]
    grid = [] if shaded else [Layer("grid", [*across, *down], stroke=1.0), Layer("axis", solid, stroke=1.0)]
    return [*grid, Layer("ink", texts), Layer("quiet", _titles(chart, plot, below, column_width(beside)))]


def _whole(axis: Axis, word: str) -> str:
    """The words that were cut short to this one."""
    if not word.endswith("…"):
        return ""
    begun = " ".join(word[:-1].split())
    return next((whole for _, whole in axis.ticks or () if " ".join(whole.split()).startswith(begun)), "")


def _titles(chart: Chart, plot: Plot, below: Row, beside: float) -> list[Shape]:
    """The words along the axes."""
    frame = plot.frame
    made: list[Shape] = []
    if chart.x.label:
        text = fit(chart.x.label, chart.width - 16)
        half = breadth(text) / 2
        middle = min(max(frame.x + frame.width / 2, 8 + half), chart.width - 8 - half)
        y = frame.y + frame.height + below.depth + 13
        made.append(Text(middle, y, text, anchor="middle", whole=chart.x.label if text != chart.x.label else ""))
    if chart.y.label:
        text = fit(chart.y.label, frame.height + 20)
        x, whole = frame.x - beside - 7, chart.y.label if text != chart.y.label else ""
        made.append(Text(x, frame.y + frame.height / 2, text, anchor="middle", turn=90, whole=whole))
    return made
