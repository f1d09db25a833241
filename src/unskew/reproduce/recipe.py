"""A recipe: the rows and columns of a table or figure, what is trained for each cell, and what the paper has there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from unskew.core.errors import UserError, brief
from unskew.runs.options import Value

SCALES = ("smoke", "small", "paper")


@dataclass(frozen=True)
class Level:
    """What is set for all cells, for a column or for a row: options of a run, and variables in their texts.

    ``scale`` has what differs at a scale, ``stand_in`` what differs where other data stand in for the paper's, and
    in it again ``scale`` what differs at a scale with these data.
    """

    settings: Mapping[str, Value] = field(default_factory=dict)
    variables: Mapping[str, Value] = field(default_factory=dict)
    scale: Mapping[str, "Level"] = field(default_factory=dict)
    stand_in: Mapping[str, "Level"] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperValue:
    """A value as the paper prints it: accuracies in per cent. ``beyond``: it is more than that (``> 50k`` rounds)."""

    text: str
    mean: float
    deviation: float | None = None
    beyond: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Column:
    """A column of the table; where it is a figure of the same run, ``reads`` says which, for all rows."""

    name: str
    level: Level = Level()
    reads: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the table: what is trained, which classifier is read, and which of its figures."""

    name: str
    level: Level = Level()
    after: str = ""  # the calibration whose classifier is read; "": the run's own
    reads: str = ""  # one of reproduce.readings; "": what the column reads, or the accuracy
    against: str = ""  # the row that the gain is over
    values: tuple[PaperValue | None, ...] = ()  # by column
    by_column: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)  # variables of some columns
    only: tuple[str, ...] = ()  # patterns of the columns that have this row; none: all
    line: str = ""  # in a chart of lines: which line
    x: float | None = None  # and where on it


@dataclass(frozen=True)
class Paper:
    """A paper: what its tables share."""

    name: str
    reference: str
    level: Level
    seeds: Mapping[str, tuple[int, ...]]  # by scale
    differences: tuple[str, ...]
    columns: Mapping[str, Column]  # that several of its tables have


@dataclass(frozen=True)
class Extent:
    """What of a recipe is done at a scale: patterns of rows and columns, and the seeds."""

    rows: tuple[str, ...] = ("*",)
    columns: tuple[str, ...] = ("*",)
    seeds: tuple[int, ...] = ()

    def has(self, row: str, column: str) -> bool:
        """Whether that cell is done."""
        return matches(row, self.rows) and matches(column, self.columns)


@dataclass(frozen=True)
class Recipe:
    """A table or a figure of a paper."""

    name: str  # "ccvr/table2"
    title: str
    source: str  # where it is in the paper
    about: str
    paper: Paper
    level: Level
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    extents: Mapping[tuple[str, str], Extent]  # by scale and the data that stand in for the paper's, "" for its own
    baseline: Mapping[str, Value] | None = None  # over a column's settings: what relative accuracy is relative to
    measures: tuple[str, ...] = ()  # taken of every run, of the first seed alone unless ``measure_all``
    measure_all: bool = False
    figures: tuple[Mapping[str, Any], ...] = ()  # one of reproduce.figures each
    notes: tuple[str, ...] = ()  # on the paper's values: contradictions, where they were taken from
    differences: tuple[str, ...] = ()  # of the set-up, beside the paper's own
    stand_ins: Mapping[str, str] = field(default_factory=dict)  # by name, what it is
    # by stand-in, how the differences begin that do not apply to it
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def extent(self, scale: str, data: str = "") -> Extent:
        """What is done at that scale with these data in the place of the paper's."""
        return self.extents.get((scale, data)) or self.extents[scale, ""]

    @property
    def is_figure(self) -> bool:
        """Whether it is a figure of the paper, not a table."""
        return "figure" in self.name.partition("/")[2]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of these, which may have ``*``, and ``alpha`` for α, ``beta`` for β."""
    plain = name.replace("α", "alpha").replace("β", "beta")
    return any(fnmatchcase(each, pattern) for each in (name, plain) for pattern in patterns)


def paper_value(given: Any, where: str) -> PaperValue | None:
    """``"68.62±0.77"``, ``57.94``, ``"> 50000"``; None for ``""``, where the paper has nothing."""
    if given == "":
        return None
    number = r"-?\d+(?:\.\d+)?"
    match = re.fullmatch(rf"(>?)\s*({number})\s*(?:±\s*({number}))?", str(given).strip())
    if match is None:
        raise UserError(f'{where}: {brief(given)} is not a value; write it as "68.62±0.77", 57.9 or "> 50000"')
    text = f"{match[1]} {match[2]}".strip() + (f" ± {match[3]}" if match[3] else "")
    return PaperValue(text, float(match[2]), float(match[3]) if match[3] else None, bool(match[1]))
