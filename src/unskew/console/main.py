"""The command line: flags in, values to the library, what comes out on the screen."""

import csv
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import unskew
from unskew import methods
from unskew.console import comparison as comparing
from unskew.console.data import data_app
from unskew.console.plain import PlainConsole
from unskew.console.screen import Screen, summary
from unskew.console.study import analyse, report
from unskew.console.watch import fail, watched
from unskew.core.errors import ClientFailure, UserError, nearest
from unskew.core.files import write_whole
from unskew.data import partition_files, sources
from unskew.data.population import Population, emd
from unskew.loggers import LOGGERS
from unskew.runs import config as configs
from unskew.runs import finished, train
from unskew.runs.config import Config
from unskew.runs.folder import write_arrays
from unskew.runs.metrics import read_metrics
from unskew.runs.prepare import split
from unskew.runs.result import read_result

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.add_typer(data_app, name="data")

out = PlainConsole()

LOG = typer.Option(help=f"Also log for {' | '.join(LOGGERS)}, into the run folder; may be given several times.")


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False) -> None:
    """Federated training on skewed image data."""
    if version:
        print(f"unskew {unskew.__version__}")  # noqa: T201
        raise typer.Exit


@app.command()
def run(
    recipe: Annotated[Path | None, typer.Argument(help="A TOML recipe; the options below go over it.")] = None,
    data: Annotated[
        str | None, typer.Option(help=f"{Config.data} (default) | cifar10 | … | folder:DIR | arrays:FILE.npz")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where image sets lie (or the variable UNSKEW_DATA).")] = None,
    partition: Annotated[str | None, typer.Option(help=f'"{Config.partition}" (default) | iid | file:FILE | …')] = None,
    clients: Annotated[
        int | None, typer.Option(help="How many clients (default: 10, or what the partition says).")
    ] = None,
    per_round: Annotated[int | None, typer.Option(help="How many come each round (default: all).")] = None,
    method: Annotated[str | None, typer.Option(help='"fedavgm(0.9) + fedvc(256) + fedir"; see: unskew methods')] = None,
    model: Annotated[
        str | None, typer.Option(help="simple-cnn | lenet-64 | tiny-cnn (default: as suits the images).")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help=f"How many rounds (default: {Config.rounds}).")] = None,
    epochs: Annotated[int | None, typer.Option(help=f"Local epochs a round (default: {Config.epochs}).")] = None,
    batch: Annotated[int | None, typer.Option(help=f"Examples in a step (default: {Config.batch}).")] = None,
    lr: Annotated[float | None, typer.Option(help=f"The clients' learning rate (default: {Config.lr}).")] = None,
    momentum: Annotated[float | None, typer.Option(help=f"The clients' momentum (default: {Config.momentum}).")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help=f"The clients' weight decay (default: {Config.weight_decay}).")
    ] = None,
    augment: Annotated[bool | None, typer.Option(help="Crops and flips (default: as suits the data).")] = None,
    engine: Annotated[str | None, typer.Option(help="auto (default) | loop | pool")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of the pool (default: one a core).")] = None,
    seed: Annotated[
        int | None, typer.Option(help=f"The same seed gives the same weights (default: {Config.seed}).")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help=f"Rounds between evaluations (default: {Config.evaluate_every}).")
    ] = None,
    on_failure: Annotated[
        str | None, typer.Option(help="A client that fails: stop (default) the run, or skip it.")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None,
        typer.Option(help=f"Time between checkpoints (default: {Config.checkpoint_seconds:g}); 0: every round."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="A finished run, such as one of --method centralised, to compare accuracy with.")
    ] = None,
    during: Annotated[
        str | None, typer.Option(help='Write down while training: "silhouette(every=5) + norms + drift + model"')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder (default: runs/<name>).")] = None,
    log: Annotated[list[str] | None, LOG] = None,
    page: Annotated[bool, typer.Option("--report", help="Then make the run's report, as unskew report does.")] = False,
) -> None:
    """Train, evaluate, write the run folder."""
    others = ("recipe", "out", "log", "page")
    options = {key: value for key, value in locals().items() if value is not None and key not in (*others, "others")}
    result = watched(log, lambda observe: train.run(recipe, out=out, observe=observe, **options))
    if page:
        report([result.path])


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    on_failure: Annotated[str | None, typer.Option(help="From here on: stop, or skip.")] = None,
    log: Annotated[list[str] | None, LOG] = None,
) -> None:
    """Go on where a run stopped; the result equals that of a run never stopped."""
    watched(log, lambda observe: train.resume(path, observe=observe, on_failure=on_failure))


@app.command()
def calibrate(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")],
    methods_: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help='"ccvr(per_class=2000)" | "lda + secure" | oracle | …')
    ],
    engine: Annotated[str | None, typer.Option(help="auto | loop | pool (default: the run's).")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of the pool (default: the run's).")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where image sets lie now (default: as for the run).")] = None,
) -> None:
    """Make a run's classifier anew, in one way or several side by side; the run's own weights stay as they are."""
    screen = Screen(out)
    result = finished.calibrate_run(path, *methods_, engine=engine, workers=workers, data_dir=data_dir, observe=screen)
    out.print(summary(result))


app.command()(analyse)
app.command()(report)


@app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run trained centrally, for relative accuracy.")
    ] = None,
    at_round: Annotated[
        int | None, typer.Option(help="Accuracy at this round (default: the last that all runs reached).")
    ] = None,
    at_batch: Annotated[
        int | None, typer.Option(help="Accuracy at this batch count (default: the largest that all runs reached).")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Show finished runs side by side."""
    if form not in comparing.FORMATS:
        raise UserError(f"--format {form}: {nearest(form, comparing.FORMATS)}")
    for name, place in (("round", at_round), ("batch", at_batch)):
        if place is not None and place < 1:
            raise UserError(f"--at-{name} {place}: give a whole number from 1 on")
    compared = comparing.side_by_side(
        [read_result(path) for path in paths],
        [read_metrics(path) for path in paths],
        baseline=None if baseline is None else read_result(baseline),
        at_round=at_round,
        at_batch=at_batch,
    )
    if form == "table":
        out.print(comparing.as_table(compared, out.width))
    else:
        print(comparing.as_text(compared, form))  # noqa: T201  for programs: no wrapping, no colour


@app.command()
def partition(
    file: Annotated[Path, typer.Option("--out", help="Where to write it: FILE.npz (ours) or FILE.csv (published).")],
    data: Annotated[str, typer.Option()] = Config.data,
    data_dir: Annotated[str | None, typer.Option()] = None,
    scheme: Annotated[str, typer.Option("--partition", help='"dirichlet(alpha=0.1)" | …')] = Config.partition,
    clients: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int, typer.Option()] = Config.seed,
    plot: Annotated[Path | None, typer.Option(help="A picture of it: FILE.png, .svg or .pdf.")] = None,
) -> None:
    """Make a partition, say how skewed it is, write it to a file that --partition file:FILE reads."""
    if file.suffix not in (".npz", ".csv"):
        raise UserError(f"--out {file}: a partition is written as .npz or .csv")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {plot}: a picture is written as .png, .svg or .pdf")
    config = configs.checked(replace(Config(), data=data, data_dir=data_dir, clients=clients, seed=seed))
    config = replace(config, partition=scheme)
    images = sources.load(config.data, Path(config.data_dir) if config.data_dir else None)
    found = split(config, images)
    labels, classes = images.train.labels, len(images.classes)
    if file.suffix == ".npz":
        write_arrays(file, partition_files.to_arrays(found, labels, classes))
    else:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(partition_files.to_csv_rows(found, labels))
        write_whole(file, text.getvalue().encode())
    sizes = Population.from_partition(found).sizes
    out.print(
        f"{found.scheme}, seed {found.seed}: {found.clients:,} clients of {sizes.min():,} to {sizes.max():,} examples, "
        f"EMD {emd(found.client, labels, classes):.3f}; drawn {found.redraws + 1} times"
    )
    for note in found.notes:
        out.print(f"note: {note}")
    out.print(f"hash {found.hash}\nwritten to {file}")
    if plot is not None:
        from unskew.analysis.partition_charts import partition_charts
        from unskew.charts.files import sheet_bytes
        from unskew.charts.paper import missing_letters

        charts = partition_charts(found, labels, images.classes)
        if plot.suffix != ".svg" and missing_letters([*images.classes, *(found.names or ())]):
            out.print("note: the font lacks some characters of the names; they are drawn as boxes")
        write_whole(plot, sheet_bytes(charts, plot.suffix.removeprefix(".")))
        out.print(f"drawn to {plot}")


@app.command(name="methods")
def list_methods() -> None:
    """Every method: what it changes, its knobs with defaults, its reference."""
    table = Table(show_lines=True)
    for column in ("method", "what it changes", "slots", "knobs", "reference"):
        table.add_column(column, overflow="fold")
    for row in methods.describe():
        slots, knobs = (words.replace(", ", "\n") for words in (row.slots, row.knobs))
        table.add_row(row.name, row.changes.replace("``", ""), slots, knobs, row.reference)
    out.print(table)
    out.print('Put them together with +, as in --method "fedavgm(0.9) + fedvc(256) + fedir".')
    out.print(
        "terms, statistics, remember and finish take many; two methods that want the same other slot are refused."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a user's mistake is one message and exit code 2, never a traceback."""
    try:
        _command(arguments)
    except BrokenPipeError:  # whoever read our output has gone: `unskew methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt lies at the bottom: Python wraps one that comes while a class is being made."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _command(arguments: Sequence[str] | None) -> None:
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="unskew")
    except (UserError, ClientFailure) as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except BrokenPipeError:
        raise
    except OSError as error:
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
