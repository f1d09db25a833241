"""The command reproduce: a paper's table or figure, with our values next to the published ones."""

import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from unskew.console.main import fail
from unskew.console.options import DataDir, option
from unskew.console.progress import Json, StageProgress, out, print_json
from unskew.core.errors import UserError, brief
from unskew.core.files import usable_path
from unskew.core.units import counted, format_duration
from unskew.reproduce import plan as plans
from unskew.reproduce import results
from unskew.reproduce.cells import Variant
from unskew.reproduce.claim import write_claim
from unskew.reproduce.recipe import SCALES, Recipe, find_recipes, load_recipe, recipe_names
from unskew.reproduce.tables import format_cell, name_ours, write_index, write_table
from unskew.runs.seeds import parse_seeds
from unskew.sweeps.sweep import parse_over
from unskew.sweeps.tasks import RunFailure, Task

WIDTH = 19  # of the longest name and two spaces
COLOURS = {results.INSIDE: "green", results.NEAR: "yellow", results.OUTSIDE: "red"}


def list_recipes(data: str, data_dir: str | None, as_json: bool) -> None:
    """Print every table and figure in two lines, with its data, and its runs and time at each scale."""
    unavailable: dict[str, str] = {}
    lines, records, paper = list[Text](), list[dict[str, Any]](), ""
    with StageProgress(out) as progress:
        speeds = plans.Speeds(progress)
        for name in recipe_names():
            recipe = load_recipe(name)
            if recipe.paper.reference != paper:
                paper = recipe.paper.reference
                lines.append(Text(f"\n{paper}", "bold"))
            jobs = {scale: plans.plan_runs([(recipe, Variant(scale, data))]) for scale in SCALES}
            used = list(dict.fromkeys(job.config.data for job in jobs["paper"]))
            missing = plans.find_missing_data(used, data_dir)
            unavailable |= missing
            cells = counted(len(recipe.rows) * len(recipe.columns), "cell")
            sets = ", ".join(f"{name} (missing)" if name in missing else name for name in used)
            scales: dict[str, dict[str, Any]] = {
                scale: {"runs": len(those), "seconds": plans.estimate_all(those, speeds)}
                for scale, those in jobs.items()
            }
            about = {"table": name, "title": recipe.title, "paper": paper, "data": used, "missing_data": list(missing)}
            records.append(about | {"scales": scales})
            times = [f"{scale} {_describe_time(**needs)}" for scale, needs in scales.items()]
            lines.append(Text(f"{name:{WIDTH}}", "cyan").append(recipe.title, "default"))
            lines.append(Text(" " * WIDTH + "; ".join([f"{cells} on {sets}", *times]), "dim"))
    estimates = "Times are estimates for this machine if it is otherwise idle; runs that tables share are trained once."
    lines.append(Text(f"\n{estimates} For example: unskew reproduce ccvr/table2 --scale small"))
    if unavailable:
        how = "see docs/how-to/data.md for how to get them. --data digits needs no download."
        lines.append(Text(f"Not on this machine: {', '.join(unavailable)}; {how}"))
    out.say(*lines)
    if as_json:
        print_json(records)


def _describe_time(runs: int, seconds: float | None) -> str:
    if seconds is None:
        return counted(runs, "run")
    hours = seconds / 3600
    time = f"{hours / 24:,.0f} days" if hours > 72 else f"{hours:,.0f} h" if hours > 10 else format_duration(seconds)
    return f"{time} ({counted(runs, 'run')})"


def show_table(result: results.TableResult, values: dict[str, Any], files: Sequence[Path]) -> None:
    """Print a table: our values next to the paper's, the findings, the known differences, the files."""
    recipe = result.recipe
    out.say(f"\n{recipe.name}: {recipe.title}", f"{recipe.paper.reference}; {recipe.source}")
    table = Table("row", "column", "paper", Column(name_ours(result), justify="right"))
    for one in result.cells:
        if one.cell.done:
            mark = f" {results.MARKS[one.agreement]}" if one.agreement else ""
            ours = Text(format_cell(one) + mark, COLOURS.get(one.agreement, ""))
            table.add_row(Text(one.cell.row_name), Text(one.cell.column.name), str(one.paper or ""), ours)
    out.print(table)
    if any(one.agreement for one in result.cells):
        legend = Text("in parentheses, the difference from the paper: ")
        for name, meaning in results.AGREEMENT.items():
            legend.append(f"{results.MARKS[name]} {meaning}  ", COLOURS[name])
        out.print(legend)
    out.say(*values["findings"], "Known differences:", *(f"  - {sentence}" for sentence in values["differences"]))
    if recipe.notes:
        out.say("On the paper's values:", *(f"  - {sentence}" for sentence in recipe.notes))
    out.say(*(f"  {file}" for file in files if file.suffix != ".svg"))


OUT = Path("runs/reproduce")


def reproduce(
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE]...", help='"ccvr/table2" | hsu | "fedeccr/figure*" (default: list them all).'),
    ] = None,
    scale: Annotated[str, option("smoke: a minute | small: up to an hour | paper: as published.")] = "smoke",
    data: Annotated[str | None, option("Use other data than the paper's, such as digits.", metavar="NAME")] = None,
    data_dir: DataDir = None,
    cells: Annotated[str | None, option("Train only the I-th of N parts, for several machines.", metavar="I/N")] = None,
    rows: Annotated[list[str] | None, option("Train only for these rows, such as FedAvg*.", metavar="NAME")] = None,
    columns: Annotated[list[str] | None, option("Train only for these columns; repeatable.", metavar="NAME")] = None,
    seeds: Annotated[str | None, option('Seeds: "0,1,2" or "0-4" (default: the scale\'s).', metavar="N,N…")] = None,
    changes: Annotated[
        list[str] | None, option("Set an option of every run; repeatable.", "--set", metavar="NAME=VALUE")
    ] = None,
    jobs: Annotated[int | None, option("Runs at the same time (default: one per core).", metavar="N", min=1)] = None,
    folder: Annotated[Path, option("The folder for runs, records and tables.", "--out")] = OUT,
    claim: Annotated[
        bool, option("Train nothing: report when to choose which method, from all results in --out.", "--claim")
    ] = False,
    show: Annotated[bool, option("Train nothing: make the tables from existing results.", "--show")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of a paper; print our values next to the paper's, with every known difference."""
    if claim:
        files, sentences = write_claim(usable_path(folder))
        out.say(*(f"- {sentence}" for sentence in sentences), *(f"  {file}" for file in files))
        if as_json:
            print_json({"choices": sentences, "files": files})
        return
    if not tables:
        list_recipes(data or "", data_dir, as_json)
        return
    settings = {}
    for varied in parse_over(changes, "--set") if changes else ():
        if len(varied.values) != 1:
            raise UserError(f"--set {brief(varied.text)}: give a single value; use unskew sweep for several")
        settings[varied.option] = varied.values[0]
    selection = parse_seeds(seeds) if seeds else (), tuple(rows or ("*",)), tuple(columns or ("*",))
    variant = Variant(scale, data or "", settings, *selection)
    folder = usable_path(folder)
    recipes = [load_recipe(name) for name in find_recipes(tables)]
    planned = plans.plan_runs([(recipe, variant) for recipe in recipes], folder)
    part = plans.select_part(planned, cells) if cells else planned
    reasons: dict[str, str] = {}
    if not show:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder} cannot be created: {error.strerror}; choose another folder") from error
        reasons = _train(part, recipes[0], data_dir, jobs, _command(tables, variant, cells, folder))
    contents: list[dict[str, Any]] = []
    for recipe in recipes:
        result = results.read_table(recipe, variant, folder, reasons)
        files, values = write_table(result, _command([recipe.name], variant, cells, folder))
        show_table(result, values, files)
        contents.append(values)
    write_index(folder)
    if as_json:
        print_json(contents)


def _train(
    tasks: Sequence[Task], recipe: Recipe, data_dir: str | None, at_once: int | None, again: str
) -> dict[str, str]:
    """Do the remaining runs; returns why some have no result, by training or by data set."""
    left = [task for task in tasks if plans.find_record(task) is None]
    missing = plans.find_missing_data([task.config.data for task in left], data_dir)
    possible = [task for task in left if task.config.data not in missing]
    if left and not possible and len(left) == len(tasks):
        stand_ins = []
        for name in recipe.stand_ins:
            used = [task.config.data for task in plans.plan_runs([(recipe, Variant("smoke", name))])]
            stand_ins += [] if plans.find_missing_data(used, data_dir) else [name]
        raise UserError(plans.explain_missing_data(list(missing), again, stand_ins))
    out.say(*(f"note: {reason}" for reason in missing.values()))
    plan = counted(len(tasks), "run") + (f", {len(tasks) - len(left)} already done" if len(left) < len(tasks) else "")
    plan += f", {len(left) - len(possible)} without data" if len(left) > len(possible) else ""
    if possible:
        with StageProgress(out) as progress:
            seconds = plans.estimate_all(possible, plans.Speeds(progress))
        if seconds is not None:
            plan += f"; about {format_duration(seconds)} on this machine if it is otherwise idle"
    out.say(plan)
    began, reasons = time.monotonic(), {name: f"no data: {name}" for name in missing}
    with StageProgress(out) as progress:

        def finished(task: Task, failure: RunFailure | None, done: int, total: int) -> None:
            rest = (time.monotonic() - began) / done * (total - done)
            state = f"failed: {failure.reason}" if failure else "done"
            name = f"{task.path.parent.name}, seed {task.config.seed}"
            out.say(f"{done}/{total}  {name}: {state}; {format_duration(rest)} left")

        advance = partial(progress, "training") if out.is_terminal else None
        try:
            failures = plans.do_runs(possible, data_dir=data_dir, at_once=at_once, finished=finished, progress=advance)
        except KeyboardInterrupt:
            fail(f"interrupted; to continue, repeat the command: {again}", 130)
    return reasons | {path.parent.name: failure.reason for path, failure in failures.items()}


def _command(tables: Sequence[str], variant: Variant, cells: str | None, folder: Path) -> str:
    parts = ["unskew", "reproduce", *tables, "--scale", variant.scale]
    parts += ["--data", variant.data] if variant.data else []
    parts += ["--seeds", ",".join(map(str, variant.seeds))] if variant.seeds else []
    for name in ("rows", "columns"):
        parts += [part for pattern in getattr(variant, name) if pattern != "*" for part in (f"--{name}", pattern)]
    parts += [part for name, value in variant.changes.items() for part in ("--set", f"{name}={value}")]
    parts += ["--cells", cells] if cells else []
    parts += ["--out", str(folder)] if folder != OUT else []
    return shlex.join(parts)
