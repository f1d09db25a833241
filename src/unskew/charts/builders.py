"""Charts that several pages draw: grouped bars, heat maps, sorted values, means over runs, accuracy by round."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from unskew.charts import PALETTE, Axis, Band, Bars, Cells, Chart, Colour, Dots, Line, Mark, Numbers
from unskew.charts.files import svg

MAX_POINTS_MARKED = 40  # of a line in a chart; with more the dots would hide it


def grouped(groups: Mapping[str, Numbers], tip: Callable[[str, int], str] | None = None) -> list[Mark]:
    """Bars around 0, 1, 2, …, in one color for each name; ``tip(name, index)`` describes a bar."""
    width, marks = 0.8 / max(len(groups), 1), list[Mark]()
    for index, (name, heights) in enumerate(groups.items()):
        x = [at + (index - (len(groups) - 1) / 2) * width for at in range(len(heights))]
        tips = [] if tip is None else [tip(name, at) for at in range(len(heights))]
        marks.append(Bars(x, heights, width=0.9 * width, colour=index % PALETTE, name=name, tips=tips))
    return marks


def axis_of(label: str, names: Sequence[str], *, most: int = 1000) -> Axis:
    """An axis with a name at 0, 1, 2, …; with numbers if there are too many names."""
    return Axis(label, ticks=tuple(enumerate(map(str, names))) if len(names) <= most else None, kind="count")


def heat_map(
    name: str, title: str, alt: str, values: Sequence[Numbers], tip: Callable[[int, int], str], x: Axis, y: Axis, *,
    low: float = 0.0, high: float = 1.0, numbers: str = "", width: int = 440, height: int = 340, square: bool = False,
) -> Chart:  # fmt: skip
    """A table in shades; ``tip(row, column)`` describes a cell."""
    tips = [[tip(i, j) for j in range(len(row))] for i, row in enumerate(values)]
    cells = Cells(values, low, high, numbers, tips)
    return Chart(name, title, alt, [cells], x, y, width, height, square=square)


def sorted_chart(
    name: str, title: str, alt: str, curves: Mapping[str, Sequence[float]], of: str, y: Axis,
    tip: Callable[[str, int], str] | None = None,
) -> Chart:  # fmt: skip
    """Ascending values by name, as lines or, if they are few, as dots; ``of`` is what has them: "clients"."""
    marks = list[Mark]()
    for colour, (label, values) in enumerate(curves.items()):
        share = [at / max(len(values) - 1, 1) for at in range(len(values))]
        tips = [f"{at:.0%} of the {of}: at most {value:.3g}" for at, value in zip(share, values, strict=True)]
        tips = tips if tip is None else [tip(label, at) for at in range(len(values))]
        dots = Dots(share, values, colour, radius=4.0, name=label, tips=tips)
        line = Line(share, values, label, colour, tips=tips if len(values) <= 200 else ())
        marks.append(dots if len(values) <= 100 else line)
    return Chart(name, title, alt, marks, Axis(f"share of the {of}", low=0, high=1, kind="percent"), y)


def average(
    runs: Sequence[Mapping[int, tuple[float, float]]], colour: Colour
) -> tuple[list[float], list[float], list[Band]]:
    """Mean x and mean y at the rounds that all runs have; for several runs, a band of one deviation around them."""
    common = sorted(set.intersection(*map(set, runs)))
    x, y = ([fmean(run[number][axis] for run in runs) for number in common] for axis in (0, 1))
    if len(runs) == 1:
        return x, y, []
    spread = [stdev(run[number][1] for run in runs) for number in common]
    low, high = ([mean + sign * s for mean, s in zip(y, spread, strict=True)] for sign in (-1, 1))
    return x, y, [Band(x, low, high, colour)]


def accuracy_picture(
    rows: Sequence[Mapping[str, Any]], calibrated: Mapping[str, float] | None = None, on: str = "the test set"
) -> str:
    """Accuracy by round as inline SVG, with a dashed line for each calibration; empty if no round was evaluated."""
    evaluated = [(row["round"], row["accuracy"]) for row in rows if row.get("accuracy") is not None]
    if not evaluated:
        return ""
    rounds, scores = zip(*evaluated, strict=True)
    marks = [Line(rounds, scores, "trained", 0, points=len(scores) <= MAX_POINTS_MARKED)]
    for colour, (name, accuracy) in enumerate((calibrated or {}).items(), 1):
        ends = [rounds[0], rounds[-1]] if rounds[-1] > rounds[0] else [rounds[0], rounds[0] + 1]
        marks.append(Line(ends, [accuracy, accuracy], f"after {name}", colour % 10, dashed=True))
    alt = f"Accuracy by round; the last is {scores[-1]:.2%}."
    x, y = Axis("round", kind="count"), Axis("accuracy", kind="percent")
    return svg(Chart("accuracy", f"Accuracy on {on}", alt, marks, x=x, y=y))
