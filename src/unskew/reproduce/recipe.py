"""A recipe: the rows and columns of a table or figure, what is trained for each cell, and what the paper has there."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from unskew.core.errors import UserError, brief, nearest
from unskew.runs.config import OPTIONS, Value

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
class RecipeColumn:
    """A column of the table; where it is a figure of the same run, ``reads`` says which, for all rows."""

    name: str
    level: Level = Level()
    reads: str = ""


@dataclass(frozen=True)
class RecipeRow:
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
    columns: Mapping[str, RecipeColumn]  # that several of its tables have


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
    columns: tuple[RecipeColumn, ...]
    rows: tuple[RecipeRow, ...]
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


def parse_paper_value(given: Any, where: str) -> PaperValue | None:
    """``"68.62±0.77"``, ``57.94``, ``"> 50000"``; None for ``""``, where the paper has nothing."""
    if given == "":
        return None
    number = r"-?\d+(?:\.\d+)?"
    match = re.fullmatch(rf"(>?)\s*({number})\s*(?:±\s*({number}))?", str(given).strip())
    if match is None:
        raise UserError(f'{where}: {brief(given)} is not a value; write it as "68.62±0.77", 57.9 or "> 50000"')
    text = f"{match[1]} {match[2]}".strip() + (f" ± {match[3]}" if match[3] else "")
    return PaperValue(text, float(match[2]), float(match[3]) if match[3] else None, bool(match[1]))


SHARED = "paper.toml"
PLAIN = {"settings", "with"}
LEVEL = PLAIN | {"scale", "stand_in"}
EXTENT = {"rows", "columns", "seeds"}
ROW = LEVEL | {"name", "after", "reads", "against", "values", "by_column", "only", "line", "x", "each"}
WORDS = {"title", "source", "about", "notes", "differences"}
TABLE = LEVEL | WORDS | {"columns", "rows", "baseline", "measures", "measure_all", "figures"}
PAPER = LEVEL | {"reference", "differences", "columns", "like"}


@cache
def recipe_names() -> tuple[str, ...]:
    """Every table and figure, paper by paper, in the order in which people count."""
    folders = [each for each in files("unskew.reproduce").joinpath("recipes").iterdir() if each.is_dir()]
    found = [
        (folder.name, file.name.removesuffix(".toml"))
        for folder in folders
        for file in folder.iterdir()
        if file.name.endswith(".toml") and file.name != SHARED
    ]
    return tuple(f"{paper}/{table}" for paper, table in sorted(found, key=_place))


def _place(pair: tuple[str, str]) -> tuple[bool, str, bool, int, str]:
    """The papers before ours, tables before figures, by number."""
    paper, table = pair
    number = "".join(letter for letter in table if letter.isdigit())
    return paper == "ours", paper, not table.startswith("table"), int(number or 0), table


def find_recipes(asked: Sequence[str]) -> list[str]:
    """The recipes that these texts name: ``ccvr/table2``, a paper, or a pattern such as ``ccvr/figure*``."""
    found: dict[str, None] = {}
    for text in asked:
        some = [name for name in recipe_names() if matches(name, (text, f"{text}/*", f"{text}[a-z]"))]
        if not some:
            raise UserError(
                f"there is no table or figure {brief(text)}; {nearest(text, recipe_names())}; all: unskew reproduce"
            )
        found |= dict.fromkeys(some)
    return list(found)


@cache
def load_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    folder, _, table = name.partition("/")
    paper = _paper(folder)
    given = _read(folder, f"{table}.toml")
    where = f"recipe {name}"
    _known(given, TABLE, where)
    columns = tuple(_column(each, paper.columns, where) for each in given.get("columns", [{"name": ""}]))
    rows = tuple(row for each in given.get("rows", []) for row in _rows(each, [c.name for c in columns], where))
    _check_names(rows, columns, where)
    level, shared = _level(given, where), paper.level
    extents = _extents(given, paper)
    words = {key: given["stand_in"][key].get("what", key) for key in given.get("stand_in", {})}
    left_out = {key: tuple(each.get("left_out", ())) for key, each in given.get("stand_in", {}).items()}
    inherited = {key: _shared(folder)["stand_in"][key].get("what", key) for key in shared.stand_in}
    return Recipe(
        name=name, title=given["title"], source=given["source"], about=given.get("about", ""), paper=paper,
        level=level, columns=columns, rows=rows, extents=extents, baseline=given.get("baseline"),
        measures=tuple(given.get("measures", ())), measure_all=given.get("measure_all", False),
        figures=tuple(given.get("figures", ())), notes=tuple(given.get("notes", ())),
        differences=tuple(given.get("differences", ())), stand_ins={**inherited, **words}, left_out=left_out,
    )  # fmt: skip


@cache
def _paper(name: str) -> Paper:
    given, where = _shared(name), f"recipe {name}/{SHARED}"
    _known(given, PAPER, where)
    seeds = {scale: tuple(given["scale"][scale].get("seeds", (0,))) for scale in SCALES}
    columns = {each["name"]: _column(each, {}, where) for each in given.get("columns", ())}
    level, differences = _level(given, where), tuple(given.get("differences", ()))
    return Paper(name, given["reference"], level, seeds, differences, columns)


def _shared(name: str) -> Mapping[str, Any]:
    """What a paper's tables share; where it is ``like`` another's, that, and over it its own."""
    own = _read(name, SHARED)
    return {**_shared(own["like"]), **own} if "like" in own else own


@cache
def _read(folder: str, file: str) -> Mapping[str, Any]:
    place = files("unskew.reproduce").joinpath("recipes", folder, file)
    try:
        return tomllib.loads(place.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {folder}/{file} is not TOML: {error}") from error


def _level(given: Mapping[str, Any], where: str) -> Level:
    scales, others = {}, {}
    for name, inner in given.get("scale", {}).items():
        if name not in SCALES:
            raise UserError(f"{where}: no scale is called {name!r}; {nearest(name, SCALES)}")
        _known(inner, PLAIN | EXTENT, f"{where}, scale {name}")
        scales[name] = _level(inner, where)
    for name, inner in given.get("stand_in", {}).items():
        here = f"{where}, stand_in {name}"
        _known(inner, PLAIN | {"what", "left_out", "scale"}, here)
        others[name] = _level(inner, here)
    return Level(_settings(given, where), given.get("with", {}), scales, others)


def _settings(given: Mapping[str, Any], where: str) -> Mapping[str, Value]:
    settings: Mapping[str, Value] = given.get("settings", {})
    for name in settings:
        if name not in OPTIONS:
            raise UserError(f"{where}: no option is called {name!r}; {nearest(name, OPTIONS)}")
    return settings


def _column(given: Mapping[str, Any] | str, shared: Mapping[str, RecipeColumn], where: str) -> RecipeColumn:
    """A column of the table's own, or by its name one of those that the paper's tables share."""
    if isinstance(given, str):
        if given not in shared:
            raise UserError(f"{where}: the paper has no column {given!r}; {nearest(given, shared)}")
        return shared[given]
    _known(given, LEVEL | {"name", "reads"}, where)
    return RecipeColumn(given["name"], _level(given, f"{where}, column {given['name']}"), given.get("reads", ""))


def _rows(given: Mapping[str, Any], columns: Sequence[str], where: str) -> list[RecipeRow]:
    """One row, or with ``each`` one for every set of variables in it, which name and texts then have."""
    _known(given, ROW, where)
    variants = given.get("each", [{}])
    made = []
    for own in variants:
        name = str(given["name"]).format(**own) if own else given["name"]
        here = f"{where}, row {name}"
        level = _level(given, here)
        values = [parse_paper_value(each, here) for each in given.get("values", [""] * len(columns))]
        if len(values) != len(columns):
            raise UserError(f"{here}: {len(values)} values for {len(columns)} columns; give one each, or none")
        by_column = given.get("by_column", {})
        if odd := [column for column in by_column if column not in columns]:
            raise UserError(f"{here}: there is no column {odd[0]!r}; {nearest(odd[0], columns)}")
        made.append(
            RecipeRow(
                name, Level(level.settings, {**level.variables, **own}, level.scale, level.stand_in),
                given.get("after", ""), given.get("reads", ""), given.get("against", ""), tuple(values),
                by_column, tuple(given.get("only", ())), given.get("line", ""), given.get("x"),
            )
        )  # fmt: skip
    return made


def _check_names(rows: Sequence[RecipeRow], columns: Sequence[RecipeColumn], where: str) -> None:
    for kind, those in (("row", [row.name for row in rows]), ("column", [column.name for column in columns])):
        if len(set(those)) < len(those):
            raise UserError(f"{where}: two of its {kind}s have one name; give each its own")
    for row in rows:
        if row.against and row.against not in [each.name for each in rows]:
            raise UserError(f"{where}, row {row.name}: there is no row {row.against!r} to compare it with")


def _extents(given: Mapping[str, Any], paper: Paper) -> dict[tuple[str, str], Extent]:
    """What is done at each scale; with other data the same, but for what they say at that scale."""
    found = {}
    for scale in SCALES:
        usual = _extent(given.get("scale", {}).get(scale, {}), Extent(seeds=paper.seeds[scale]))
        found[scale, ""] = usual
        for data, inner in given.get("stand_in", {}).items():
            found[scale, data] = _extent(inner.get("scale", {}).get(scale, {}), usual)
    return found


def _extent(given: Mapping[str, Any], usual: Extent) -> Extent:
    return replace(usual, **{name: tuple(value) for name, value in given.items() if name in EXTENT})


def _known(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise UserError(f"{where}: nothing is called {name!r} there; {nearest(name, sorted(known))}")
