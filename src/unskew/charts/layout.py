"""From a chart to a drawing: where title, legend, axes and plot go, so that nothing overlaps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unskew.charts import Axis, Band, Bars, Cells, Chart, Dots, Line, Mark, Numbers, Picture, Rule, Words
from unskew.charts.marks import Plot, layers, shade
from unskew.charts.scales import (
    Box,
    Circle,
    Drawing,
    Layer,
    Path,
    Scale,
    Shape,
    Text,
    breadth,
    broken,
    colour_name,
    ends,
    fit,
    known,
    place,
    ticks,
    wrap,
)

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


ENTRIES, GAP = 10, 14.0  # entries of a legend that is not whole, and the room between two
SWATCH = 18.0  # width of the colour before a name
Named = Line | Band | Bars | Dots


def legend(chart: Chart, left: float, top: float, room: float) -> tuple[list[Layer], float]:
    """The entries from the left, and how far down they reach."""
    entries = list(dict(reversed(list(_named(chart)))).items())[::-1]  # the first mark of a name gives its colour
    if not entries:
        return [], top + 4
    made = _whole_legend(entries, left, top, room) if chart.whole_legend else _short(entries, left, top, room)
    return made, max(shape.y for layer in made for shape in layer.shapes if isinstance(shape, Text)) + 12


def _named(chart: Chart) -> list[tuple[str, Named]]:
    return [(mark.name, mark) for mark in chart.marks if isinstance(mark, Line | Band | Bars | Dots) and mark.name]


def _short(entries: Sequence[tuple[str, Named]], left: float, top: float, room: float) -> list[Layer]:
    """At most ten entries, each cut where it is long; a reader of a page sees the whole name below the pointer."""
    made: list[Layer] = []
    x, y = left, top + 9
    limit = min(room - 20, room / 3 - 32 if len(entries) > 6 else 130.0 if len(entries) > 2 else 260.0)
    for name, mark in entries[:ENTRIES]:
        text = fit(name, limit)
        wide = SWATCH + breadth(text) + GAP
        if x > left and x + wide - GAP > left + room:
            x, y = left, y + LINE
        made.append(_swatch(mark, x, y))
        made.append(Layer("ink", [Text(x + SWATCH, y + 4, text, whole=name if text != name else "")]))
        x += wide
    if more := [name for name, _ in entries[ENTRIES:]]:
        text = f"+{len(more)} more"
        if x > left and x + breadth(text) > left + room:
            x, y = left, y + LINE
        made.append(Layer("quiet", [Text(x, y + 4, text, whole=", ".join(more))]))
    return made


def _whole_legend(entries: Sequence[tuple[str, Named]], left: float, top: float, room: float) -> list[Layer]:
    """Every entry with its whole name, in several lines where it needs them."""
    made: list[Layer] = []
    x, y = left, top + 9
    for name, mark in entries:
        lines = broken(name, room - SWATCH)
        wide = SWATCH + max(map(breadth, lines)) + GAP
        if x > left and (len(lines) > 1 or x + wide - GAP > left + room):
            x, y = left, y + LINE
        made.append(_swatch(mark, x, y))
        made.append(Layer("ink", [Text(x + SWATCH, y + 4 + LINE * place, line) for place, line in enumerate(lines)]))
        x += wide
        if len(lines) > 1:
            x, y = left + room, y + LINE * (len(lines) - 1)  # the next begins a row
    return made


def _swatch(mark: Named, x: float, y: float) -> Layer:
    first = mark.colour if isinstance(mark.colour, int | str) else (*mark.colour, 0)[0]
    colour = colour_name(first)
    if isinstance(mark, Line):
        return Layer(colour, [Path(((x, y), (x + 14, y)))], stroke=2.5, dashed=mark.dashed)
    if isinstance(mark, Dots):
        return Layer(colour, [Circle(x + 7, y, 4.5)], opacity=0.8)
    return Layer(colour, [Box(x + 2, y - 5, 10, 10)], opacity=0.2 if isinstance(mark, Band) else 1.0)


EDGE = 8.0  # free at the border of the picture
TITLE, BOLD = 14.0, 1.15  # size of letters, and how much wider they are for being bold
MIN_SIDE = 12.0  # of a plot, whatever is around it
Ends = tuple[float, float]


def drawing(chart: Chart) -> Drawing:
    """Everything that is seen of a chart, from back to front."""
    head, top = _head(chart)
    across, upwards = _ends(chart, chart.x, 0), _ends(chart, chart.y, 1)
    around: list[Layer] = []
    if chart.frame:
        plot, below = _framed(chart, top, across, upwards)
        around = axes(chart, plot, below)
    else:
        plot = _bare(chart, top, across, upwards)
    made = [*around, *layers(chart.marks, plot), *_quantity(chart, plot), *head]
    seen = [layer for layer in made if layer.shapes]
    return Drawing(chart.name, chart.alt, chart.width, chart.height, plot.frame, seen)


def head_bottom(chart: Chart) -> float:
    """How far down title and legend reach."""
    return _head(chart)[1]


def _head(chart: Chart) -> tuple[list[Layer], float]:
    """Title and legend, and how far down they reach."""
    room = chart.width - 2 * EDGE
    lines = wrap(chart.title, room, BOLD * TITLE)
    whole = chart.title if lines and lines[-1].endswith("…") else ""
    titles = [
        Text(EDGE, EDGE + 13 + 18 * i, line, TITLE, bold=True, whole=whole if line == lines[-1] else "")
        for i, line in enumerate(lines)
    ]
    made, bottom = legend(chart, EDGE, EDGE + 18 * len(lines) + (4 if lines else 0), room)
    return [Layer("ink", titles), *made], bottom


def _ends(chart: Chart, axis: Axis, side: int) -> Ends:
    """The ends of the axis across (side 0) or upwards (1), with room for what is drawn around points."""
    length = 0.75 * (chart.height if side else chart.width)
    zero = any(isinstance(mark, Bars) and mark.flat != bool(side) for mark in chart.marks)
    kinds = {type(mark) for mark in chart.marks}
    largest = max((mark.radius for mark in chart.marks if isinstance(mark, Dots)), default=0.0)
    room = 0.05 if zero or side else 0.0  # lines go from border to border
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
            places = [at for value in mark.x if (at := known(value)) is not None]
            return [at + sign * mark.width / 2 for at in places for sign in (-1, 1)]
        feet = [known(foot) or 0.0 for foot in mark.base]
        feet += [0.0] * (len(mark.height) - len(feet))
        tops = zip(map(known, mark.height), feet, strict=False)
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
    """The plot between these borders, or with ``square`` the largest in their middle whose units are alike."""
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


def _bare(chart: Chart, top: float, across: Ends, upwards: Ends) -> Plot:
    labels = any(isinstance(mark, Picture) and mark.label for mark in chart.marks)
    right = chart.width - EDGE - _quantity_width(chart)
    return _plot(chart, across, upwards, EDGE, top, right, chart.height - EDGE - (LINE if labels else 0))


def _framed(chart: Chart, top: float, across: Ends, upwards: Ends) -> tuple[Plot, Row]:
    """The plot beside its ticks; they need room as wide as their words, and which words depends on the room."""
    floor = chart.height - EDGE - (LINE if chart.x.label else 0)
    wall = chart.width - _quantity_width(chart)
    left, right, bottom = EDGE, wall - 12, floor - LINE
    plot = _plot(chart, across, upwards, left, top, right, bottom)
    below = row(chart, plot)
    for _ in range(8):  # each time a little narrower, until everything fits
        before = plot
        bottom = floor - below.depth
        first, last = overhang(below)
        beside = column_width(column(chart, plot)) + (LINE if chart.y.label else 0)
        left = max(left, EDGE + beside, left + 4 - first)
        right = min(right, right + wall - 4 - last)
        plot = _plot(chart, across, upwards, left, top, right, bottom)
        below = row(chart, plot)
        if plot == before:
            break
    return plot, below


def _scale_words(chart: Chart) -> tuple[str, str] | None:
    """The values of the palest and the fullest shade."""
    first = next((mark for mark in chart.marks if isinstance(mark, Cells) and len(mark.values)), None)
    if first is None:
        return None
    low, high = (
        (format(end, first.numbers) for end in (first.low, first.high))
        if first.numbers
        else (f"{end:,.0f}" if abs(end) >= 1000 else f"{end:.3g}" for end in (first.low, first.high))
    )
    return low, high


def _quantity_width(chart: Chart) -> float:
    words = _scale_words(chart)
    return 26 + max(breadth(word, 11) for word in words) if words else 0.0


def _quantity(chart: Chart, plot: Plot) -> list[Layer]:
    """The scale of shades at the right of a table."""
    words = _scale_words(chart)
    if words is None:
        return []
    x, steps = plot.frame.x + plot.frame.width + 12, 20
    height = min(plot.frame.height, 140.0) / steps
    boxes = [Box(x, plot.frame.y + height * i, 10, height, shade(steps - 1 - i, 0, steps - 1)) for i in range(steps)]
    ends = [Text(x + 14, plot.frame.y + 9, words[1], 11), Text(x + 14, plot.frame.y + height * steps, words[0], 11)]
    return [Layer("heat", boxes, crisp=True), Layer("quiet", ends)]
