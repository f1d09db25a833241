"""From a chart to a drawing: where title, legend, axes and plot go, so that nothing overlaps."""

from unskew.charts import Axis, Band, Bars, Cells, Chart, Dots, Mark, Numbers, Picture, Rule, Words
from unskew.charts.axes import LINE, Row, axes, column, column_width, overhang, row
from unskew.charts.legend import legend
from unskew.charts.marks import Plot, layers, shade
from unskew.charts.scales import Scale, breadth, ends, known, wrap
from unskew.charts.shapes import Box, Drawing, Layer, Text

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
