"""A recipe: the rows and columns of a table or figure, what each cell trains, and the paper's value for it."""

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
    """Options of a run and variables in their texts, for all cells, a column or a row.

    ``scale`` overrides them at a scale, ``stand_in`` where other data replace the paper's; a stand-in may again have
    a ``scale``.
    """

    settings: Mapping[str, Value] = field(default_factory=dict)
    variables: Mapping[str, Value] = field(default_factory=dict)
    scale: Mapping[str, "Level"] = field(default_factory=dict)
    stand_in: Mapping[str, "Level"] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperValue:
    """A value as the paper prints it, accuracies in per cent. ``beyond``: more than that (``> 50k`` rounds)."""

    text: str
    mean: float
    deviation: float | None = None
    beyond: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RecipeColumn:
    """A column of the table; ``reads`` says what all its rows read from the run, if not the accuracy."""

    name: str
    level: Level = Level()
    reads: str = ""


@dataclass(frozen=True)
class RecipeRow:
    """A row of the table: what is trained, which classifier is read, and what is read from it."""

    name: str
    level: Level = Level()
    after: str = ""  # the calibration whose classifier is read; "": the run's own
    reads: str = ""  # a reading of reproduce.cells; "": what the column reads, or the accuracy
    against: str = ""  # the row that the gain is over
    values: tuple[PaperValue | None, ...] = ()  # by column
    by_column: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)  # variables of some columns
    only: tuple[str, ...] = ()  # patterns of the columns that have this row; (): all
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
    columns: Mapping[str, RecipeColumn]  # that several of its tables share


@dataclass(frozen=True)
class Extent:
    """The part of a recipe that is run at a scale: patterns of rows and columns, and the seeds."""

    rows: tuple[str, ...] = ("*",)
    columns: tuple[str, ...] = ("*",)
    seeds: tuple[int, ...] = ()

    def has(self, row: str, column: str) -> bool:
        """Whether that cell is run."""
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
    extents: Mapping[tuple[str, str], Extent]  # by scale and data; "" is the paper's data
    baseline: Mapping[str, Value] | None = None  # over a column's settings: what relative accuracy is relative to
    measures: tuple[str, ...] = ()  # of every run; of the first seed only, unless ``measure_all``
    measure_all: bool = False
    figures: tuple[Mapping[str, Any], ...] = ()  # one of reproduce.figures each
    notes: tuple[str, ...] = ()  # on the paper's values: contradictions, sources
    differences: tuple[str, ...] = ()  # of the setup, in addition to those of all the paper's tables
    stand_ins: Mapping[str, str] = field(default_factory=dict)  # descriptions by name
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # beginnings of differences, by stand-in

    def extent(self, scale: str, data: str = "") -> Extent:
        """The part that is run at that scale, with these data instead of the paper's."""
        return self.extents.get((scale, data)) or self.extents[scale, ""]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches a pattern with ``*``; ``alpha`` matches α and ``beta`` matches β."""
    plain = name.replace("α", "alpha").replace("β", "beta")
    return any(fnmatchcase(one, pattern) for one in (name, plain) for pattern in patterns)


def parse_paper_value(given: Any, where: str) -> PaperValue | None:
    """``"68.62±0.77"``, ``57.94``, ``"> 50000"``; None for ``""``, where the paper has none."""
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
    """Every table and figure: the papers before our own, tables before figures, by number."""

    def order(name: str) -> tuple[bool, str, bool, int, str]:
        paper, table = name.split("/")
        number = "".join(letter for letter in table if letter.isdigit())
        return paper == "ours", paper, not table.startswith("table"), int(number or 0), table

    folders = [one for one in files("unskew.reproduce").joinpath("recipes").iterdir() if one.is_dir()]
    found = [(folder.name, file.name) for folder in folders for file in folder.iterdir() if file.name != SHARED]
    names = [f"{paper}/{file.removesuffix('.toml')}" for paper, file in found if file.endswith(".toml")]
    return tuple(sorted(names, key=order))


def find_recipes(asked: Sequence[str]) -> list[str]:
    """The recipes that these texts name: ``ccvr/table2``, a paper, or a pattern such as ``ccvr/figure*``."""
    found: dict[str, None] = {}
    for text in asked:
        names = [name for name in recipe_names() if matches(name, (text, f"{text}/*", f"{text}[a-z]"))]
        if not names:
            hint = nearest(text, recipe_names())
            raise UserError(f"there is no table or figure {brief(text)}; {hint}; unskew reproduce lists all")
        found |= dict.fromkeys(names)
    return list(found)


@cache
def load_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    folder, _, table = name.partition("/")
    paper = _paper(folder)
    given = _read(folder, f"{table}.toml")
    where = f"recipe {name}"
    _check_keys(given, TABLE, where)
    columns = tuple(_column(one, paper.columns, where) for one in given.get("columns", [{"name": ""}]))
    rows = tuple(row for one in given.get("rows", []) for row in _rows(one, [c.name for c in columns], where))
    _check_names(rows, columns, where)
    stand_ins = {key: inner.get("what", key) for key, inner in _shared(folder).get("stand_in", {}).items()}
    stand_ins |= {key: inner.get("what", key) for key, inner in given.get("stand_in", {}).items()}
    lists = {key: tuple(given.get(key, ())) for key in ("measures", "figures", "notes", "differences")}
    return Recipe(
        name=name,
        title=given["title"],
        source=given["source"],
        about=given.get("about", ""),
        paper=paper,
        level=_level(given, where),
        columns=columns,
        rows=rows,
        extents=_extents(given, paper),
        baseline=given.get("baseline"),
        measure_all=given.get("measure_all", False),
        stand_ins=stand_ins,
        left_out={key: tuple(inner.get("left_out", ())) for key, inner in given.get("stand_in", {}).items()},
        **lists,
    )


@cache
def _paper(name: str) -> Paper:
    given, where = _shared(name), f"recipe {name}/{SHARED}"
    _check_keys(given, PAPER, where)
    seeds = {scale: tuple(given["scale"][scale].get("seeds", (0,))) for scale in SCALES}
    columns = {one["name"]: _column(one, {}, where) for one in given.get("columns", ())}
    level, differences = _level(given, where), tuple(given.get("differences", ()))
    return Paper(name, given["reference"], level, seeds, differences, columns)


def _shared(name: str) -> Mapping[str, Any]:
    """What a paper's tables share; with ``like``, on top of what another paper's share."""
    own = _read(name, SHARED)
    return {**_shared(own["like"]), **own} if "like" in own else own


@cache
def _read(folder: str, file: str) -> Mapping[str, Any]:
    return tomllib.loads(files("unskew.reproduce").joinpath("recipes", folder, file).read_text("utf-8"))


def _level(given: Mapping[str, Any], where: str) -> Level:
    scales, others = {}, {}
    for name, inner in given.get("scale", {}).items():
        if name not in SCALES:
            raise UserError(f"{where}: there is no scale {name!r}; {nearest(name, SCALES)}")
        _check_keys(inner, PLAIN | EXTENT, f"{where}, scale {name}")
        scales[name] = _level(inner, where)
    for name, inner in given.get("stand_in", {}).items():
        here = f"{where}, stand_in {name}"
        _check_keys(inner, PLAIN | {"what", "left_out", "scale"}, here)
        others[name] = _level(inner, here)
    settings: Mapping[str, Value] = given.get("settings", {})
    for name in settings:
        if name not in OPTIONS:
            raise UserError(f"{where}: there is no option {name!r}; {nearest(name, OPTIONS)}")
    return Level(settings, given.get("with", {}), scales, others)


def _column(given: Mapping[str, Any] | str, shared: Mapping[str, RecipeColumn], where: str) -> RecipeColumn:
    """A column of this table, or by name one that the paper's tables share."""
    if isinstance(given, str):
        if given not in shared:
            raise UserError(f"{where}: the paper has no column {given!r}; {nearest(given, shared)}")
        return shared[given]
    _check_keys(given, LEVEL | {"name", "reads"}, where)
    return RecipeColumn(given["name"], _level(given, f"{where}, column {given['name']}"), given.get("reads", ""))


def _rows(given: Mapping[str, Any], columns: Sequence[str], where: str) -> list[RecipeRow]:
    """One row, or with ``each`` one for every set of variables, which its name and texts then use."""
    _check_keys(given, ROW, where)
    rows = []
    for own in given.get("each", [{}]):
        name = str(given["name"]).format(**own) if own else given["name"]
        here = f"{where}, row {name}"
        level = _level(given, here)
        values = tuple(parse_paper_value(value, here) for value in given.get("values", [""] * len(columns)))
        if len(values) != len(columns):
            raise UserError(f"{here}: {len(values)} values for {len(columns)} columns; give one per column, or none")
        by_column = given.get("by_column", {})
        if unknown := [column for column in by_column if column not in columns]:
            raise UserError(f"{here}: there is no column {unknown[0]!r}; {nearest(unknown[0], columns)}")
        texts = {key: given.get(key, "") for key in ("after", "reads", "against", "line")}
        level = replace(level, variables={**level.variables, **own})
        only, x = tuple(given.get("only", ())), given.get("x")
        rows.append(RecipeRow(name, level, values=values, by_column=by_column, only=only, x=x, **texts))
    return rows


def _check_names(rows: Sequence[RecipeRow], columns: Sequence[RecipeColumn], where: str) -> None:
    names = [row.name for row in rows]
    for kind, those in (("row", names), ("column", [column.name for column in columns])):
        if len(set(those)) < len(those):
            raise UserError(f"{where}: two {kind}s have the same name")
    for row in rows:
        if row.against and row.against not in names:
            raise UserError(f"{where}, row {row.name}: there is no row {row.against!r} to compare it with")


def _extents(given: Mapping[str, Any], paper: Paper) -> dict[tuple[str, str], Extent]:
    """What is run at each scale; with other data the same, except for what they set at that scale."""

    def override(usual: Extent, inner: Mapping[str, Any]) -> Extent:
        changes = inner.get("scale", {}).get(scale, {})
        return replace(usual, **{name: tuple(value) for name, value in changes.items() if name in EXTENT})

    found = {}
    for scale in SCALES:
        found[scale, ""] = usual = override(Extent(seeds=paper.seeds[scale]), given)
        for data, inner in given.get("stand_in", {}).items():
            found[scale, data] = override(usual, inner)
    return found


def _check_keys(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise UserError(f"{where}: unknown key {name!r}; {nearest(name, sorted(known))}")
