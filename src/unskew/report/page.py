"""A page as values (sentences, facts, sections with charts and tables), and its HTML through ``page.html``."""

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import chain, count
from typing import Any

from unskew.analysis.measure import CellValue, Column, Element, Linked
from unskew.charts.files import STYLE, svg
from unskew.core.units import format_bytes, format_duration

WIDE = 560  # wider charts span both columns
LONG_CELL = 24  # characters; longer texts wrap
MAX_OPEN_ROWS = 200  # longer tables start folded; page.css sets how many rows are then visible

_UNPRINTABLE = {code: "\ufffd" for code in (*range(32), 127) if chr(code) not in "\t\n\r"}


@dataclass(frozen=True)
class Section:
    """One section of the page. ``missing`` lists what cannot be shown and why."""

    name: str  # for links
    title: str
    text: str = ""  # how to read the charts
    elements: Sequence[Element] = ()
    findings: Sequence[str] = ()
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A page: its title, findings, facts and sections."""

    title: str
    subtitle: str
    findings: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str = ""
    heading: str = "What this run shows"  # above the findings


def to_html(page: Page) -> str:
    """The page as one self-contained HTML file; characters that cannot be shown are replaced."""
    sections, used = list[tuple[Section, str]](), {"content", "findings", "findings-title", "chart-style"}
    for section in page.sections:  # a unique id for its link: letters, digits and dashes
        name = re.sub(r"[^\w-]+", "-", section.name).strip("-").lower() or "section"
        anchor = next(id for id in chain([name], (f"{name}-{number}" for number in count(2))) if id not in used)
        sections.append((section, anchor))
        used |= {anchor, f"{anchor}-title"}
    html: str = _template().render(page=page, sections=sections)
    return html.translate(_UNPRINTABLE).encode("utf-8", "replace").decode("utf-8")


@cache
def _template() -> Any:
    from jinja2 import Environment  # only pages need it
    from markupsafe import Markup

    assets = {name: files("unskew.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js")}
    digest = hashlib.sha256(assets["page.js"].encode()).digest()  # the only script that may run
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {
        "draw": lambda chart, name: Markup(svg(replace(chart, name=name, title=""), standalone=False)),
        "span": lambda charts: " wide" if any(chart.width > WIDE for chart in charts) else "",
        "lay_out_row": _lay_out_row, "max_open_rows": MAX_OPEN_ROWS,
        "chart_style": Markup(STYLE), "style": Markup(assets["page.css"]), "script": Markup(assets["page.js"]),
        "script_hash": base64.b64encode(digest).decode(),
    }  # fmt: skip
    return environment.from_string(files("unskew.report").joinpath("page.html").read_text("utf-8"))


def _lay_out_row(columns: Sequence[Column], row: Sequence[CellValue]) -> Iterator[dict[str, Any]]:
    """Text, classes, link and sorting value of each cell."""
    for column, cell in zip(columns, row, strict=True):
        look, text, href, value = "number" if column.kind != "text" else "", "", "", None
        if isinstance(cell, Linked):
            look, text, href, value = " ".join(filter(None, (look, cell.look))), cell.text, cell.href, cell.value
        elif isinstance(cell, str):
            look, text = look or ("long" if len(cell) > LONG_CELL else ""), cell
        elif cell is not None:
            text, value = format_value(cell, column.kind), cell
        shown = str(value).replace("inf", "Infinity").replace("nan", "NaN")  # as in JavaScript
        yield {"look": look, "text": text, "href": href, "value": None if value is None else shown}


def format_value(value: float, kind: str = "number") -> str:
    """A number for readers: 0.6279 becomes 62.79 %, 1500000 bytes 1.5 MB, 90 seconds 1 min 30 s."""
    kinds: dict[str, Callable[[float], str]] = {
        "text": lambda value: f"{value:.6g}",
        "number": _format_number,
        "count": lambda count: f"{count:,.0f}",
        "percent": lambda share: f"{100 * share:.2f} %",
        "points": lambda gain: f"{100 * gain:+.2f}",
        "bytes": format_bytes,
        "seconds": lambda span: f"{1000 * span:.0f} ms" if 0.0005 <= span < 0.0995 else format_duration(span),
    }
    if kind not in kinds:
        raise ValueError(f"Column(kind={kind!r}): choose from {', '.join(kinds)}")
    if math.isfinite(value):
        return kinds[kind](value)
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


def _format_number(value: float) -> str:
    if isinstance(value, int) or 1e4 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:#.4g}".removesuffix(".") if 1e-4 <= abs(value) < 1e4 else f"{value:.4g}"
