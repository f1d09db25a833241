"""What a page shows of a measure: charts, one of several charts at a time, tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unskew.charts import Chart

LOOKS = ("inside", "near", "outside")  # how a value agrees with another that it is compared with


@dataclass(frozen=True)
class Linked:
    """A cell's text that leads somewhere, to a file below or beside the page; ``look`` colours it: one of LOOKS."""

    text: str
    href: str = ""
    look: str = ""
    value: float | None = None  # what it is sorted by; None: its text


Cell = str | int | float | Linked | None  # a number is sorted as a number; None is an empty cell and sorts last


@dataclass(frozen=True)
class Column:
    """A table's column. ``kind``: "text", "number", "count", "percent" (0.5 is 50.00 %), "points" (0.5 is +50.00),
    "bytes", "seconds"."""

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


Element = Chart | Choice | Table
