"""From a chart to a drawing: marks as shapes, and the positions of title, legend, axes and plot."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from unskew.charts import Axis, Band, Bars, Cells, Chart, Dots, Line, Mark, Numbers, Picture, Rule, Words, colour_name
from unskew.charts.scales import Scale, break_lines, ends, fit, locate, text_width, ticks, to_number, wrap


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text at its baseline, rotated by ``turn`` degrees counterclockwise; ``full`` is the uncut text."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    turn: int = 0
    bold: bool = False
    full: str = ""


@dataclass(frozen=True, slots=True)
class Circle:
    """A circle around (x, y) with an optional link."""

    x: float
    y: float
    radius: float
    tip: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with its upper left corner at (x, y)."""

    x: float
    y: float
    width: float
    height: float
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Polyline:
    """Connected points; if ``closed``, the last is connected to the first."""

    points: Sequence[tuple[float, float]]
    closed: bool = False
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """Pixels [h][w] or [h][w][3], 0..255, stretched over a rectangle."""

    pixels: Sequence[Sequence[int | Sequence[int]]]
    x: float
    y: float
    width: float
    height: float
    tip: str = ""


Shape = Text | Circle | Box | Polyline | Image


@dataclass(frozen=True)
class Layer:
    """Shapes of one color, filled or, with a ``stroke``, drawn as lines of that width."""

    colour: str  # a key of LIGHT, or "hit" for invisible hover targets
    shapes: Sequence[Shape]
    stroke: float = 0.0
    dashed: bool = False
    opacity: float = 1.0
    clip: bool = False  # cut off at the drawing's frame
    crisp: bool = False  # edges on whole pixels, so that there are no gaps


@dataclass(frozen=True)
class Drawing:
    """A picture: layers from back to front, and the frame that clips some of them."""

    name: str
    alt: str
    width: int
    height: int
    frame: Box
    layers: Sequence[Layer]


SMALL = 11.0  # font size of labels in the plot
LEGIBLE = 6.5  # minimum font size of numbers in cells
PALEST = 0.08  # shade of the lowest value, still visible
READABLE = {"pale": 0.54, "half": 0.75, "full": 1.0}  # the darkest shade on which each text color is readable
Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """The plot area: two scales and the frame that they span."""

    x: Scale
    y: Scale
    frame: Box


def layers(marks: Sequence[Mark], plot: Plot) -> list[Layer]:
    """All marks from back to front: cells, bands, the others in their order, texts, hover targets."""

    def draw(function: Callable[[Any, Plot], list[Layer]], *kinds: type) -> list[Layer]:
        return [layer for mark in marks if isinstance(mark, kinds) for layer in function(mark, plot)]

    functions: dict[type, Callable[[Any, Plot], list[Layer]]] = {Bars: _bars, Line: _line, Dots: _dots}
    drawn = [*draw(_cells, Cells), *draw(_band, Band)]
    drawn += draw(lambda mark, plot: functions[type(mark)](mark, plot), Bars, Line, Dots)
    drawn += _pictures([mark for mark in marks if isinstance(mark, Picture)], plot)
    drawn += _draw_rules([mark for mark in marks if isinstance(mark, Rule)], plot)
    return [*drawn, *draw(_words, Words), *draw(_hover_targets, Line)]


def shade(value: float, low: float, high: float) -> float:
    """The shade of a value, from PALEST at ``low`` to 1 at ``high``."""
    share = (value - low) / (high - low) if high > low else float(value >= high)
    return PALEST + (1 - PALEST) * min(max(share, 0.0), 1.0)


def _cells(mark: Cells, plot: Plot) -> list[Layer]:
    boxes: list[Shape] = []
    texts: dict[str, list[Shape]] = {name: [] for name in READABLE}
    size = _number_size(mark, plot) if mark.numbers else 0.0
    for i, row in enumerate(mark.values):
        top, bottom = locate(plot.y, i - 0.5), locate(plot.y, i + 0.5)
        for j, value in enumerate(row):
            number = to_number(value)
            left, right = locate(plot.x, j - 0.5), locate(plot.x, j + 0.5)
            if number is None or left is None or right is None or top is None or bottom is None:
                continue
            full = shade(number, mark.low, mark.high)
            figures = format(number, mark.numbers) if mark.numbers else ""
            tip = _item(mark.tips[i], j) if i < len(mark.tips) else ""
            corners = ((round(left, 2), round(top, 2)), (round(right, 2), round(bottom, 2)))  # without gaps
            box = _clip_box(*corners, plot, full, tip or ("" if size else figures))
            boxes += box
            if size and box:
                x, y = (left + right) / 2, (top + bottom) / 2 + 0.35 * size
                colour = next(name for name, most in READABLE.items() if full <= most)
                texts[colour].append(Text(x, y, figures, size, "middle"))
    return [Layer("heat", boxes, crisp=True), *(Layer(name, shapes) for name, shapes in texts.items())]


def _cut(x: float, y: float, text: str, room: float, size: float = 12.0, anchor: str = "start", turn: int = 0) -> Text:
    short = fit(text, room, size)
    return Text(x, y, short, size, anchor, turn, full=text if short != text else "")


def _number_size(mark: Cells, plot: Plot) -> float:
    """The font size of the numbers in cells; 0 if they would be too small to read."""
    across = abs((locate(plot.x, 1) or 0) - (locate(plot.x, 0) or 0))
    upwards = abs((locate(plot.y, 1) or 0) - (locate(plot.y, 0) or 0))
    figures = [format(number, mark.numbers) for row in mark.values for v in row if (number := to_number(v)) is not None]
    longest = max((text_width(text, 1) for text in figures), default=1.0)
    size = min(SMALL, 0.86 * across / longest, 0.85 * upwards)
    return size if size >= LEGIBLE else 0.0


def _band(mark: Band, plot: Plot) -> list[Layer]:
    lows, highs = _split_curves(mark.x, mark.low, mark.high, plot=plot)
    shapes: list[Shape] = [Polyline((*low, *high[::-1]), closed=True) for low, high in zip(lows, highs, strict=True)]
    clip = any(_outside(run, plot) for run in (*lows, *highs))
    return [Layer(colour_name(mark.colour), shapes, opacity=0.2, clip=clip)]


def _line(mark: Line, plot: Plot) -> list[Layer]:
    (runs,) = _split_curves(mark.x, mark.y, plot=plot)
    colour, clip = colour_name(mark.colour), any(_outside(run, plot) for run in runs)
    paths: list[Shape] = [Polyline(run) for run in runs if len(run) > 1]
    dots = [point for run in runs if mark.points or len(run) == 1 for point in run]
    circles: list[Shape] = [Circle(x, y, 3.0) for x, y in dots if not _outside([(x, y)], plot)]
    return [Layer(colour, paths, stroke=2.0, dashed=mark.dashed, clip=clip), Layer(colour, circles)]


def _hover_targets(mark: Line, plot: Plot) -> list[Layer]:
    radius = min(7.0, max(2.0, plot.frame.width / max(1, len(mark.tips)) / 2))
    shapes: list[Shape] = []
    for x, y, tip in zip(mark.x, mark.y, mark.tips, strict=False):
        point = _point(x, y, plot)
        if tip and point and not _outside([point], plot):
            shapes.append(Circle(*point, radius, tip))
    return [Layer("hit", shapes)]


def _bars(mark: Bars, plot: Plot) -> list[Layer]:
    along, upward = (plot.y, plot.x) if mark.flat else (plot.x, plot.y)
    shapes: dict[str, list[Shape]] = {}
    for i, (x, height) in enumerate(zip(mark.x, mark.height, strict=False)):
        at, length, base = to_number(x), to_number(height), to_number(mark.base[i]) if i < len(mark.base) else 0.0
        if at is None or length is None:
            continue
        base = base or 0.0
        sides = [locate(along, at - mark.width / 2), locate(along, at + mark.width / 2)]
        a, b = (along.start if side is None else side for side in sides)
        foot, top = locate(upward, base), locate(upward, base + length)
        foot, top = (upward.start if end is None else end for end in (foot, top))
        corners = ((foot, a), (top, b)) if mark.flat else ((a, foot), (b, top))
        box = _clip_box(*corners, plot, 1.0, _item(mark.tips, i))
        shapes.setdefault(colour_name(mark.colour, i), []).extend(box)
    return [Layer(colour, boxes) for colour, boxes in shapes.items()]


def _dots(mark: Dots, plot: Plot) -> list[Layer]:
    shapes: dict[str, list[Shape]] = {}
    for i, (x, y) in enumerate(zip(mark.x, mark.y, strict=False)):
        point = _point(x, y, plot)
        area = to_number(mark.area[i]) if i < len(mark.area) else 1.0
        if point and area and area > 0 and not _outside([point], plot):
            radius = mark.radius * math.sqrt(min(area, 1.0))
            circle = Circle(*point, radius, _item(mark.tips, i), _item(mark.links, i))
            shapes.setdefault(colour_name(mark.colour, i), []).append(circle)
    return [Layer(colour, circles, opacity=0.8) for colour, circles in shapes.items()]


def _draw_rules(marks: Sequence[Rule], plot: Plot) -> list[Layer]:
    """The lines, each with its label at the first free spot along it."""
    frame = plot.frame
    right, bottom = frame.x + frame.width, frame.y + frame.height
    lines: list[tuple[Rule, Box]] = []
    for mark in marks:
        x, y = locate(plot.x, mark.x), locate(plot.y, mark.y)
        if x is not None and not _outside([(x, frame.y)], plot):
            lines.append((mark, Box(x, frame.y, 0, frame.height)))
        if y is not None and not _outside([(frame.x, y)], plot):
            lines.append((mark, Box(frame.x, y, frame.width, 0)))

    def overlap(one: Box, other: Box) -> bool:
        across = one.x < other.x + other.width and other.x < one.x + one.width
        return across and one.y < other.y + other.height and other.y < one.y + one.height

    drawn: list[Layer] = []
    occupied = [line for _, line in lines]
    for mark, line in lines:
        ends = ((line.x, line.y), (line.x + line.width, line.y + line.height))
        drawn.append(Layer(colour_name(mark.colour), [Polyline(ends)], stroke=1.2, dashed=True))
        wide = text_width(fit(mark.label, frame.width / 2, SMALL), SMALL)
        if line.width:
            tops = [y for y in (line.y - 15, line.y + 2) if frame.y <= y <= bottom - 12]
            spots = [(right - 2 - wide - 30 * step, y) for step in range(int(frame.width / 60) + 1) for y in tops]
        else:
            lefts = [x for x in (line.x + 4, line.x - 4 - wide) if frame.x <= x <= right - wide]
            spots = [(x, frame.y + 13 * step) for step in range(int(frame.height / 26) + 1) for x in lefts]
        if mark.label and spots:
            boxes = [Box(x, y, wide, 12) for x, y in spots]
            spot = next((box for box in boxes if not any(overlap(box, other) for other in occupied)), boxes[0])
            occupied.append(spot)
            text = _cut(spot.x, spot.y + 10, mark.label, frame.width / 2, SMALL)
            drawn.append(Layer(colour_name(mark.colour), [text]))
    return drawn


def _pictures(marks: Sequence[Picture], plot: Plot) -> list[Layer]:
    images: list[Shape] = []
    texts: list[Shape] = []
    clip = False
    for mark in marks:
        middle = _point(mark.x, mark.y, plot)
        ends = [_point(mark.x + sign * mark.width / 2, mark.y + sign * mark.height / 2, plot) for sign in (-1, 1)]
        if middle is None or ends[0] is None or ends[1] is None or not len(mark.pixels) or not len(mark.pixels[0]):
            continue
        (left, right), (top, bottom) = (sorted(pair) for pair in zip(*ends, strict=True))
        clip = clip or _outside(((left, top), (right, bottom)), plot)
        images.append(Image(mark.pixels, left, top, right - left, bottom - top, mark.tip))
        if mark.label and not _outside([middle], plot):
            own, row = locate(plot.x, mark.x) or 0.0, (other.x for other in marks if other.y == mark.y)
            gaps = (abs((locate(plot.x, x) or 0.0) - own) for x in row if x != mark.x)
            room = min(gaps, default=plot.frame.width) - 4
            texts.append(_cut(middle[0], bottom + 13, mark.label, room, SMALL, "middle"))
    return [Layer("ink", images, clip=clip), Layer("ink", texts)]


def _words(mark: Words, plot: Plot) -> list[Layer]:
    point = _point(mark.x, mark.y, plot)
    if point is None or _outside([point], plot):
        return []
    text = fit(mark.text, plot.frame.width)
    before = {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * text_width(text)
    left, right = plot.frame.x, plot.frame.x + plot.frame.width - text_width(text)
    x = min(max(point[0] - before, left), max(left, right)) + before  # moved into the frame
    label = _cut(x, point[1] + 4, mark.text, plot.frame.width, anchor=mark.anchor)
    return [Layer(colour_name(mark.colour), [label])]


def _split_curves(x: Numbers, *curves: Numbers, plot: Plot) -> list[list[list[Point]]]:
    """Each curve's points, in pieces that end where a value is unknown in any curve."""
    pieces: list[list[list[Point]]] = [[] for _ in curves]
    begun = False
    for at, *heights in zip(x, *curves, strict=False):
        points = [_point(at, height, plot) for height in heights]
        known = [point for point in points if point is not None]
        if len(known) < len(points):
            begun = False
            continue
        for runs, point in zip(pieces, known, strict=True):
            runs[-1].append(point) if begun else runs.append([point])
        begun = True
    return pieces


def _point(x: float | None, y: float | None, plot: Plot) -> Point | None:
    across, down = locate(plot.x, x), locate(plot.y, y)
    return None if across is None or down is None else (across, down)


def _outside(points: Iterable[Point], plot: Plot) -> bool:
    frame = plot.frame
    right, bottom = frame.x + frame.width + 0.01, frame.y + frame.height + 0.01
    return any(not (frame.x - 0.01 <= x <= right and frame.y - 0.01 <= y <= bottom) for x, y in points)


def _clip_box(one: Point, other: Point, plot: Plot, opacity: float, tip: str) -> list[Box]:
    """The part of the rectangle with these corners that is inside the plot, if any."""
    frame = plot.frame
    left, right = max(min(one[0], other[0]), frame.x), min(max(one[0], other[0]), frame.x + frame.width)
    top, bottom = max(min(one[1], other[1]), frame.y), min(max(one[1], other[1]), frame.y + frame.height)
    return [Box(left, top, right - left, bottom - top, opacity, tip)] if right > left and bottom > top else []


def _item(tips: Sequence[str], i: int) -> str:
    return tips[i] if i < len(tips) else ""


LINE = 16.0  # line height
SLANT = 0.72  # a little more than the sine of 45 degrees
Tick = tuple[float, str]  # position and label


@dataclass(frozen=True)
class TickRow:
    """The ticks below a plot, whether their labels are slanted, and their depth."""

    ticks: Sequence[Tick]
    slanted: bool
    depth: float


def column_width(column: Sequence[Tick]) -> float:
    """The width of the labels to the left of a plot."""
    return max((text_width(label) for _, label in column), default=0.0) + 6


def _place_ticks(axis: Axis, scale: Scale, most: int) -> list[Tick]:
    """The ticks of an axis that are between its ends, in their order in the picture."""
    values: Sequence[Tick] | None = axis.ticks
    if values is None:
        values = ticks(scale.low, scale.high, most=max(2, most), kind=axis.kind, log=axis.log)
    first, last = sorted((scale.start, scale.end))
    placed = [(at, label) for value, label in values if (at := locate(scale, value)) is not None]
    return sorted((at, label) for at, label in placed if first - 0.01 <= at <= last + 0.01)


def column(chart: Chart, plot: Plot) -> list[Tick]:
    """The ticks to the left of the plot; only every second or third if they are too close."""
    placed = _place_ticks(chart.y, plot.y, int(plot.frame.height / 28))
    for stride in range(1, len(placed) + 1):
        sparse = placed[::stride]
        if all(later[0] - earlier[0] >= 12.5 for earlier, later in pairwise(sparse)):
            return [(at, fit(label, 0.33 * chart.width)) for at, label in sparse]
    return []


def row(chart: Chart, plot: Plot) -> TickRow:
    """The ticks below the plot: horizontal if they fit; else text in two lines or slanted, numbers thinned out."""
    longest = 0.6 * chart.width
    placed = [(at, fit(label, longest)) for at, label in _place_ticks(chart.x, plot.x, int(plot.frame.width / 62))]
    space = min((later[0] - earlier[0] for earlier, later in pairwise(placed)), default=plot.frame.width)
    if chart.x.ticks is None or not any(letter.isalpha() for _, label in placed for letter in label):
        fitting = (placed[::stride] for stride in range(1, len(placed) + 1) if _apart(placed[::stride]))
        return TickRow(next(fitting, []), False, LINE + 2)
    if _apart(placed):
        return TickRow(placed, False, LINE + 2)
    lines = [(at, wrap(label, space - 6, most=2)) for at, label in placed]
    if space >= 130 or (space >= 50 and not any(line.endswith("…") for _, pair in lines for line in pair)):
        return TickRow([(at, "\n".join(pair)) for at, pair in lines], False, 2 * LINE)
    sparse = placed[:: max(1, -(-15 // max(1, int(space))))]
    depth = min(0.3 * chart.height, 90.0)
    shorter = [(at, fit(label, depth)) for at, label in sparse]
    if len(dict(shorter)) > len({label for _, label in shorter}):  # their beginnings are the same: show their ends
        shorter = [(at, fit(label[::-1], depth)[::-1]) for at, label in sparse]
    return TickRow(shorter, True, SLANT * max(text_width(label) for _, label in shorter) + 10)


def _apart(row: Sequence[Tick]) -> bool:
    return all(b[0] - a[0] >= (text_width(a[1]) + text_width(b[1])) / 2 + 6 for a, b in pairwise(row))


def axes(chart: Chart, plot: Plot, below: TickRow) -> list[Layer]:
    """Grid, axes, ticks and the axes' titles."""
    frame, labels = plot.frame, column(chart, plot)
    right, bottom = frame.x + frame.width, frame.y + frame.height
    shaded = any(isinstance(mark, Cells) for mark in chart.marks)
    upright = any(isinstance(mark, Bars) and not mark.flat for mark in chart.marks)
    horizontal = any(isinstance(mark, Bars) and mark.flat for mark in chart.marks)
    across: list[Shape] = [Polyline(((frame.x, y), (right, y))) for y, _ in labels if not horizontal]
    down: list[Shape] = [Polyline(((x, frame.y), (x, bottom))) for x, _ in below.ticks if not upright]
    zero = locate(plot.y, 0.0) if upright or (chart.y.ticks is None and plot.y.low < 0) else bottom
    level = zero if zero is not None and frame.y <= zero <= bottom else bottom
    upward = locate(plot.x, 0.0) if horizontal else None
    solid: list[Shape] = [Polyline(((upward, frame.y), (upward, bottom)))] if upward is not None else []
    solid += [] if horizontal else [Polyline(((frame.x, level), (right, level)))]
    texts: list[Shape] = [
        Text(frame.x - 6, y + 4, label, anchor="end", full=_full_label(chart.y, label)) for y, label in labels
    ]
    for x, label in below.ticks:
        full = _full_label(chart.x, label)
        if below.slanted:
            texts.append(Text(x + 4, bottom + 12, label, anchor="end", turn=45, full=full))
        else:
            lines = enumerate(label.split("\n"))
            texts += [Text(x, bottom + LINE + 14 * i, line, anchor="middle", full=full) for i, line in lines]
    grid = [] if shaded else [Layer("grid", [*across, *down], stroke=1.0), Layer("axis", solid, stroke=1.0)]
    return [*grid, Layer("ink", texts), Layer("quiet", _titles(chart, plot, below, column_width(labels)))]


def _full_label(axis: Axis, label: str) -> str:
    if "…" not in (label[:1], label[-1:]):
        return ""
    part = " ".join(label.strip("…").split())
    labels = [" ".join(full.split()) for _, full in axis.ticks or ()]
    return next((full for full in labels if full.startswith(part) or full.endswith(part)), "")


def _titles(chart: Chart, plot: Plot, below: TickRow, labels: float) -> list[Shape]:
    frame = plot.frame
    titles: list[Shape] = []
    if chart.x.label:
        half = text_width(fit(chart.x.label, chart.width - 16)) / 2
        middle = min(max(frame.x + frame.width / 2, 8 + half), chart.width - 8 - half)
        y = frame.y + frame.height + below.depth + 13
        titles.append(_cut(middle, y, chart.x.label, chart.width - 16, anchor="middle"))
    if chart.y.label:
        x, y = frame.x - labels - 7, frame.y + frame.height / 2
        titles.append(_cut(x, y, chart.y.label, frame.height + 20, anchor="middle", turn=90))
    return titles


GAP = 14.0  # between two entries of a legend
SWATCH = 18.0  # width of the color sample before a name
Named = Line | Band | Bars | Dots


def legend(chart: Chart, left: float, top: float, room: float) -> tuple[list[Layer], float]:
    """The legend with every name in full, and its bottom."""
    named = [mark for mark in chart.marks if isinstance(mark, Line | Band | Bars | Dots) and mark.name]
    entries = {mark.name: mark for mark in reversed(named)}  # the first mark of a name decides its color
    drawn: list[Layer] = []
    x, y, bottom = left, top + 9, top + 4
    for name, mark in reversed(entries.items()):
        lines = break_lines(name, room - SWATCH)
        wide = SWATCH + max(map(text_width, lines)) + GAP
        if x > left and (len(lines) > 1 or x + wide - GAP > left + room):
            x, y = left, y + LINE
        drawn.append(_swatch(mark, x, y))
        drawn.append(Layer("ink", [Text(x + SWATCH, y + 4 + LINE * i, line) for i, line in enumerate(lines)]))
        x += wide
        if len(lines) > 1:
            x, y = left + room, y + LINE * (len(lines) - 1)  # the next starts a new row
        bottom = y + 16
    return drawn, bottom


def _swatch(mark: Named, x: float, y: float) -> Layer:
    colour = colour_name(mark.colour)
    if isinstance(mark, Line):
        return Layer(colour, [Polyline(((x, y), (x + 14, y)))], stroke=2.5, dashed=mark.dashed)
    if isinstance(mark, Dots):
        return Layer(colour, [Circle(x + 7, y, 4.5)], opacity=0.8)
    return Layer(colour, [Box(x + 2, y - 5, 10, 10)], opacity=0.2 if isinstance(mark, Band) else 1.0)


EDGE = 8.0  # margin of the picture
TITLE, BOLD = 14.0, 1.15  # font size, and how much wider bold text is
MIN_SIDE = 12.0  # of a plot
Ends = tuple[float, float]


def lay_out(chart: Chart) -> Drawing:
    """Lay out a chart; a long legend makes it higher."""
    head, top = lay_out_head(chart)
    if not chart.physical:
        _, short = lay_out_head(replace(chart, marks=()))
        chart = replace(chart, height=round(chart.height + max(0.0, top - short - 2 * LINE)))
    across, upwards = _ends(chart, chart.x, 0), _ends(chart, chart.y, 1)
    around: list[Layer] = []
    if chart.frame:
        plot, below = _lay_out_frame(chart, top, across, upwards)
        around = axes(chart, plot, below)
    else:
        labels = any(isinstance(mark, Picture) and mark.label for mark in chart.marks)
        right, bottom = chart.width - EDGE - _quantity_width(chart), chart.height - EDGE - (LINE if labels else 0)
        plot = _plot(chart, across, upwards, EDGE, top, right, bottom)
    drawn = [*around, *layers(chart.marks, plot), *_quantity(chart, plot), *head]
    drawn = [layer for layer in drawn if layer.shapes]
    return Drawing(chart.name, chart.alt, chart.width, chart.height, plot.frame, drawn)


def lay_out_head(chart: Chart) -> tuple[list[Layer], float]:
    """Title and legend, and their bottom."""
    room = chart.width - 2 * EDGE
    lines = wrap(chart.title, room, BOLD * TITLE)
    full = chart.title if lines and lines[-1].endswith("…") else ""
    titles = [
        Text(EDGE, EDGE + 13 + 18 * i, line, TITLE, bold=True, full=full if line == lines[-1] else "")
        for i, line in enumerate(lines)
    ]
    names, bottom = legend(chart, EDGE, EDGE + 18 * len(lines) + (4 if lines else 0), room)
    return [Layer("ink", titles), *names], bottom


def _ends(chart: Chart, axis: Axis, side: int) -> Ends:
    """The ends of the horizontal (side 0) or vertical (1) axis, with room for dots."""
    length = 0.75 * (chart.height if side else chart.width)
    zero = any(isinstance(mark, Bars) and mark.flat != bool(side) for mark in chart.marks)
    kinds = {type(mark) for mark in chart.marks}
    largest = max((mark.radius for mark in chart.marks if isinstance(mark, Dots)), default=0.0)
    room = 0.05 if zero or side else 0.0  # lines extend from border to border
    if kinds & {Bars, Cells, Picture} and not zero:
        room = 0.015 if Bars in kinds else 0.0
    if largest:
        room = max(room, (largest + 2) / max(1.0, length - 2 * (largest + 2)))
    values = [value for mark in chart.marks for value in _reach(mark, side)]
    return ends(values, axis, room=room, zero=zero)


def _reach(mark: Mark, side: int) -> Numbers:
    """The numbers that a mark needs on an axis."""
    if isinstance(mark, Cells):
        count = len(mark.values) if side else max(map(len, mark.values), default=0)
        return [-0.5, count - 0.5] if count else []
    if isinstance(mark, Bars):
        if bool(side) == mark.flat:
            positions = [at for value in mark.x if (at := to_number(value)) is not None]
            return [at + sign * mark.width / 2 for at in positions for sign in (-1, 1)]
        feet = [to_number(foot) or 0.0 for foot in mark.base]
        feet += [0.0] * (len(mark.height) - len(feet))
        tops = zip(map(to_number, mark.height), feet, strict=False)
        return [*feet, *(foot + height for height, foot in tops if height is not None)]
    if isinstance(mark, Picture):
        middle, length = (mark.y, mark.height) if side else (mark.x, mark.width)
        return [middle - length / 2, middle + length / 2]
    if isinstance(mark, Band):
        return [*mark.low, *mark.high] if side else mark.x
    if isinstance(mark, Rule | Words):
        return [mark.y if side else mark.x]
    return mark.y if side else mark.x


def _plot(chart: Chart, across: Ends, upwards: Ends, left: float, top: float, right: float, bottom: float) -> Plot:
    """The plot between these borders, or with ``square`` the largest centered one with equal units."""
    width, height = max(MIN_SIDE, right - left), max(MIN_SIDE, bottom - top)
    if chart.square and not chart.x.log and not chart.y.log:
        unit = min(width / (across[1] - across[0]), height / (upwards[1] - upwards[0]))
        spare = width - unit * (across[1] - across[0])
        left, width, height = left + spare / 2, width - spare, unit * (upwards[1] - upwards[0])
    downwards = chart.y.reverse or any(isinstance(mark, Cells) for mark in chart.marks)
    sides, heights = (left, left + width), (top + height, top)
    return Plot(
        Scale(*across, *(sides[::-1] if chart.x.reverse else sides), chart.x.log),
        Scale(*upwards, *(heights[::-1] if downwards else heights), chart.y.log),
        Box(left, top, width, height),
    )


def _lay_out_frame(chart: Chart, top: float, across: Ends, upwards: Ends) -> tuple[Plot, TickRow]:
    """The plot and its ticks: the labels need room, and the room decides which labels are shown."""
    floor = chart.height - EDGE - (LINE if chart.x.label else 0)
    wall = chart.width - _quantity_width(chart)
    left, right, bottom = EDGE, wall - 12, floor - LINE
    plot = _plot(chart, across, upwards, left, top, right, bottom)
    below = row(chart, plot)
    for _ in range(8):  # shrink until everything fits
        before = plot
        bottom = floor - below.depth
        share = SLANT if below.slanted else 0.5  # of a label's width to the left of its tick
        widths = [(at, max(map(text_width, label.split("\n")))) for at, label in below.ticks]
        first = min((at - share * width for at, width in widths), default=1e9)
        last = max((at + (0 if below.slanted else 0.5) * width for at, width in widths), default=0.0)
        labels = column_width(column(chart, plot)) + (LINE if chart.y.label else 0)
        left = max(left, EDGE + labels, left + 4 - first)
        right = min(right, right + wall - 4 - last)
        plot = _plot(chart, across, upwards, left, top, right, bottom)
        below = row(chart, plot)
        if plot == before:
            break
    return plot, below


def _scale_labels(chart: Chart) -> tuple[str, str] | None:
    first = next((mark for mark in chart.marks if isinstance(mark, Cells) and len(mark.values)), None)
    if first is None:
        return None
    ends = first.low, first.high
    formats = [first.numbers or (",.0f" if abs(end) >= 1000 else ".3g") for end in ends]
    return format(ends[0], formats[0]), format(ends[1], formats[1])


def _quantity_width(chart: Chart) -> float:
    labels = _scale_labels(chart)
    return 26 + max(text_width(label, 11) for label in labels) if labels else 0.0


def _quantity(chart: Chart, plot: Plot) -> list[Layer]:
    labels = _scale_labels(chart)
    if labels is None:
        return []
    x, steps = plot.frame.x + plot.frame.width + 12, 20
    height = min(plot.frame.height, 140.0) / steps
    boxes = [Box(x, plot.frame.y + height * i, 10, height, shade(steps - 1 - i, 0, steps - 1)) for i in range(steps)]
    ends = [Text(x + 14, plot.frame.y + 9, labels[1], 11), Text(x + 14, plot.frame.y + height * steps, labels[0], 11)]
    return [Layer("heat", boxes, crisp=True), Layer("quiet", ends)]
