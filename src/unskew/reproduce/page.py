"""A table with its results as a page: coloured by agreement, every cell with a link to its run."""

from collections.abc import Sequence
from pathlib import Path

from unskew.analysis.elements import Cell, Column, Linked, Table
from unskew.charts import Chart
from unskew.report.page import Page, Section
from unskew.reproduce.links import run_link
from unskew.reproduce.results import AGREEMENT, CellResult, TableResult, columns_of, rows_of
from unskew.reproduce.wording import Told, difference_words, ours_of

_READ = "Each cell has mean ± deviation over the seeds, and leads to the report of its first run."
_JUDGED = (
    " In brackets ours minus the paper's. Green is inside the paper's ±, yellow inside twice that, red outside; where "
    "the paper gives no ±, ours is the measure."
)


def to_page(result: TableResult, said: Told, command: str, charts: Sequence[Chart], folder: Path) -> Page:
    """The page; ``folder`` is where it is written, and what links are relative to."""
    recipe = result.recipe
    read = _READ + (_JUDGED if any(each.agreement for each in result.cells) else "")
    sections = [
        Section("table", "Ours beside the paper's", "\n\n".join(filter(None, (recipe.about, read))),
                [_table(result, folder)], notes=recipe.notes),
        *([Section("figures", "Figures", "", list(charts))] if charts else []),
        Section("differences", "Known differences", "", findings=said.differences),
        Section("cells", "Every cell", _CELLS, [_cells(result, folder)]),
        Section("runs", "Every run", f"Made by: {command}", [_runs(result, folder)]),
    ]  # fmt: skip
    return Page(
        title=f"{recipe.name}: {recipe.title}",
        subtitle=f"{recipe.paper.reference}; {recipe.source}",
        findings=said.findings,
        facts=said.facts,
        sections=sections,
        footer="Made by unskew from the records beside this page; the same command makes them again.",
        heading="How far it agrees",
    )


_CELLS = "Gains are over the row that a row is compared with, paired over the seeds; the interval is one of 95 %."


def _table(result: TableResult, folder: Path) -> Table:
    names = [name or "value" for name in columns_of(result)]
    printed = any(each.paper for each in result.cells)
    columns = [Column("row")]
    for name in names:
        columns += [Column(f"{name}, the paper's", "number")] if printed else []
        columns.append(Column(f"{name}, {ours_of(result)}", "number"))
    rows: list[list[Cell]] = []
    for row, cells in rows_of(result).items():
        line: list[Cell] = [row]
        for each in cells:
            if printed:
                line.append(Linked(str(each.paper), value=each.paper.mean) if each is not None and each.paper else None)
            line.append(None if each is None else _ours(each, folder))
        rows.append(line)
    return Table("", columns, rows)


def _ours(each: CellResult, folder: Path) -> Cell:
    if each.ours is None:
        return each.reason
    gap = f" ({difference_words(each)})" if each.difference is not None else ""
    link = run_link(next(iter(each.records.values())), folder)
    return Linked(each.words() + gap, link, each.agreement, each.ours.mean)


def _cells(result: TableResult, folder: Path) -> Table:
    names = ("row", "column", "seeds", "the paper's", "ours", "difference", "agreement", "gain, the paper's",
             "gain, ours", "interval")  # fmt: skip
    kinds = ("text", "text", "text", "text", "number", "number", "text", "number", "number", "text")
    rows: list[list[Cell]] = []
    for each in [one for one in result.cells if one.cell.done]:
        gain = result.gain(each)
        interval = f"{gain.interval.low:+.2f} to {gain.interval.high:+.2f}" if gain and gain.interval else None
        seeds = ", ".join(f"{seed}: {value:.{each.reading.decimals}f}" for seed, value in each.values.items())
        rows.append(
            [each.cell.row.name, each.cell.column.name, seeds or each.reason, str(each.paper) if each.paper else None,
             _ours(each, folder) if each.ours else None, each.difference, AGREEMENT.get(each.agreement),
             gain.paper if gain else None, gain.ours if gain else None, interval]
        )  # fmt: skip
    return Table("", [Column(name, kind) for name, kind in zip(names, kinds, strict=True)], rows)


def _runs(result: TableResult, folder: Path) -> Table:
    names = ("run", "seed", "method", "partition", "accuracy", "sent up", "time", "weights", "machine")
    kinds = ("text", "count", "text", "text", "percent", "bytes", "seconds", "text", "text")
    rows: list[list[Cell]] = [
        [Linked(each.training, run_link(each, folder)), each.result.seed, each.result.method, each.result.partition,
         each.result.accuracy, each.result.bytes_up, each.result.seconds, each.result.weights_sha256[:12],
         each.machine.get("machine", "")]
        for each in result.records
    ]  # fmt: skip
    return Table("", [Column(name, kind) for name, kind in zip(names, kinds, strict=True)], rows)
