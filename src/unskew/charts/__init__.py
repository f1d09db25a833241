"""A chart as a value: axes, marks, and a description for readers who cannot see it.

Measures return charts; ``charts.files`` writes them as SVG, PNG or PDF. Coordinates are those of the data. Colors are
numbers in a palette of ten that is safe for color-blind readers, or names of roles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
