"""The command compare, and what commands about finished runs share."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from unskew.console.progress import Json, out
from unskew.core.errors import UserError, nearest
from unskew.core.units import counted
from unskew.report.table import FORMATS
from unskew.report.table import compare as compare_runs
from unskew.runs.seals import unsealed_note
from unskew.runs.seeds import finished_runs

Trust = Annotated[bool, typer.Option("--trust", help="Trust plug-ins named in run directories by other authors.")]


def note_unsealed(paths: Iterable[Path]) -> None:
    """Note on standard error each run directory that has no manifest."""
    for path in paths:
        if note := unsealed_note(path):
            print(f"note: {note}", file=sys.stderr)  # noqa: T201


def runs_named(paths: Sequence[Path]) -> list[Path]:
    """The runs that these folders are or have; a note on standard error says which are not finished."""
    found, begun = finished_runs(paths)
    if begun:
        words = f"{counted(len(begun), 'run')} left out: not finished"
        print(f"note: {words}: {', '.join(map(str, begun[:5]))}{' …' if begun[5:] else ''}", file=sys.stderr)  # noqa: T201
    return found


def compare(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that contain some.")
    ],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run with --method centralised, for relative accuracy.")
    ] = None,
    at_round: Annotated[
        int | None, typer.Option(metavar="N", help="Accuracy at this round (default: the last that all runs reached).")
    ] = None,
    at_batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Accuracy at this batch count (default: the largest that all runs reached)."),
    ] = None,
    columns: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME…",
            help='The columns to show, such as "method,accuracy,after"; the beginning of a name is enough '
            "(default: what differs, as far as it fits).",
        ),
    ] = "",
    form: Annotated[str, typer.Option("--format", metavar="|".join(FORMATS), help="The format.")] = "table",
    each: Annotated[
        bool, typer.Option("--each", help="One row per run, even if runs differ only in the seed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare finished runs in a table; runs that differ only in the seed share a row, mean ± deviation."""
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
    paths = runs_named(paths)
    note_unsealed([*paths, *([baseline] if baseline else [])])
    table = compare_runs(*paths, baseline=baseline, at_round=at_round, at_batch=at_batch, columns=columns, each=each)
    if form == "table" and not as_json:
        out.print(table.render(out.width))
    else:
        print(table.text("json" if as_json else form))  # noqa: T201  for programs: no wrapping, no colour
