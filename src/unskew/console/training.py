"""The commands that train: one run, several seeds, a sweep; and the list of methods."""

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from unskew import methods
from unskew.charts.files import check_format
from unskew.console.main import fail
from unskew.console.options import Format, Trust, note_unsealed, option, with_options
from unskew.console.progress import Json, StageProgress, out, print_json
from unskew.console.screen import Screen, show_facts, summary
from unskew.core.errors import IN_PLUGIN, ClientFailure, LostMemory, UserError, nearest
from unskew.core.units import counted, format_duration
from unskew.loggers import LOGGERS, open_logger
from unskew.report.table import compare
from unskew.runs import config as configs
from unskew.runs import finished, train
from unskew.runs.execute import Observer
from unskew.runs.result import Result, to_json
from unskew.runs.seeds import FINISHED, describe_states, plan_runs
from unskew.sweeps.sweep import Sweep, TriedSetting, describe_trial, tabulate, write_summary
from unskew.sweeps.sweep import sweep as do_sweep


def watch_run(log: Sequence[str] | None, work: Callable[[Observer], Result], again: str = "") -> Result:
    """Train with the screen and these loggers as observers, then show the result.

    ``again`` explains how to continue after an interrupt, if not with ``unskew resume``.
    """
    screen, paths = Screen(out), list[Path]()
    observers: list[Any] = [*(open_logger(name, screen.note) for name in dict.fromkeys(log or ())), screen]

    def observe(event: Any) -> None:
        if hasattr(event, "path"):
            paths.append(event.path)
        for observer in observers:
            observer(event)

    try:
        with ExitStack() as stack:
            for observer in observers:
                stack.callback(observer.close)
            result = work(observe)
    except (KeyboardInterrupt, ClientFailure, UserError) as error:
        if not paths or isinstance(error, LostMemory) or (paths[0] / "result.json").exists():
            raise
        resume = f"unskew resume {shlex.quote(str(paths[0]))}"
        if isinstance(error, KeyboardInterrupt):
            fail(f"interrupted; {again or f'resume it with: {resume}'}", 130)
        if isinstance(error, ClientFailure) and error.skippable:
            fail(f"{error}; skip such clients with: {resume} --on-failure skip", 2)
        if IN_PLUGIN in str(error):
            fail(f"{error}\ncorrect this code, then resume with: {resume}", 2)
        fail(f"{error}; resume it with: {resume}", 2)
    out.print(summary(result))
    return result


LOG = option(
    f"Also log to the run directory with {' | '.join(LOGGERS)} | package.module:function; repeatable.", metavar="NAME"
)
RECIPE = typer.Argument(help="A TOML recipe; options on the command line override it.")


@with_options(list(configs.OPTIONS), several=("method",))
def run(
    options: dict[str, Any],
    recipe: Annotated[Path | None, RECIPE] = None,
    folder: Annotated[Path | None, option("The run directory (default: runs/<name>).", "--out")] = None,
    log: Annotated[list[str] | None, LOG] = None,
    page: Annotated[bool, option("Also write the report, as unskew report does.", "--report")] = False,
    seeds: Annotated[str | None, option('Train one run per seed: "0,1,2" or "0-4".', metavar="N,N…")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Train, evaluate and calibrate; write the run directory.

    Several --method or --seeds train a run for each combination, in one folder, and compare them. Repeated, the same
    command continues where it stopped.
    """
    methods = options.pop("method", [])
    listed: Sequence[Any] = () if recipe is None else configs.read_recipe(recipe, trust=trust)[1]
    one_seed = seeds is None and ("seed" in options or not listed)
    if one_seed and len(methods) < 2:
        options |= {"method": methods[0]} if methods else {}
        result = watch_run(log, lambda observe: train.run(recipe, out=folder, observe=observe, trust=trust, **options))
        results = [result]
    else:
        if one_seed:
            seeds = str(options.pop("seed", 0 if recipe is None else configs.read(recipe).seed))
        results = _run_several(recipe, log, methods=methods, seeds=seeds, out=folder, trust=trust, **options)
    if page:
        from unskew.console.study import report  # most runs need neither measures nor pages

        paths = [result.path for result in results]
        report(paths=paths, file=Path(os.path.commonpath(paths)) / "report.html")
    if as_json:
        print_json(_as_json(results[0]) if len(results) == 1 else json.loads(compare(*results).text("json")))


def _as_json(result: Result) -> dict[str, Any]:
    return {"run": str(result.path), **to_json(result)}


@with_options(train.WORK, default="the run's")
def resume(
    options: dict[str, Any],
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    log: Annotated[list[str] | None, LOG] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Continue a stopped run; the result is that of a run that never stopped."""
    note_unsealed([path])
    result = watch_run(log, lambda observe: train.resume(path, observe=observe, trust=trust, **options))
    if as_json:
        print_json(_as_json(result))


@with_options(["engine", "workers", "data_dir", "device"], default="the run's")
def calibrate(
    options: dict[str, Any],
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run.")],
    methods_: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...", help='"ccvr(per_class=2000)" | "lda + secure" | oracle | … | package.module:function'
        ),
    ],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Build new classifiers for a finished run, one per METHOD; the run's own weights do not change."""
    note_unsealed([path])
    result = finished.calibrate_run(path, *methods_, observe=Screen(out), trust=trust, **options)
    out.print(summary(result))
    if as_json:
        print_json(_as_json(result))


def _run_several(recipe: Path | None, log: Sequence[str] | None, **options: Any) -> list[Result]:
    """Train each method with each seed unless that run is finished, and show the comparison."""
    with StageProgress(out) as say:
        plans = plan_runs(recipe, say=say, **options)
    target = plans[0].path if len(plans) == 1 else plans[0].path.parent
    states = [state for plan in plans for state in plan.states.values()]
    named = f"{len(plans)} methods, {describe_states(states, 'runs')}" if len(plans) > 1 else describe_states(states)
    out.say(f"{target}: {named}")
    again = f"to continue, repeat the command with --out {shlex.quote(str(target))}"
    results: list[Result] = []
    for plan in plans:
        for seed, state in plan.states.items():
            name = f"seed {seed}" if len(plans) == 1 else f"{plan.options['method']}, seed {seed}"
            if state == FINISHED:
                results.append(plan.complete(seed))
                out.say(f"{name}: already finished, accuracy {results[-1].accuracy:.2%}")
                continue
            out.print(name, style="bold")
            results.append(watch_run(log, partial(plan.complete, seed), again))
    if len(plans) == 1:
        out.print(compare(*results, each=True).render(out.width))
    out.print(compare(*results).render(out.width))
    return results


MOST_ROWS = 30  # of the table in the terminal; table.csv has all


@with_options([name for name in configs.OPTIONS if name not in ("validation", "seed")])
def sweep(
    options: dict[str, Any],
    over: Annotated[
        list[str],
        option(
            'An option and its values: "lr=0.01,0.1" | "method=fedavg,fedavgm(0.9)"; with --trials also a range: '
            '"lr=0.001..0.3 log"; repeatable.',
            metavar="NAME=VALUES",
        ),
    ],
    recipe: Annotated[Path | None, RECIPE] = None,
    folder: Annotated[Path | None, option("The sweep's folder (default: runs/sweep-<name>).", "--out")] = None,
    seeds: Annotated[str | None, option('Seeds of each setting: "0,1,2" or "0-4" (default: 0)', metavar="N,N…")] = None,
    validation: Annotated[
        float | None, option("Share of the training images to judge settings on (default: 0.15).", metavar="SHARE")
    ] = None,
    trials: Annotated[int | None, option("Let Optuna choose N settings instead of trying all.", metavar="N")] = None,
    by: Annotated[str, option("Score by accuracy | loss | a calibration's name.", metavar="TEXT")] = "accuracy",
    jobs: Annotated[int | None, option("Runs at the same time (default: one per core).", metavar="N", min=1)] = None,
    form: Format = "svg",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Try many settings on held-out training images; the test images are never used."""
    check_format(form)
    began, started = time.monotonic(), list[Path]()
    with StageProgress(out) as progress:

        def finished(outcome: TriedSetting, done: int, total: int) -> None:
            left = (time.monotonic() - began) / done * (total - done)
            out.say(f"{done}/{total}  {describe_trial(outcome)}  {format_duration(left)} left")

        rounds = partial(progress, "training") if out.is_terminal else None
        options |= {"over": over, "seeds": seeds, "trials": trials, "validation": validation, "by": by, "jobs": jobs}
        observers: Any = {"finished": finished, "progress": rounds, "begun": started.append, "say": progress}
        try:
            result = do_sweep(recipe, out=folder, trust=trust, **observers, **options)
        except KeyboardInterrupt:
            where = f" with --out {shlex.quote(str(started[0]))}" if started else ""
            fail(f"interrupted; to continue, repeat the command{where}", 130)
    files = write_summary(result, form)
    _show_sweep(result)
    out.say(*(f"  {file}" for file in files))
    if as_json:
        best = result.best and dict(result.best.values)
        print_json({"path": result.path, "best": best, "settings": tabulate(result)})


def _show_sweep(sweep: Sweep) -> None:
    rows = tabulate(sweep)
    shown = [key for key in rows[0] if key != "failed" or any(row["failed"] for row in rows)]
    columns = [Column(key, justify="left" if key == "method" else "right", overflow="fold") for key in shown]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows[:MOST_ROWS]:
        table.add_row(*(Text(row[key]) for key in shown))
    out.print(table)
    if len(rows) > MOST_ROWS:
        out.say(f"and {len(rows) - MOST_ROWS} more, in table.csv")
    if sweep.best is None:
        diverged = all(outcome.failure == "diverged" for outcome in sweep.outcomes)
        out.print("every setting failed" + ("; try smaller learning rates" if diverged else ""))
        return
    over = f" over {counted(len(sweep.seeds), 'seed')}" if len(sweep.seeds) > 1 else ""
    out.say(f"best: {describe_trial(sweep.best)} on the validation images{over}")
    out.say(f"train it on all images with: unskew run {shlex.quote(str(sweep.path / 'best.toml'))}")


def show_methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The method to describe; also package.module:function.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List every method, or describe one: what it changes, its knobs and defaults, its slots, its reference."""
    build = methods.find_method(name) if name else None
    if name and build is None:
        raise UserError(f"no method is called {name!r}; {nearest(name, methods.METHODS)}")
    rows = methods.describe() if build is None or name is None else [methods.describe_method(name, build)]
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    if name:
        row = rows[0]
        out.print(Text(row.call))
        paragraphs = [" ".join(paragraph.split()) for paragraph in (row.changes, *row.body.split("\n\n"))]
        out.print(Padding(Text("\n\n".join(filter(None, paragraphs))), (0, 0, 1, 2)))
        slots = row.slots or "none: with its defaults it changes nothing"
        facts = {"knobs": "\n".join(row.knobs) or "none", "slots": slots, "group": row.group}
        facts |= {"reference": row.reference} if row.reference else {}
        out.print(Padding(show_facts(list(facts.items())), (0, 0, 0, 2)))
        return
    width = max(len(row.name) for row in rows)
    for group in methods.GROUPS:
        out.print(group)
        table = show_facts([(row.name, row.changes) for row in rows if row.group == group], width)
        out.print(Padding(table, (0, 0, 1, 2)))
    out.print("unskew methods NAME describes one: its formula, its knobs and defaults, its reference.")
    out.print('Combine methods with +, as in --method "fedavgm(0.9) + fedvc(256) + fedir + ccvr".')
    out.print("Use your own method as package.module:function.")
