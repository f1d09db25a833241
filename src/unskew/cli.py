"""The command line: flags in, values to the library, what comes out on the screen."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import unskew
from unskew import config as configs
from unskew import experiment, methods, runs
from unskew.config import Config
from unskew.data import fetch as fetching
from unskew.data import partition_files, sources
from unskew.data.population import Population, emd
from unskew.errors import ClientFailure, UserError, nearest
from unskew.experiment import Observer
from unskew.report import compare as comparing
from unskew.report.screen import Screen, size, summary
from unskew.results import Result, read_result

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
data_app = typer.Typer(help="The image sets: list, fetch, check.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

out = Console(highlight=False)


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
    method: Annotated[str | None, typer.Option(help='"fedavgm(0.9) + fedprox(0.01)"; see: unskew methods')] = None,
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
    out: Annotated[Path | None, typer.Option(help="The run folder (default: runs/<name>).")] = None,
) -> None:
    """Train, evaluate, write the run folder."""
    options = {key: value for key, value in locals().items() if value is not None and key not in ("recipe", "out")}
    _watched(lambda screen: experiment.run(screen, out=out, recipe=recipe, **options))


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    on_failure: Annotated[str | None, typer.Option(help="From here on: stop, or skip.")] = None,
) -> None:
    """Go on where a run stopped; the result equals that of a run never stopped."""
    _watched(lambda screen: experiment.resume(path, screen, on_failure=on_failure))


@app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    form: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Show finished runs side by side."""
    if form not in comparing.FORMATS:
        raise UserError(f"--format {form}: {nearest(form, comparing.FORMATS)}")
    results = [read_result(path) for path in paths]
    if form == "table":
        out.print(comparing.as_table(results))
    else:
        print(comparing.as_text(results, form))  # noqa: T201  for programs: no wrapping, no colour


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
    found = experiment.split(config, images)
    labels, classes = images.train.labels, len(images.classes)
    if file.suffix == ".npz":
        runs.write_arrays(file, partition_files.to_arrays(found, labels, classes))
    else:
        rows = partition_files.to_csv_rows(found, labels)
        runs.write_whole(file, "".join(",".join(row) + "\n" for row in rows).encode())
    sizes = Population.from_partition(found).sizes
    out.print(
        f"{found.scheme}, seed {found.seed}: {found.clients:,} clients of {sizes.min():,} to {sizes.max():,} examples, "
        f"EMD {emd(found.client, labels, classes):.3f}; drawn {found.redraws + 1} times"
    )
    for note in found.notes:
        out.print(f"note: {note}")
    out.print(f"hash {found.hash}\nwritten to {file}")
    if plot is not None:
        from unskew.report.partition_plot import partition_figure  # matplotlib takes a second to import

        picture = io.BytesIO()
        partition_figure(found, labels, images.classes).savefig(picture, format=plot.suffix.removeprefix("."))
        runs.write_whole(plot, picture.getvalue())
        out.print(f"drawn to {plot}")


@app.command(name="methods")
def list_methods() -> None:
    """Every method: what it changes, its knobs with defaults, its reference."""
    table = Table(show_lines=True)
    for column in ("method", "what it changes", "knobs", "reference"):
        table.add_column(column, overflow="fold")
    for row in methods.describe():
        table.add_row(row.name, row.changes, row.knobs.replace(", ", "\n"), row.reference)
    out.print(table)
    out.print('Put them together with +, as in --method "fedavgm(0.9) + fedprox(mu=0.01)".')


@data_app.command("list")
def data_list(data_dir: Annotated[str | None, typer.Option()] = None) -> None:
    """The image sets, and which of them lie here."""
    table = Table()
    for column in ("name", "what it is", "train + test", "where"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in sources.survey(_folder(data_dir)):
        channels, height, width = row.shape or (0, 0, 0)
        kind = "grey" if channels == 1 else "colour"
        counts = " + ".join(f"{count:,}" for count in row.sizes or ())
        held = f"{counts} of {width}x{height} {kind}" if row.shape else "as they are"
        here = row.found or ("not found" if row.shape else "")
        table.add_row(row.name, f"{row.what}; {row.classes} classes" if row.classes else row.what, held, here)
    out.print(table)
    if _folder(data_dir) is None:
        out.print("No data folder is named: give --data-dir DIR or set UNSKEW_DATA.")


@data_app.command("fetch")
def data_fetch(
    name: str,
    data_dir: Annotated[str | None, typer.Option()] = None,
    mirror: Annotated[str | None, typer.Option(help="An address to fetch from instead of the public one.")] = None,
) -> None:
    """Download an image set, check it, put it where --data-dir points."""
    folder = _folder(data_dir)
    if folder is None:
        raise UserError("where to? give --data-dir DIR or set UNSKEW_DATA")

    def report(done: int, total: int | None) -> None:
        if out.is_terminal:
            of = f" of {size(total)}" if total else ""
            out.print(f"{size(done)}{of}", end="\r")

    path = fetching.fetch(name, folder, mirror=mirror, report=report)
    out.print(f"{name} lies in {path}")


@data_app.command("check")
def data_check(name: str, data_dir: Annotated[str | None, typer.Option()] = None) -> None:
    """Read an image set whole and compare its files with the published ones."""
    findings = sources.check(name, _folder(data_dir))
    for finding in findings:
        out.print(f"{finding.path}: {size(finding.size)}, {finding.status}; {finding.detail}", soft_wrap=True)
    damaged = [finding.path for finding in findings if not finding.whole]
    if damaged:
        raise UserError(f"{name}: {len(damaged)} of {len(findings)} files cannot be read; fetch them anew")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a user's mistake is one message and exit code 2, never a traceback."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _command(arguments)
    except BrokenPipeError:  # whoever read our output has gone: `unskew methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _command(arguments: Sequence[str] | None) -> None:
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="unskew")
    except (UserError, ClientFailure) as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        raise
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}", 2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own complaints about the words of a command have it
            raise
        said = error.format_message()
        if said.startswith("Usage:"):  # no command was given
            print(said)  # noqa: T201
            sys.exit(2)
        _fail(f"{said} (unskew --help shows the options)", 2)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _watched(work: Any) -> None:
    """Run with the screen as observer, then show what came out; say how to go on where it did not end."""
    screen, place = Screen(out), list[Path]()

    def observe(event: Any) -> None:
        if hasattr(event, "path"):
            place.append(event.path)
        screen(event)

    observer: Observer = observe
    try:
        result: Result = work(observer)
    except (KeyboardInterrupt, ClientFailure) as error:
        screen.close()
        if place:
            what = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            _fail(f"{what}; go on with: unskew resume {place[0]}", 130 if isinstance(error, KeyboardInterrupt) else 2)
        raise
    finally:
        screen.close()
    out.print(summary(result))


def _folder(given: str | None) -> Path | None:
    named = given or os.environ.get("UNSKEW_DATA")
    return Path(named) if named else None


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> None:
    print(f"unskew: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


if __name__ == "__main__":
    main()
