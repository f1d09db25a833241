"""From a chart to a drawing: marks as shapes, and the positions of title, legend, axes and plot."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.charts import Axis, Band, Bars, Cells, Chart, Dots, Line, Mark, Numbers, Picture, Rule, Words, colour_name
from unskew.charts.scales import Floats, Scale, ends, fit, text_width, ticks, to_array, wrap

SMALL = 11.0  # font size of labels in the plot
LEGIBLE = 6.5  # minimum font size of numbers in cells
PALEST = 0.08  # shade of the lowest value, still visible
READABLE = {"pale": 0.54, "half": 0.75, "full": 1.0}  # the darkest shade on which each text color is readable
LINE = 16.0  # line height
SLANT = 0.72  # a little more than the sine of 45 degrees
GAP, SWATCH = 14.0, 18.0  # between two entries of a legend; width of the color sample before a name
EDGE = 8.0  # margin of the picture
TITLE, BOLD = 14.0, 1.15  # font size, and how much wider bold text is
MIN_SIDE = 12.0  # of a plot
Ends = tuple[float, float]


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
    """A rectangle with its upper left corner at (x, y), filled with the layer's color or with ``pixels``."""

    x: float
    y: float
    width: float
    height: float
    opacity: float = 1.0
    tip: str = ""
    pixels: Sequence[Sequence[int | Sequence[int]]] | None = None  # [h][w] or [h][w][3], 0..255


@dataclass(frozen=True, slots=True)
class Polyline:
    """Connected points; if ``closed``, the last is connected to the first."""

    points: Sequence[Sequence[float]]
    closed: bool = False


Shape = Text | Circle | Box | Polyline


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


@dataclass(frozen=True)
class Plot:
    """The plot area: two scales and the frame that they span."""

    x: Scale
    y: Scale
    frame: Box

    def points(self, x: Numbers, y: Numbers) -> Floats:
        """[n, 2], the positions of these points; NaN if a number is unknown."""
        count = min(len(x), len(y))
        return np.stack([self.x.place(x[:count]), self.y.place(y[:count])], axis=1)

    def inside(self, points: Floats) -> npt.NDArray[np.bool_]:
        """Whether points [n, 2] are known and inside the frame."""
        return self.x.inside(points[:, 0]) & self.y.inside(points[:, 1])


def lay_out(chart: Chart) -> Drawing:
    """Lay out a chart; a long legend makes it higher."""
    head, top = lay_out_head(chart)
    if not chart.physical:
        _, short = lay_out_head(replace(chart, marks=()))
        chart = replace(chart, height=round(chart.height + max(0.0, top - short - 2 * LINE)))
    across, upwards = _ends(chart, chart.x, 0), _ends(chart, chart.y, 1)
    scale, width = _color_scale(chart)
    if chart.frame:
        plot, around = _lay_out_frame(chart, top, chart.width - width, across, upwards)
    else:
        labels = any(isinstance(mark, Picture) and mark.label for mark in chart.marks)
        bottom = chart.height - EDGE - (LINE if labels else 0)
        plot, around = _plot(chart, across, upwards, EDGE, top, chart.width - width - EDGE, bottom), []
    drawn = [*around, *draw_marks(chart.marks, plot), *_draw_color_scale(scale, plot), *head]
    shown = [layer for layer in drawn if layer.shapes]
    return Drawing(chart.name, chart.alt, chart.width, chart.height, plot.frame, shown)


def lay_out_head(chart: Chart) -> tuple[list[Layer], float]:
    """Title and legend with every name in full, and their bottom."""
    room = chart.width - 2 * EDGE
    lines = wrap(chart.title, room, BOLD * TITLE, most=3)
    full = chart.title if lines and lines[-1].endswith("…") else ""
    titles = [Text(EDGE, EDGE + 13 + 18 * i, line, TITLE, bold=True, full=full) for i, line in enumerate(lines)]
    drawn = [Layer("ink", titles)]
    top = EDGE + 18 * len(lines) + (4 if lines else 0)
    named = [mark for mark in chart.marks if isinstance(mark, Line | Band | Bars | Dots) and mark.name]
    entries = {mark.name: mark for mark in reversed(named)}  # the first mark of a name decides its color
    x, y, bottom = EDGE, top + 9, top + 4
    for name, mark in reversed(entries.items()):
        lines = wrap(name, room - SWATCH) or [""]
        wide = SWATCH + max(map(text_width, lines)) + GAP
        if x > EDGE and (len(lines) > 1 or x + wide - GAP > EDGE + room):
            x, y = EDGE, y + LINE
        colour = colour_name(mark.colour)
        if isinstance(mark, Line):
            drawn.append(Layer(colour, [Polyline(((x, y), (x + 14, y)))], stroke=2.5, dashed=mark.dashed))
        elif isinstance(mark, Dots):
            drawn.append(Layer(colour, [Circle(x + 7, y, 4.5)], opacity=0.8))
        else:
            drawn.append(Layer(colour, [Box(x + 2, y - 5, 10, 10)], opacity=0.2 if isinstance(mark, Band) else 1.0))
        drawn.append(Layer("ink", [Text(x + SWATCH, y + 4 + LINE * i, line) for i, line in enumerate(lines)]))
        x += wide
        if len(lines) > 1:
            x, y = EDGE + room, y + LINE * (len(lines) - 1)  # the next starts a new row
        bottom = y + 16
    return drawn, bottom


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
    return ends([value for mark in chart.marks for value in _reach(mark, side)], axis, room=room, zero=zero)


def _reach(mark: Mark, side: int) -> Numbers:
    """The numbers that a mark needs on an axis."""
    if isinstance(mark, Cells):
        count = len(mark.values) if side else max(map(len, mark.values), default=0)
        return [-0.5, count - 0.5] if count else []
    if isinstance(mark, Bars):
        if bool(side) == mark.flat:
            return [*(to_array(mark.x) - mark.width / 2), *(to_array(mark.x) + mark.width / 2)]
        feet = _bases(mark)
        return [*feet, *(feet + to_array(mark.height))]
    if isinstance(mark, Picture):
        middle, length = (mark.y, mark.height) if side else (mark.x, mark.width)
        return [middle - length / 2, middle + length / 2]
    if isinstance(mark, Rule | Words):
        return [mark.y if side else mark.x]
    if not side:
        return mark.x
    return [*mark.low, *mark.high] if isinstance(mark, Band) else mark.y


def _bases(mark: Bars) -> Floats:
    return np.nan_to_num(_fill(mark.base, len(mark.height), 0.0))


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


def _lay_out_frame(chart: Chart, top: float, wall: float, across: Ends, upwards: Ends) -> tuple[Plot, list[Layer]]:
    """The plot and its axes: the labels need room, and the room decides which labels are shown."""
    floor = chart.height - EDGE - (LINE if chart.x.label else 0)
    left, right, bottom = EDGE, wall - 12, floor - LINE
    plot = _plot(chart, across, upwards, left, top, right, bottom)
    for _ in range(8):  # shrink until everything fits
        before, row, column = plot, _label_row(chart, plot), _label_column(chart, plot)
        widths, slanted = [(at, text_width(text.text)) for at, text in row], any(text.turn for _, text in row)
        depth = SLANT * max(width for _, width in widths) + 10 if slanted else LINE + 2
        first = min((at - (SLANT if slanted else 0.5) * width for at, width in widths), default=1e9)
        last = max((at + (0 if slanted else 0.5) * width for at, width in widths), default=0.0)
        labels = max((text_width(text.text) for _, text in column), default=0.0) + 6
        left = max(left, EDGE + labels + (LINE if chart.y.label else 0), left + 4 - first)
        right, bottom = min(right, right + wall - 4 - last), floor - depth
        plot = _plot(chart, across, upwards, left, top, right, bottom)
        if plot == before:
            break
    row, column = _label_row(chart, plot), _label_column(chart, plot)
    frame, titles = plot.frame, list[Shape]()
    if chart.x.label:
        half = text_width(fit(chart.x.label, chart.width - 16)) / 2
        middle = min(max(frame.x + frame.width / 2, 8 + half), chart.width - 8 - half)
        y = frame.y + frame.height + depth + 13
        titles.append(_cut(middle, y, chart.x.label, chart.width - 16, anchor="middle"))
    if chart.y.label:
        x, y = frame.x - labels - 7, frame.y + frame.height / 2
        titles.append(_cut(x, y, chart.y.label, frame.height + 20, anchor="middle", turn=90))
    grid = _grid(chart, plot, [x for x, _ in row], [y for y, _ in column])
    return plot, [*grid, Layer("ink", [text for _, text in (*column, *row)]), Layer("quiet", titles)]


def _place_ticks(axis: Axis, scale: Scale, most: int) -> list[tuple[float, str]]:
    """Position and label of the ticks between the ends of an axis, in their order in the picture."""
    values: Sequence[tuple[float, str]] | None = axis.ticks
    if values is None:
        values = ticks(scale.low, scale.high, most=max(2, most), kind=axis.kind, log=axis.log)
    positions = scale.place([value for value, _ in values])
    placed = zip(positions.tolist(), scale.inside(positions), values, strict=True)
    return sorted((at, label) for at, inside, (_, label) in placed if inside)


def _label_column(chart: Chart, plot: Plot) -> list[tuple[float, Text]]:
    """The ticks to the left of the plot; only every second or third if they are too close."""
    placed = _place_ticks(chart.y, plot.y, int(plot.frame.height / 28))
    every = (placed[::stride] for stride in range(1, len(placed) + 1))
    sparse = next((some for some in every if all(b[0] - a[0] >= 12.5 for a, b in pairwise(some))), [])
    return [(y, _cut(plot.frame.x - 6, y + 4, label, 0.33 * chart.width, anchor="end")) for y, label in sparse]


def _label_row(chart: Chart, plot: Plot) -> list[tuple[float, Text]]:
    """The ticks below the plot; where they do not fit, names are slanted and numbers thinned out."""
    placed = _place_ticks(chart.x, plot.x, int(plot.frame.width / 62))
    bottom = plot.frame.y + plot.frame.height
    row = [(x, _cut(x, bottom + LINE, label, 0.6 * chart.width, anchor="middle")) for x, label in placed]

    def apart(row: Sequence[tuple[float, Text]]) -> bool:
        return all(b[0] - a[0] >= (text_width(a[1].text) + text_width(b[1].text)) / 2 + 6 for a, b in pairwise(row))

    if chart.x.ticks is None or not any(letter.isalpha() for _, label in placed for letter in label) or apart(row):
        return next((row[::stride] for stride in range(1, len(row) + 1) if apart(row[::stride])), [])
    space = max(1, int(min(b[0] - a[0] for a, b in pairwise(placed))))
    if space >= 100:
        return [(x, _cut(x, bottom + LINE, label, space - 6.0, anchor="middle")) for x, label in placed]
    sparse, depth = placed[:: -(-15 // space)], min(0.3 * chart.height, 90.0)
    return [(x, _cut(x + 4, bottom + 12, label, depth, anchor="end", turn=45)) for x, label in sparse]


def _grid(chart: Chart, plot: Plot, across: Sequence[float], upwards: Sequence[float]) -> list[Layer]:
    """Lines at the ticks, and the axis from which bars start; none behind cells."""
    if any(isinstance(mark, Cells) for mark in chart.marks):
        return []
    left, top = plot.frame.x, plot.frame.y
    right, bottom = left + plot.frame.width, top + plot.frame.height
    flat = {mark.flat for mark in chart.marks if isinstance(mark, Bars)}
    lines = [] if True in flat else [Polyline(((left, y), (right, y))) for y in upwards]
    lines += [] if False in flat else [Polyline(((x, top), (x, bottom))) for x in across]
    zero, upright = plot.y.at(0.0 if chart.y.ticks is None or flat else None), plot.x.at(0.0)
    level = zero if top <= zero <= bottom else bottom
    axis = ((upright, top), (upright, bottom)) if True in flat else ((left, level), (right, level))
    solid = [] if np.isnan(axis).any() else [Polyline(axis)]
    return [Layer("grid", lines, stroke=1.0), Layer("axis", solid, stroke=1.0)]


def _color_scale(chart: Chart) -> tuple[list[str], float]:
    """The labels of the scale next to cells, the low end first, and its width; none without cells."""
    for mark in chart.marks:
        if isinstance(mark, Cells) and len(mark.values):
            ends = (mark.low, mark.high)
            labels = [format(end, mark.numbers or (",.0f" if abs(end) >= 1000 else ".3g")) for end in ends]
            return labels, 26 + max(text_width(label, SMALL) for label in labels)
    return [], 0.0


def _draw_color_scale(labels: Sequence[str], plot: Plot) -> list[Layer]:
    if not labels:
        return []
    x, y, steps = plot.frame.x + plot.frame.width + 12, plot.frame.y, 20
    height = min(plot.frame.height, 140.0) / steps
    boxes = [Box(x, y + height * i, 10, height, shade(steps - 1 - i, 0, steps - 1)) for i in range(steps)]
    texts = [Text(x + 14, y + 9, labels[1], SMALL), Text(x + 14, y + height * steps, labels[0], SMALL)]
    return [Layer("heat", boxes, crisp=True), Layer("quiet", texts)]


def shade(value: float, low: float, high: float) -> float:
    """The shade of a value, from PALEST at ``low`` to 1 at ``high``."""
    share = (value - low) / (high - low) if high > low else float(value >= high)
    return PALEST + (1 - PALEST) * min(max(share, 0.0), 1.0)


def draw_marks(marks: Sequence[Mark], plot: Plot) -> list[Layer]:
    """All marks from back to front: cells, bands, the others in their order, texts, hover targets."""

    def draw(painters: Mapping[type[Any], Callable[[Any, Plot], list[Layer]]]) -> list[Layer]:
        chosen = [(painters[type(mark)], mark) for mark in marks if type(mark) in painters]
        return [layer for paint, mark in chosen for layer in paint(mark, plot)]

    behind = [*draw({Cells: _cells}), *draw({Band: _band}), *draw({Bars: _bars, Line: _line, Dots: _dots})]
    rules = _rules([mark for mark in marks if isinstance(mark, Rule)], plot)
    return [*behind, *draw({Picture: _picture}), *rules, *draw({Words: _words}), *draw({Line: _hover_targets})]


def _cells(mark: Cells, plot: Plot) -> list[Layer]:
    def edges(scale: Scale, count: int) -> list[Ends]:
        """The ends of each of these cells in ascending order; neighbors share an edge."""
        places = scale.clip(scale.place(np.arange(count + 1, dtype=float) - 0.5)).round(2).tolist()
        return [(min(pair), max(pair)) for pair in pairwise(places)]

    boxes: list[Shape] = []
    texts: dict[str, list[Shape]] = {name: [] for name in READABLE}
    rows, size = [to_array(row).tolist() for row in mark.values], 0.0
    if mark.numbers:
        longest = max((text_width(format(v, mark.numbers), 1) for row in rows for v in row if v == v), default=1.0)
        across, upwards = (abs(scale.at(1) - scale.at(0)) for scale in (plot.x, plot.y))
        size = min(SMALL, 0.86 * across / longest, 0.85 * upwards)
        size = size if size >= LEGIBLE else 0.0
    columns = edges(plot.x, max(map(len, rows), default=0))
    for i, (row, (top, bottom)) in enumerate(zip(rows, edges(plot.y, len(rows)), strict=True)):
        for j, (number, (left, right)) in enumerate(zip(row, columns, strict=False)):
            if math.isnan(number) or not (right > left and bottom > top):
                continue
            full, figures = shade(number, mark.low, mark.high), format(number, mark.numbers) if mark.numbers else ""
            tip = _item(mark.tips[i], j) if i < len(mark.tips) else ""
            boxes.append(Box(left, top, right - left, bottom - top, full, tip or ("" if size else figures)))
            if size:
                colour = next(name for name, most in READABLE.items() if full <= most)
                middle = (left + right) / 2, (top + bottom) / 2 + 0.35 * size
                texts[colour].append(Text(*middle, figures, size, "middle"))
    return [Layer("heat", boxes, crisp=True), *(Layer(name, shapes) for name, shapes in texts.items())]


def _cut(x: float, y: float, text: str, room: float, size: float = 12.0, anchor: str = "start", turn: int = 0) -> Text:
    short = fit(text, room, size)
    return Text(x, y, short, size, anchor, turn, full=text if short != text else "")


def _pieces(points: Floats) -> list[Floats]:
    """The runs of consecutive known points."""
    at = np.flatnonzero(~np.isnan(points).any(1))
    return np.split(points[at], np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else []


def _band(mark: Band, plot: Plot) -> list[Layer]:
    count = min(len(mark.low), len(mark.high))
    pieces = _pieces(np.hstack([plot.points(mark.x, mark.low[:count]), plot.points(mark.x, mark.high[:count])]))
    shapes = [Polyline((*piece[:, :2].tolist(), *piece[::-1, 2:].tolist()), closed=True) for piece in pieces]
    clip = not all((plot.inside(piece[:, :2]) & plot.inside(piece[:, 2:])).all() for piece in pieces)
    return [Layer(colour_name(mark.colour), shapes, opacity=0.2, clip=clip)]


def _line(mark: Line, plot: Plot) -> list[Layer]:
    pieces, colour = _pieces(plot.points(mark.x, mark.y)), colour_name(mark.colour)
    paths = [Polyline(piece.tolist()) for piece in pieces if len(piece) > 1]
    dots = [point for piece in pieces if mark.points or len(piece) == 1 for point in piece[plot.inside(piece)].tolist()]
    clip = not all(plot.inside(piece).all() for piece in pieces)
    line = Layer(colour, paths, stroke=2.0, dashed=mark.dashed, clip=clip)
    return [line, Layer(colour, [Circle(x, y, 3.0) for x, y in dots])]


def _hover_targets(mark: Line, plot: Plot) -> list[Layer]:
    radius = min(7.0, max(2.0, plot.frame.width / max(1, len(mark.tips)) / 2))
    points = plot.points(mark.x, mark.y)
    targets = zip(points.tolist(), plot.inside(points), mark.tips, strict=False)
    return [Layer("hit", [Circle(x, y, radius, tip) for (x, y), inside, tip in targets if inside and tip])]


def _bars(mark: Bars, plot: Plot) -> list[Layer]:
    along, upward = (plot.y, plot.x) if mark.flat else (plot.x, plot.y)
    count = min(len(mark.x), len(mark.height))
    at, length, base = to_array(mark.x[:count]), to_array(mark.height[:count]), _bases(mark)[:count]

    def span(scale: Scale, one: Floats, other: Floats) -> list[list[float]]:
        """[n][2], the ends of each bar; what has no place on a logarithmic axis is at its start."""
        positions = np.stack([scale.place(one), scale.place(other)], axis=1)
        return list(np.sort(scale.clip(np.where(np.isnan(positions), scale.start, positions))).tolist())

    sides, lengths = span(along, at - mark.width / 2, at + mark.width / 2), span(upward, base, base + length)
    shapes: dict[str, list[Shape]] = {}
    for i in np.flatnonzero(~np.isnan(at + length)).tolist():
        (left, right), (top, bottom) = (lengths[i], sides[i]) if mark.flat else (sides[i], lengths[i])
        if right > left and bottom > top:
            box = Box(left, top, right - left, bottom - top, tip=_item(mark.tips, i))
            shapes.setdefault(colour_name(mark.colour, i), []).append(box)
    return [Layer(colour, boxes) for colour, boxes in shapes.items()]


def _dots(mark: Dots, plot: Plot) -> list[Layer]:
    points = plot.points(mark.x, mark.y)
    areas = _fill(mark.area, len(points), 1.0)
    radii = (mark.radius * np.sqrt(np.clip(areas, 0, 1))).tolist()
    shapes: dict[str, list[Shape]] = {}
    for i in np.flatnonzero(plot.inside(points) & (areas > 0)).tolist():
        circle = Circle(points[i, 0], points[i, 1], radii[i], _item(mark.tips, i), _item(mark.links, i))
        shapes.setdefault(colour_name(mark.colour, i), []).append(circle)
    return [Layer(colour, circles, opacity=0.8) for colour, circles in shapes.items()]


def _rules(marks: Sequence[Rule], plot: Plot) -> list[Layer]:
    """Lines across the plot with their labels: at the right end, or one below the other at the top."""
    left, top, drawn = plot.frame.x, plot.frame.y, list[Layer]()
    right, bottom, room = left + plot.frame.width, top + plot.frame.height, plot.frame.width / 2
    for number, mark in enumerate(marks):
        colour, x, y = colour_name(mark.colour), plot.x.at(mark.x), plot.y.at(mark.y)
        wide = text_width(fit(mark.label, room, SMALL), SMALL)
        lines = []
        if left <= x <= right:
            start = x + 4 if x + 4 + wide <= right else x - 4 - wide
            lines.append((((x, top), (x, bottom)), start, top + 10 + 13 * number))
        if top <= y <= bottom:
            lines.append((((left, y), (right, y)), right - 2 - wide, y - 5 if y > top + 15 else y + 12))
        for line, start, level in lines:
            drawn.append(Layer(colour, [Polyline(line)], stroke=1.2, dashed=True))
            drawn.append(Layer(colour, [_cut(start, level, mark.label, room, SMALL)] if mark.label else []))
    return drawn


def _picture(mark: Picture, plot: Plot) -> list[Layer]:
    x, y = ([at, at - side / 2, at + side / 2] for at, side in ((mark.x, mark.width), (mark.y, mark.height)))
    corners = plot.points(x, y)
    if np.isnan(corners).any() or not len(mark.pixels) or not len(mark.pixels[0]):
        return []
    (left, right), (top, bottom) = np.sort(corners[1:].T).tolist()
    image = Box(left, top, right - left, bottom - top, tip=mark.tip, pixels=mark.pixels)
    inside = plot.inside(corners)
    label = _cut(float(corners[0, 0]), bottom + 13, mark.label, 1.1 * (right - left), SMALL, "middle")
    texts = [label] if mark.label and inside[0] else []
    return [Layer("ink", [image], clip=not inside[1:].all()), Layer("ink", texts)]


def _words(mark: Words, plot: Plot) -> list[Layer]:
    points, room = plot.points([mark.x], [mark.y]), plot.frame.width
    if not plot.inside(points).all():
        return []
    (at, y), wide = points[0].tolist(), text_width(fit(mark.text, room))
    before = {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * wide
    left, right = plot.frame.x, plot.frame.x + room - wide
    x = min(max(at - before, left), max(left, right)) + before  # moved into the frame
    return [Layer(colour_name(mark.colour), [_cut(x, y + 4, mark.text, room, anchor=mark.anchor)])]


def _fill(values: Numbers, count: int, default: float) -> Floats:
    return to_array([*values, *[default] * count][:count])


def _item(tips: Sequence[str], i: int) -> str:
    return tips[i] if i < len(tips) else ""
