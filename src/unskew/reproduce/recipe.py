"""A recipe: the rows and columns of a table or figure, what each cell trains, and the paper's values."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import msgspec

from unskew.core.errors import UserError, brief, nearest
from unskew.runs.config import Value

SCALES = ("smoke", "small", "paper")
ScaleName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(SCALES)})$")]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"variables": "with"}):
    """Options of a run, variables in their texts, and the options of the run that relative values refer to."""

    settings: dict[str, Value] = {}
    variables: dict[str, Value] = {}
    baseline: dict[str, Value] = {}  # replaces the row's settings; without a method there is no baseline


class AtScale(Settings, frozen=True):
    """What differs at a scale: settings, and the part of a table to run."""

    rows: tuple[str, ...] = ()  # patterns; (): all
    columns: tuple[str, ...] = ()  # of the recipe, or of one row
    seeds: tuple[int, ...] = ()


class StandIn(Settings, frozen=True):
    """What differs if other data replace the paper's."""

    what: str = ""  # a description of the data
    left_out: tuple[str, ...] = ()  # beginnings of differences that do not apply to them
    scale: dict[ScaleName, AtScale] = {}


class Level(Settings, frozen=True):
    """Settings of all cells, a column or a row, with what differs at a scale or with other data."""

    scale: dict[ScaleName, AtScale] = {}
    stand_in: dict[str, StandIn] = {}


@dataclass(frozen=True)
class PaperValue:
    """A value as the paper prints it, accuracies in percent. ``beyond``: a lower bound (``> 50k`` rounds)."""

    text: str
    mean: float
    deviation: float | None = None
    beyond: bool = False

    def __str__(self) -> str:
        return self.text


class RecipeColumn(Level, frozen=True, kw_only=True):
    """A column of the table; ``reads`` is the reading of its rows, by default the accuracy."""

    name: str
    reads: str = ""


class RecipeRow(Level, frozen=True, kw_only=True):
    """A row of the table: what is trained, which classifier is used, and what is read from it."""

    name: str
    after: str = ""  # the calibration to read; "": the run's own classifier
    reads: str = ""  # a reading of reproduce.cells; "": the column's, or the accuracy
    against: str = ""  # the row that it is compared with
    values: tuple[str | int | float, ...] = ()  # the paper's, by column
    by_column: dict[str, dict[str, Value]] = {}  # variables of some columns
    only: tuple[str, ...] = ()  # patterns of the columns that have this row; (): all
    best_of: str = ""  # candidates with the same text form one row of that name, with the best in each column
    keeps: tuple[str, ...] = ()  # options of this row that --set does not change
    line: str = ""  # its line in a chart of lines
    x: float | None = None  # its position on the line


class Paper(Level, frozen=True, kw_only=True):
    """What the tables of a paper share."""

    reference: str
    differences: tuple[str, ...] = ()
    texts: dict[str, str] = {}  # differences that some of its tables share, by name
    lists: dict[str, tuple[dict[str, Value], ...]] = {}  # of variables, for rows with ``each = "name"``
    columns: tuple[RecipeColumn, ...] = ()  # that several of its tables share
    like: str = ""  # another paper to inherit from


class Recipe(Level, frozen=True, kw_only=True):
    """A table or a figure of a paper."""

    name: str  # "ccvr/table2"
    title: str
    source: str  # where it is in the paper
    about: str = ""
    paper: Paper
    columns: tuple[RecipeColumn, ...]
    rows: tuple[RecipeRow, ...]
    measures: tuple[str, ...] = ()  # of every run with the first seed, or with all seeds if ``measure_all``
    measure_all: bool = False
    figures: tuple[dict[str, Any], ...] = ()  # arguments of reproduce.figures
    notes: tuple[str, ...] = ()  # on the paper's values: contradictions, sources
    differences: tuple[str, ...] = ()  # in the setup, in addition to the paper's

    @property
    def stand_ins(self) -> dict[str, str]:
        """Descriptions of the data that may replace the paper's, by name."""
        parts = [*self.paper.stand_in.items(), *self.stand_in.items()]
        return {name: name for name, _ in parts} | {name: part.what for name, part in parts if part.what}

    def list_differences(self, data: str = "") -> list[str]:
        """Known differences from the paper's setup, without those that do not apply to other data."""
        parts = [level.stand_in[data] for level in (self.paper, self) if data in level.stand_in]
        ignored = tuple(text for part in parts for text in part.left_out)
        own = (self.paper.texts.get(text, text) for text in self.differences)
        return [text for text in (*own, *self.paper.differences) if not text.startswith(ignored)]

    def extent(self, scale: str, data: str = "") -> AtScale:
        """The rows, columns and seeds to run at that scale, with these data instead of the paper's."""
        extent = AtScale(rows=("*",), columns=("*",), seeds=self.paper.scale[scale].seeds or (0,))
        for level in (self, self.stand_in.get(data, StandIn())):
            part = level.scale.get(scale, AtScale())
            given = {name: getattr(part, name) for name in ("rows", "columns", "seeds") if getattr(part, name)}
            extent = msgspec.structs.replace(extent, **given)
        return extent


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches a pattern with ``*``; ``alpha`` matches α and ``beta`` matches β."""
    plain = name.replace("α", "alpha").replace("β", "beta")
    return any(fnmatchcase(text, pattern) for text in (name, plain) for pattern in patterns)


def parse_value(source: str | float) -> PaperValue | None:
    """``"68.62±0.77"``, ``57.94``, ``"> 50000"``; None for ``""``, a value that the paper lacks."""
    if source == "":
        return None
    number = r"-?\d+(?:\.\d+)?"
    match = re.fullmatch(rf"(>?)\s*({number})\s*(?:±\s*({number}))?", str(source).strip())
    if match is None:
        raise UserError(f'{brief(source)} is not a value; write it as "68.62±0.77", 57.9 or "> 50000"')
    text = f"{match[1]} {match[2]}".strip() + (f" ± {match[3]}" if match[3] else "")
    return PaperValue(text, float(match[2]), float(match[3]) if match[3] else None, bool(match[1]))


SHARED = "paper.toml"


@cache
def recipe_names() -> tuple[str, ...]:
    """Every table and figure, sorted: the papers before our own, tables before figures, by number."""

    def order(name: str) -> tuple[bool, str, bool, int, str]:
        paper, table = name.split("/")
        return paper == "ours", paper, not table.startswith("table"), int(re.sub(r"\D", "", table) or 0), table

    folders = [folder for folder in files("unskew.reproduce").joinpath("recipes").iterdir() if folder.is_dir()]
    names = [f"{folder.name}/{file.name}" for folder in folders for file in folder.iterdir() if file.name != SHARED]
    return tuple(sorted((name.removesuffix(".toml") for name in names if name.endswith(".toml")), key=order))


def find_recipes(texts: Sequence[str]) -> list[str]:
    """The recipes that these texts name: ``ccvr/table2``, a paper, or a pattern such as ``ccvr/figure*``."""
    recipes = list[str]()
    for text in texts:
        names = [name for name in recipe_names() if matches(name, (text, f"{text}/*", f"{text}[a-z]"))]
        if not names:
            hint = nearest(text, recipe_names())
            raise UserError(f"no table or figure is called {brief(text)}; {hint}; unskew reproduce lists all")
        recipes += names
    return list(dict.fromkeys(recipes))


@cache
def load_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    folder, _, table = name.partition("/")
    paper, content = _read_paper(folder), _read(folder, f"{table}.toml")
    shared = {column["name"]: column for column in paper.get("columns", ())}
    columns = []
    for column in content.get("columns", [{"name": ""}]):
        if isinstance(column, str) and column not in shared:
            raise UserError(f"recipe {name}: the paper has no column {column!r}; {nearest(column, shared)}")
        columns.append(shared[column] if isinstance(column, str) else column)
    rows = [row for entry in content.get("rows", ()) for row in _list_rows(entry, paper.get("lists", {}))]
    try:
        return msgspec.convert({**content, "name": name, "paper": paper, "columns": columns, "rows": rows}, Recipe)
    except msgspec.ValidationError as error:
        raise UserError(f"recipe {name}: {error}") from error


def _list_rows(entry: Mapping[str, Any], lists: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row, or with ``each`` a row for every set of variables, which may include the paper's ``values``."""
    template, rows = {**entry}, []
    sets = template.pop("each", ())
    for own in lists[sets] if isinstance(sets, str) else sets:
        row = template | {key: template[key].format(**own) for key in ("name", "against", "line") if key in template}
        row["with"] = template.get("with", {}) | {key: value for key, value in own.items() if key != "values"}
        row["values"] = own.get("values", template.get("values", ()))
        rows.append(row)
    return rows or [template]


def _read_paper(name: str) -> dict[str, Any]:
    """What a paper's tables share; with ``like``, added to what another paper's tables share."""
    own = _read(name, SHARED)
    return {**_read_paper(own["like"]), **own} if "like" in own else own


def _read(folder: str, file: str) -> dict[str, Any]:
    return tomllib.loads(files("unskew.reproduce").joinpath("recipes", folder, file).read_text("utf-8"))
