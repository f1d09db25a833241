"""A recipe with its results: each cell over the seeds next to the paper's value, the difference and the agreement."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unskew.analysis.ranking import Difference, compare_pairs
from unskew.reproduce.cells import (
    Cell,
    Reading,
    RunView,
    Variant,
    list_seeds,
    make_cells,
    name_training,
    parse_reading,
    with_seed,
)
from unskew.reproduce.recipe import PaperValue, Recipe
from unskew.reproduce.records import RunRecord, read_record
from unskew.runs.seeds import SeedSpread, spread_over_seeds
from unskew.sweeps.tasks import RunFailure

INSIDE, NEAR, OUTSIDE = "inside", "near", "outside"
AGREEMENT = {INSIDE: "within ±", NEAR: "within 2 ±", OUTSIDE: "outside"}
MARKS = {INSIDE: "●", NEAR: "◐", OUTSIDE: "○"}  # without colors


@dataclass(frozen=True)
class CellResult:
    """A cell with our values by seed, and why some seeds have none."""

    cell: Cell
    reading: Reading
    values: Mapping[int, float]
    missing: Mapping[int, str]
    records: Mapping[int, RunRecord]
    baselines: Mapping[int, RunRecord]
    judged: bool  # False for other data than the paper's, and for times, which depend on the machine

    @property
    def rank(self) -> tuple[bool, int, float]:
        """The order of candidates for a row: part of the scale, then the most seeds, then the highest mean."""
        return self.cell.done, len(self.values), self.ours.mean if self.ours else float("-inf")

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
        if self.difference is None or self.paper is None or self.ours is None:
            return ""
        size = self.paper.deviation if self.paper.deviation is not None else self.ours.deviation
        if size is None:
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
        return self.reason if self.ours is None else self.ours.format(decimals=self.reading.decimals)


@dataclass(frozen=True)
class Gain:
    """A row's gain over the row it is compared with: the paper's, and ours paired over the seeds."""

    over: str
    paper: float | None
    ours: float | None
    interval: Difference | None  # with three seeds or more, in the unit of the cell


@dataclass(frozen=True)
class TableResult:
    """A recipe with its results."""

    recipe: Recipe
    variant: Variant
    seeds: tuple[int, ...]
    cells: tuple[CellResult, ...]
    out: Path = field(default_factory=Path)

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

    @property
    def complete(self) -> bool:
        """Whether every cell of this scale has a value for every seed."""
        return all(not result.missing for result in self.cells if result.cell.done)


def read_table(recipe: Recipe, variant: Variant, out: Path, reasons: Mapping[str, str] | None = None) -> TableResult:
    """The recipe with the values in the records; ``reasons`` for missing ones, by the training's name or data."""
    seeds = list_seeds(recipe, variant)
    own = {}
    if variant.data:
        own = {cell.column.name: cell.config.data for cell in make_cells(recipe, Variant(variant.scale))}
    best: dict[tuple[str, str], CellResult] = {}
    for cell in make_cells(recipe, variant):
        reading = parse_reading(cell.reads)
        values: dict[int, float] = {}
        missing: dict[int, str] = {}
        records: dict[int, RunRecord] = {}
        baselines: dict[int, RunRecord] = {}
        for seed in seeds if cell.done else ():
            record, baseline, value = _read_cell(cell, reading, seed, out, reasons or {})
            records |= {seed: record} if record is not None else {}
            baselines |= {seed: baseline} if baseline is not None else {}
            if isinstance(value, str):
                missing[seed] = value
            else:
                values[seed] = value
        judged = reading.unit not in ("s", "% of the time")  # measured on another machine
        judged = judged and (not variant.data or own.get(cell.column.name) == cell.config.data)
        result = CellResult(cell, reading, values, missing, records, baselines, judged)
        key = (cell.row_name, cell.column.name)
        if key not in best or result.rank > best[key].rank:
            best[key] = result
    return TableResult(recipe, variant, seeds, tuple(best.values()), out)


def _read_cell(
    cell: Cell, reading: Reading, seed: int, out: Path, reasons: Mapping[str, str]
) -> tuple[RunRecord | None, RunRecord | None, float | str]:
    training = cell.training(seed)
    record = read_record(out, training, seed)
    if isinstance(record, RunFailure):
        return None, None, "diverged"
    if record is None:
        return None, None, reasons.get(training, "") or reasons.get(cell.config.data, "") or "not run yet"
    baseline = None
    if cell.baseline is not None:
        other = read_record(out, name_training(with_seed(cell.baseline, seed)), seed)
        baseline = other if isinstance(other, RunRecord) else None
    value = reading.read(RunView(record, cell.after, baseline))
    if value is not None:
        return record, baseline, value
    if reading.relative and baseline is None:
        return record, None, "its baseline has not been run yet"
    if reading.text.startswith("rounds-"):
        return record, baseline, f"not within {record.result.rounds:,}"
    if reading.text.startswith("at-"):
        return record, baseline, "not reached, or not evaluated by then"
    return record, baseline, record.failure or "not measured yet"


def list_columns(result: TableResult) -> list[str]:
    """The columns with a cell at this scale."""
    done = {one.cell.column.name for one in result.cells if one.cell.done}
    return [column.name for column in result.recipe.columns if column.name in done]


def list_rows(result: TableResult) -> dict[str, list[CellResult | None]]:
    """The cells by row, in the order of ``list_columns``; rows without a cell at this scale are left out."""
    names = list_columns(result)
    order = dict.fromkeys(row.best_of or row.name for row in result.recipe.rows)
    rows = {row: [result.cell(row, name) for name in names] for row in order}
    return {name: cells for name, cells in rows.items() if any(one and one.cell.done for one in cells)}
