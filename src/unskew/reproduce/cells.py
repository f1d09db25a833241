"""The cells of a recipe at a scale: for each the whole configuration of its training, and what is read of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unskew.analysis import parse_measure
from unskew.core.errors import UserError, brief, nearest
from unskew.reproduce.readings import check_reading
from unskew.reproduce.recipe import SCALES, Column, Level, PaperValue, Recipe, Row, matches
from unskew.runs import config as configs
from unskew.runs.config import Config
from unskew.runs.finished import plain_name
from unskew.runs.options import OPTIONS, Value
from unskew.runs.train import slug


@dataclass(frozen=True)
class Cell:
    """One cell: what is trained (with seed 0 here), which classifier is read, and what the paper has."""

    row: Row
    column: Column
    config: Config
    after: str  # a calibration in its plainest spelling; "": the run's own classifier
    reads: str
    baseline: Config | None
    measures: tuple[str, ...]
    done: bool  # whether it is done at this scale
    paper: PaperValue | None
    variables: Mapping[str, Value] = field(default_factory=dict, compare=False)

    @property
    def training(self) -> str:
        """The name of its training, the same for all cells that share it."""
        return training_name(self.config)


@dataclass(frozen=True)
class Asked:
    """How a recipe is done: its scale, the data in place of the paper's, options over all, and which seeds."""

    scale: str = "smoke"
    data: str = ""  # "": the paper's
    changes: Mapping[str, Value] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()  # (): the scale's
    rows: tuple[str, ...] = ("*",)
    columns: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UserError(f"--scale {brief(self.scale)}: {nearest(self.scale, SCALES)}")

    @property
    def folder(self) -> str:
        """A word for the folder of its tables."""
        words = [self.scale, self.data, *(f"{name}-{value}" for name, value in self.changes.items())]
        return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(filter(None, words))).strip("-")[:100]


def cells_of(recipe: Recipe, asked: Asked) -> list[Cell]:
    """Every cell of the recipe, row by row; those that are not done at this scale too."""
    pairs = [(row, column) for row in recipe.rows for column in recipe.columns]
    chosen = [(row, column) for row, column in pairs if not row.only or matches(column.name, row.only)]
    return [_cell(recipe, asked, row, column) for row, column in chosen]


def wanted(cells: Sequence[Cell], asked: Asked) -> list[Cell]:
    """The cells that are trained for: done at this scale, and in the rows and columns that were asked for."""
    kinds = {"rows": {cell.row.name for cell in cells}, "columns": {cell.column.name for cell in cells}}
    for kind, those in kinds.items():
        patterns: tuple[str, ...] = getattr(asked, kind)
        if not any(matches(name, patterns) for name in those):
            given = ", ".join(patterns)
            raise UserError(f"--{kind} {given}: no such {kind}; {nearest(patterns[0], sorted(those))}")
    return [
        cell for cell in cells
        if cell.done and matches(cell.row.name, asked.rows) and matches(cell.column.name, asked.columns)
    ]  # fmt: skip


def seeds_of(recipe: Recipe, asked: Asked) -> tuple[int, ...]:
    """The seeds of every cell."""
    return asked.seeds or recipe.extent(asked.scale, asked.data).seeds


def training_name(config: Config) -> str:
    """A folder's name for a training: what it is in words, and a fingerprint of all that decides it but the seed."""
    plain = Config(**{**vars(config), "seed": 0, "data_dir": None})
    words = f"{slug(plain, seed=False)}-{plain.partition}-{plain.clients or ''}"
    words = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")[:80]
    return f"{words}-{configs.fingerprint(plain)[:10]}"


def _cell(recipe: Recipe, asked: Asked, row: Row, column: Column) -> Cell:
    where = f"recipe {recipe.name}, {row.name}, {column.name}"
    settings, variables = _merged(recipe, asked, row, column)
    config = _config({**settings, **asked.changes}, variables, where)
    baseline = None
    if recipe.baseline is not None:
        plain, free = _merged(recipe, asked, Row(row.name), column)
        baseline = _config({**plain, **recipe.baseline, **asked.changes}, free, where)
    after = plain_name(_filled(row.after, variables, where)) if row.after else ""
    reads = check_reading(_filled(row.reads or column.reads or "accuracy", variables, where))
    measures = tuple(parse_measure(_filled(each, variables, where)).text for each in recipe.measures)
    place = [each.name for each in recipe.columns].index(column.name)
    done = recipe.extent(asked.scale, asked.data).has(row.name, column.name)
    paper = row.values[place] if row.values else None
    return Cell(row, column, config, after, reads, baseline, measures, done, paper, variables)


def _merged(
    recipe: Recipe, asked: Asked, row: Row, column: Column
) -> tuple[dict[str, Value], dict[str, Value]]:  # fmt: skip
    """Settings and variables, from the general to the particular; then the scale's, then other data's."""
    levels = (recipe.paper.level, recipe.level, column.level, row.level)
    chosen: list[Level] = [*levels, Level(variables=row.by_column.get(column.name, {}))]
    chosen += [each.scale[asked.scale] for each in levels if asked.scale in each.scale]
    if asked.data:
        others = [each.stand_in[asked.data] for each in levels if asked.data in each.stand_in]
        chosen += others + [each.scale[asked.scale] for each in others if asked.scale in each.scale]
        if not others:
            chosen.append(Level({"data": asked.data}))
    settings = {name: value for level in chosen for name, value in level.settings.items()}
    variables = {name: value for level in chosen for name, value in level.variables.items()}
    return settings, variables


def _config(settings: Mapping[str, Value], variables: Mapping[str, Value], where: str) -> Config:
    values = {name: _typed(name, value, variables, where) for name, value in settings.items()}
    return configs.with_values(Config(), values, where)


def _typed(name: str, value: Value, variables: Mapping[str, Value], where: str) -> Value | None:
    """An option's value with its variables filled in; an empty text is the option's default."""
    option = OPTIONS[name]
    if not isinstance(value, str):
        return value
    text = _filled(value, variables, where)
    if text == "":
        return option.default
    if option.kind in (int, float):
        try:
            number: Value = option.kind(text)
        except ValueError:
            raise UserError(f"{where}: {name} must be a number, {brief(text)} given") from None
        return number
    return text


def _filled(text: str, variables: Mapping[str, Value], where: str) -> str:
    try:
        return text.format_map({name: _spelled(value) for name, value in variables.items()})
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"{where}: {brief(text)} needs the variable {error}") from error


def _spelled(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
