"""The command line: flags in, values to the library, results on the screen."""

import csv
import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

import unskew
from unskew import engines
from unskew.console import comparison, training
from unskew.console import comparison as comparing
from unskew.console.data import data_app
from unskew.console.federation import federation_app
from unskew.console.progress import PlainConsole, StageProgress, print_any_letter
from unskew.console.reproduce import reproduce
from unskew.console.screen import Screen, summary
from unskew.console.study import Device, analyse, check, note_unsealed, report, runs_named
from unskew.console.training import fail, show_methods, sweep, watch_run, with_options
from unskew.core.errors import ClientFailure, UserError, nearest
from unskew.core.files import write_whole
from unskew.core.machine import too_many_files
from unskew.core.units import counted
from unskew.data import partition_files
from unskew.data.population import Population, emd, sizes_in_words
from unskew.loggers import LOGGERS
from unskew.runs import config as configs
from unskew.runs import finished, train
from unskew.runs.config import OPTIONS, Config
from unskew.runs.folder import write_arrays
from unskew.runs.journal import read_metrics
from unskew.runs.prepare import make_partition, read_examples
from unskew.runs.result import read_result

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(federation_app, name="federation")

out = PlainConsole()

LOG = typer.Option(
    metavar="NAME",
    help=f"Also log with {' | '.join(LOGGERS)} | package.module:function, into the run folder; repeatable.",
)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Federated training on skewed image data."""
    if version:
        print(f"unskew {unskew.__version__}")  # noqa: T201
        raise typer.Exit


@app.command()
@with_options(list(OPTIONS))
def run(
    options: dict[str, Any],
    recipe: Annotated[Path | None, typer.Argument(help="A TOML recipe; the options below go over it.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder (default: runs/<name>).")] = None,
    log: Annotated[list[str] | None, LOG] = None,
    page: Annotated[bool, typer.Option("--report", help="Then write the run's report, as unskew report does.")] = False,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N…", help='Several runs, one for each seed: "0,1,2" or "0-4".')
    ] = None,
) -> None:
    """Train, evaluate, write the run folder."""
    if seeds is not None or ("seed" not in options and training.lists_seeds(recipe)):
        training.run_seeds(recipe, seeds, out, log, page, options)
        return
    result = watch_run(log, lambda observe: train.run(recipe, out=out, observe=observe, **options))
    if page:
        report([result.path])


@app.command()
@with_options(train.WORK, default="the run's")
def resume(
    options: dict[str, Any],
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    log: Annotated[list[str] | None, LOG] = None,
) -> None:
    """Continue where a run stopped; the result equals that of a run that never stopped."""
    note_unsealed([path])
    watch_run(log, lambda observe: train.resume(path, observe=observe, **options))


@app.command()
def calibrate(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")],
    methods_: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...", help='"ccvr(per_class=2000)" | "lda + secure" | oracle | … | package.module:function'
        ),
    ],
    engine: Annotated[
        str | None, typer.Option(help="auto | loop | pool | torchrun | package.module:function (default: the run's).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of the pool (default: the run's).")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data sets are now (default: as for the run).")] = None,
    device: Device = None,
) -> None:
    """Make new classifiers for a finished run, one for each METHOD; the run's own weights stay as they are."""
    engines.check_command(engine)
    engines.work_beside(engine)
    note_unsealed([path])
    screen = Screen(out)
    result = finished.calibrate_run(
        path, *methods_, engine=engine, workers=workers, data_dir=data_dir, device=device, observe=screen
    )
    out.print(summary(result))


app.command()(sweep)
app.command()(reproduce)
app.command()(analyse)
app.command()(report)
app.command()(check)


@app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that have some.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run of --method centralised, for relative accuracy.")
    ] = None,
    at_round: Annotated[
        int | None, typer.Option(help="Accuracy at this round (default: the last that all runs reached).")
    ] = None,
    at_batch: Annotated[
        int | None, typer.Option(help="Accuracy at this batch count (default: the largest that all runs reached).")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="table | markdown | csv | latex | json")] = "table",
    each: Annotated[
        bool, typer.Option("--each", help="A row for each run, also where runs differ in the seed alone.")
    ] = False,
) -> None:
    """Show finished runs side by side; runs that differ in the seed alone are one row, mean ± deviation."""
    if form not in comparing.FORMATS:
        raise UserError(f"--format {form}: {nearest(form, comparing.FORMATS)}")
    for name, place in (("round", at_round), ("batch", at_batch)):
        if place is not None and place < 1:
            raise UserError(f"--at-{name} {place}: give a whole number from 1 on")
    paths = runs_named(paths)
    note_unsealed([*paths, *([baseline] if baseline else [])])
    compared = comparing.side_by_side(
        [read_result(path) for path in paths],
        [read_metrics(path) for path in paths],
        baseline=None if baseline is None else read_result(baseline),
        at_round=at_round,
        at_batch=at_batch,
    )
    sheet = None if each or not comparison.several_seeds(compared) else comparison.seed_sheet(compared, form)
    if form == "table":
        out.print(comparing.as_table(compared, out.width, sheet))
    elif form == "json":
        print(comparison.seeds_json(compared))  # noqa: T201
    else:
        print(comparing.as_text(compared, form, sheet))  # noqa: T201  for programs: no wrapping, no colour


@app.command()
@with_options(["data", "data_dir", "cache_dir", "partition", "clients", "seed"])
def partition(
    options: dict[str, Any],
    file: Annotated[Path, typer.Option("--out", help="Where to write it: FILE.npz (ours) or FILE.csv (published).")],
    plot: Annotated[Path | None, typer.Option(help="A picture of it: FILE.png, .svg or .pdf.")] = None,
) -> None:
    """Make a partition, say how skewed it is, write it to a file that --partition file:FILE reads."""
    if file.suffix not in (".npz", ".csv"):
        raise UserError(f"--out {file}: a partition is written as .npz or .csv")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {plot}: a picture is written as .png, .svg or .pdf")
    config = configs.checked(configs.with_values(Config(), options, "partition"))
    with StageProgress(out) as say:
        examples = read_examples(config, say)
    drawn = make_partition(config, examples)
    labels, classes = examples.labels, len(examples.classes)
    if file.suffix == ".npz":
        write_arrays(file, partition_files.to_arrays(drawn, labels, classes))
    else:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(partition_files.to_csv_rows(drawn, labels))
        write_whole(file, text.getvalue().encode())
    sizes = Population.from_partition(drawn).sizes
    out.print(
        f"{drawn.scheme}, seed {drawn.seed}: {counted(drawn.clients, 'client')} of {sizes_in_words(sizes)}, "
        f"EMD {emd(drawn.client, labels, classes):.3f}; drawn {counted(drawn.redraws + 1, 'time')}"
    )
    for note in drawn.notes:
        out.print(f"note: {note}")
    out.print(f"hash {drawn.hash}\nwritten to {file}")
    if plot is not None:
        from unskew.analysis.skew import partition_charts
        from unskew.charts.files import missing_letters, sheet_bytes

        charts = partition_charts(drawn, labels, examples.classes)
        if plot.suffix != ".svg" and missing_letters([*examples.classes, *(drawn.names or ())]):
            out.print("note: the font lacks some characters of the names; they are drawn as boxes")
        write_whole(plot, sheet_bytes(charts, plot.suffix.removeprefix(".")))
        out.print(f"drawn to {plot}")


app.command(name="methods")(show_methods)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a user's mistake is one message and exit code 2, never a traceback."""
    print_any_letter()
    try:
        _command(arguments)
    except BrokenPipeError:  # the reader of our output has gone: `unskew methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is the cause: Python wraps one that comes while a class is being made."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _command(arguments: Sequence[str] | None) -> None:
    typer.core.HAS_RICH = False  # help is plain text; typer 0.20 would escape "[required]" as rich wants it
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="unskew")
    except (UserError, ClientFailure) as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            fail(too_many_files("too many files are open"), 2)
        fail(f"{error.filename or 'a file'}: {error.strerror or error}", 2)
    except Exception as error:
        if _interrupted(error):
            fail("interrupted", 130)
        if not hasattr(error, "format_message"):  # typer's own complaints about the words of a command have it
            raise
        said = error.format_message()
        if said.startswith("Usage:"):  # no command was given
            print(said)  # noqa: T201
            sys.exit(2)
        fail(f"{said} (unskew --help shows the options)", 2)
    else:
        if code == 130:  # typer has swallowed an interrupt
            fail("interrupted", 130)
        sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
