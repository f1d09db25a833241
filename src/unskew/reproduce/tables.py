"""A table with its results: sentences, Markdown, HTML, JSON, and its figures as SVG."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unskew.analysis.measure import CellValue, Column, Linked, Table
from unskew.charts import Chart
from unskew.charts.files import svg
from unskew.core.errors import UserError
from unskew.core.files import json_object, write_whole
from unskew.core.units import counted, format_duration
from unskew.report.page import Page, Section, to_html
from unskew.reproduce.cells import Variant, make_cells
from unskew.reproduce.figures import draw_figures
from unskew.reproduce.recipe import recipe_names
from unskew.reproduce.records import link_run
from unskew.reproduce.results import AGREEMENT, MARKS, CellResult, Gain, TableResult, list_columns, list_rows
from unskew.runs.config import Value, deciding
from unskew.runs.folder import json_bytes

MOST = 12  # options named in the sentence on the scale
SAME = 0.05  # points; smaller gains have no sign
TABLES, INDEX = "tables", "tables.md"
TIME = "training time, all runs"  # shown in the index


@dataclass(frozen=True)
class Wording:
    """The sentences and facts of a table, shared by all its formats."""

    findings: list[str]
    differences: list[str]  # every known difference from the paper's setup
    facts: list[tuple[str, str]]  # scale, seeds, machine, …


def describe_table(result: TableResult) -> Wording:
    """All sentences and facts of a table."""
    return Wording(findings(result), differences(result), facts(result))


def findings(result: TableResult) -> list[str]:
    """How well our values agree with the paper's, and which values are missing."""
    return [*_describe_agreement(result), *_describe_gains(result), *_describe_missing(result)]


def _describe_agreement(result: TableResult) -> list[str]:
    counts = {name: sum(one.agreement == name for one in result.cells) for name in AGREEMENT}
    if not any(counts.values()):
        return []
    shares = ", ".join(f"{count} {AGREEMENT[name]}" for name, count in counts.items() if count)
    printed = [one.paper.deviation is not None for one in result.cells if one.agreement and one.paper]
    whose = "the paper's ±" if any(printed) else "our own ±, since the paper gives none"
    if any(printed) and not all(printed):
        whose += ", or ours where it gives none"
    sentence = f"{counted(sum(counts.values()), 'cell')} with a value in the paper, judged by {whose}: {shares}."
    if result.variant.scale != "paper":
        sentence += " This scale trains less than the paper does, so values outside are expected."
    return [sentence]


def _describe_gains(result: TableResult) -> list[str]:
    """Whether gains have the paper's sign, which can be compared at every scale."""
    known: list[tuple[CellResult, Gain, bool | None]] = []  # with whether the signs agree; None: too small
    for one in result.cells:
        gain = result.gain(one)
        if gain is not None and gain.paper is not None and gain.ours is not None:
            large = min(abs(gain.paper), abs(gain.ours)) >= SAME
            known.append((one, gain, gain.paper * gain.ours > 0 if large else None))
    if not known:
        return []
    same, opposite, small = ([gain for _, gain, sign in known if sign is wanted] for wanted in (True, False, None))
    ignored = f"Not counted, with a gain below {SAME:g} points in the paper or here: {counted(len(small), 'pair')}"
    if not same and not opposite:
        return [f"{ignored}."]

    def count_clear(some: Iterable[Gain]) -> int:
        """How many intervals exclude zero."""
        return sum(one.interval is not None and (one.interval.low > 0 or one.interval.high < 0) for one in some)

    where = "" if all(one.judged for one in result.cells) else ", on data other than the paper's"
    count, has = counted(len(same) + len(opposite), "gain"), "has" if len(same) == 1 else "have"
    sentence = f"{len(same)} of {count} of one row over another {has} the paper's sign{where}"
    if not any(gain.interval for gain in (*same, *opposite)):
        sentence += _describe_chance([(one, sign) for one, _, sign in known if sign is not None])
    if any(gain.interval for gain in same):
        sentence += f"; for {count_clear(same)} of these the 95 % interval over the seeds excludes zero"
    if any(gain.interval for gain in opposite):
        sentence += f". It also excludes zero for {count_clear(opposite)} of the {len(opposite)} with the opposite sign"
    return [f"{sentence}. {ignored}." if small else f"{sentence}."]


def _describe_chance(signs: Sequence[tuple[CellResult, bool]]) -> str:
    """For too few seeds for intervals: whether the signs could agree by chance. Each training counts once."""
    trainings: dict[str, bool] = {}
    for one, agrees in signs:
        name = one.cell.training()
        trainings[name] = trainings.get(name, True) and agrees
    agree, count = sum(trainings.values()), len(trainings)
    chance = sum(comb(count, k) for k in range(agree, count + 1)) / 2**count
    seeds = counted(max(len(one.values) for one, _ in signs), "seed")
    sentence = f". That is {agree} of {counted(count, 'training')} with {seeds}, which a coin would give with a "
    return f"{sentence}probability of {chance:.2g}{': no evidence' if chance > 0.05 else ''}"


def _describe_missing(result: TableResult) -> list[str]:
    sentences = []
    if empty := [one for one in result.cells if one.cell.done and not one.values]:
        reasons = "; ".join(dict.fromkeys(one.reason for one in empty))
        sentences.append(f"Without a value: {counted(len(empty), 'cell')} ({reasons}).")
    if partial := [one for one in result.cells if one.values and one.missing]:
        sentences.append(f"Some seeds missing: {counted(len(partial), 'cell')}.")
    if skipped := [one for one in result.cells if not one.cell.done]:
        names = dict.fromkeys(one.cell.column.name for one in skipped)
        columns = [name for name in names if name not in list_columns(result)]
        which = f", including the columns {', '.join(columns)}" if columns else ""
        count = f"{len(skipped)} of the paper's cells"
        sentences.append(f"Left out at scale {result.variant.scale}: {count}{which}.")
    return sentences


def differences(result: TableResult) -> list[str]:
    """Every known difference from the paper's setup: data, scale, changed options, seeds, then the recipe's own."""
    recipe, variant = result.recipe, result.variant
    sentences = []
    if variant.data:
        what = recipe.stand_ins.get(variant.data, f"{variant.data} instead of the paper's data")
        sentences.append(f"Data: {what}. The paper's values are shown for reference; differences are not judged.")
    if variant.scale != "paper" and (changed := _list_changes(result)):
        sentences.append(f"Scale {variant.scale}: {changed}.")
    sentences += [f"Changed by --set: {name} = {value}." for name, value in variant.changes.items()]
    published = len(recipe.extent("paper").seeds)
    if len(result.seeds) != published:
        sentences.append(f"Seeds: {counted(len(result.seeds), 'seed')} instead of {published}.")
    return sentences + recipe.list_differences(variant.data)


def _list_changes(result: TableResult) -> str:
    differing: dict[str, set[tuple[Value | None, Value | None]]] = {}
    published = make_cells(result.recipe, Variant("paper", result.variant.data))
    for one in _list_run(result):
        theirs = published[one.cell.number]
        ours, paper = deciding(one.cell.config), deciding(theirs.config)
        for name in {**ours, **paper}:
            if ours.get(name) != paper.get(name) and name not in result.variant.changes:
                differing.setdefault(name, set()).add((ours.get(name), paper.get(name)))
        if one.cell.reads != theirs.reads:
            differing.setdefault("read", set()).add((one.cell.reads, theirs.reads))
    changes = []
    for name, pairs in list(differing.items())[:MOST]:
        texts = [["the default" if value is None else value for value in pair] for pair in sorted(pairs, key=str)]
        values = " or ".join(f"{new} instead of {old}" for new, old in texts)
        changes.append(f"{name.replace('_', ' ')} {values}")
    return ", ".join(changes)


def _list_run(result: TableResult) -> list[CellResult]:
    """The cells with a value, or, if there are none yet, those of the scale."""
    return [one for one in result.cells if one.values] or [one for one in result.cells if one.cell.done]


def facts(result: TableResult) -> list[tuple[str, str]]:
    """Scale, data, seeds, time, machine and versions."""
    records = result.records
    machines = dict.fromkeys(record.machine.get("machine", "") for record in records)
    packages = ("unskew", "torch", "numpy", "python")
    versions = dict.fromkeys(
        ", ".join(f"{name} {record.machine[name]}" for name in packages if name in record.machine) for record in records
    )
    run = [seed for seed in result.seeds if any(seed in one.values for one in result.cells)]
    waiting = [str(seed) for seed in result.seeds if seed not in run]
    seeds = ", ".join(map(str, run)) + (f" (not yet {', '.join(waiting)})" if waiting else "") if run else "none yet"
    trained = sum(record.result.seconds for record in records)
    calibrated = sum(row.seconds for record in records for row in record.result.calibrations.values())
    return [
        ("scale", result.variant.scale),
        ("data", ", ".join(dict.fromkeys(one.cell.config.data for one in _list_run(result)))),
        ("seeds", seeds),
        ("runs", f"{len(records):,}"),
        (TIME, format_duration(trained)),
        ("calibration time", format_duration(calibrated)),
        ("machine", "; ".join(filter(None, machines)) or "none yet"),
        ("versions", "; ".join(filter(None, versions)) or "none yet"),
    ]


def name_ours(result: TableResult) -> str:
    """The name of our columns; it includes the data if they are not the paper's."""
    other = result.variant.data
    return f"ours ({other if other in result.recipe.stand_ins else 'other data'})" if other else "ours"


def format_difference(one: CellResult) -> str:
    """Ours minus the paper's, with its sign; "" if unknown."""
    return "" if one.difference is None else f"{one.difference:+.{one.reading.decimals}f}"


def _format_rows(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of a Markdown table; the second contains the alignment."""
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def to_markdown(result: TableResult, wording: Wording, command: str, charts: Sequence[Chart], folder: Path) -> str:
    """The table as a Markdown page in ``folder``, which links are relative to."""
    recipe = result.recipe
    lines = [f"# {recipe.name}: {recipe.title}", "", f"{recipe.paper.reference}; {recipe.source}.", ""]
    lines += [recipe.about, ""] if recipe.about else []
    lines += [f"Made by `{command}`.", "", *(f"- {sentence}" for sentence in wording.findings), ""]
    table = _tabulate(result, folder)
    head = ["", *(column.name for column in table.columns[1:])]
    rows = [[_to_markdown(cell) for cell in row] for row in table.rows]
    lines += [*_format_rows([head, ["---", *["---:"] * (len(head) - 1)], *rows]), ""]
    if any(one.agreement for one in result.cells):
        legend = ", ".join(f"{MARKS[name]} {meaning}" for name, meaning in AGREEMENT.items())
        lines += [f"In brackets: ours minus the paper's. {legend}; ± is the paper's, or ours where it gives none.", ""]
    lines += [f"![{chart.alt}]({quote(chart.name)}.svg)\n" for chart in charts]
    if gains := _list_gains(result):
        head = ["row", "column", "over", "paper", "ours", "95 % interval, paired over seeds"]
        lines += ["## Gains", "", *_format_rows([head, ["---"] * 3 + ["---:"] * 3, *gains]), ""]
    lines += ["## Known differences", "", *(f"- {sentence}" for sentence in wording.differences), ""]
    if recipe.notes:
        lines += ["## On the paper's values", "", *(f"- {note}" for note in recipe.notes), ""]
    lines += ["## How it was made", "", *(f"- {name}: {fact}" for name, fact in wording.facts), ""]
    if result.records:
        head, runs = ["run", "seed", "accuracy, %", "seconds", "weights"], []
        for record in result.records:
            run = record.result
            numbers = [str(run.seed), f"{100 * run.accuracy:.2f}", f"{run.seconds:.0f}", run.weights_sha256[:12]]
            runs.append([f"[{record.training}]({quote(link_run(record, folder))})", *numbers])
        lines += _format_rows([head, ["---", "---:", "---:", "---:", "---"], *runs])
    return "\n".join(lines).rstrip() + "\n"


def _to_markdown(cell: CellValue) -> str:
    if not isinstance(cell, Linked):
        return "" if cell is None else str(cell)
    link = f"[{cell.text}]({quote(cell.href)})" if cell.href else cell.text
    return f"{link} {MARKS[cell.look]}" if cell.look else link


def _list_gains(result: TableResult) -> list[list[str]]:
    rows = []
    for one in result.cells:
        gain = result.gain(one)
        if gain is None or not one.cell.done or (gain.paper is None and gain.ours is None):
            continue
        values = ["" if value is None else f"{value:+.2f}" for value in (gain.paper, gain.ours)]
        rows.append([one.cell.row_name, one.cell.column.name, gain.over, *values, _format_interval(gain)])
    return rows


def _format_interval(gain: Gain | None) -> str:
    return f"{gain.interval.low:+.2f} to {gain.interval.high:+.2f}" if gain and gain.interval else ""


def to_page(result: TableResult, wording: Wording, command: str, charts: Sequence[Chart], folder: Path) -> Page:
    """The table as an HTML page in ``folder``, which links are relative to."""
    recipe = result.recipe
    text = "Each cell shows mean ± deviation over the seeds and links to the report of its first run."
    if any(one.agreement for one in result.cells):
        text += (
            " In brackets: ours minus the paper's. Green is within the paper's ±, yellow within twice that, red "
            "outside; where the paper gives no ±, ours is used."
        )
    about = "\n\n".join(filter(None, (recipe.about, text)))
    cells = "Gains are over the row that a row is compared with, paired over the seeds, with a 95 % interval."
    return Page(
        title=f"{recipe.name}: {recipe.title}",
        subtitle=f"{recipe.paper.reference}; {recipe.source}",
        findings=wording.findings,
        facts=wording.facts,
        sections=[
            Section("table", "Our values and the paper's", about, [_tabulate(result, folder)], notes=recipe.notes),
            *([Section("figures", "Figures", "", list(charts))] if charts else []),
            Section("differences", "Known differences", "", findings=wording.differences),
            Section("cells", "Every cell", cells, [_tabulate_cells(result, folder)]),
            Section("runs", "Every run", f"Made by: {command}", [_tabulate_runs(result, folder)]),
        ],
        footer="Made by unskew from the records in this folder; the same command makes it again.",
        heading="How well it agrees",
    )


def _tabulate(result: TableResult, folder: Path) -> Table:
    printed = any(one.paper for one in result.cells)
    columns = [Column("row")]
    for name in list_columns(result):
        heads = [", ".join(filter(None, (name, whose))) for whose in ("paper", name_ours(result))]
        columns += [Column(head, "number") for head in (heads if printed else [name or "value"])]
    rows: list[list[CellValue]] = []
    for name, cells in list_rows(result).items():
        row: list[CellValue] = [name]
        for one in cells:
            if printed:
                row.append(Linked(str(one.paper), value=one.paper.mean) if one is not None and one.paper else None)
            row.append(None if one is None else _link_cell(one, folder))
        rows.append(row)
    return Table("", columns, rows)


def _link_cell(one: CellResult, folder: Path) -> CellValue:
    if one.ours is None:
        return one.reason
    link = link_run(next(iter(one.records.values())), folder)
    difference = f" ({format_difference(one)})" if one.difference is not None else ""
    return Linked(one.format() + difference, link, one.agreement, one.ours.mean)


def _tabulate_cells(result: TableResult, folder: Path) -> Table:
    texts, numbers = ("row", "column", "seeds", "paper"), ("ours", "difference")
    columns = [*map(Column, texts), *(Column(name, "number") for name in numbers), Column("agreement")]
    columns += [Column("gain, paper", "number"), Column("gain, ours", "number"), Column("interval")]
    rows: list[list[CellValue]] = []
    for one in [one for one in result.cells if one.cell.done]:
        gain = result.gain(one)
        seeds = ", ".join(f"{seed}: {value:.{one.reading.decimals}f}" for seed, value in one.values.items())
        row: list[CellValue] = [one.cell.row_name, one.cell.column.name, seeds or one.reason]
        row += [str(one.paper) if one.paper else None, _link_cell(one, folder) if one.ours else None, one.difference]
        row += [AGREEMENT.get(one.agreement), *((gain.paper, gain.ours) if gain else (None, None))]
        rows.append([*row, _format_interval(gain) or None])
    return Table("", columns, rows)


def _tabulate_runs(result: TableResult, folder: Path) -> Table:
    columns = [Column("run"), Column("seed", "count"), Column("method"), Column("partition")]
    columns += [Column("accuracy", "percent"), Column("sent up", "bytes"), Column("time", "seconds")]
    columns += [Column("weights"), Column("machine")]
    rows: list[list[CellValue]] = []
    for record in result.records:
        run = record.result
        row: list[CellValue] = [Linked(record.training, link_run(record, folder)), run.seed, run.method, run.partition]
        row += [run.accuracy, run.bytes_up, run.seconds, run.weights_sha256[:12], record.machine.get("machine", "")]
        rows.append(row)
    return Table("", columns, rows)


def write_table(result: TableResult, wording: Wording, command: str) -> list[Path]:
    """Write the Markdown, HTML, JSON and SVG files of a table, replacing earlier ones."""
    paper, _, name = result.recipe.name.partition("/")
    folder = result.out / TABLES / result.variant.folder / paper
    charts = draw_figures(result)
    contents = {
        f"{name}.md": to_markdown(result, wording, command, charts, folder).encode(),
        f"{name}.html": to_html(to_page(result, wording, command, charts, folder)).encode(),
        f"{name}.json": json_bytes(to_json(result, wording, command, folder)),
        **{f"{chart.name}.svg": svg(chart).encode() for chart in charts},
    }
    for file, content in contents.items():
        write_whole(folder / file, content)
    for old in folder.glob(f"{name}-*.svg"):
        if old.name not in contents:
            old.unlink(missing_ok=True)
    return [folder / file for file in contents]


def to_json(result: TableResult, wording: Wording, command: str, folder: Path) -> dict[str, Any]:
    """The table as JSON."""
    cells = []
    for one in result.cells:
        cell: dict[str, Any] = {"row": one.cell.row_name, "column": one.cell.column.name, "reads": one.cell.reads}
        cell |= {"after": one.cell.after, "unit": one.reading.unit}
        for name, value in (("paper", one.paper), ("ours", one.ours)):
            cell[name] = None if value is None else {"mean": value.mean, "deviation": value.deviation}
        cell["by_seed"] = {str(seed): value for seed, value in one.values.items()}
        cell["missing"] = {str(seed): reason for seed, reason in one.missing.items()} or one.reason
        cell |= {"difference": one.difference, "agreement": one.agreement, "settings": deciding(one.cell.config)}
        cells.append(cell | {"runs": [link_run(record, folder) for record in one.records.values()]})
    about = {"recipe": result.recipe.name, "title": result.recipe.title, "command": command}
    return {**about, **vars(wording), "facts": dict(wording.facts), "cells": cells}


def write_index(out: Path) -> Path:
    """Write tables.md from the JSON files of the tables, listing those that cannot be read."""
    groups: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    names = [*recipe_names()]

    def order(file: Path) -> tuple[Path, int, str]:
        """By scale, then in the order of recipes; others last."""
        name = f"{file.parent.name}/{file.stem}"
        return file.parents[1], names.index(name) if name in names else len(names), name

    for file in sorted((out / TABLES).glob("*/*/*.json"), key=order):
        try:
            values: Mapping[str, Any] = json_object(file.read_bytes(), file)
        except (OSError, UserError):
            values = {"findings": [f"{file.name} cannot be read; run its command again."]}
        groups.setdefault(file.parent.parent.name, []).append((file, values))
    lines = ["# Tables in this folder", ""]
    for name, tables in groups.items():
        rows = [["table", "findings", "seeds", "runs", "training time"], ["---", "---", "---", "---:", "---:"]]
        commands: dict[tuple[str, str], list[str]] = {}
        for file, values in tables:
            about = values.get("facts") or {}
            link = f"[{values.get('recipe', file.stem)}]({file.with_suffix('.md').relative_to(out).as_posix()})"
            findings = " ".join(values.get("findings") or ())
            numbers = [str(about.get(fact, "")) for fact in ("seeds", "runs", TIME)]
            rows.append([f"{link}: {values.get('title', '')}", findings, *numbers])
            before, recipe, after = str(values.get("command", "")).partition(str(values.get("recipe", " ")))
            if before:  # commands that differ only in the table's name are merged
                commands.setdefault((before, after), []).append(recipe)
        merged = [f"{before}{' '.join(filter(None, those))}{after}" for (before, after), those in commands.items()]
        lines += [f"## {name}", "", *_format_rows(rows), "", "Made by:", "", "```", *merged, "```", ""]
    write_whole(out / INDEX, ("\n".join(lines).rstrip() + "\n").encode())
    return out / INDEX
