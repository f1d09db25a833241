"""Charts as files: SVG, PNG or PDF, one chart or several below one another."""

from collections.abc import Sequence

from unskew.charts import Chart
from unskew.charts.svg import svg, svg_sheet

FORMATS = ("svg", "png", "pdf")


def chart_bytes(chart: Chart, form: str) -> bytes:
    """One chart as the bytes of a file."""
    if form == "svg":
        return svg(chart).encode()
    from unskew.charts.paper import paper  # here: matplotlib takes a second to import

    return paper(chart, form)


def sheet_bytes(charts: Sequence[Chart], form: str) -> bytes:
    """Several charts below one another as the bytes of one file."""
    if form == "svg":
        return svg_sheet(charts).encode()
    from unskew.charts.paper import paper_sheet

    return paper_sheet(charts, form)
