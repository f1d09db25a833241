"""The papers' tables on a terminal: the list of them, and one with ours beside the paper's."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unskew.console.stage_progress import StageProgress
from unskew.core.units import counted, format_duration
from unskew.reproduce.availability import missing_data
from unskew.reproduce.cells import Asked
from unskew.reproduce.estimate import Speeds, seconds_together
from unskew.reproduce.plan import Job, jobs_of
from unskew.reproduce.recipe import SCALES
from unskew.reproduce.recipe_files import names, recipe
from unskew.reproduce.results import (
    AGREEMENT,
    INSIDE,
    MARKS,
    NEAR,
    OUTSIDE,
    CellResult,
    TableResult,
    columns_of,
    rows_of,
)  # fmt: skip
from unskew.reproduce.wording import Told, difference_words, ours_of

WIDTH = 19  # of the longest name, and two spaces
COLOURS = {INSIDE: "green", NEAR: "yellow", OUTSIDE: "red"}


def list_recipes(out: Console, data: str, data_dir: str | None) -> None:
    """Every table and figure, with what it takes: data, runs, time at each scale. Two lines each, on any terminal."""
    lacking: dict[str, str] = {}
    lines: list[Text] = []
    paper = ""
    with StageProgress(out) as progress:
        speeds = Speeds.of_machine(lambda words: progress(words, 0, 0))
        for name in names():
            each = recipe(name)
            if each.paper.reference != paper:
                paper = each.paper.reference
                lines.append(Text(f"\n{paper}", "bold"))
            jobs = {scale: jobs_of([(each, Asked(scale, data))]) for scale in SCALES}
            used = list(dict.fromkeys(job.config.data for job in jobs["paper"]))
            missing = missing_data(used, data_dir)
            lacking |= missing
            cells = counted(len(each.rows) * len(each.columns), "cell")
            words = ", ".join(f"{one} (not here)" if one in missing else one for one in used)
            took = [f"{scale} {_estimated(those, speeds)}" for scale, those in jobs.items()]
            lines.append(Text(f"{name:{WIDTH}}", "cyan").append(each.title, "default"))
            lines.append(Text(" " * WIDTH + "; ".join([f"{cells} on {words}", *took]), "dim"))
    for line in lines:
        out.print(line, soft_wrap=True)
    out.print(
        "\nTimes are estimates for this machine, if it does nothing else; runs that tables share are trained once. One "
        "of them: unskew reproduce ccvr/table2 --scale small",
        soft_wrap=True,
    )
    if lacking:
        out.print(
            f"Not here: {', '.join(lacking)}; docs/data.md says how to get them, --data digits needs none.",
            soft_wrap=True,
        )


def _estimated(jobs: Sequence[Job], speeds: Speeds) -> str:
    seconds, runs = seconds_together(jobs, speeds), counted(len(jobs), "run")
    if seconds is None:
        return runs
    hours = seconds / 3600
    time = f"{hours / 24:,.0f} days" if hours > 72 else f"{hours:,.0f} h" if hours > 10 else format_duration(seconds)
    return f"{time} ({runs})"


def show_table(out: Console, result: TableResult, said: Told, files: Sequence[Path]) -> None:
    """A table on the terminal: ours beside the paper's, what to make of it, every known difference, the files."""
    recipe = result.recipe
    out.print(f"\n{recipe.name}: {recipe.title}", soft_wrap=True)
    out.print(f"{recipe.paper.reference}; {recipe.source}", soft_wrap=True)
    for table in _blocks(result, out.width):
        out.print(table)
    if any(each.agreement for each in result.cells):
        words = Text("ours, and in brackets ours minus the paper's: ")
        for name, meaning in AGREEMENT.items():
            words.append(f"{MARKS[name]} {meaning}  ", COLOURS[name])
        out.print(words)
    for sentence in said.findings:
        out.print(sentence, soft_wrap=True)
    out.print("Known differences:")
    for sentence in said.differences:
        out.print(f"  - {sentence}", soft_wrap=True)
    if recipe.notes:
        out.print("On the paper's values:")
    for sentence in recipe.notes:
        out.print(f"  - {sentence}", soft_wrap=True)
    for file in files[:3]:
        out.print(f"  {file}", soft_wrap=True)


def _blocks(result: TableResult, width: int) -> list[Table]:
    """The table, its columns in as many blocks as the terminal needs."""
    columns = columns_of(result)
    lines = rows_of(result)
    printed = any(each.paper for each in result.cells)
    first = max(len(name) for name in lines)
    called = ours_of(result) if printed else ""
    needs = [_width(name, [cells[place] for cells in lines.values()], called) for place, name in enumerate(columns)]
    blocks: list[list[int]] = [[]]
    for place, need in enumerate(needs):
        if blocks[-1] and first + 4 + sum(needs[each] for each in blocks[-1]) + need > width:
            blocks.append([])
        blocks[-1].append(place)
    return [_block(lines, columns, block, called) for block in blocks]


def _block(lines: dict[str, list[CellResult | None]], columns: Sequence[str], block: Sequence[int], ours: str) -> Table:
    """Some of the columns; ``ours`` is what ours are called beside the paper's, "" where it has none."""
    table = Table()
    table.add_column("", overflow="fold")
    for place in block:
        name = columns[place]
        if ours:
            table.add_column(f"{name}\npaper", justify="right", no_wrap=True)
        table.add_column(f"{name}\n{ours}" if ours else name, justify="right")
    for row, cells in lines.items():
        parts: list[Text] = []
        for place in block:
            each = cells[place]
            if ours:
                parts.append(Text(str(each.paper) if each is not None and each.paper else ""))
            parts.append(_ours(each))
        table.add_row(Text(row, overflow="fold"), *parts)
    return table


def _ours(each: CellResult | None) -> Text:
    if each is None:
        return Text("")
    if each.ours is None:
        return Text(each.reason, "dim")
    gap = f" ({difference_words(each)})" if each.difference is not None else ""
    mark = f" {MARKS[each.agreement]}" if each.agreement else ""
    return Text(f"{each.words()}{gap}{mark}", COLOURS.get(each.agreement, ""))


def _width(name: str, cells: Sequence[CellResult | None], called: str) -> int:
    """What a column takes, with its borders: the paper's values and ours."""
    there = [each for each in cells if each is not None]
    ours = max([len(name), len(called), *(len(_ours(each).plain) for each in there)]) + 3
    return ours + (max([len(name), *(len(str(each.paper or "")) for each in there)]) + 3 if called else 0)
