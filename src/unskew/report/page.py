"""A page as values: sentences, facts, sections with charts and tables."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from urllib.parse import quote

from unskew.analysis.measure import CellValue, Choice, Column, Element, Linked, Table
from unskew.charts import Chart
from unskew.charts.files import STYLE, svg
from unskew.core.units import format_bytes, format_duration


@dataclass(frozen=True)
class Section:
    """One section of the page. ``missing`` says what cannot be shown and why, ``notes`` what a reader must know."""

    name: str  # a word for links
    title: str
    text: str = ""  # a few plain sentences on how to read the charts
    elements: Sequence[Element] = ()
    findings: Sequence[str] = ()  # in a sentence each
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The whole: what it is about, the findings in a sentence each, the facts, the sections."""

    title: str
    subtitle: str
    findings: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str = ""
    heading: str = "What this run shows"  # above the findings


WIDE = 560  # a chart wider than this has a row to itself
LONG_FACT, LONG_CELL = 40, 24  # letters: what is longer gets a row to itself, or lines
MAX_OPEN_ROWS = 200  # a table with more rows than this begins folded, after as many rows as page.css says

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath fill='%232f6db3' "
    "d='M1 9h4v6H1zM6 1h4v14H6zM11 6h4v9h-4z'/%3E%3C/svg%3E"
)

_UNPRINTABLE = {code: "\ufffd" for code in (*range(32), 127) if chr(code) not in "\t\n\r"}


def to_html(page: Page) -> str:
    """The HTML of a page: head, findings, facts, sections. Characters that cannot be shown are replaced by a mark."""
    anchors = _anchors(page.sections)
    whole = "\n".join(
        [
            *_head(page.title),
            "<body>",
            '<a class="skip" href="#content">Skip to the content</a>',
            *_title(page),
            '<div class="sheet">',
            *_navigation(page, anchors),
            '<main id="content" tabindex="-1">',
            *_findings(page),
            *_facts(page.facts),
            *(line for pair in zip(page.sections, anchors, strict=True) for line in _section(*pair)),
            "</main>",
            "</div>",
            *([f'<footer><p dir="auto">{escape(page.footer)}</p></footer>'] if page.footer else []),
            "</body>",
            "</html>\n",
        ]
    )
    return whole.translate(_UNPRINTABLE).encode("utf-8", "replace").decode("utf-8")


def _asset(name: str) -> str:
    return files("unskew.report").joinpath(name).read_text("utf-8")


def _head(title: str) -> list[str]:
    return [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title>",
        f'<link rel="icon" href="{ICON}">',
        f'<style id="chart-style">{STYLE}</style>',
        f"<style>{_asset('page.css')}</style>",
        f"<script>{_asset('page.js')}</script>",
        "</head>",
    ]


def _title(page: Page) -> list[str]:
    subtitle = [f'<p class="subtitle" dir="auto">{escape(page.subtitle)}</p>'] if page.subtitle else []
    return ["<header>", f'<h1 dir="auto">{escape(page.title)}</h1>', *subtitle, "</header>"]


def _navigation(page: Page, anchors: Sequence[str]) -> list[str]:
    if not page.sections:
        return []
    links = [("findings", "Findings")] if page.findings else []
    links += [(anchor, section.title) for anchor, section in zip(anchors, page.sections, strict=True)]
    items = (f'<li><a href="#{anchor}" dir="auto">{escape(title)}</a></li>' for anchor, title in links)
    return ['<nav aria-label="Sections">', "<ul>", *items, "</ul>", "</nav>"]


def _findings(page: Page) -> list[str]:
    if not page.findings:
        return []
    head = [
        '<section id="findings" aria-labelledby="findings-title">',
        f'<h2 id="findings-title">{escape(page.heading)}</h2>',
    ]
    return [*head, *_list("findings", map(escape, page.findings)), "</section>"]


def _facts(facts: Sequence[tuple[str, str]]) -> list[str]:
    if not facts:
        return []
    items = (
        f'<div{_long(fact, LONG_FACT)}><dt dir="auto">{escape(name)}</dt><dd dir="auto">{escape(fact)}</dd></div>'
        for name, fact in facts
    )
    return ['<section aria-label="Facts">', '<dl class="facts">', *items, "</dl>", "</section>"]


def _section(section: Section, anchor: str) -> Iterator[str]:
    yield f'<section id="{anchor}" aria-labelledby="{anchor}-title">'
    yield f'<h2 id="{anchor}-title" dir="auto">{escape(section.title)}</h2>'
    for paragraph in filter(None, map(str.strip, section.text.split("\n\n"))):
        yield f'<p class="text" dir="auto">{escape(paragraph)}</p>'
    yield from _list("says", map(escape, section.findings))
    if section.elements:
        yield '<div class="elements">'
        yield from (_element(each, f"{anchor}-{place}") for place, each in enumerate(section.elements))
        yield "</div>"
    remarks = [("Not shown:", reason) for reason in section.missing] + [("Note:", note) for note in section.notes]
    yield from _list("missing", (f"<b>{word}</b> {escape(words)}" for word, words in remarks))
    yield "</section>"


def _list(look: str, items: Iterable[str]) -> list[str]:
    lines = [f'<li dir="auto">{item}</li>' for item in items]
    return [f'<ul class="{look}">', *lines, "</ul>"] if lines else []


def _element(element: Element, name: str) -> str:
    if isinstance(element, Chart):
        return _figure(element, name, _span([element]))
    return _choice(element, name) if isinstance(element, Choice) else _table(element)


def _span(charts: Sequence[Chart]) -> str:
    return " wide" if any(chart.width > WIDE for chart in charts) else ""


def _figure(chart: Chart, name: str, span: str = "", which: str = "") -> str:
    """A chart under its title. ``name`` is unique on the page: charts may share names, ids may not.

    ``which`` says which of a choice it is, where all of them are seen: on paper, without scripts.
    """
    drawn = svg(replace(chart, name=name, title=""), standalone=False)
    label = f'<p class="which" dir="auto">{escape(which)}</p>' if which else ""
    return (
        f'<figure class="figure{span}" data-name="{escape(chart.name)}" style="--width: {chart.width}px">'
        f'<figcaption>{label}<h3 dir="auto">{escape(chart.title)}</h3></figcaption>'
        f'<div class="plot">{drawn}</div></figure>'
    )


def _choice(choice: Choice, name: str) -> str:
    start = choice.start or next(iter(choice.options), "")
    if start not in choice.options:
        raise ValueError(f"Choice(start={start!r}): there is no such {choice.label}, there are {list(choice.options)}")
    label = escape(choice.label)
    options = "".join(f"<option{' selected' if one == start else ''}>{escape(one)}</option>" for one in choice.options)
    charts = "\n".join(
        f'<div class="{"option shown" if one == start else "option"}">'
        f"{_figure(chart, f'{name}-{place}', which=f'{choice.label}: {one}')}</div>"
        for place, (one, chart) in enumerate(choice.options.items())
    )
    return (
        f'<div class="choice{_span([*choice.options.values()])}" data-label="{label}">'
        f'<div class="chooser"><label><span dir="auto">{label}</span> '
        f'<select autocomplete="off">{options}</select></label>'
        f'<button type="button" data-step="-1" aria-label="Previous {label}">‹</button>'
        f'<button type="button" data-step="1" aria-label="Next {label}">›</button></div>\n{charts}</div>'
    )


def _table(table: Table) -> str:
    name = escape(table.title)
    title = f'<h3 dir="auto">{name}</h3>' if name else ""
    note = f'<p class="note" dir="auto">{escape(table.note)}</p>' if table.note else ""
    head = "".join(f'<th scope="col"{_kind(column)} dir="auto">{escape(column.name)}</th>' for column in table.columns)
    body = "\n".join(_row(table.columns, row) for row in table.rows)
    folded = ' class="folded"' if len(table.rows) > MAX_OPEN_ROWS else ""
    return (
        f'<div class="table">{title}<div class="box" role="region" aria-label="{name or "Table"}" tabindex="0">'
        f'<table{folded} aria-label="{name or "Table"}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>{note}</div>"
    )


def _long(text: str, limit: int) -> str:
    return ' class="long"' if len(text) > limit else ""


def _kind(column: Column) -> str:
    return "" if column.kind == "text" else ' class="number"'


def _row(columns: Sequence[Column], row: Sequence[CellValue]) -> str:
    cells = []
    for place, (column, cell) in enumerate(zip(columns, row, strict=True)):
        if cell is None:
            look, text = _kind(column), ""
        elif isinstance(cell, Linked):
            look, text = _linked(cell, column)
        elif isinstance(cell, str):
            look, text = f'{_kind(column) or _long(cell, LONG_CELL)} dir="auto"', escape(cell)
        else:
            look, text = f'{_kind(column)} data-value="{_plain(cell)}"', format_value(cell, column.kind)
        cells.append(f"<td{look}>{text}</td>" if place else f'<th scope="row"{look}>{text}</th>')
    return f"<tr>{''.join(cells)}</tr>"


def _linked(cell: Linked, column: Column) -> tuple[str, str]:
    """The attributes and the content of a cell that leads somewhere."""
    classes = " ".join(filter(None, ("number" if column.kind != "text" else "", cell.look)))
    look = f' class="{classes}"' if classes else ""
    look += f' data-value="{_plain(cell.value)}"' if cell.value is not None else ""
    text = escape(cell.text)
    return f'{look} dir="auto"', f'<a href="{escape(quote(cell.href))}">{text}</a>' if cell.href else text


def format_value(value: float, kind: str = "number") -> str:
    """A number as people read it: 0.6279 is 62.79 % of a whole, 1 500 000 bytes are 1.5 MB, 90 seconds 1 min 30 s."""
    kinds: dict[str, Callable[[float], str]] = {
        "text": lambda value: f"{value:.6g}",
        "number": _number,
        "count": lambda count: f"{count:,.0f}",
        "percent": lambda share: f"{100 * share:.2f} %",
        "points": lambda gain: f"{100 * gain:+.2f}",
        "bytes": format_bytes,
        "seconds": lambda span: f"{1000 * span:.0f} ms" if 0.0005 <= span < 0.0995 else format_duration(span),
    }
    if kind not in kinds:
        raise ValueError(f"Column(kind={kind!r}): the kinds are {', '.join(kinds)}")
    if math.isfinite(value):
        return kinds[kind](value)
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


def _number(value: float) -> str:
    """Whole numbers in full, others with four significant digits."""
    if isinstance(value, int) or 1e4 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:#.4g}".removesuffix(".") if 1e-4 <= abs(value) < 1e4 else f"{value:.4g}"


def _plain(value: float) -> str:
    """A number as scripts read it."""
    return repr(value) if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity"}.get(str(value), "-Infinity")


def _anchors(sections: Sequence[Section]) -> list[str]:
    """A word for each section's link: letters, digits and dashes, none of them twice."""
    taken = {"content", "findings", "findings-title", "chart-style"}
    anchors = []
    for section in sections:
        word = re.sub(r"[^\w-]+", "-", section.name).strip("-").lower() or "section"
        anchor, count = word, 1
        while anchor in taken:
            count += 1
            anchor = f"{word}-{count}"
        taken |= {anchor, f"{anchor}-title"}
        anchors.append(anchor)
    return anchors
