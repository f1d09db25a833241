"""A recipe with its results: each cell over the seeds next to the paper's value, the difference and the agreement."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unskew.analysis.ranking import Difference, compare_pairs
from unskew.reproduce.cells import Cell, RunView, Unread, Variant, list_seeds, make_cells, name_training, with_seed
from unskew.reproduce.recipe import PaperValue, Recipe
from unskew.reproduce.records import RunRecord, read_record, run_folder
from unskew.runs.seeds import SeedSpread, spread_over_seeds

INSIDE, NEAR, OUTSIDE = "inside", "near", "outside"
AGREEMENT = {INSIDE: "within ±", NEAR: "within 2 ±", OUTSIDE: "outside"}
MARKS = {INSIDE: "●", NEAR: "◐", OUTSIDE: "○"}  # without colors


@dataclass(frozen=True)
class CellResult:
    """A cell with our values by seed, and why some seeds have none."""

    cell: Cell
    judged: bool  # False for other data than the paper's, and for times, which depend on the machine
    values: dict[int, float] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    records: dict[int, RunRecord] = field(default_factory=dict)
    baselines: dict[int, RunRecord] = field(default_factory=dict)

    @property
    def ours(self) -> SeedSpread | None:
        """Mean and deviation over the seeds."""
        return spread_over_seeds(self.values.values())

    @property
    def paper(self) -> PaperValue | None:
        """The paper's value."""
        return self.cell.paper

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; None if one is missing or cannot be judged."""
        if self.paper is None or self.paper.beyond or self.ours is None or not self.judged:
            return None
        return self.ours.mean - self.paper.mean

    @property
    def agreement(self) -> str:
        """Within the paper's ±, within twice that, or outside; with our ± if the paper has none; "" if unknown."""
        size = next((one.deviation for one in (self.paper, self.ours) if one and one.deviation is not None), None)
        if self.difference is None or size is None:
            return ""
        return INSIDE if abs(self.difference) <= size else NEAR if abs(self.difference) <= 2 * size else OUTSIDE

    @property
    def reason(self) -> str:
        """Why there is no value; "" if there is one."""
        if self.values:
            return ""
        return next(iter(self.missing.values()), "") if self.cell.done else "not at this scale"

    def format(self) -> str:
        """Our value as text, or why it is missing."""
        return self.reason if self.ours is None else self.ours.format(decimals=self.cell.reading.decimals)


@dataclass(frozen=True)
class Gain:
    """A row's gain over the row it is compared with: the paper's, and ours paired over the seeds."""

    over: str
    paper: float | None
    ours: float | None
    interval: Difference | None  # with three seeds or more, in the unit of the cell

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval, and zero is not in it."""
        return self.interval is not None and (self.interval.low > 0 or self.interval.high < 0)


@dataclass(frozen=True)
class TableResult:
    """A recipe with its results."""

    recipe: Recipe
    variant: Variant
    seeds: tuple[int, ...]
    cells: tuple[CellResult, ...]
    out: Path = field(default_factory=Path)

    @property
    def columns(self) -> list[str]:
        """The columns with a cell at this scale."""
        done = {one.cell.column.name for one in self.cells if one.cell.done}
        return [column.name for column in self.recipe.columns if column.name in done]

    def cell(self, row: str, column: str) -> CellResult | None:
        """The cell of that row and column, if there is one."""
        return next((one for one in self.cells if (one.cell.row_name, one.cell.column.name) == (row, column)), None)

    def gain(self, result: CellResult) -> Gain | None:
        """The gain of a cell over the row it is compared with."""
        other = self.cell(result.cell.row.against, result.cell.column.name)
        if other is None:
            return None
        paper = None
        if result.paper and other.paper and not (result.paper.beyond or other.paper.beyond):
            paper = result.paper.mean - other.paper.mean
        gaps = [result.values[seed] - other.values[seed] for seed in sorted(result.values.keys() & other.values.keys())]
        interval = compare_pairs(result.values, other.values)
        return Gain(other.cell.row_name, paper, sum(gaps) / len(gaps) if gaps else None, interval)

    @property
    def records(self) -> list[RunRecord]:
        """Every run behind the table, once."""
        records = [record for result in self.cells for record in result.records.values()]
        return list({(record.training, record.result.seed): record for record in records}.values())


def read_table(recipe: Recipe, variant: Variant, out: Path, reasons: Mapping[str, str] | None = None) -> TableResult:
    """The recipe with the values in the records; ``reasons`` for missing ones, by the training's name or data."""
    seeds = list_seeds(recipe, variant)
    published = {cell.column.name: cell.config.data for cell in make_cells(recipe, Variant(variant.scale))}
    best: dict[tuple[str, str], CellResult] = {}
    for cell in make_cells(recipe, variant):
        same_data = not variant.data or published[cell.column.name] == cell.config.data
        timed = cell.reading.unit in ("s", "% of the time")  # the paper's times are of another machine
        result = CellResult(cell, judged=same_data and not timed)
        for seed in seeds if cell.done else ():
            _read_seed(result, seed, out, reasons or {})
        key = (cell.row_name, cell.column.name)
        if key not in best or _rank(result) > _rank(best[key]):
            best[key] = result
    return TableResult(recipe, variant, seeds, tuple(best.values()), out)


def _rank(result: CellResult) -> tuple[bool, int, float]:
    """The order of candidates for a row: part of the scale, then the most seeds, then the highest mean."""
    return result.cell.done, len(result.values), result.ours.mean if result.ours else float("-inf")


def _read_seed(result: CellResult, seed: int, out: Path, reasons: Mapping[str, str]) -> None:
    """Add the value of one seed, or why it is missing."""
    cell, training = result.cell, result.cell.training(seed)
    record = read_record(run_folder(out, training, seed))
    if not isinstance(record, RunRecord):
        reason = reasons.get(training) or reasons.get(cell.config.data) or "not run yet"
        result.missing[seed] = reason if record is None else "diverged"
        return
    result.records[seed] = record
    if cell.baseline is not None:
        baseline = read_record(run_folder(out, name_training(with_seed(cell.baseline, seed)), seed))
        if isinstance(baseline, RunRecord):
            result.baselines[seed] = baseline
    try:
        view = RunView(record, cell.after, result.baselines.get(seed))
        result.values[seed] = float(cell.reading.function(view))
    except Unread as reason:
        result.missing[seed] = str(reason) or record.failure or "not measured yet"
