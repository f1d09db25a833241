"""The cells of a recipe at a scale: the configuration that each one trains, and the value read from the run."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any

from unskew.analysis import bind_knobs, parse_measure
from unskew.analysis.curves import volatility
from unskew.analysis.norms import unevenness as uneven
from unskew.core import text
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


@dataclass(frozen=True)
class RunView:
    """The inputs of a reading: the run, the calibration to read, and the baseline."""

    record: RunRecord
    after: str = ""
    baseline: RunRecord | None = None

    @property
    def classifier(self) -> Result | Calibration | None:
        """The scores of the run's own classifier, or of the calibration; None if that is missing."""
        return self.record.result.calibrations.get(self.after) if self.after else self.record.result


@dataclass(frozen=True)
class Reading:
    """A reading with its knobs: its function and unit, and whether it needs a baseline."""

    text: str
    read: Callable[[RunView], float | None]
    unit: str
    decimals: int = 2
    relative: bool = False


def accuracy(view: RunView) -> float | None:
    """Accuracy of the final model, with its own classifier or the calibrated one."""
    return None if view.classifier is None else 100 * view.classifier.accuracy


def gain(view: RunView) -> float | None:
    """The gain of the calibration, in points."""
    after = accuracy(view)
    return None if after is None or not view.after else after - 100 * view.record.result.accuracy


def at_round(view: RunView, round: int) -> float | None:
    """Accuracy of the last evaluated round up to this one; None for a shorter run."""
    share = accuracy_at_round(view.record.curve, round) if view.record.result.rounds >= round else None
    return None if share is None else 100 * share


def at_batch(view: RunView, batches: int) -> float | None:
    """Accuracy when the largest clients had done that many batches; None for a shorter run."""
    rows = view.record.curve
    share = accuracy_at_batch(rows, batches) if sum(row["batches_max"] for row in rows) >= batches else None
    return None if share is None else 100 * share


def rounds_to_share(view: RunView, share: int) -> float | None:
    """The first evaluated round with that share of the baseline's accuracy, in percent; None if never reached."""
    if view.baseline is None:
        return None
    number = rounds_to(view.record.curve, share / 100 * view.baseline.result.accuracy)
    return None if number is None else float(number)


def rounds_ratio(view: RunView, share: int, over: int = 10) -> float | None:
    """The rounds to ``share`` percent of the baseline's accuracy, divided by those to ``over`` percent."""
    late, early = rounds_to_share(view, share), rounds_to_share(view, over)
    return None if late is None or not early else late / early


def relative(view: RunView, round: int = 0) -> float | None:
    """The final accuracy, or that at a round, in percent of the baseline's final accuracy."""
    own = at_round(view, round) if round else accuracy(view)
    if own is None or view.baseline is None or not view.baseline.result.accuracy:
        return None
    return own / view.baseline.result.accuracy


def volatility_points(view: RunView) -> float | None:
    """How much accuracy jumps between evaluations, in points."""
    share = volatility([row["accuracy"] for row in view.record.curve])
    return None if share is None else 100 * share


def silhouette(view: RunView, best: bool = False) -> float | None:
    """The last silhouette recorded during training, or the highest."""
    values = [value for _, value in view.record.silhouettes]
    return (max(values) if best else values[-1]) if values else None


def extra_seconds(view: RunView) -> float | None:
    """Seconds of training beyond the baseline's."""
    return None if view.baseline is None else view.record.result.seconds - view.baseline.result.seconds


def overhead(view: RunView) -> float | None:
    """Extra seconds of training and those of the calibration, in percent of the run's training time."""
    extra, classifier = extra_seconds(view), view.classifier
    if extra is None or classifier is None or not view.after:
        return None
    return 100 * (extra + classifier.seconds) / max(view.record.result.seconds, 1e-9)


def read_skew(view: RunView, what: str) -> float | None:
    """A number of the partition: clients, classes, examples, classes per client, or the deviation of sizes / mean."""
    values = view.record.measure("skew")
    if values is None:
        return None
    sizes: list[float] = values["sizes"]
    if what == "imbalance":
        return pstdev(sizes) / max(fmean(sizes), 1e-9)
    if what == "per-client":
        shown = values["ranked"].get("classes") or [sum(map(bool, row)) for row in values["counts"]]
        return float(fmean(shown))
    counts = {
        "clients": values["clients"],
        "classes": sum(map(bool, values["total"])),
        "examples": sum(values["total"]),
    }
    return float(counts[what])


def cka(view: RunView, layer: str = "classifier") -> float | None:
    """The mean CKA of a layer between two clients' models."""
    values = view.record.measure("cka")
    if values is None or layer not in values["layers"]:
        return None
    return float(values["means"][values["layers"].index(layer)])


def features(view: RunView, held: bool | None = None) -> float | None:
    """The mean shift of class features from the server to clients, for all classes or those they have or lack."""
    values = view.record.measure("features")
    if values is None:
        return None
    rows = zip(values["shifts"], values["held"], strict=True)
    pairs = [pair for shifts, marks in rows for pair in zip(shifts, marks, strict=True)]
    chosen = [shift for shift, mark in pairs if held is None or mark is held]
    return fmean(chosen) if chosen else None


def inversion(view: RunView, what: str) -> float | None:
    """The mean similarity to the original of reconstructions, of another image, or of a gray picture."""
    values = view.record.measure("inversion")
    return None if values is None else fmean(float(row[f"{what}_ssim"]) for row in values["rows"])


def unevenness(view: RunView, local: bool = False) -> float | None:
    """Deviation of the classifier's row norms over their mean; with ``local``, the mean over local classifiers."""
    if local:
        return _find_number(_find_visit(view), "unevenness")
    values = view.record.measure("norms")
    rows = None if values is None else values["calibrated"].get(view.after) if view.after else values["server"]
    return None if rows is None else uneven(rows)


def correlation(view: RunView, first: bool = False) -> float | None:
    """Mean correlation of local classifiers' rows with label counts, after the last or in the first round."""
    return _find_number(_find_visit(view, first), "correlation")


def _find_visit(view: RunView, first: bool = False) -> dict[str, Any] | None:
    """The rows of local classifiers in the first round, or in the visit after the last."""
    values = view.record.measures.get("norms(round=0)") if first else view.record.measure("norms")
    return next((row for row in values["rounds"] if row.get("asked")), None) if values else None


def _find_number(values: Any, name: str) -> float | None:
    return None if values is None or values.get(name) is None else float(values[name])


READINGS: dict[str, tuple[Callable[..., float | None], str, int]] = {  # function, unit, decimals
    "accuracy": (accuracy, "%", 2),
    "best": (lambda view: max((100 * row["accuracy"] for row in view.record.curve), default=None), "%", 2),
    "gain": (gain, "%", 2),
    "at-round": (at_round, "%", 1),
    "at-batch": (at_batch, "%", 1),
    "rounds-to": (rounds_to_share, "rounds", 0),
    "rounds-ratio": (rounds_ratio, "times", 1),
    "relative": (relative, "%", 1),
    "volatility": (volatility_points, "points", 2),
    "skew": (read_skew, "", 2),
    "emd": (lambda view: view.record.result.emd, "", 2),
    "silhouette": (silhouette, "", 4),
    "seconds": (lambda view: classifier.seconds if (classifier := view.classifier) else None, "s", 1),
    "extra-seconds": (extra_seconds, "s", 1),
    "overhead": (overhead, "% of the time", 2),
    "places": (lambda view: float(sum(values["counts"])) if (values := view.record.measure("places")) else None, "", 0),
    "features": (features, "", 2),
    "inversion": (inversion, "", 3),
    "separability": (lambda view: _find_number(view.record.measure("separability"), "mean"), "", 3),
    "cka": (cka, "", 3),
    "unevenness": (unevenness, "", 3),
    "correlation": (correlation, "", 2),
}


RELATIVE = ("rounds-to", "rounds-ratio", "relative", "extra-seconds", "overhead")  # these need a baseline


def parse_reading(source: str) -> Reading:
    """The reading of a text such as ``accuracy`` or ``at-round(1000)``."""
    call = text.parse_calls(source, "reading")[0]
    if call.name not in READINGS:
        raise text.complain(source, call.start, f"no reading is called {call.name!r}; {nearest(call.name, READINGS)}")
    function, unit, decimals = READINGS[call.name]
    read: Callable[[RunView], float | None] = text.apply(call, bind_knobs(function), "reading")
    return Reading(str(call), read, unit, decimals, call.name in RELATIVE)


@dataclass(frozen=True)
class Cell:
    """One cell: its training (with seed 0), the classifier to read, and the paper's value."""

    row: RecipeRow
    column: RecipeColumn
    config: Config
    after: str  # a calibration in its canonical spelling; "": the run's own classifier
    reads: str
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
            variables = {name: value for level in chosen for name, value in level.variables.items()}
            changes = {name: value for name, value in variant.changes.items() if name not in row.keeps}
            settings = {name: value for level in chosen for name, value in level.settings.items()}
            config = _make_config({**settings, **changes}, variables, where)
            baseline = None
            own = {name: value for level in chosen for name, value in level.baseline.items()}
            if "method" in own:
                others = _list_levels(recipe, variant, RecipeRow(name=row.name), column)
                plain = {name: value for level in others for name, value in level.settings.items()}
                baseline = _make_config({**plain, **own, **changes}, variables, where)
            after = plain_name(fill_in(row.after, variables, where)) if row.after else ""
            reads = parse_reading(fill_in(row.reads or column.reads or "accuracy", variables, where)).text
            measures = tuple(parse_measure(fill_in(text, variables, where)).text for text in recipe.measures)
            part = row.scale.get(variant.scale, AtScale()).columns
            done = extent.has(row.name, column.name) and (not part or matches(column.name, part))
            paper = parse_value(row.values[at]) if row.values else None
            number = len(cells)
            cells.append(Cell(row, column, config, after, reads, baseline, measures, done, paper, variables, number))
    return cells


def select_cells(cells: Sequence[Cell], variant: Variant) -> list[Cell]:
    """The cells of this scale in the chosen rows and columns."""
    names = {"rows": {cell.row.name for cell in cells}, "columns": {cell.column.name for cell in cells}}
    for kind, known in names.items():
        patterns: tuple[str, ...] = getattr(variant, kind)
        if not any(matches(name, patterns) for name in known):
            raise UserError(f"--{kind} {', '.join(patterns)}: no such {kind}; {nearest(patterns[0], sorted(known))}")
    rows = [cell for cell in cells if cell.done and matches(cell.row.name, variant.rows)]
    return [cell for cell in rows if matches(cell.column.name, variant.columns)]


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


def _make_config(settings: Mapping[str, Value], variables: Mapping[str, Value], where: str) -> Config:
    """The configuration with its variables filled in; an empty text means the option's default."""
    values: dict[str, Value | None] = {}
    for name, value in settings.items():
        if name not in OPTIONS:
            raise UserError(f"{where}: no option is called {name!r}; {nearest(name, OPTIONS)}")
        option, values[name] = OPTIONS[name], value
        if not isinstance(value, str):
            continue
        filled = fill_in(value, variables, where)
        values[name] = filled if filled else option.default
        if filled and option.kind in (int, float):
            try:
                values[name] = option.kind(filled)
            except ValueError:
                raise UserError(f"{where}: {name} must be a number, not {brief(filled)}") from None
    return configs.with_values(Config(), values, where)


def fill_in(text: str, variables: Mapping[str, Value], where: str) -> str:
    """A recipe's text with its variables filled in."""
    spelled = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in variables.items()}
    try:
        return text.format_map(spelled)
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"{where}: {brief(text)} needs the variable {error}") from error
