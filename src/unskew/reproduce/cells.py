"""The cells of a recipe at a scale: for each the whole configuration of its training, and what is read of it."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unskew.analysis import parse_measure
from unskew.analysis.norms import unevenness as uneven
from unskew.core import text
from unskew.core.errors import UserError, brief, nearest
from unskew.reproduce.recipe import SCALES, Level, PaperValue, Recipe, RecipeColumn, RecipeRow, matches
from unskew.reproduce.records import RunRecord
from unskew.runs import config as configs
from unskew.runs.config import OPTIONS, Config, Value
from unskew.runs.finished import plain_name
from unskew.runs.journal import accuracy_at_batch, accuracy_at_round, rounds_to
from unskew.runs.train import slug

PERCENT, NUMBER, COUNT, SECONDS = "%", "", "rounds", "s"


@dataclass(frozen=True)
class RunView:
    """What a reading may look at: the run, the calibration whose classifier counts, the run it is relative to."""

    record: RunRecord
    after: str = ""
    baseline: RunRecord | None = None


@dataclass(frozen=True)
class Reading:
    """A reading with its knobs: the number, its unit, and whether it needs a baseline."""

    text: str
    read: Callable[[RunView], float | None]
    unit: str
    decimals: int = 2
    relative: bool = False


def accuracy(seen: RunView) -> float | None:
    """Of the final model, with its own classifier or the calibrated one."""
    result = seen.record.result
    if not seen.after:
        return 100 * result.accuracy
    made = result.calibrations.get(seen.after)
    return None if made is None else 100 * made.accuracy


def best(seen: RunView) -> float | None:
    """The best of all evaluated rounds: what a paper that reports its best round has."""
    return max((100 * row["accuracy"] for row in seen.record.curve), default=None)


def gain(seen: RunView) -> float | None:
    """What the calibration gained, in points."""
    after = accuracy(seen)
    return None if after is None or not seen.after else after - 100 * seen.record.result.accuracy


def at_round(seen: RunView, round: int) -> float | None:
    """Accuracy of the last evaluated round up to this one; None for a run that ended before it."""
    if seen.record.result.rounds < round:
        return None
    return _percent(accuracy_at_round(seen.record.curve, round))


def at_batch(seen: RunView, batches: int) -> float | None:
    """Accuracy when the largest clients of all rounds had done that many batches; None for a run that ended before."""
    rows = seen.record.curve
    if sum(row["batches_max"] for row in rows) < batches:
        return None
    return _percent(accuracy_at_batch(rows, batches))


def reached(seen: RunView, share: int) -> float | None:
    """The first evaluated round with that share, in per cent, of the baseline's accuracy; None where it never had."""
    if seen.baseline is None:
        return None
    found = rounds_to(seen.record.curve, share / 100 * seen.baseline.result.accuracy)
    return None if found is None else float(found)


def relative(seen: RunView, round: int = 0) -> float | None:
    """Accuracy in per cent of the baseline's at its end: of the final model, or by that round."""
    own = at_round(seen, round) if round else accuracy(seen)
    if own is None or seen.baseline is None or not seen.baseline.result.accuracy:
        return None
    return own / seen.baseline.result.accuracy


def emd(seen: RunView) -> float | None:
    """How unlike the clients are, from 0 to 2."""
    return seen.record.result.emd


def silhouette(seen: RunView) -> float | None:
    """Of the features after the last round, as recorded while training."""
    return seen.record.silhouettes[-1][1] if seen.record.silhouettes else None


def seconds(seen: RunView) -> float | None:
    """Of training, or of the calibration."""
    result = seen.record.result
    if not seen.after:
        return result.seconds
    made = result.calibrations.get(seen.after)
    return None if made is None else made.seconds


def separability(seen: RunView) -> float | None:
    """The mean sliced Wasserstein distance between the classes' Gaussians."""
    return _number(seen.record.measure("separability"), "mean")


def cka(seen: RunView, layer: str = "classifier") -> float | None:
    """The mean CKA of a layer between two clients' models."""
    values = seen.record.measure("cka")
    if values is None or layer not in values["layers"]:
        return None
    return float(values["means"][values["layers"].index(layer)])


def unevenness(seen: RunView, local: bool = False) -> float | None:
    """How far the lengths of the classifier's rows differ: their deviation over their mean; of local classifiers after
    the last round the mean over clients."""
    values = seen.record.measure("norms")
    if local:
        return _number(_visit(seen), "unevenness")
    rows = None if values is None else values["calibrated"].get(seen.after) if seen.after else values["server"]
    return None if rows is None else uneven(rows)


def correlation(seen: RunView, first: bool = False) -> float | None:
    """How the rows of local classifiers follow the clients' label counts, the mean over clients; in the first round or
    after the last."""
    return _number(_visit(seen, first), "correlation")


def _visit(seen: RunView, first: bool = False) -> dict[str, Any] | None:
    """The rows of local classifiers in the first round, or in the visit after the last."""
    values = seen.record.measures.get("norms(round=0)") if first else seen.record.measure("norms")
    return next((row for row in values["rounds"] if row.get("asked")), None) if values else None


READINGS: dict[str, tuple[Callable[..., float | None], str, int]] = {
    "accuracy": (accuracy, PERCENT, 2), "best": (best, PERCENT, 2), "gain": (gain, PERCENT, 2),
    "at-round": (at_round, PERCENT, 1), "at-batch": (at_batch, PERCENT, 1), "rounds-to": (reached, COUNT, 0),
    "relative": (relative, PERCENT, 1), "emd": (emd, NUMBER, 2), "silhouette": (silhouette, NUMBER, 4),
    "seconds": (seconds, SECONDS, 1), "separability": (separability, NUMBER, 3), "cka": (cka, NUMBER, 3),
    "unevenness": (unevenness, NUMBER, 3), "correlation": (correlation, NUMBER, 2),
}  # fmt: skip
RELATIVE = ("rounds-to", "relative")


def parse_reading(source: str) -> Reading:
    """The reading of a text such as ``accuracy`` or ``at-round(1000)``."""
    call = text.parse_calls(source, "reading")[0]
    if call.name not in READINGS:
        raise text.complain(source, call.start, f"no reading is called {call.name!r}; {nearest(call.name, READINGS)}")
    function, unit, decimals = READINGS[call.name]
    read: Callable[[RunView], float | None] = text.apply(call, _with_knobs(function), "reading")
    return Reading(str(call), read, unit, decimals, call.name in RELATIVE)


def check_reading(source: str) -> str:
    """The text in its plainest spelling, if there is such a reading."""
    return parse_reading(source).text


def _with_knobs(function: Callable[..., float | None]) -> Callable[..., Any]:
    """A function of the knobs alone, which gives a function of what is seen."""

    def bound(**knobs: Any) -> Callable[[RunView], float | None]:
        return partial(function, **knobs)

    knobs = list(inspect.signature(function).parameters.values())[1:]
    bound.__signature__ = inspect.Signature(knobs)  # type: ignore[attr-defined]
    return bound


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _number(values: Any, name: str) -> float | None:
    return None if values is None or values.get(name) is None else float(values[name])


@dataclass(frozen=True)
class Cell:
    """One cell: what is trained (with seed 0 here), which classifier is read, and what the paper has."""

    row: RecipeRow
    column: RecipeColumn
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
        return name_training(self.config)


@dataclass(frozen=True)
class Variant:
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


def make_cells(recipe: Recipe, asked: Variant) -> list[Cell]:
    """Every cell of the recipe, row by row; those that are not done at this scale too."""
    pairs = [(row, column) for row in recipe.rows for column in recipe.columns]
    chosen = [(row, column) for row, column in pairs if not row.only or matches(column.name, row.only)]
    return [_cell(recipe, asked, row, column) for row, column in chosen]


def select_cells(cells: Sequence[Cell], asked: Variant) -> list[Cell]:
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


def list_seeds(recipe: Recipe, asked: Variant) -> tuple[int, ...]:
    """The seeds of every cell."""
    return asked.seeds or recipe.extent(asked.scale, asked.data).seeds


def name_training(config: Config) -> str:
    """A folder's name for a training: what it is in words, and a fingerprint of all that decides it but the seed."""
    plain = Config(**{**vars(config), "seed": 0, "data_dir": None})
    words = f"{slug(plain, seed=False)}-{plain.partition}-{plain.clients or ''}"
    words = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")[:80]
    return f"{words}-{configs.fingerprint(plain)[:10]}"


def _cell(recipe: Recipe, asked: Variant, row: RecipeRow, column: RecipeColumn) -> Cell:
    where = f"recipe {recipe.name}, {row.name}, {column.name}"
    settings, variables = _merged(recipe, asked, row, column)
    config = _config({**settings, **asked.changes}, variables, where)
    baseline = None
    if recipe.baseline is not None:
        plain, free = _merged(recipe, asked, RecipeRow(row.name), column)
        baseline = _config({**plain, **recipe.baseline, **asked.changes}, free, where)
    after = plain_name(_filled(row.after, variables, where)) if row.after else ""
    reads = check_reading(_filled(row.reads or column.reads or "accuracy", variables, where))
    measures = tuple(parse_measure(_filled(each, variables, where)).text for each in recipe.measures)
    place = [each.name for each in recipe.columns].index(column.name)
    done = recipe.extent(asked.scale, asked.data).has(row.name, column.name)
    paper = row.values[place] if row.values else None
    return Cell(row, column, config, after, reads, baseline, measures, done, paper, variables)


def _merged(
    recipe: Recipe, asked: Variant, row: RecipeRow, column: RecipeColumn
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
