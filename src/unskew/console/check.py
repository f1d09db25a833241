"""The command check: whether the files of run folders are as they were written; and the note on unsealed folders."""

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from unskew.console.plain import PlainConsole
from unskew.core.errors import UserError
from unskew.runs.check import DAMAGED, UNSEALED, WHOLE, Examined, examine, seal_folder, unsealed_note

out = PlainConsole()


def check(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    seal: Annotated[
        bool, typer.Option("--seal", help="Take the files as they are from now on: write a new manifest.json.")
    ] = False,
) -> None:
    """Say which files of a run folder are as they were written, which are damaged and which are not sealed."""
    damaged = []
    for path in paths:
        if seal:
            out.print(f"{path}: {len(seal_folder(path))} files are sealed as they are", soft_wrap=True)
            continue
        files = examine(path)
        _show(path, files)
        damaged += [each for each in files if each.state == DAMAGED]
    if damaged:
        raise UserError(f"{len(damaged)} damaged: {'; '.join(each.problem for each in damaged)}")


def note_unsealed(paths: Iterable[Path]) -> None:
    """A line on standard error for each run folder that has no manifest."""
    for path in paths:
        if note := unsealed_note(path):
            print(f"note: {note}", file=sys.stderr)  # noqa: T201


def _show(path: Path, files: list[Examined]) -> None:
    width = max((len(each.name) for each in files), default=0)
    for each in files:
        if each.state != UNSEALED or not each.name.startswith(("figures/", "logs/", "report")):
            out.print(f"{each.name:<{width}}  {each.state}", soft_wrap=True)
    counts = Counter(each.state for each in files)
    words = [f"{counts[state]} {state}" for state in (WHOLE, UNSEALED, DAMAGED) if counts[state]]
    out.print(f"{path}: {', '.join(words)}", soft_wrap=True)
    if note := unsealed_note(path):
        out.print(f"note: {note}; seal it as it is with: unskew check {path} --seal", soft_wrap=True)
