"""The files of a table with its results: Markdown, HTML, JSON, and its figures as SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unskew.analysis.measure import Cell, Column, Linked, Table
from unskew.charts import Chart
from unskew.charts.files import svg
from unskew.core.errors import UserError
from unskew.core.files import json_object, write_whole
from unskew.report.page import Page, Section, to_html
from unskew.reproduce.figures import draw_figures
from unskew.reproduce.recipe import names
from unskew.reproduce.records import run_link
from unskew.reproduce.results import AGREEMENT, MARKS, CellResult, TableResult, columns_of, rows_of
from unskew.reproduce.wording import Wording, difference_words, ours_of
from unskew.runs.config import deciding
from unskew.runs.folder import json_bytes


def to_markdown(result: TableResult, said: Wording, command: str, charts: Sequence[Chart], folder: Path) -> str:
    """The whole page; ``folder`` is where it is written, and what links are relative to."""
    recipe = result.recipe
    lines = [f"# {recipe.name}: {recipe.title}", "", f"{recipe.paper.reference}; {recipe.source}.", ""]
    lines += [recipe.about, ""] if recipe.about else []
    lines += [f"Made by `{command}`.", ""]
    lines += [f"- {each}" for each in said.findings]
    lines += ["", *_markdown_table(result, folder), ""]
    judged = [each for each in result.cells if each.agreement]
    if judged:
        legend = ", ".join(f"{MARKS[name]} {words}" for name, words in AGREEMENT.items())
        lines += [
            f"In brackets ours minus the paper's. {legend}: the paper's ± where it gives one, otherwise ours.",
            "",
        ]
    lines += [f"![{chart.alt}]({quote(chart.name)}.svg)\n" for chart in charts]
    lines += ["## Gains", "", *gains, ""] if (gains := _gains(result)) else []
    lines += ["## Known differences", "", *(f"- {each}" for each in said.differences), ""]
    if recipe.notes:
        lines += ["## On the paper's values", "", *(f"- {each}" for each in recipe.notes), ""]
    lines += ["## How it was made", "", *(f"- {name}: {fact}" for name, fact in said.facts), ""]
    lines += _markdown_runs(result, folder)
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(result: TableResult, folder: Path) -> list[str]:
    names = columns_of(result)
    printed, ours = any(each.paper for each in result.cells), ours_of(result)
    head = [""]
    for name in names:
        head += [_headed(name, "paper"), _headed(name, ours)] if printed else [name or "value"]
    rows = []
    for name, cells in rows_of(result).items():
        parts = [
            part
            for each in cells
            for part in ([_paper(each), _markdown_ours(each, folder)] if printed else [_markdown_ours(each, folder)])
        ]
        rows.append([name, *parts])
    rules = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in (head, rules, *rows)]


def _headed(column: str, whose: str) -> str:
    return f"{column}, {whose}" if column else whose


def _paper(each: CellResult | None) -> str:
    return str(each.paper) if each is not None and each.paper is not None else ""


def _markdown_ours(each: CellResult | None, folder: Path) -> str:
    if each is None:
        return ""
    if each.ours is None:
        return f"*{each.reason}*"
    gap = f" ({difference_words(each)})" if each.difference is not None else ""
    mark = f" {MARKS[each.agreement]}" if each.agreement else ""
    return f"[{each.words()}]({quote(run_link(next(iter(each.records.values())), folder))}){gap}{mark}"


def _gains(result: TableResult) -> list[str]:
    """What each row gains over the one that it is compared with, paired over the seeds."""
    rows = []
    for each in result.cells:
        gain = result.gain(each)
        if gain is None or not each.cell.done or (gain.paper is None and gain.ours is None):
            continue
        paper = "" if gain.paper is None else f"{gain.paper:+.2f}"
        ours = "" if gain.ours is None else f"{gain.ours:+.2f}"
        interval = f"{gain.interval.low:+.2f} to {gain.interval.high:+.2f}" if gain.interval else ""
        rows.append([each.cell.row.name, each.cell.column.name, gain.over, paper, ours, interval])
    if not rows:
        return []
    head = ["row", "column", "over", "paper", "ours", "95 % interval, paired over seeds"]
    rules = ["---"] * 3 + ["---:"] * 3
    return ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in (head, rules, *rows)]


def _markdown_runs(result: TableResult, folder: Path) -> list[str]:
    if not result.records:
        return []
    head = ["run", "seed", "accuracy, %", "seconds", "weights"]
    rows = [
        [f"[{each.training}]({quote(run_link(each, folder))})", str(each.result.seed),
         f"{100 * each.result.accuracy:.2f}", f"{each.result.seconds:.0f}", each.result.weights_sha256[:12]]
        for each in result.records
    ]  # fmt: skip
    table = (head, ["---", "---:", "---:", "---:", "---"], *rows)
    return ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in table]


def _plain(cell: str) -> str:
    return cell.replace("|", "\\|")


_READ = "Each cell has mean ± deviation over the seeds, and leads to the report of its first run."
_JUDGED = (
    " In brackets ours minus the paper's. Green is inside the paper's ±, yellow inside twice that, red outside; where "
    "the paper gives no ±, ours is the measure."
)


def to_page(result: TableResult, said: Wording, command: str, charts: Sequence[Chart], folder: Path) -> Page:
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


TABLES = "tables"


def table_folder(result: TableResult) -> Path:
    """Where the files of a table are."""
    return result.out / TABLES / result.asked.folder / result.recipe.paper.name


def write_table(result: TableResult, said: Wording, command: str) -> list[Path]:
    """Write them; what was there before is replaced."""
    folder, name = table_folder(result), result.recipe.name.partition("/")[2]
    charts = draw_figures(result)
    contents = {
        f"{name}.md": to_markdown(result, said, command, charts, folder).encode(),
        f"{name}.html": to_html(to_page(result, said, command, charts, folder)).encode(),
        f"{name}.json": json_bytes(as_json(result, said, command, folder)),
        **{f"{chart.name}.svg": svg(chart).encode() for chart in charts},
    }
    for file, content in contents.items():
        write_whole(folder / file, content)
    for old in folder.glob(f"{name}-*.svg"):
        if old.name not in contents:
            old.unlink(missing_ok=True)
    return [folder / file for file in contents]


def as_json(result: TableResult, said: Wording, command: str, folder: Path) -> dict[str, Any]:
    """The table for programs."""
    cells = []
    for each in result.cells:
        paper, ours = each.paper, each.ours
        cells.append(
            {
                "row": each.cell.row.name,
                "column": each.cell.column.name,
                "reads": each.cell.reads,
                "after": each.cell.after,
                "unit": each.reading.unit,
                "paper": None if paper is None else {"mean": paper.mean, "deviation": paper.deviation},
                "ours": None if ours is None else {"mean": ours.mean, "deviation": ours.deviation},
                "by_seed": {str(seed): value for seed, value in each.values.items()},
                "missing": {str(seed): reason for seed, reason in each.missing.items()} or each.reason,
                "difference": each.difference,
                "agreement": each.agreement,
                "settings": deciding(each.cell.config),
                "runs": [run_link(record, folder) for record in each.records.values()],
            }
        )
    about = {"recipe": result.recipe.name, "title": result.recipe.title, "command": command}
    return {
        **about,
        "findings": said.findings,
        "differences": said.differences,
        "facts": dict(said.facts),
        "cells": cells,
    }


INDEX = "tables.md"


def write_index(out: Path) -> Path:
    """Write tables.md from the JSON files of the tables; one that cannot be read is named."""
    groups: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    order = [*map(Path, names())]
    for file in sorted((out / TABLES).glob("*/*/*.json"), key=lambda each: (each.parents[1], _place(each, order))):
        try:
            values = json_object(file.read_bytes(), file)
        except (OSError, UserError):
            values = {"findings": [f"{file.name} cannot be read; give its command again."]}
        groups.setdefault(file.parent.parent.name, []).append((file, values))
    lines = ["# Tables in this folder", ""]
    for name, tables in groups.items():
        lines += [
            f"## {name}",
            "",
            "| table | what was found | seeds | runs | trained |",
            "| --- | --- | --- | ---: | ---: |",
        ]
        lines += [_line(out, file, values) for file, values in tables]
        lines += ["", "Made by:", "", "```", *_commands([values for _, values in tables]), "```", ""]
    write_whole(out / INDEX, ("\n".join(lines).rstrip() + "\n").encode())
    return out / INDEX


def _place(file: Path, order: Sequence[Path]) -> tuple[int, Path]:
    """Where a table stands among those of its scale: as in the list of all recipes, what is none of them last."""
    name = Path(file.parent.name, file.stem)
    return (order.index(name) if name in order else len(order)), name


def _commands(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tables' commands; those that differ in the table's name alone are one."""
    found: dict[tuple[str, str], list[str]] = {}
    for values in tables:
        before, name, after = str(values.get("command", "")).partition(str(values.get("recipe", " ")))
        if before:
            found.setdefault((before, after), []).append(name)
    return [f"{before}{' '.join(filter(None, those))}{after}" for (before, after), those in found.items()]


def _line(out: Path, file: Path, values: Mapping[str, Any]) -> str:
    facts = values.get("facts") or {}
    link = f"[{values.get('recipe', file.stem)}]({file.with_suffix('.md').relative_to(out).as_posix()})"
    found = " ".join(values.get("findings") or ())
    cells = [f"{link}: {values.get('title', '')}", found, *(str(facts.get(name, "")) for name in ("seeds", "runs"))]
    cells.append(str(facts.get("training, of all runs together", "")))
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"
