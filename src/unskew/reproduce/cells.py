"""The cells of a recipe at a scale: the configuration that each one trains, and the value read from the run."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any, TypeVar

from unskew.analysis import bind_knobs, parse_measure
from unskew.analysis.curves import volatility
from unskew.analysis.norms import unevenness as uneven
from unskew.core import language
from unskew.core.errors import UserError, brief, nearest
from unskew.reproduce.recipe import (
    SCALES,
    AtScale,
    PaperValue,
    Recipe,
    RecipeColumn,
    RecipeRow,
    Settings,
    matches,
    parse_value,
)
from unskew.reproduce.records import RunRecord
from unskew.runs import config as configs
from unskew.runs.config import OPTIONS, Config, Value
from unskew.runs.finished import plain_name
from unskew.runs.journal import accuracy_at_batch, accuracy_at_round, rounds_to
from unskew.runs.result import Calibration, Result
from unskew.runs.train import slug

T = TypeVar("T")


class Unread(LookupError):
    """The record lacks what a reading needs; the text, if any, is the reason."""


def _need(value: T | None, reason: str = "") -> T:
    if value is None or value == []:
        raise Unread(reason)
    return value


@dataclass(frozen=True)
class RunView:
    """The inputs of a reading: the run, the calibration to read, and the baseline."""

    record: RunRecord
    after: str = ""
    baseline: RunRecord | None = None

    @property
    def calibration(self) -> Calibration:
        """The scores of the calibration to read."""
        return _need(self.record.result.calibrations.get(self.after))

    @property
    def classifier(self) -> Result | Calibration:
        """The scores of the run's own classifier, or of the calibration."""
        return self.calibration if self.after else self.record.result

    @property
    def reference(self) -> Result:
        """The result of the baseline."""
        return _need(self.baseline, "its baseline has not been run yet").result

    def measure(self, name: str) -> Any:
        """The values of a measure."""
        return _need(self.record.measure(name))


@dataclass(frozen=True)
class Reading:
    """A reading with its knobs: its function, unit and decimals."""

    text: str
    function: Callable[[RunView], float]
    unit: str
    decimals: int

    def read(self, view: RunView) -> float | None:
        """The value; None if the record lacks it."""
        try:
            return float(self.function(view))
        except Unread:
            return None


def gain(view: RunView) -> float:
    """The gain of the calibration, in points."""
    return 100 * view.calibration.accuracy - 100 * view.record.result.accuracy


LATER = "not reached, or not evaluated by then"


def at_round(view: RunView, round: int) -> float:
    """Accuracy of the last evaluated round up to this one, for a run that is as long."""
    reached = view.record.result.rounds >= round
    return 100 * _need(accuracy_at_round(view.record.curve, round) if reached else None, LATER)


def at_batch(view: RunView, batches: int) -> float:
    """Accuracy when the largest clients had done that many batches, for a run that is as long."""
    rows = view.record.curve
    reached = sum(row["batches_max"] for row in rows) >= batches
    return 100 * _need(accuracy_at_batch(rows, batches) if reached else None, LATER)


def rounds_to_share(view: RunView, share: int) -> float:
    """The first evaluated round with that share of the baseline's accuracy, in percent."""
    reached = rounds_to(view.record.curve, share / 100 * view.reference.accuracy)
    return _need(reached, f"not within {view.record.result.rounds:,}")


def rounds_ratio(view: RunView, share: int) -> float:
    """The rounds to ``share`` percent of the baseline's accuracy, divided by those to 10 percent."""
    return rounds_to_share(view, share) / _need(rounds_to_share(view, 10) or None)


def relative(view: RunView, round: int = 0) -> float:
    """The final accuracy, or that at a round, in percent of the baseline's final accuracy."""
    own = at_round(view, round) if round else 100 * view.classifier.accuracy
    return own / _need(view.reference.accuracy or None)


def silhouette(view: RunView, best: bool = False) -> float:
    """The last silhouette recorded during training, or the highest."""
    values = _need([value for _, value in view.record.silhouettes])
    return max(values) if best else values[-1]


def extra_seconds(view: RunView) -> float:
    """Seconds of training beyond the baseline's."""
    return view.record.result.seconds - view.reference.seconds


def overhead(view: RunView) -> float:
    """Extra seconds of training and those of the calibration, in percent of the run's training time."""
    return 100 * (extra_seconds(view) + view.calibration.seconds) / max(view.record.result.seconds, 1e-9)


def read_skew(view: RunView, what: str) -> float:
    """A number of the partition: clients, classes, examples, classes per client, or the deviation of sizes / mean."""
    values = view.measure("skew")
    if what == "imbalance":
        return float(pstdev(values["sizes"]) / max(fmean(values["sizes"]), 1e-9))
    if what == "per-client":
        return float(fmean(values["ranked"].get("classes") or [sum(map(bool, row)) for row in values["counts"]]))
    counts = {"clients": values["clients"], "classes": sum(map(bool, values["total"]))}
    return float((counts | {"examples": sum(values["total"])})[what])


def cka(view: RunView, layer: str = "classifier") -> float:
    """The mean CKA of a layer between two clients' models."""
    values = view.measure("cka")
    return float(_need(dict(zip(values["layers"], values["means"], strict=True)).get(layer)))


def features(view: RunView, held: bool | None = None) -> float:
    """The mean shift of class features from the server to clients, for all classes or those they have or lack."""
    values = view.measure("features")
    rows = zip(values["shifts"], values["held"], strict=True)
    pairs = [pair for shifts, marks in rows for pair in zip(shifts, marks, strict=True)]
    return fmean(_need([shift for shift, mark in pairs if held is None or mark is held]))


def inversion(view: RunView, what: str) -> float:
    """The mean similarity to the original of reconstructions, of another image, or of a gray picture."""
    return fmean(float(row[f"{what}_ssim"]) for row in view.measure("inversion")["rows"])


def unevenness(view: RunView, local: bool = False) -> float:
    """Deviation of the classifier's row norms over their mean; with ``local``, the mean over local classifiers."""
    values = view.measure("norms")
    if local:
        return _find_visit(values, "unevenness")
    return uneven(_need(values["calibrated"].get(view.after)) if view.after else values["server"])


def correlation(view: RunView, first: bool = False) -> float:
    """Mean correlation of local classifiers' rows with label counts, after the last or in the first round."""
    values = _need(view.record.measures.get("norms(round=0)")) if first else view.measure("norms")
    return _find_visit(values, "correlation")


def _find_visit(norms: Mapping[str, Any], name: str) -> float:
    """A number of local classifiers in the round that the measure was asked for."""
    asked = [row for row in norms["rounds"] if row.get("asked")]
    return float(_need(asked[0].get(name) if asked else None))


READINGS: dict[str, tuple[Callable[..., float], str, int]] = {  # function, unit, decimals
    "accuracy": (lambda view: 100 * view.classifier.accuracy, "%", 2),
    "best": (lambda view: 100 * max(_need([row["accuracy"] for row in view.record.curve])), "%", 2),
    "gain": (gain, "%", 2),
    "at-round": (at_round, "%", 1),
    "at-batch": (at_batch, "%", 1),
    "rounds-to": (rounds_to_share, "rounds", 0),
    "rounds-ratio": (rounds_ratio, "times", 1),
    "relative": (relative, "%", 1),
    "volatility": (lambda view: 100 * _need(volatility([row["accuracy"] for row in view.record.curve])), "points", 2),
    "skew": (read_skew, "", 2),
    "emd": (lambda view: _need(view.record.result.emd), "", 2),
    "silhouette": (silhouette, "", 4),
    "seconds": (lambda view: view.classifier.seconds, "s", 1),
    "extra-seconds": (extra_seconds, "s", 1),
    "overhead": (overhead, "% of the time", 2),
    "places": (lambda view: sum(view.measure("places")["counts"]), "", 0),
    "features": (features, "", 2),
    "inversion": (inversion, "", 3),
    "separability": (lambda view: _need(view.measure("separability").get("mean")), "", 3),
    "cka": (cka, "", 3),
    "unevenness": (unevenness, "", 3),
    "correlation": (correlation, "", 2),
}


def parse_reading(source: str) -> Reading:
    """The reading of a text such as ``accuracy`` or ``at-round(1000)``."""
    call = language.parse_calls(source, "reading")[0]
    if call.name not in READINGS:
        raise call.error(f"no reading is called {call.name!r}; {nearest(call.name, READINGS)}")
    function, unit, decimals = READINGS[call.name]
    return Reading(str(call), language.apply(call, bind_knobs(function), "reading"), unit, decimals)


@dataclass(frozen=True)
class Cell:
    """One cell: its training (with seed 0), the classifier to read, and the paper's value."""

    row: RecipeRow
    column: RecipeColumn
    config: Config
    after: str  # a calibration in its canonical spelling; "": the run's own classifier
    reading: Reading
    baseline: Config | None
    measures: tuple[str, ...]
    done: bool  # whether it is part of this scale
    paper: PaperValue | None
    variables: Mapping[str, Value] = field(default_factory=dict, compare=False)
    number: int = 0  # among all cells of the recipe

    def training(self, seed: int = 0) -> str:
        """The name of its training with this seed, shared by all cells with the same training."""
        return name_training(with_seed(self.config, seed))

    @property
    def row_name(self) -> str:
        """The row of the table that it belongs to."""
        return self.row.best_of or self.row.name


@dataclass(frozen=True)
class Variant:
    """How a recipe is run: its scale, data instead of the paper's, changed options, seeds, rows and columns."""

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
        """The name of the folder for its tables."""
        parts = [self.scale, self.data, *(f"{name}-{value}" for name, value in self.changes.items())]
        return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(filter(None, parts))).strip("-")[:100]


def make_cells(recipe: Recipe, variant: Variant) -> list[Cell]:
    """Every cell of the recipe, row by row, including those that are not part of the scale."""
    extent = recipe.extent(variant.scale, variant.data)
    cells: list[Cell] = []
    for row in recipe.rows:
        for at, column in enumerate(recipe.columns):
            if row.only and not matches(column.name, row.only):
                continue
            where = f"recipe {recipe.name}, {row.name}, {column.name}"
            chosen = _list_levels(recipe, variant, row, column)
            variables, changes = _merge(chosen, "variables"), {**variant.changes}
            for name in row.keeps:
                changes.pop(name, None)
            config = _make_config(_merge(chosen, "settings") | changes, variables, where)
            baseline, own = None, _merge(chosen, "baseline")
            if "method" in own:
                plain = _merge(_list_levels(recipe, variant, RecipeRow(name=row.name), column), "settings")
                baseline = _make_config(plain | own | changes, variables, where)
            after = plain_name(fill_in(row.after, variables, where)) if row.after else ""
            reading = parse_reading(fill_in(row.reads or column.reads or "accuracy", variables, where))
            measures = tuple(parse_measure(fill_in(text, variables, where)).text for text in recipe.measures)
            part = row.scale.get(variant.scale, AtScale()).columns or ("*",)
            done = matches(row.name, extent.rows) and all(matches(column.name, some) for some in (extent.columns, part))
            paper = parse_value(row.values[at]) if row.values else None
            number = len(cells)
            cells.append(Cell(row, column, config, after, reading, baseline, measures, done, paper, variables, number))
    return cells


def select_cells(cells: Sequence[Cell], variant: Variant) -> list[Cell]:
    """The cells of this scale in the chosen rows and columns."""
    rows, columns = {cell.row.name for cell in cells}, {cell.column.name for cell in cells}
    for kind, patterns, known in (("rows", variant.rows, rows), ("columns", variant.columns, columns)):
        if not any(matches(name, patterns) for name in known):
            raise UserError(f"--{kind} {', '.join(patterns)}: no such {kind}; {nearest(patterns[0], sorted(known))}")
    chosen = [cell for cell in cells if cell.done and matches(cell.row.name, variant.rows)]
    return [cell for cell in chosen if matches(cell.column.name, variant.columns)]


def list_seeds(recipe: Recipe, variant: Variant) -> tuple[int, ...]:
    """The seeds of every cell."""
    return variant.seeds or recipe.extent(variant.scale, variant.data).seeds


def with_seed(config: Config, seed: int) -> Config:
    """The run with this seed. A partition seed equal to the run's is the default, so it is left out."""
    fixed = None if config.partition_seed == seed else config.partition_seed
    return replace(config, seed=seed, partition_seed=fixed)


def name_training(config: Config) -> str:
    """A folder name for a training: a description, and a fingerprint of everything that decides it except the seed."""
    plain = replace(config, seed=0, data_dir=None)
    name = f"{slug(plain, seed=False)}-{plain.partition}-{plain.clients or ''}"
    name = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")[:80]
    return f"{name}-{configs.fingerprint(plain)[:10]}"


def _list_levels(recipe: Recipe, variant: Variant, row: RecipeRow, column: RecipeColumn) -> list[Settings]:
    """Settings from general to specific, then those of the scale, then those of other data."""
    levels = (recipe.paper, recipe, column, row)
    chosen: list[Settings] = [*levels, Settings(variables=row.by_column.get(column.name, {}))]
    chosen += [level.scale[scale] for level in levels if (scale := variant.scale) in level.scale]
    if variant.data:
        others = [level.stand_in[variant.data] for level in levels if variant.data in level.stand_in]
        chosen += [*others, *(level.scale[scale] for level in others if (scale := variant.scale) in level.scale)]
        if not others:
            chosen.append(Settings(settings={"data": variant.data}))
    return chosen


def _merge(levels: Sequence[Settings], table: str) -> dict[str, Value]:
    return {name: value for level in levels for name, value in getattr(level, table).items()}


def _make_config(settings: Mapping[str, Value], variables: Mapping[str, Value], where: str) -> Config:
    """The configuration with its variables filled in; an empty text means the option's default."""
    values: dict[str, Value | None] = {**settings}
    for name, value in settings.items():
        if isinstance(value, str) and name in OPTIONS:
            filled, option = fill_in(value, variables, where), OPTIONS[name]
            try:
                values[name] = option.kind(filled) if filled else option.default
            except ValueError as error:
                raise UserError(f"{where}, {name}: {error}") from error
    return configs.with_values(Config(), values, where)


def fill_in(text: str, variables: Mapping[str, Value], where: str) -> str:
    """A recipe's text with its variables filled in."""
    spelled = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in variables.items()}
    try:
        return text.format_map(spelled)
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"{where}: {brief(text)} needs the variable {error}") from error
