"""Which data sets a plan needs, which of them are here, and what to do about the others."""

import os
from collections.abc import Sequence
from pathlib import Path

from unskew.core.errors import UserError
from unskew.data import sources
from unskew.data.builders import is_built
from unskew.data.builders import locate as locate_built
from unskew.data.convert import is_function
from unskew.data.fetch import DOWNLOADS
from unskew.reproduce.plan import Job


def missing_data(names: Sequence[str], data_dir: str | None) -> dict[str, str]:
    """The data sets that are not here, each with the reason; nothing is read but names of files."""
    folder = data_dir or os.environ.get("UNSKEW_DATA")
    reasons = {}
    for name in dict.fromkeys(names):
        try:
            _look(name, Path(folder) if folder else None)
        except UserError as error:
            reasons[name] = str(error)
    return reasons


def _look(name: str, folder: Path | None) -> None:
    """Raise a UserError where a published set is not found; a user's own is looked at when it is read."""
    if is_built(name):
        locate_built(name.partition("?")[0], folder)
    elif ":" not in name and not is_function(name) and (source := sources.find(name)).layouts:
        sources.locate(source, folder)


def split_by_data(jobs: Sequence[Job], data_dir: str | None) -> tuple[list[Job], dict[str, str]]:
    """The runs whose data are here, and why the data of the others are not."""
    missing = missing_data([job.config.data for job in jobs], data_dir)
    return [job for job in jobs if job.config.data not in missing], missing


def how_to_get(missing: Sequence[str], again: str, stand_ins: Sequence[str]) -> str:
    """One message: what is not here, how it is got, and what can be had without it."""
    names = [name.partition("?")[0] for name in missing]
    fetched = [name for name in names if name in DOWNLOADS]
    others = [name for name in names if name not in fetched]
    ways = [f"unskew data fetch {name} --data-dir DIR" for name in fetched]
    words = f"the data are not here: {', '.join(dict.fromkeys(names))}"
    if ways:
        words += f"; download them with: {'; '.join(dict.fromkeys(ways))}; then give --data-dir DIR or set UNSKEW_DATA"
    if others:
        words += (
            f"; {', '.join(dict.fromkeys(others))} cannot be fetched by a command: docs/data.md says where to get it"
        )
    if stand_ins:
        words += f"; or see it work on other data: {' or '.join(f'{again} --data {name}' for name in stand_ins)}"
    return words
