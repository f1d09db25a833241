"""A table with its results: sentences, one page as Markdown and HTML, JSON, and its figures as SVG."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unskew.analysis.measure import CellValue, Linked, Table, tabulate
from unskew.charts import Chart
from unskew.charts.files import svg
from unskew.core.errors import UserError
from unskew.core.files import read_json, write_whole
from unskew.core.units import counted, format_duration
from unskew.report.page import Page, Section, format_value, to_html
from unskew.reproduce.cells import Variant, make_cells
from unskew.reproduce.figures import draw_figures
from unskew.reproduce.recipe import recipe_names
from unskew.reproduce.records import link_run
from unskew.reproduce.results import AGREEMENT, MARKS, CellResult, Gain, TableResult
from unskew.runs.config import Value, deciding
from unskew.runs.folder import json_bytes

SAME = 0.05  # points; smaller gains have no sign
TABLES, INDEX = "tables", "tables.md"
TIME = "training time, all runs"  # shown in the index


def findings(result: TableResult) -> list[str]:
    """How well our values agree with the paper's, and which values are missing."""
    sentences = []
    if counts := Counter(one.agreement for one in result.cells if one.agreement):
        shares = ", ".join(f"{counts[name]} {meaning}" for name, meaning in AGREEMENT.items() if counts[name])
        cells = f"{counted(counts.total(), 'cell')} with a value in the paper"
        sentence = f"{cells}, judged by the paper's ±, or ours where it gives none: {shares}."
        if result.variant.scale != "paper":
            sentence += " This scale trains less than the paper does, so values outside are expected."
        sentences.append(sentence)
    sentences += _describe_gains(result)
    if empty := [one for one in result.cells if one.cell.done and not one.values]:
        reasons = "; ".join(dict.fromkeys(one.reason for one in empty))
        sentences.append(f"Without a value: {counted(len(empty), 'cell')} ({reasons}).")
    if partial := [one for one in result.cells if one.values and one.missing]:
        sentences.append(f"Some seeds missing: {counted(len(partial), 'cell')}.")
    if skipped := [one.cell.column.name for one in result.cells if not one.cell.done]:
        columns = [name for name in dict.fromkeys(skipped) if name not in result.columns]
        which = f", including the columns {', '.join(columns)}" if columns else ""
        sentences.append(f"Left out at scale {result.variant.scale}: {len(skipped)} of the paper's cells{which}.")
    return sentences


def _describe_gains(result: TableResult) -> list[str]:
    """Whether gains have the paper's sign, which can be compared at every scale."""
    large: list[tuple[CellResult, Gain, bool]] = []  # with whether the signs agree
    small, sentences = 0, []
    for one in result.cells:
        gain = result.gain(one)
        if gain is None or gain.paper is None or gain.ours is None:
            continue
        if min(abs(gain.paper), abs(gain.ours)) >= SAME:
            large.append((one, gain, gain.paper * gain.ours > 0))
        else:
            small += 1
    if large:
        same = [gain for _, gain, agrees in large if agrees]
        opposite = [gain for _, gain, agrees in large if not agrees]
        where = "" if all(one.judged for one in result.cells) else ", on data other than the paper's"
        count = f"{len(same)} of {counted(len(large), 'gain')} of one row over another"
        sentence = f"{count} {'has' if len(same) == 1 else 'have'} the paper's sign{where}"
        if any(gain.interval for _, gain, _ in large):
            clear, wrong = (sum(gain.excludes_zero for gain in gains) for gains in (same, opposite))
            sentence += f"; for {clear} of these the 95 % interval over the seeds excludes zero"
            sentence += f", and for {wrong} of the {len(opposite)} with the opposite sign" if opposite else ""
        else:
            sentence += _describe_chance([(one, agrees) for one, _, agrees in large])
        sentences.append(f"{sentence}.")
    if small:
        pairs = counted(small, "pair")
        sentences.append(f"Not counted, with a gain below {SAME:g} points in the paper or here: {pairs}.")
    return sentences


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
    differing = defaultdict[str, set[tuple[Value | None, Value | None]]](set)
    published = make_cells(result.recipe, Variant("paper", result.variant.data))
    for one in _list_run(result):
        theirs = published[one.cell.number]
        ours, paper = deciding(one.cell.config), deciding(theirs.config)
        for name in {**ours, **paper}:
            if ours.get(name) != paper.get(name) and name not in result.variant.changes:
                differing[name].add((ours.get(name), paper.get(name)))
        if one.cell.reading.text != theirs.reading.text:
            differing["read"].add((one.cell.reading.text, theirs.reading.text))
    changes = []
    for name, pairs in differing.items():
        texts = [["the default" if value is None else value for value in pair] for pair in sorted(pairs, key=str)]
        values = " or ".join(f"{new} instead of {old}" for new, old in texts)
        changes.append(f"{name.replace('_', ' ')} {values}")
    return ", ".join(changes)


def _list_run(result: TableResult) -> list[CellResult]:
    """The cells with a value, or, if there are none yet, those of the scale."""
    return [one for one in result.cells if one.values] or [one for one in result.cells if one.cell.done]


def facts(result: TableResult) -> list[tuple[str, str]]:
    """Scale, data, seeds, time, machine and versions."""
    records, packages = result.records, ("unskew", "torch", "numpy", "python")
    about = [record.machine for record in records]
    machines = dict.fromkeys(machine.get("machine", "") for machine in about)
    versions = dict.fromkeys(", ".join(f"{key} {one[key]}" for key in packages if key in one) for one in about)
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
    return f"ours ({result.variant.data})" if result.variant.data else "ours"


def format_cell(one: CellResult) -> str:
    """Our value, with the difference from the paper's in brackets, or why it is missing."""
    difference = "" if one.difference is None else f" ({one.difference:+.{one.cell.reading.decimals}f})"
    return one.format() + difference


def write_table(result: TableResult, command: str) -> tuple[list[Path], dict[str, Any]]:
    """Write the Markdown, HTML, SVG and JSON files of a table; returns them and the content of the JSON file."""
    recipe = result.recipe
    paper, _, name = recipe.name.partition("/")
    folder = result.out / TABLES / result.variant.folder / paper
    charts, gains, values = draw_figures(result), _tabulate_gains(result), to_json(result, command, folder)
    about = [recipe.about] if recipe.about else []
    if any(one.agreement for one in result.cells):
        legend = ", ".join(f"{MARKS[name]} {meaning}" for name, meaning in AGREEMENT.items())
        about.append(f"In brackets: ours minus the paper's. {legend}; ± is the paper's, or ours where it gives none.")
    page = Page(
        title=f"{recipe.name}: {recipe.title}",
        subtitle=f"{recipe.paper.reference}; {recipe.source}",
        findings=values["findings"],
        facts=[*values["facts"].items(), ("made by", command)],
        sections=[
            Section("table", "Our values and the paper's", "\n\n".join(about), [_tabulate(result, folder), *charts]),
            *([Section("gains", "Gains", "", [gains])] if gains.rows else []),
            Section("differences", "Known differences", "", findings=values["differences"]),
            *([Section("notes", "On the paper's values", "", findings=recipe.notes)] if recipe.notes else []),
            Section("runs", "Every run", "", [_tabulate_runs(result, folder)]),
        ],
        footer="Made by unskew from the records in this folder; the same command makes it again.",
        heading="How well it agrees",
    )
    files = [*write_page(page, folder, name), folder / f"{name}.json"]
    write_whole(files[-1], json_bytes(values))
    return files, values


def write_page(page: Page, folder: Path, name: str) -> list[Path]:
    """Write a page as Markdown and HTML, and its charts as SVG files."""
    charts = [element for section in page.sections for element in section.elements if isinstance(element, Chart)]
    contents = {f"{name}.md": to_markdown(page), f"{name}.html": to_html(page)}
    contents |= {f"{chart.name}.svg": svg(chart) for chart in charts}
    for file, content in contents.items():
        write_whole(folder / file, content.encode())
    return [folder / file for file in contents]


def to_markdown(page: Page) -> str:
    """The page as Markdown, with links to the charts' SVG files."""
    lines = [f"# {page.title}", "", f"{page.subtitle}.", "", *(f"- {sentence}" for sentence in page.findings), ""]
    for section in page.sections:
        lines += [f"## {section.title}", "", *([section.text, ""] if section.text else [])]
        for element in section.elements:
            if isinstance(element, Chart):
                lines += [f"![{element.alt}]({quote(element.name)}.svg)", ""]
            elif isinstance(element, Table):
                lines += [*_format_table(element), ""]
        lines += [*(f"- {sentence}" for sentence in section.findings), ""]
    lines += ["## How it was made", "", *(f"- {name}: {fact}" for name, fact in page.facts)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _format_table(table: Table) -> list[str]:
    heads = [column.name for column in table.columns]
    rows = [heads, ["---" if column.kind == "text" else "---:" for column in table.columns]]
    for row in table.rows:
        cells = [_format_cell(cell, column.kind) for cell, column in zip(row, table.columns, strict=True)]
        rows.append([cell.replace("|", "\\|") for cell in cells])
    return [f"| {' | '.join(row)} |" for row in rows]


def _format_cell(cell: CellValue, kind: str) -> str:
    if isinstance(cell, Linked):
        text = f"[{cell.text}]({quote(cell.href)})" if cell.href else cell.text
        return f"{text} {MARKS[cell.look]}" if cell.look else text
    return "" if cell is None else cell if isinstance(cell, str) else format_value(cell, kind)


def _tabulate(result: TableResult, folder: Path) -> Table:
    """The paper's values and ours side by side; rows and columns without a cell at this scale are left out."""
    printed = any(one.paper for one in result.cells)
    columns = {"": "text"}
    for name in result.columns:
        heads = [", ".join(filter(None, (name, whose))) for whose in ("paper", name_ours(result))]
        columns |= dict.fromkeys(heads if printed else [name or "value"], "number")
    rows: list[list[CellValue]] = []
    for name in dict.fromkeys(row.best_of or row.name for row in result.recipe.rows):
        cells = [result.cell(name, column) for column in result.columns]
        row: list[CellValue] = [name]
        for one in cells:
            if printed:
                row.append(Linked(str(one.paper), value=one.paper.mean) if one and one.paper else None)
            if one and one.ours:
                link = link_run(next(iter(one.records.values())), folder)
                row.append(Linked(format_cell(one), link, one.agreement, one.ours.mean))
            else:
                row.append(one.reason if one else None)
        if any(one and one.cell.done for one in cells):
            rows.append(row)
    return tabulate("", columns, rows)


def _tabulate_gains(result: TableResult) -> Table:
    columns = {"row": "text", "column": "text", "over": "text"}
    columns |= dict.fromkeys(("paper", "ours", "95 % interval, paired over seeds"), "number")
    rows: list[list[CellValue]] = []
    for one in result.cells:
        gain = result.gain(one)
        if gain is not None and one.cell.done and not (gain.paper is None and gain.ours is None):
            values = ["" if value is None else f"{value:+.2f}" for value in (gain.paper, gain.ours)]
            interval = f"{gain.interval.low:+.2f} to {gain.interval.high:+.2f}" if gain.interval else ""
            rows.append([one.cell.row_name, one.cell.column.name, gain.over, *values, interval])
    return tabulate("", columns, rows)


def _tabulate_runs(result: TableResult, folder: Path) -> Table:
    columns = {"run": "text", "seed": "count", "accuracy": "percent", "time": "seconds", "weights": "text"}
    rows: list[list[CellValue]] = []
    for run, record in ((record.result, record) for record in result.records):
        link = Linked(record.training, link_run(record, folder))
        rows.append([link, run.seed, run.accuracy, run.seconds, run.weights_sha256[:12]])
    return tabulate("", columns, rows)


def to_json(result: TableResult, command: str, folder: Path) -> dict[str, Any]:
    """The table as JSON."""
    cells = []
    for one in result.cells:
        cell: dict[str, Any] = {"row": one.cell.row_name, "column": one.cell.column.name}
        cell |= {"reads": one.cell.reading.text, "after": one.cell.after, "unit": one.cell.reading.unit}
        for name, value in (("paper", one.paper), ("ours", one.ours)):
            cell[name] = None if value is None else {"mean": value.mean, "deviation": value.deviation}
        cell["by_seed"] = {str(seed): value for seed, value in one.values.items()}
        cell["missing"] = {str(seed): reason for seed, reason in one.missing.items()} or one.reason
        cell |= {"difference": one.difference, "agreement": one.agreement, "settings": deciding(one.cell.config)}
        cells.append(cell | {"runs": [link_run(record, folder) for record in one.records.values()]})
    about = {"recipe": result.recipe.name, "title": result.recipe.title, "command": command}
    sentences = {"findings": findings(result), "differences": differences(result)}
    return {**about, **sentences, "facts": dict(facts(result)), "cells": cells}


def write_index(out: Path) -> None:
    """Write tables.md from the JSON files of the tables, by scale and in the order of the recipes."""
    order = {name: number for number, name in enumerate(recipe_names())}
    groups = defaultdict[str, list[tuple[int, str, Path]]](list)
    for file in (out / TABLES).glob("*/*/*.json"):
        name = f"{file.parent.name}/{file.stem}"
        groups[file.parents[1].name].append((order.get(name, len(order)), name, file))
    lines = ["# Tables in this folder", ""]
    columns = {"table": "text", "findings": "text", "seeds": "text", "runs": "count", TIME: "text"}
    for scale, tables in sorted(groups.items()):
        rows, commands = list[list[CellValue]](), list[str]()
        for _, name, file in sorted(tables):
            try:
                values = read_json(file)
            except UserError as error:
                values = {"title": str(error)}
            link = f"[{name}]({file.with_suffix('.md').relative_to(out).as_posix()})"
            numbers = [str(values.get("facts", {}).get(fact, "")) for fact in ("seeds", "runs", TIME)]
            rows.append([f"{link}: {values.get('title', '')}", " ".join(values.get("findings", ())), *numbers])
            commands.append(values.get("command", ""))
        table = tabulate("", columns, rows)
        lines += [f"## {scale}", "", *_format_table(table), "", "Made by:", "", "```", *commands, "```", ""]
    write_whole(out / INDEX, ("\n".join(lines).rstrip() + "\n").encode())
