"""The legend of a chart: one entry for each name, in rows; cut to stay small, or whole."""

from collections.abc import Sequence

from unskew.charts import Band, Bars, Chart, Dots, Line
from unskew.charts.axes import LINE
from unskew.charts.scales import breadth, broken, fit
from unskew.charts.shapes import Box, Circle, Layer, Path, Text, colour_name

ENTRIES, GAP = 10, 14.0  # entries of a legend that is not whole, and the room between two
SWATCH = 18.0  # width of the colour before a name
Named = Line | Band | Bars | Dots


def legend(chart: Chart, left: float, top: float, room: float) -> tuple[list[Layer], float]:
    """The entries from the left, and how far down they reach."""
    entries = list(dict(reversed(list(_named(chart)))).items())[::-1]  # the first mark of a name gives its colour
    if not entries:
        return [], top + 4
    made = _whole(entries, left, top, room) if chart.whole_legend else _short(entries, left, top, room)
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


def _whole(entries: Sequence[tuple[str, Named]], left: float, top: float, room: float) -> list[Layer]:
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
