"""The work that recipes take: trainings that cells share, each with its calibrations and measures, seed by seed."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from unskew.core.errors import UserError, brief
from unskew.core.machine import cores, resolve_device
from unskew.data import sources
from unskew.data.arrays import is_function
from unskew.data.builders import is_built
from unskew.data.builders import locate as locate_built
from unskew.data.fetch import DOWNLOADS
from unskew.report.write import write_report
from unskew.reproduce.cells import Asked, Cell, cells_of, seeds_of, training_name, wanted
from unskew.reproduce.recipe import Recipe
from unskew.reproduce.records import Record, make_record, read_record, run_folder, write_failure
from unskew.runs.config import Config
from unskew.runs.result import RESULT
from unskew.sweeps.jobs import do_all
from unskew.sweeps.work import Failure, Task


@dataclass(frozen=True)
class Job:
    """A run: one training with one seed, and all that is made of it."""

    training: str
    config: Config  # with its seed
    calibrations: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    def task(self, out: Path, data_dir: str | None) -> Task:
        """The run as worker processes take it."""
        config = replace(self.config, data_dir=data_dir or self.config.data_dir)
        return Task(config, run_folder(out, self.training, self.seed), self.calibrations, self.measures)

    def state(self, out: Path) -> Record | Failure | None:
        """Its record, where that has all that is asked for; how it diverged; None where something is left to do."""
        found = read_record(out, self.training, self.seed)
        if isinstance(found, Record) and not found.has(self.calibrations, self.measures):
            return None
        return found


def jobs_of(recipes: Sequence[tuple[Recipe, Asked]]) -> list[Job]:
    """The runs of all these recipes, each once, in the order of the recipes; seed by seed: the first is done first."""
    jobs: dict[tuple[str, int], Job] = {}
    for recipe, asked in recipes:
        cells = wanted(cells_of(recipe, asked), asked)
        for seed in (seeds := seeds_of(recipe, asked)):
            for cell in cells:
                if cell.baseline is not None:
                    _add(jobs, cell.baseline, seed)
                measured = recipe.measure_all or seed == seeds[0]
                _add(jobs, cell.config, seed, cell.after, cell.measures if measured else ())
    return list(jobs.values())


def _add(
    jobs: dict[tuple[str, int], Job], config: Config, seed: int, after: str = "", measures: Sequence[str] = ()
) -> None:
    name = training_name(config)
    job = jobs.get((name, seed)) or Job(name, replace(config, seed=seed))
    if config.during and config.during != job.config.during:  # what is recorded changes no result
        job = replace(job, config=replace(job.config, during=config.during))
    calibrations = dict.fromkeys((*job.calibrations, *([after] if after else ())))
    jobs[name, seed] = replace(
        job, calibrations=tuple(calibrations), measures=tuple(dict.fromkeys((*job.measures, *measures)))
    )


def part_of(jobs: Sequence[Job], text: str) -> list[Job]:
    """The i-th of n parts of the runs, ``"1/4"``: every n-th run, so that parts take about as long as each other."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--cells {brief(text)}: give a part of all, from 1/4 to 4/4")
    return list(jobs[int(match[1]) - 1 :: int(match[2])])


def cells_needing(cells: Sequence[Cell], job: Job) -> list[Cell]:
    """The cells that this run is for."""
    return [cell for cell in cells if cell.training == job.training]


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


SHOWN = ("skew", "curves")  # what the report of a run shows: what costs next to nothing

Finished = Callable[
    [Job, Failure | None, int, int], None
]  # a run, why it has no result, how many are done, of how many
Rounds = Callable[[int, int], None]  # rounds that are done, of how many


@dataclass(frozen=True)
class Watcher:
    """Who is told of what."""

    finished: Finished | None = None
    rounds: Rounds | None = None


def carry_out(
    jobs: Sequence[Job],
    out: Path,
    *,
    data_dir: str | None = None,
    at_once: int | None = None,
    told: Watcher | None = None,
) -> dict[tuple[str, int], Failure]:
    """Do these runs, as many at the same time as there are cores; why some have no result, by training and seed.

    An interrupted run goes on where it stopped when this is called again.
    """
    told = told or Watcher()
    tasks = [job.task(out, data_dir) for job in jobs]
    rounds, whole = dict.fromkeys(range(len(jobs)), 0), sum(max(job.config.rounds, 1) for job in jobs)
    failures: dict[tuple[str, int], Failure] = {}
    done = 0

    def ended(place: int, failure: Failure | None) -> None:
        nonlocal done
        job, done = jobs[place], done + 1
        if failure is not None:
            failures[job.training, job.seed] = failure
        if (tasks[place].path / RESULT).exists():
            make_record(out, job.training, job.seed, job.measures, failure.reason if failure else "")
            with suppress(UserError):  # a page beside the figures; the table is made without it
                write_report(tasks[place].path, only=SHOWN)
        elif failure is not None and failure.diverged:
            write_failure(out, job.training, job.seed, failure)
        if told.finished is not None:
            told.finished(job, failure, done, len(jobs))

    def progressed(place: int, number: int) -> None:
        rounds[place] = number
        if told.rounds is not None:
            told.rounds(sum(rounds.values()), whole)

    if jobs:
        do_all(tasks, at_once or _at_once(jobs), ended, progressed)
    return failures


def _at_once(jobs: Sequence[Job]) -> int:
    """One for each core; on a GPU one at a time."""
    return cores() if resolve_device(jobs[0].config.device).type == "cpu" else 1


def check_out(out: Path) -> None:
    """Make the folder, or refuse one that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}; choose another") from error
