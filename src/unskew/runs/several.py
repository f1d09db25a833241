"""Folders of runs, such as those of ``--seeds`` and of a sweep: the finished runs in them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from unskew.core.errors import UserError
from unskew.runs.config import CONFIG
from unskew.runs.result import RESULT

DEPTH = 3  # folders in folders that are looked into


def finished_runs(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The run folders that these paths name, and those in folders of runs that are not finished.

    A path that is a run, or nothing at all, stays as it is: whatever reads it says what is wrong.
    """
    found: list[Path] = []
    begun: list[Path] = []
    for path in paths:
        inside = [] if not path.is_dir() or _is_run(path) else list(_runs_in(path, DEPTH))
        if not inside:
            found.append(path)
            continue
        done = [each for each in inside if (each / RESULT).exists()]
        if not done:
            raise UserError(f"{path} has no finished run; finish one with: unskew resume {inside[0]}")
        found += [each for each in done if each not in found]
        begun += [each for each in inside if each not in done]
    return found, begun


def _is_run(path: Path) -> bool:
    return (path / CONFIG).exists() or (path / RESULT).exists()


def _runs_in(path: Path, depth: int) -> Iterator[Path]:
    for each in sorted(path.iterdir(), key=_counted):
        if each.is_dir() and not each.name.startswith("."):
            if _is_run(each):
                yield each
            elif depth > 1:
                yield from _runs_in(each, depth - 1)


def _counted(path: Path) -> list[tuple[int, str]]:
    """As people count: seed2 comes before seed10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,18})", path.name)]
