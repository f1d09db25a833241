"""A table with its results: sentences, Markdown, HTML, JSON, and its figures as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from unskew.reproduce.results import (
    AGREEMENT,
    MARKS,
    CellResult,
    Gain,
    TableResult,
    count_agreement,
    list_columns,
    list_rows,
)
from unskew.runs import config as configs
from unskew.runs.config import Value, deciding
from unskew.runs.folder import json_bytes

MOST = 12  # options that a sentence on the scale names
SAME = 0.05  # points: gains that differ from zero by less have no sign


@dataclass(frozen=True)
class Wording:
    """All that is said of a table."""

    findings: list[str]  # what a reader wants to know first
    differences: list[str]  # every known one of the set-up
    facts: list[tuple[str, str]]  # scale, seeds, machine, …


def describe_table(result: TableResult) -> Wording:
    """All sentences and facts, written once for all forms of a table."""
    return Wording(findings(result), differences(result), facts(result))


def findings(result: TableResult) -> list[str]:
    """What a reader wants to know first."""
    return [*_agreement(result), *_describe_gains(result), *_missing(result)]


def _agreement(result: TableResult) -> list[str]:
    number = count_agreement(result)
    judged = sum(number.values())
    if not judged:
        return []
    words = ", ".join(f"{count} {AGREEMENT[name]}" for name, count in number.items() if count)
    with_own = [each.paper.deviation is not None for each in result.cells if each.agreement and each.paper]
    whose = "the paper's ±" if any(with_own) else "our own ±, since the paper gives none"
    if any(with_own) and not all(with_own):
        whose += ", or ours where it gives none"
    said = f"Of {counted(judged, 'cell')} with a value in the paper, by {whose}: {words}."
    if result.asked.scale != "paper":
        said += " At this scale less is trained than in the paper, so that values are expected to be outside."
    return [said]


def _describe_gains(result: TableResult) -> list[str]:
    """Whether gains have the paper's sign: what can be compared at every scale."""
    pairs = [gain for each in result.cells if (gain := result.gain(each)) is not None]
    known = [(gain, gain.paper, gain.ours) for gain in pairs if gain.paper is not None and gain.ours is not None]
    if not known:
        return []
    large = [(gain, paper * ours > 0) for gain, paper, ours in known if min(abs(paper), abs(ours)) >= SAME]
    same, other = ([gain for gain, agrees in large if agrees is wanted] for wanted in (True, False))
    small = len(known) - len(large)
    where = "" if all(each.judged for each in result.cells) else ", on other data than the paper's"
    has = "has" if len(same) == 1 else "have"
    said = f"Of {counted(len(large), 'gain')} of one row over another{where}, {len(same)} {has} the paper's sign"
    if any(gain.interval for gain in same):
        said += f"; for {_apart(same)} of these the 95 % interval over the seeds leaves out zero"
    if any(gain.interval for gain in other):
        said += f". Of the {len(other)} with the other sign it does for {_apart(other)}"
    rest = (
        f" Pairs with a gain of less than {SAME:g} points, the paper's or ours, are not counted: {small}."
        if small
        else ""
    )
    return [f"{said}.{rest}"]


def _apart(gains: Sequence[Gain]) -> int:
    """Of how many the interval leaves out zero."""
    return sum(each.interval is not None and (each.interval.low > 0 or each.interval.high < 0) for each in gains)


def _missing(result: TableResult) -> list[str]:
    said = []
    if lacking := [each for each in result.cells if each.cell.done and not each.values]:
        reasons = "; ".join(dict.fromkeys(each.reason for each in lacking))
        said.append(f"Without a value: {counted(len(lacking), 'cell')} ({reasons}).")
    if partly := [each for each in result.cells if each.values and each.missing]:
        said.append(f"Without some of the seeds: {counted(len(partly), 'cell')}.")
    if left := [each for each in result.cells if not each.cell.done]:
        shown = list_columns(result)
        names = [name for name in dict.fromkeys(each.cell.column.name for each in left) if name not in shown]
        which = f", among them the columns {', '.join(names)}" if names else ""
        said.append(f"Not done at the scale {result.asked.scale}: {counted(len(left), 'cell')} of the paper's{which}.")
    return said


def differences(result: TableResult) -> list[str]:
    """Every known difference of the set-up: of the scale, of the data, what was asked for, then the recipe's own."""
    recipe, asked = result.recipe, result.asked
    said = []
    if asked.data:
        what = recipe.stand_ins.get(asked.data, f"{asked.data} in the place of the paper's data")
        said.append(f"Data: {what}. The paper's values stand beside ours, and differences are not judged.")
    if asked.scale != "paper":
        changed = _changed(result)
        if changed:
            said.append(f"Scale {asked.scale}: {changed}.")
    said += [f"Asked for: {name} = {value}." for name, value in asked.changes.items()]
    published = recipe.extent("paper").seeds
    if len(result.seeds) != len(published):
        said.append(f"Seeds: {counted(len(result.seeds), 'seed')} instead of {len(published)}.")
    own = [*recipe.differences, *recipe.paper.differences]
    return [*said, *(each for each in own if not each.startswith(recipe.left_out.get(asked.data, ())))]


def _changed(result: TableResult) -> str:
    """The options in which the cells of this scale are not those of the paper's."""
    found: dict[str, set[tuple[Value | None, Value | None]]] = {}
    whole = make_cells(result.recipe, Variant("paper", result.asked.data))
    known = {id(each) for each in _run(result)}
    for each, there in zip(result.cells, whole, strict=True):
        now, published = configs.deciding(each.cell.config), configs.deciding(there.config)
        for name in {**now, **published} if id(each) in known else ():
            if now.get(name) != published.get(name) and name not in result.asked.changes:
                found.setdefault(name, set()).add((now.get(name), published.get(name)))
        if id(each) in known and each.cell.reads != there.reads:
            found.setdefault("read", set()).add((each.cell.reads, there.reads))
    words = []
    for name, pairs in list(found.items())[:MOST]:
        each_one = [f"{now} instead of {published}" for now, published in sorted(pairs, key=str)]
        words.append(f"{name.replace('_', ' ')} {' or '.join(each_one)}")
    return ", ".join(words)


def _run(result: TableResult) -> list[CellResult]:
    """The cells that have a value; before there are any, those of the scale."""
    return [each for each in result.cells if each.values] or [each for each in result.cells if each.cell.done]


def facts(result: TableResult) -> list[tuple[str, str]]:
    """Scale, seeds, what it took, where it was made."""
    records = result.records
    machines = dict.fromkeys(record.machine.get("machine", "") for record in records)
    versions = dict.fromkeys(
        ", ".join(
            f"{name} {record.machine[name]}"
            for name in ("unskew", "torch", "numpy", "python")
            if name in record.machine
        )
        for record in records
    )
    trained = sum(record.result.seconds for record in records)
    calibrated = sum(one.seconds for record in records for one in record.result.calibrations.values())
    return [
        ("scale", result.asked.scale),
        ("data", ", ".join(dict.fromkeys(each.cell.config.data for each in _run(result)))),
        ("seeds", _seeds(result)),
        ("runs", f"{len(records):,}"),
        ("training, of all runs together", format_duration(trained)),
        ("calibration", format_duration(calibrated)),
        ("machine", "; ".join(filter(None, machines)) or "none yet"),
        ("versions", "; ".join(filter(None, versions)) or "none yet"),
    ]


def _seeds(result: TableResult) -> str:
    """Those that a cell has a value of, and those that none has."""
    there = [seed for seed in result.seeds if any(seed in each.values for each in result.cells)]
    left = ", ".join(str(seed) for seed in result.seeds if seed not in there)
    if not there:
        return "none yet"
    return ", ".join(map(str, there)) + (f" (not yet {left})" if left else "")


def name_ours(result: TableResult) -> str:
    """What our columns are called: with other data in the paper's place their names say so."""
    other = result.asked.data
    if not other:
        return "ours"
    return f"ours ({other if other in result.recipe.stand_ins else 'other data'})"


def format_difference(each: CellResult) -> str:
    """Ours minus the paper's, with its sign; "" where it is not known."""
    return "" if each.difference is None else f"{each.difference:+.{each.reading.decimals}f}"


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
    names = list_columns(result)
    printed, ours = any(each.paper for each in result.cells), name_ours(result)
    head = [""]
    for name in names:
        head += [_headed(name, "paper"), _headed(name, ours)] if printed else [name or "value"]
    rows = []
    for name, cells in list_rows(result).items():
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
    gap = f" ({format_difference(each)})" if each.difference is not None else ""
    mark = f" {MARKS[each.agreement]}" if each.agreement else ""
    return f"[{each.words()}]({quote(link_run(next(iter(each.records.values())), folder))}){gap}{mark}"


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
        [f"[{each.training}]({quote(link_run(each, folder))})", str(each.result.seed),
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
    names = [name or "value" for name in list_columns(result)]
    printed = any(each.paper for each in result.cells)
    columns = [Column("row")]
    for name in names:
        columns += [Column(f"{name}, the paper's", "number")] if printed else []
        columns.append(Column(f"{name}, {name_ours(result)}", "number"))
    rows: list[list[CellValue]] = []
    for row, cells in list_rows(result).items():
        line: list[CellValue] = [row]
        for each in cells:
            if printed:
                line.append(Linked(str(each.paper), value=each.paper.mean) if each is not None and each.paper else None)
            line.append(None if each is None else _ours(each, folder))
        rows.append(line)
    return Table("", columns, rows)


def _ours(each: CellResult, folder: Path) -> CellValue:
    if each.ours is None:
        return each.reason
    gap = f" ({format_difference(each)})" if each.difference is not None else ""
    link = link_run(next(iter(each.records.values())), folder)
    return Linked(each.words() + gap, link, each.agreement, each.ours.mean)


def _cells(result: TableResult, folder: Path) -> Table:
    names = ("row", "column", "seeds", "the paper's", "ours", "difference", "agreement", "gain, the paper's",
             "gain, ours", "interval")  # fmt: skip
    kinds = ("text", "text", "text", "text", "number", "number", "text", "number", "number", "text")
    rows: list[list[CellValue]] = []
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
    rows: list[list[CellValue]] = [
        [Linked(each.training, link_run(each, folder)), each.result.seed, each.result.method, each.result.partition,
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
        f"{name}.json": json_bytes(to_json(result, said, command, folder)),
        **{f"{chart.name}.svg": svg(chart).encode() for chart in charts},
    }
    for file, content in contents.items():
        write_whole(folder / file, content)
    for old in folder.glob(f"{name}-*.svg"):
        if old.name not in contents:
            old.unlink(missing_ok=True)
    return [folder / file for file in contents]


def to_json(result: TableResult, said: Wording, command: str, folder: Path) -> dict[str, Any]:
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
                "runs": [link_run(record, folder) for record in each.records.values()],
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
    order = [*map(Path, recipe_names())]
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
