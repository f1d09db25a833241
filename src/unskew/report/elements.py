"""What a page is made of, as values: sentences, facts, sections with charts and tables, what a reader may choose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unskew.charts import Chart

Cell = str | int | float | None  # a number is sorted as a number; None stands empty and sorts last


@dataclass(frozen=True)
class Column:
    """A table's column. ``kind``: "text", "number", "count", "percent" (0.5 is 50.00 %), "bytes", "seconds"."""

    name: str
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """Rows that a reader can sort by any column."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """One of several charts at a time: a reader chooses a layer, a client, a class."""

    label: str  # "layer"
    options: Mapping[str, Chart]  # by what the reader sees in the list
    start: str = ""  # which is shown first; "": the first


@dataclass(frozen=True)
class Section:
    """A part of the page. ``missing`` says what cannot be shown and why, ``notes`` what a reader must know."""

    name: str  # a word for links
    title: str
    text: str = ""  # a few plain sentences on how to read the pictures
    parts: Sequence[Chart | Choice | Table] = ()
    says: Sequence[str] = ()  # what was found, in a sentence each
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The whole: what it is about, what was found in a sentence each, the facts, the sections."""

    title: str
    subtitle: str
    findings: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str = ""
    heading: str = "What this run shows"  # above the findings
