"""Recipes from TOML files: ``recipes/PAPER/TABLE.toml``, with what a paper's tables share in ``paper.toml``."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from unskew.core.errors import UserError, brief, nearest
from unskew.reproduce.recipe import SCALES, Column, Extent, Level, Paper, Recipe, Row, matches, paper_value
from unskew.runs.options import OPTIONS, Value

SHARED = "paper.toml"
PLAIN = {"settings", "with"}
LEVEL = PLAIN | {"scale", "stand_in"}
EXTENT = {"rows", "columns", "seeds"}
ROW = LEVEL | {"name", "after", "reads", "against", "values", "by_column", "only", "line", "x", "each"}
WORDS = {"title", "source", "about", "notes", "differences"}
TABLE = LEVEL | WORDS | {"columns", "rows", "baseline", "measures", "measure_all", "figures"}
PAPER = LEVEL | {"reference", "differences", "columns", "like"}


@cache
def names() -> tuple[str, ...]:
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


def named(asked: Sequence[str]) -> list[str]:
    """The recipes that these texts name: ``ccvr/table2``, a paper, or a pattern such as ``ccvr/figure*``."""
    found: dict[str, None] = {}
    for text in asked:
        some = [name for name in names() if matches(name, (text, f"{text}/*", f"{text}[a-z]"))]
        if not some:
            raise UserError(
                f"there is no table or figure {brief(text)}; {nearest(text, names())}; all: unskew reproduce"
            )
        found |= dict.fromkeys(some)
    return list(found)


@cache
def recipe(name: str) -> Recipe:
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


def _column(given: Mapping[str, Any] | str, shared: Mapping[str, Column], where: str) -> Column:
    """A column of the table's own, or by its name one of those that the paper's tables share."""
    if isinstance(given, str):
        if given not in shared:
            raise UserError(f"{where}: the paper has no column {given!r}; {nearest(given, shared)}")
        return shared[given]
    _known(given, LEVEL | {"name", "reads"}, where)
    return Column(given["name"], _level(given, f"{where}, column {given['name']}"), given.get("reads", ""))


def _rows(given: Mapping[str, Any], columns: Sequence[str], where: str) -> list[Row]:
    """One row, or with ``each`` one for every set of variables in it, which name and texts then have."""
    _known(given, ROW, where)
    variants = given.get("each", [{}])
    made = []
    for own in variants:
        name = str(given["name"]).format(**own) if own else given["name"]
        here = f"{where}, row {name}"
        level = _level(given, here)
        values = [paper_value(each, here) for each in given.get("values", [""] * len(columns))]
        if len(values) != len(columns):
            raise UserError(f"{here}: {len(values)} values for {len(columns)} columns; give one each, or none")
        by_column = given.get("by_column", {})
        if odd := [column for column in by_column if column not in columns]:
            raise UserError(f"{here}: there is no column {odd[0]!r}; {nearest(odd[0], columns)}")
        made.append(
            Row(
                name, Level(level.settings, {**level.variables, **own}, level.scale, level.stand_in),
                given.get("after", ""), given.get("reads", ""), given.get("against", ""), tuple(values),
                by_column, tuple(given.get("only", ())), given.get("line", ""), given.get("x"),
            )
        )  # fmt: skip
    return made


def _check_names(rows: Sequence[Row], columns: Sequence[Column], where: str) -> None:
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
