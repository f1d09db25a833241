"""``unskew data``: list the data sets, fetch one, check one, write one as a table."""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from unskew.console.progress import DownloadProgress, PlainConsole, StageProgress
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.units import counted, format_bytes
from unskew.data import fetch as fetching
from unskew.data import sources
from unskew.data.interface import BROKEN, DAMAGED, Finding
from unskew.data.rows import table_csv
from unskew.data.store import cache_of
from unskew.data.synthetic_set import Shape, write_population
from unskew.runs.config import OPTIONS

data_app = typer.Typer(
    help="List, fetch and check data sets, and write tables.", no_args_is_help=True, rich_markup_mode=None
)

out = PlainConsole()

DataDir = Annotated[
    str | None, typer.Option(metavar="DIR", help="The folder of the published data sets (or the variable UNSKEW_DATA).")
]


@data_app.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """List the data sets, and where each was found."""
    table = Table()
    for column in ("name", "what it is", "train + test", "where"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for source, where in sources.survey(_folder(data_dir)):
        channels, height, width = source.shape or (0, 0, 0)
        kind = "grey" if channels == 1 else "colour"
        counts = " + ".join(f"{count:,}" for count in source.sizes or ())
        size = f"{counts} of {width}x{height} {kind}" if source.shape else "as they are"
        what = f"{source.what}; {source.classes} classes" if source.classes else source.what
        table.add_row(source.spelling, what, size, where)
    out.print(table)
    if _folder(data_dir) is None:
        out.print("No data folder was given: use --data-dir DIR or set UNSKEW_DATA.")


@data_app.command("fetch")
def data_fetch(
    name: str,
    data_dir: DataDir = None,
    mirror: Annotated[str | None, typer.Option(help="An address to fetch from instead of the public ones.")] = None,
) -> None:
    """Download a data set into the folder of --data-dir, and check it; a download that broke off is continued."""
    folder = _folder(data_dir)
    if folder is None:
        raise UserError("no data folder was given; use --data-dir DIR or set UNSKEW_DATA")
    with DownloadProgress(out, name) as progress:
        path = fetching.fetch(name, folder, mirror=mirror, report=progress, say=progress.say)
    out.print(f"{name} is in {path}")


@data_app.command("check")
def data_check(
    name: str,
    data_dir: DataDir = None,
    cache_dir: Annotated[str | None, typer.Option(metavar="DIR", help=OPTIONS["cache_dir"].help)] = None,
) -> None:
    """Read a whole data set and compare its files with the published ones."""
    with StageProgress(out) as say:
        findings = sources.check(name, _folder(data_dir), cache_of(cache_dir), say)
    damaged = [finding for finding in findings if finding.status == DAMAGED]
    table = name.startswith("table:")
    _print_lines(_words(finding) for finding in findings if not (table and finding in damaged))
    _print_lines(f"note: {note}" for finding in findings for note in finding.notes)
    if damaged and table:
        raise UserError(f"{name}: {damaged[0].detail}")
    if damaged:
        raise UserError(f"{name}: {len(damaged)} of {len(findings)} files are damaged; fetch them again")


@data_app.command("table")
def data_table(
    name: str,
    file: Annotated[
        Path, typer.Option("--out", help="Where to write it: FILE.csv, which --data table:FILE.csv reads.")
    ],
    data_dir: DataDir = None,
) -> None:
    """Write inaturalist, landmarks, cinic10, tiny-imagenet or omniglot as a table of pictures."""
    if file.suffix != ".csv":
        raise UserError(f"--out {file}: a table is written as .csv")
    rows = sources.load_rows(name, _folder(data_dir))
    write_whole(file, table_csv(rows, file))
    train = int((~rows.test).sum())
    held = f"{counted(train, 'training example')} and {counted(len(rows) - train, 'test example')}"
    out.print(f"{name}: {held} of {len(rows.classes):,} classes")
    for note in rows.notes:
        out.print(f"note: {note}")
    out.print(f"written to {file}")


@data_app.command("generate")
def data_generate(
    file: Annotated[
        Path,
        typer.Option("--out", help="FILE.csv, with pictures in a folder beside it, or FILE.parquet, with them inside."),
    ],
    users: Annotated[int, typer.Option(help="How many users.")] = Shape.users,
    classes: Annotated[int, typer.Option(help="How many classes.")] = Shape.classes,
    examples: Annotated[int, typer.Option(help="How many training examples.")] = Shape.examples,
    test: Annotated[int, typer.Option(help="How many test examples.")] = Shape.test,
    balanced: Annotated[
        bool, typer.Option("--balanced/--long-tailed", help="As many of each class, or few classes with most of them.")
    ] = True,
    size: Annotated[int, typer.Option(help="The sides of the pictures in pixels.")] = 32,
    images: Annotated[bool, typer.Option("--images/--no-images", help="Draw pictures, or name them only.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another population.")] = 0,
) -> None:
    """Draw a population of photographers in the shape of iNaturalist-User-120k, for tests and benchmarks."""
    shape = Shape(users, classes, examples, test, balanced)
    with StageProgress(out) as progress:
        report = partial(progress, "drawing pictures")
        rows = write_population(file, shape, size=size if images else None, seed=seed, report=report)
    out.print(f"{counted(len(rows), 'example')} of {counted(users, 'user')} and {classes:,} classes")
    for note in rows.notes:
        out.print(f"note: {note}")
    out.print(f"written to {file}; use it as --data table:{file}")


def _words(finding: Finding) -> str:
    if finding.status == BROKEN:
        return f"{finding.path} {finding.detail}"
    size = f"{format_bytes(finding.size)}, " if finding.size else ""
    return f"{finding.path}: {size}{finding.status}; {finding.detail}"


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)


def _folder(given: str | None) -> Path | None:
    named = given or os.environ.get("UNSKEW_DATA")
    return Path(named) if named else None
