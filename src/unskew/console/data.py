"""The commands about data: list, download and check data sets, write tables, draw partitions."""

import csv
import io
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from unskew.console.options import DataDir, check_suffix, option, with_options
from unskew.console.progress import Json, StageProgress, out, print_json
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.units import counted, format_bytes, span
from unskew.data import fetch as fetching
from unskew.data import partition_files, sources
from unskew.data.interface import BROKEN, DAMAGED, Rows, Summary
from unskew.data.population import Population, describe_sizes, emd
from unskew.data.store import cache_of
from unskew.data.synthetic_set import Shape, write_population
from unskew.data.tables import table_csv
from unskew.runs import config as configs
from unskew.runs.folder import write_arrays
from unskew.runs.prepare import make_partition, read_examples

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

CLASSES = 40  # rows in a table of classes


@data_app.command("list")
def data_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets and where each was found."""
    known = sources.survey(_folder(data_dir))
    if as_json:
        names = ("name", "what", "classes", "shape", "sizes")
        print_json([{name: getattr(source, name) for name in names} | {"where": where} for source, where in known])
        return
    columns = [Column(name, overflow="fold") for name in ("what it is", "train + test", "where")]
    table = Table(Column("name", no_wrap=True), *columns)
    for source, where in known:
        channels, height, width = source.shape or (0, 0, 0)
        kind = "gray" if channels == 1 else "color"
        counts = " + ".join(f"{count:,}" for count in source.sizes or ())
        size = f"{counts} of {width}x{height} {kind}" if source.shape else "as they are"
        what = f"{source.what}; {source.classes} classes" if source.classes else source.what
        table.add_row(source.spelling, what, size, where)
    out.print(table)
    if _folder(data_dir) is None:
        out.say("No data folder is set: use --data-dir DIR or set UNSKEW_DATA.")


@data_app.command("fetch")
def data_fetch(
    name: str,
    data_dir: DataDir = None,
    mirror: Annotated[str | None, option("Download from this address instead of the public ones.")] = None,
    as_json: Json = False,
) -> None:
    """Download a data set to --data-dir and check it; an interrupted download continues."""
    folder = _folder(data_dir)
    if folder is None:
        raise UserError("no data folder is set; use --data-dir DIR or set UNSKEW_DATA")
    with StageProgress(out, in_bytes=True) as progress:
        report = partial(progress, name)
        path = fetching.fetch(name, folder, mirror=mirror, report=report, say=out.say)
    out.say(f"{name} is in {path}")
    if as_json:
        print_json({"name": name, "path": path})


@data_app.command("check")
def data_check(
    name: str,
    data_dir: DataDir = None,
    cache_dir: Annotated[str | None, option(configs.OPTIONS["cache_dir"].help, metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Read a data set completely, and compare its files with the published ones."""
    with StageProgress(out) as say:
        findings = sources.check(name, _folder(data_dir), cache_of(cache_dir), say)
    if as_json:
        print_json(list(map(asdict, findings)))
    damaged = [finding for finding in findings if finding.status == DAMAGED]
    table = any(finding.status == BROKEN for finding in findings)
    for finding in findings:
        size = f"{format_bytes(finding.size)}, " if finding.size else ""
        if finding.status == BROKEN:
            out.say(f"{finding.path} {finding.detail}")
        elif not (table and finding in damaged):
            out.say(f"{finding.path}: {size}{finding.status}; {finding.detail}")
        if finding.summary is not None:
            _show_summary(finding.summary)
        out.say(*(f"note: {note}" for note in finding.notes))
    if damaged:
        files = f"{len(damaged)} of {len(findings)} files are damaged; fetch them again"
        raise UserError(f"{name}: {damaged[0].detail if table else files}")


@data_app.command("table")
def data_table(
    name: str,
    file: Annotated[Path, option("The file: FILE.csv, for --data table:FILE.csv.", "--out")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write inaturalist, landmarks, cinic10, tiny-imagenet or omniglot as a table of pictures."""
    check_suffix("--out", file, ".csv")
    rows = sources.load_rows(name, _folder(data_dir))
    write_whole(file, table_csv(rows, file))
    train = int((~rows.test).sum())
    counts = f"{counted(train, 'training example')} and {counted(len(rows) - train, 'test example')}"
    out.say(f"{name}: {counts} of {len(rows.classes):,} classes")
    _finish_table(file, rows, f"written to {file}", as_json)


@data_app.command("generate")
def data_generate(
    file: Annotated[
        Path, option("FILE.csv, with the pictures in a folder next to it, or FILE.parquet, which has them.", "--out")
    ],
    users: Annotated[int, option("How many users.")] = Shape.users,
    classes: Annotated[int, option("How many classes.")] = Shape.classes,
    examples: Annotated[int, option("How many training examples.")] = Shape.examples,
    test: Annotated[int, option("How many test examples.")] = Shape.test,
    balanced: Annotated[
        bool, option("As many examples in every class, or most in a few classes.", "--balanced/--long-tailed")
    ] = True,
    size: Annotated[int, option("The side of each picture in pixels.")] = 32,
    images: Annotated[bool, option("Draw the pictures, or only list them.", "--images/--no-images")] = True,
    seed: Annotated[int, option("The seed; each seed draws a different population.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Generate a population like that of iNaturalist-User-120k, for tests and benchmarks."""
    shape = Shape(users, classes, examples, test, balanced)
    with StageProgress(out) as progress:
        report = partial(progress, "drawing pictures")
        rows = write_population(file, shape, size=size if images else None, seed=seed, report=report)
    out.say(f"{counted(len(rows), 'example')} of {counted(users, 'user')} and {classes:,} classes")
    _finish_table(file, rows, f"written to {file}; use it as --data table:{file}", as_json)


def _finish_table(file: Path, rows: Rows, written: str, as_json: bool) -> None:
    out.say(*(f"note: {note}" for note in rows.notes), written)
    if as_json:
        counts = {"train": int((~rows.test).sum()), "test": int(rows.test.sum()), "classes": len(rows.classes)}
        print_json({"table": file, **counts, "notes": rows.notes})


def _show_summary(summary: Summary) -> None:
    """Print the number of examples of each class and of each user."""
    table = Table(Column("class", overflow="fold"), Column("train", justify="right"), Column("test", justify="right"))
    for name, counts in list(summary.classes.items())[:CLASSES]:
        table.add_row(name, *(f"{count:,}" for count in counts))
    out.print(table)
    if (more := len(summary.classes) - CLASSES) > 0:
        out.say(f"and {counted(more, 'more class')}")
    if summary.users:
        sizes = [train for train, _ in summary.users.values()]
        each = f"{span(min(sizes), max(sizes), 'training example')} each"
        out.say(f"{counted(len(summary.users), 'user')} (sites, authors): {each}; --partition users makes them clients")


def _folder(data_dir: str | None) -> Path | None:
    return Path(path) if (path := data_dir or os.environ.get("UNSKEW_DATA")) else None


@with_options(["data", "data_dir", "cache_dir", "partition", "clients", "seed"])
def partition(
    options: dict[str, Any],
    file: Annotated[Path, option("The file: FILE.npz, or FILE.csv in the published layout.", "--out")],
    plot: Annotated[Path | None, option("A picture of it: FILE.png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Draw a partition, report its skew, and write it to a file that --partition file:FILE reads."""
    check_suffix("--out", file, ".npz", ".csv")
    check_suffix("--plot", plot, ".png", ".svg", ".pdf")
    config = configs.checked(configs.with_values(configs.Config(), options, "partition"))
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
    skew = emd(drawn.client, labels, classes)
    out.print(
        f"{drawn.scheme}, seed {drawn.seed}: {counted(drawn.clients, 'client')} of {describe_sizes(sizes)}, "
        f"EMD {skew:.3f}; drawn {counted(drawn.redraws + 1, 'time')}"
    )
    out.say(*(f"note: {note}" for note in drawn.notes))
    out.say(f"hash {drawn.hash}\nwritten to {file}")
    if plot is not None:
        from unskew.analysis.skew import partition_charts
        from unskew.charts.files import chart_bytes, missing_characters

        charts = partition_charts(drawn, labels, examples.classes)
        if plot.suffix != ".svg" and missing_characters([*examples.classes, *(drawn.names or ())]):
            out.say("note: the font lacks some characters of the names; they are drawn as boxes")
        write_whole(plot, chart_bytes(charts, plot.suffix.removeprefix(".")))
        out.say(f"drawn to {plot}")
    if as_json:
        names = ("scheme", "seed", "clients", "names", "redraws", "hash", "notes")
        facts = {name: getattr(drawn, name) for name in names} | {"sizes": sizes.tolist(), "emd": skew}
        print_json(facts | {"file": file, "plot": plot})
