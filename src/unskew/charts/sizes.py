"""Charts in a chosen size, for a paper: ``8cm``, ``84mm``, ``3.3in`` or ``240pt``, with a whole legend."""

import re
from dataclasses import replace

from unskew.charts import Chart
from unskew.charts.layout import head_bottom
from unskew.core.errors import UserError

INCH = 100  # units of a chart; letters of 12 units are 8.6 pt
UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
LEAST, MOST = 1.0, 40.0  # inches
PLOT = 110  # units below title and legend that axes and plot need at least
SHAPE = 300 / 440  # height over width where only one was chosen


def length(text: str, name: str) -> int:
    """A length in units of a chart; ``name`` is the option that it was given with."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*(in|cm|mm|pt)\s*", text)
    if match is None:
        raise UserError(f"{name} {text[:40]}: give a length such as 8cm, 84mm, 3.3in or 240pt")
    inches = float(match[1]) * UNITS[match[2]]
    if not LEAST <= inches <= MOST:
        raise UserError(f"{name} {text[:40]}: give {LEAST * 2.54:.3g}cm to {MOST * 2.54:.0f}cm")
    return round(INCH * inches)


def for_paper(chart: Chart, width: int | None = None, height: int | None = None) -> Chart:
    """The chart with its whole legend in that size; without a height it is as high as legend and plot need."""
    wide = width or chart.width
    chart = replace(chart, width=wide, whole_legend=True, physical=True)
    head = head_bottom(chart)
    if height is None:
        short = head_bottom(replace(chart, marks=()))
        return replace(chart, height=round(max(SHAPE * wide, PLOT) + head - short))
    if height < head + PLOT:
        said = f"the title and the legend take {head / INCH * 2.54:.1f} cm of the height"
        least = (head + PLOT) / INCH * 2.54
        raise UserError(f"{said}; give --height {least + 0.05:.1f}cm or more, a larger --width, or fewer runs")
    return replace(chart, height=height)
