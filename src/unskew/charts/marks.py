"""From marks to shapes: each kind of mark at its place in a plot."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unskew.charts import Band, Bars, Cells, Colour, Dots, Line, Mark, Numbers, Picture, Rule, Words
from unskew.charts.scales import (
    Box,
    Circle,
    Image,
    Layer,
    Path,
    Scale,
    Shape,
    Text,
    breadth,
    colour_name,
    fit,
    known,
    place,
)

SMALL = 11.0  # letters of labels within the plot
LEGIBLE = 6.5  # numbers in cells are not smaller
PALEST = 0.08  # a cell of the lowest value is still seen to be there
TURNS = {"pale": 0.54, "half": 0.75, "full": 1.0}  # up to which shade text of a colour is read; dark turns before light
Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """The area of the data: two scales, and the frame that they span."""

    x: Scale
    y: Scale
    frame: Box


def layers(marks: Sequence[Mark], plot: Plot) -> list[Layer]:
    """All marks from back to front: shades, bands, the others as they are given, words, hover targets."""
    made = [layer for mark in marks if isinstance(mark, Cells) for layer in _cells(mark, plot)]
    made += [layer for mark in marks if isinstance(mark, Band) for layer in _band(mark, plot)]
    for mark in marks:
        if isinstance(mark, Bars):
            made += _bars(mark, plot)
        elif isinstance(mark, Line):
            made += _line(mark, plot)
        elif isinstance(mark, Dots):
            made += _dots(mark, plot)
    made += _pictures([mark for mark in marks if isinstance(mark, Picture)], plot)
    made += _rules([mark for mark in marks if isinstance(mark, Rule)], plot)
    made += [layer for mark in marks if isinstance(mark, Words) for layer in _words(mark, plot)]
    return made + [layer for mark in marks if isinstance(mark, Line) for layer in _hover_targets(mark, plot)]


def shade(value: float, low: float, high: float) -> float:
    """How full the colour of quantity is for a value, from PALEST at ``low`` to 1 at ``high``."""
    share = (value - low) / (high - low) if high > low else float(value >= high)
    return PALEST + (1 - PALEST) * min(max(share, 0.0), 1.0)


def _cells(mark: Cells, plot: Plot) -> list[Layer]:
    boxes: list[Shape] = []
    texts: dict[str, list[Shape]] = {name: [] for name in TURNS}
    size = _letters(mark, plot) if mark.numbers else 0.0
    for i, row in enumerate(mark.values):
        top, bottom = place(plot.y, i - 0.5), place(plot.y, i + 0.5)
        for j, value in enumerate(row):
            number = known(value)
            left, right = place(plot.x, j - 0.5), place(plot.x, j + 0.5)
            if number is None or left is None or right is None or top is None or bottom is None:
                continue
            full = shade(number, mark.low, mark.high)
            said = format(number, mark.numbers) if mark.numbers else ""
            tip = _at(mark.tips[i], j) if i < len(mark.tips) else ""
            corners = ((round(left, 2), round(top, 2)), (round(right, 2), round(bottom, 2)))  # neighbours leave no gap
            box = _within(*corners, plot, full, tip or ("" if size else said))
            boxes += box
            if size and box:
                x, y = (left + right) / 2, (top + bottom) / 2 + 0.35 * size
                colour = next(name for name, most in TURNS.items() if full <= most)
                texts[colour].append(Text(x, y, said, size, "middle"))
    return [Layer("heat", boxes, crisp=True), *(Layer(name, shapes) for name, shapes in texts.items())]


def _letters(mark: Cells, plot: Plot) -> float:
    """The size of the numbers in cells; 0 where they would be too small to read."""
    across = abs((place(plot.x, 1) or 0) - (place(plot.x, 0) or 0))
    upwards = abs((place(plot.y, 1) or 0) - (place(plot.y, 0) or 0))
    said = [format(number, mark.numbers) for row in mark.values for v in row if (number := known(v)) is not None]
    longest = max((breadth(text, 1) for text in said), default=1.0)
    size = min(SMALL, 0.86 * across / longest, 0.85 * upwards)
    return size if size >= LEGIBLE else 0.0


def _band(mark: Band, plot: Plot) -> list[Layer]:
    lows, highs = _runs(mark.x, mark.low, mark.high, plot=plot)
    shapes: list[Shape] = [Path((*low, *high[::-1]), closed=True) for low, high in zip(lows, highs, strict=True)]
    clip = any(_beyond(run, plot) for run in (*lows, *highs))
    return [Layer(colour_name(mark.colour), shapes, opacity=0.2, clip=clip)]


def _line(mark: Line, plot: Plot) -> list[Layer]:
    (runs,) = _runs(mark.x, mark.y, plot=plot)
    colour, clip = colour_name(mark.colour), any(_beyond(run, plot) for run in runs)
    paths: list[Shape] = [Path(run) for run in runs if len(run) > 1]
    dots = [point for run in runs if mark.points or len(run) == 1 for point in run]  # a lone point makes no line
    circles: list[Shape] = [Circle(x, y, 3.0) for x, y in dots if not _beyond([(x, y)], plot)]
    return [Layer(colour, paths, stroke=2.0, dashed=mark.dashed, clip=clip), Layer(colour, circles)]


def _hover_targets(mark: Line, plot: Plot) -> list[Layer]:
    """Invisible circles around the points of a line that have a tooltip."""
    radius = min(7.0, max(2.0, plot.frame.width / max(1, len(mark.tips)) / 2))
    shapes: list[Shape] = []
    for x, y, tip in zip(mark.x, mark.y, mark.tips, strict=False):
        point = _point(x, y, plot)
        if tip and point and not _beyond([point], plot):
            shapes.append(Circle(*point, radius, tip))
    return [Layer("hit", shapes)]


def _bars(mark: Bars, plot: Plot) -> list[Layer]:
    along, upward = (plot.y, plot.x) if mark.flat else (plot.x, plot.y)
    shapes: dict[str, list[Shape]] = {}
    for i, (x, height) in enumerate(zip(mark.x, mark.height, strict=False)):
        at, length, base = known(x), known(height), known(mark.base[i]) if i < len(mark.base) else 0.0
        if at is None or length is None:
            continue
        base = base or 0.0
        sides = [place(along, at - mark.width / 2), place(along, at + mark.width / 2)]
        a, b = (along.start if side is None else side for side in sides)
        foot, top = place(upward, base), place(upward, base + length)
        foot, top = (upward.start if end is None else end for end in (foot, top))
        corners = ((foot, a), (top, b)) if mark.flat else ((a, foot), (b, top))
        box = _within(*corners, plot, 1.0, _at(mark.tips, i))
        shapes.setdefault(_colour(mark.colour, i), []).extend(box)
    return [Layer(colour, boxes) for colour, boxes in shapes.items()]


def _dots(mark: Dots, plot: Plot) -> list[Layer]:
    shapes: dict[str, list[Shape]] = {}
    for i, (x, y) in enumerate(zip(mark.x, mark.y, strict=False)):
        point = _point(x, y, plot)
        area = known(mark.area[i]) if i < len(mark.area) else 1.0
        if point and area and area > 0 and not _beyond([point], plot):
            radius = mark.radius * math.sqrt(min(area, 1.0))
            circle = Circle(*point, radius, _at(mark.tips, i), _at(mark.links, i))
            shapes.setdefault(_colour(mark.colour, i), []).append(circle)
    return [Layer(colour, circles, opacity=0.8) for colour, circles in shapes.items()]


def _rules(marks: Sequence[Rule], plot: Plot) -> list[Layer]:
    """The lines, and each one's word at the first place along it where no other line or word is."""
    frame = plot.frame
    right, bottom = frame.x + frame.width, frame.y + frame.height
    lines: list[tuple[Rule, Box]] = []
    for mark in marks:
        x, y = place(plot.x, mark.x), place(plot.y, mark.y)
        if x is not None and not _beyond([(x, frame.y)], plot):
            lines.append((mark, Box(x, frame.y, 0, frame.height)))
        if y is not None and not _beyond([(frame.x, y)], plot):
            lines.append((mark, Box(frame.x, y, frame.width, 0)))
    made: list[Layer] = []
    taken = [line for _, line in lines]
    for mark, line in lines:
        ends = ((line.x, line.y), (line.x + line.width, line.y + line.height))
        made.append(Layer(colour_name(mark.colour), [Path(ends)], stroke=1.2, dashed=True))
        text = fit(mark.label, frame.width / 2, SMALL)
        wide = breadth(text, SMALL)
        if line.width:
            tops = [y for y in (line.y - 15, line.y + 2) if frame.y <= y <= bottom - 12]
            spots = [(right - 2 - wide - 30 * step, y) for step in range(int(frame.width / 60) + 1) for y in tops]
        else:
            lefts = [x for x in (line.x + 4, line.x - 4 - wide) if frame.x <= x <= right - wide]
            spots = [(x, frame.y + 13 * step) for step in range(int(frame.height / 26) + 1) for x in lefts]
        made += _label(mark, text, [Box(x, y, wide, 12) for x, y in spots], taken)
    return made


def _label(mark: Rule, text: str, free: Sequence[Box], taken: list[Box]) -> list[Layer]:
    if not text or not free:
        return []
    spot = next((box for box in free if not any(_touch(box, other) for other in taken)), free[0])
    taken.append(spot)
    whole = mark.label if text != mark.label else ""
    return [Layer(colour_name(mark.colour), [Text(spot.x, spot.y + 10, text, SMALL, whole=whole)])]


def _touch(one: Box, other: Box) -> bool:
    across = one.x < other.x + other.width and other.x < one.x + one.width
    return across and one.y < other.y + other.height and other.y < one.y + one.height


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
        clip = clip or _beyond(((left, top), (right, bottom)), plot)
        images.append(Image(mark.pixels, left, top, right - left, bottom - top, mark.tip))
        if mark.label and not _beyond([middle], plot):
            text = fit(mark.label, _gap(mark, marks, plot) - 4, SMALL)
            whole = mark.label if text != mark.label else ""
            texts.append(Text(middle[0], bottom + 13, text, SMALL, "middle", whole=whole))
    return [Layer("ink", images, clip=clip), Layer("ink", texts)]


def _gap(mark: Picture, marks: Sequence[Picture], plot: Plot) -> float:
    """From a picture to its nearest neighbour in the same row; the whole width when there is none."""
    own = place(plot.x, mark.x) or 0.0
    others = [place(plot.x, other.x) or 0.0 for other in marks if other.y == mark.y and other.x != mark.x]
    return min((abs(other - own) for other in others), default=plot.frame.width)


def _words(mark: Words, plot: Plot) -> list[Layer]:
    point = _point(mark.x, mark.y, plot)
    if point is None or _beyond([point], plot):
        return []
    text = fit(mark.text, plot.frame.width)
    before = {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * breadth(text)
    left, right = plot.frame.x, plot.frame.x + plot.frame.width - breadth(text)
    x = min(max(point[0] - before, left), max(left, right)) + before  # moved so far that all of it is seen
    whole = mark.text if text != mark.text else ""
    return [Layer(colour_name(mark.colour), [Text(x, point[1] + 4, text, 12.0, mark.anchor, whole=whole)])]


def _runs(x: Numbers, *curves: Numbers, plot: Plot) -> list[list[list[Point]]]:
    """Each curve's points, in pieces that end where something is unknown in any of them."""
    made: list[list[list[Point]]] = [[] for _ in curves]
    begun = False
    for at, *heights in zip(x, *curves, strict=False):
        points = [_point(at, height, plot) for height in heights]
        whole = [point for point in points if point is not None]
        if len(whole) < len(points):
            begun = False
            continue
        for runs, point in zip(made, whole, strict=True):
            runs[-1].append(point) if begun else runs.append([point])
        begun = True
    return made


def _point(x: float | None, y: float | None, plot: Plot) -> Point | None:
    across, down = place(plot.x, x), place(plot.y, y)
    return None if across is None or down is None else (across, down)


def _beyond(points: Iterable[Point], plot: Plot) -> bool:
    frame = plot.frame
    right, bottom = frame.x + frame.width + 0.01, frame.y + frame.height + 0.01
    return any(not (frame.x - 0.01 <= x <= right and frame.y - 0.01 <= y <= bottom) for x, y in points)


def _within(one: Point, other: Point, plot: Plot, opacity: float, tip: str) -> list[Box]:
    """The part of the rectangle with these corners that is inside the plot, if there is one."""
    frame = plot.frame
    left, right = max(min(one[0], other[0]), frame.x), min(max(one[0], other[0]), frame.x + frame.width)
    top, bottom = max(min(one[1], other[1]), frame.y), min(max(one[1], other[1]), frame.y + frame.height)
    return [Box(left, top, right - left, bottom - top, opacity, tip)] if right > left and bottom > top else []


def _colour(colours: Colour | Sequence[Colour], i: int) -> str:
    if isinstance(colours, str | int):
        return colour_name(colours)
    return colour_name(colours[i % len(colours)] if len(colours) else 0)


def _at(tips: Sequence[str], i: int) -> str:
    return tips[i] if i < len(tips) else ""
