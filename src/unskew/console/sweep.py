"""The command sweep: progress while settings are tried, then the table, the charts and the best setting."""

import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.console.comparison import flat
from unskew.console.options import with_options
from unskew.console.plain import PlainConsole
from unskew.console.progress import StageProgress
from unskew.console.watch import fail
from unskew.core.units import counted, format_duration
from unskew.runs.config import OPTIONS
from unskew.sweeps.outcomes import Sweep, TriedSetting, check_format, tabulate, write_summary
from unskew.sweeps.space import describe_values
from unskew.sweeps.sweep import sweep as do_sweep

out = PlainConsole()

MOST_ROWS = 30  # of the table on the screen; table.csv has all


@with_options([name for name in OPTIONS if name not in ("validation", "seed")])
def sweep(
    options: dict[str, Any],
    over: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUES",
            help='An option and its values: "lr=0.01,0.1" | "method=fedavg,fedavgm(0.9)"; with --trials also a range: '
            '"lr=0.001..0.3 log"; repeatable.',
        ),
    ],
    recipe: Annotated[Path | None, typer.Argument(help="A TOML recipe; the options below go over it.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The sweep's folder (default: runs/sweep-<name>).")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N…", help='Seeds for each setting: "0,1,2" or "0-4" (default: 0).')
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of the training images to judge settings on (default: 0.15)."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="Let Optuna choose N settings, instead of trying all.")
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="TEXT", help="What a setting is judged by: accuracy | loss | a calibration's name.")
    ] = "accuracy",
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Runs at the same time, one core each (default: one a core).")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="Of the charts: svg | png | pdf")] = "svg",
) -> None:
    """Try many settings on a validation part of the training images; the test images are never used."""
    check_format(form)
    began, place = time.monotonic(), list[Path]()
    with StageProgress(out) as progress:

        def finished(outcome: TriedSetting, done: int, total: int) -> None:
            left = (time.monotonic() - began) / done * (total - done)
            out.print(f"{done}/{total}  {_told(outcome)}  {format_duration(left)} left", soft_wrap=True)

        def rounds(done: int, total: int) -> None:
            progress("training", done, total)

        try:
            made = do_sweep(
                recipe, over=over, seeds=seeds, trials=trials, validation=validation, by=by, jobs=jobs, out=folder,
                finished=finished, progress=rounds if out.is_terminal else None, begun=place.append, say=progress,
                **options,
            )  # fmt: skip
        except KeyboardInterrupt:
            where = f", with --out {shlex.quote(str(place[0]))}" if place else ""
            fail(f"interrupted; to go on, give the same command again{where}", 130)
    files = write_summary(made, form)
    _show(made)
    for file in files:
        out.print(f"  {file}", soft_wrap=True)


def _told(outcome: TriedSetting) -> str:
    """A setting and what it came to."""
    score = outcome.score
    if score is None:
        return f"{describe_values(outcome.values)}: {outcome.failure}"
    told = f"loss {score.words(decimals=4)}" if outcome.by == "loss" else f"{score.words(100)} %"
    return f"{describe_values(outcome.values)}: {told}"


def _show(made: Sweep) -> None:
    rows = tabulate(made)
    shown = [key for key in rows[0] if key != "failed" or any(row["failed"] for row in rows)]
    for each in flat(rows[:MOST_ROWS], shown, out.width):
        out.print(each)
    if len(rows) > MOST_ROWS:
        out.print(f"and {len(rows) - MOST_ROWS} more, in table.csv")
    if made.best is None:
        diverged = all(each.failure == "diverged" for each in made.outcomes)
        out.print("every setting failed" + ("; give smaller learning rates" if diverged else ""))
        return
    over = f" over {counted(len(made.seeds), 'seed')}" if len(made.seeds) > 1 else ""
    out.print(f"best: {_told(made.best)} on the validation images{over}", soft_wrap=True)
    out.print(f"train it on all images with: unskew run {shlex.quote(str(made.path / 'best.toml'))}", soft_wrap=True)
