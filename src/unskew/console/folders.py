"""Folders of runs on the command line: which runs they have, and a note on those that are not finished."""

import sys
from collections.abc import Sequence
from pathlib import Path

from unskew.core.units import counted
from unskew.runs.several import finished_runs


def runs_named(paths: Sequence[Path]) -> list[Path]:
    """The runs that these folders are or have; a note on standard error says which are not finished."""
    found, begun = finished_runs(paths)
    if begun:
        words = f"{counted(len(begun), 'run')} in the folder not finished and left out"
        print(f"note: {words}: {', '.join(map(str, begun[:5]))}{' …' if begun[5:] else ''}", file=sys.stderr)  # noqa: T201
    return found
