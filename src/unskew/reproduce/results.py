"""What a recipe came to: each cell's value over the seeds beside the paper's, the difference, and the agreement."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unskew.analysis.ranking import Difference, compare_pairs
from unskew.reproduce.cells import (
    SECONDS,
    Cell,
    Reading,
    RunView,
    Variant,
    list_seeds,
    make_cells,
    name_training,
    parse_reading,
)
from unskew.reproduce.recipe import PaperValue, Recipe
from unskew.reproduce.records import RunRecord, read_record
from unskew.runs.seeds import SeedSpread, spread_over_seeds
from unskew.sweeps.tasks import RunFailure

INSIDE, NEAR, OUTSIDE = "inside", "near", "outside"
AGREEMENT = {INSIDE: "inside ±", NEAR: "inside twice ±", OUTSIDE: "outside"}  # in words
MARKS = {INSIDE: "●", NEAR: "◐", OUTSIDE: "○"}  # where there are no colours


@dataclass(frozen=True)
class CellResult:
    """A cell with ours: a value for each seed whose run is there, and why the others have none."""

    cell: Cell
    reading: Reading
    values: Mapping[int, float]
    missing: Mapping[int, str]
    records: Mapping[int, RunRecord]
    judged: bool  # whether ours and the paper's are of the same data, and not seconds of two machines

    @property
    def ours(self) -> SeedSpread | None:
        """Mean and deviation over the seeds."""
        return spread_over_seeds(self.values.values())

    @property
    def paper(self) -> PaperValue | None:
        """What the paper has."""
        return self.cell.paper

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; None where one is missing, or the data are others."""
        if self.paper is None or self.paper.beyond or self.ours is None or not self.judged:
            return None
        return self.ours.mean - self.paper.mean

    @property
    def agreement(self) -> str:
        """Inside the paper's ±, inside two, or outside; by our own ± where the paper gives none; "" where unknown."""
        if self.difference is None or self.paper is None or self.ours is None:
            return ""
        size = self.paper.deviation if self.paper.deviation is not None else self.ours.deviation
        if size is None:
            return ""
        return INSIDE if abs(self.difference) <= size else NEAR if abs(self.difference) <= 2 * size else OUTSIDE

    @property
    def reason(self) -> str:
        """Why there is no value, in a few words; "" where there is one."""
        if self.values:
            return ""
        return next(iter(self.missing.values()), "") if self.cell.done else "not at this scale"

    def words(self) -> str:
        """Ours, as a table has it."""
        return self.reason if self.ours is None else self.ours.words(decimals=self.reading.decimals)


@dataclass(frozen=True)
class Gain:
    """How far a row is above the row that it is compared with: the paper's, and ours paired over the seeds."""

    over: str
    paper: float | None
    ours: float | None
    interval: Difference | None  # with three seeds or more; in the unit of the cell


@dataclass(frozen=True)
class TableResult:
    """A whole recipe with its results."""

    recipe: Recipe
    asked: Variant
    seeds: tuple[int, ...]
    cells: tuple[CellResult, ...]
    out: Path = field(default_factory=Path)

    def cell(self, row: str, column: str) -> CellResult | None:
        """The cell of that row and column, if there is one."""
        found = [each for each in self.cells if (each.cell.row.name, each.cell.column.name) == (row, column)]
        return found[0] if found else None

    def gain(self, result: CellResult) -> Gain | None:
        """The gain of a cell over the row that it is compared with."""
        if not result.cell.row.against:
            return None
        other = self.cell(result.cell.row.against, result.cell.column.name)
        if other is None:
            return None
        paper = None
        if result.paper and other.paper and not (result.paper.beyond or other.paper.beyond):
            paper = result.paper.mean - other.paper.mean
        common = sorted(set(result.values) & set(other.values))
        gaps = [result.values[seed] - other.values[seed] for seed in common]
        interval = compare_pairs(result.values, other.values)
        return Gain(other.cell.row.name, paper, sum(gaps) / len(gaps) if gaps else None, interval)

    @property
    def records(self) -> list[RunRecord]:
        """Every run that the table is made of, once."""
        found = {(each.training, each.result.seed): each for one in self.cells for each in one.records.values()}
        return list(found.values())

    @property
    def complete(self) -> bool:
        """Whether every cell that is done at this scale has a value for every seed."""
        return all(not each.missing for each in self.cells if each.cell.done)


def read_table(recipe: Recipe, asked: Variant, out: Path, reasons: Mapping[str, str] | None = None) -> TableResult:
    """The recipe with what the records have. ``reasons`` say why a training has none, by its name or its data."""
    seeds = list_seeds(recipe, asked)
    own = (
        {cell.column.name: cell.config.data for cell in make_cells(recipe, Variant(asked.scale))} if asked.data else {}
    )
    made = []
    for cell in make_cells(recipe, asked):
        reading = parse_reading(cell.reads)
        values: dict[int, float] = {}
        missing: dict[int, str] = {}
        records: dict[int, RunRecord] = {}
        for seed in seeds if cell.done else ():
            found, reason = _read(cell, reading, seed, out, reasons or {})
            if isinstance(found, RunRecord):
                records[seed] = found
            if isinstance(reason, str):
                missing[seed] = reason
            else:
                values[seed] = reason
        judged = reading.unit != SECONDS and (not asked.data or own.get(cell.column.name) == cell.config.data)
        made.append(CellResult(cell, reading, values, missing, records, judged))
    return TableResult(recipe, asked, seeds, tuple(made), out)


def _read(
    cell: Cell, reading: Reading, seed: int, out: Path, reasons: Mapping[str, str]
) -> tuple[RunRecord | None, float | str]:
    """The run of a cell, and its value or the reason why there is none."""
    found = read_record(out, cell.training, seed)
    if isinstance(found, RunFailure):
        return None, "diverged"
    if found is None:
        return None, reasons.get(cell.training, "") or reasons.get(cell.config.data, "") or "not run yet"
    baseline = read_record(out, name_training(cell.baseline), seed) if cell.baseline is not None else None
    value = reading.read(RunView(found, cell.after, baseline if isinstance(baseline, RunRecord) else None))
    if value is not None:
        return found, value
    if reading.relative and not isinstance(baseline, RunRecord):
        return found, "its baseline is not run yet"
    if reading.text.startswith("rounds-to"):
        return found, f"not within {found.result.rounds:,}"
    if reading.text.startswith("at-"):
        return found, "not reached, or not evaluated by then"
    return found, found.failure or "not made of it yet"


def count_agreement(result: TableResult) -> dict[str, int]:
    """How many cells agree how well with the paper."""
    return {name: sum(each.agreement == name for each in result.cells) for name in AGREEMENT}


def list_columns(result: TableResult) -> list[str]:
    """The columns that have a cell at this scale."""
    done = {each.cell.column.name for each in result.cells if each.cell.done}
    return [column.name for column in result.recipe.columns if column.name in done]


def list_rows(result: TableResult) -> dict[str, list[CellResult | None]]:
    """The cells by row, in the order of these columns; rows without any are left out."""
    names = list_columns(result)
    rows = {row.name: [result.cell(row.name, name) for name in names] for row in result.recipe.rows}
    return {name: cells for name, cells in rows.items() if any(each and each.cell.done for each in cells)}
