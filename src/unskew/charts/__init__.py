"""A chart as a value: axes, marks, and a description for readers who cannot see it.

Measures return charts; ``charts.files`` writes them as SVG, PNG or PDF. Coordinates are those of the data. Colors are
numbers in a palette of ten that is safe for color-blind readers, or names of roles.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from unskew.core.errors import UserError

PALETTE = 10
ROLES = ("ink", "quiet", "heat")  # for text and axes; for the background; for quantities

Colour = int | str  # 0..9, or a role
Numbers = Sequence[float | None]  # None: unknown; a line breaks, a bar is missing


@dataclass(frozen=True)
class Axis:
    """One direction of a chart.

    ``low`` and ``high`` are the ends (None: as the marks need), ``ticks`` are values and their labels (None: round
    numbers), ``kind`` is the format of numbers: "number", "percent" (0.5 is 50 %), "count" (whole), "bytes", "seconds".
    """

    label: str = ""
    low: float | None = None
    high: float | None = None
    ticks: tuple[tuple[float, str], ...] | None = None
    kind: str = "number"
    log: bool = False
    reverse: bool = False  # the low end at the top, or on the right


@dataclass(frozen=True)
class Line:
    """Connected points; ``tips`` describe each point."""

    x: Numbers
    y: Numbers
    name: str = ""  # in the legend
    colour: Colour = 0
    dashed: bool = False
    points: bool = False  # whether to draw a dot at each point
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Band:
    """The area between two curves, behind the lines."""

    x: Numbers
    low: Numbers
    high: Numbers
    colour: Colour = 0
    name: str = ""


@dataclass(frozen=True)
class Bars:
    """Vertical bars around ``x``, from ``base`` (default 0) up; horizontal with ``flat``."""

    x: Numbers
    height: Numbers
    base: Numbers = ()
    width: float = 0.8
    colour: Colour | Sequence[Colour] = 0
    name: str = ""
    flat: bool = False
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Dots:
    """Circles; ``area`` is relative to the largest (default 1), ``links`` are opened by the circles of an SVG."""

    x: Numbers
    y: Numbers
    colour: Colour | Sequence[Colour] = 0
    area: Numbers = ()
    radius: float = 3.0  # of the largest, in units of the picture
    name: str = ""
    tips: Sequence[str] = ()
    links: Sequence[str] = ()


@dataclass(frozen=True)
class Cells:
    """A heat map: row 0 is at the top, cell (i, j) around x = j, y = i; None leaves a cell empty."""

    values: Sequence[Numbers]
    low: float
    high: float
    numbers: str = ""  # a format such as ".2f" for the values in the cells; "": no numbers
    tips: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Rule:
    """A thin line across the plot at ``x`` or ``y``, with a label."""

    x: float | None = None
    y: float | None = None
    label: str = ""
    colour: Colour = "quiet"


@dataclass(frozen=True)
class Picture:
    """A small image, [h][w] or [h][w][3] of numbers 0..255, centered at (x, y); its sides are in data units."""

    pixels: Sequence[Sequence[int | Sequence[int]]]
    x: float
    y: float
    width: float
    height: float
    label: str = ""  # below it
    tip: str = ""


@dataclass(frozen=True)
class Words:
    """A short text at a point."""

    x: float
    y: float
    text: str
    colour: Colour = "ink"
    anchor: str = "middle"  # start | middle | end


Mark = Line | Band | Bars | Dots | Cells | Rule | Picture | Words


@dataclass(frozen=True)
class Chart:
    """One picture. ``name`` is for files and links, ``alt`` describes the picture."""

    name: str
    title: str
    alt: str
    marks: Sequence[Mark]
    x: Axis = Axis()
    y: Axis = Axis()
    width: int = 440
    height: int = 300
    frame: bool = True  # axes with ticks; False: only marks, as for pictures and embeddings
    square: bool = False  # whether a unit has the same length on both axes
    physical: bool = False  # whether width and height are hundredths of an inch, even in SVG
    serif: bool = False


def colour_name(colours: Colour | Sequence[Colour], index: int = 0) -> str:
    """The name of a color, or of one of several; numbers beyond the palette wrap around."""
    if not isinstance(colours, str | int):
        colours = colours[index % len(colours)] if len(colours) else 0
    if not isinstance(colours, str):
        return str(int(colours) % PALETTE)
    if colours not in ROLES:
        choices = f"a number from 0 to {PALETTE - 1}, or one of {', '.join(ROLES)}"
        raise UserError(f"unknown color {colours!r}; give {choices}")
    return colours


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
