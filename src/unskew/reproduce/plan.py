"""The work that recipes take: trainings that cells share, each with its calibrations and measures, seed by seed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unskew.core.errors import UserError, brief
from unskew.reproduce.cells import Asked, Cell, cells_of, seeds_of, training_name, wanted
from unskew.reproduce.recipe import Recipe
from unskew.reproduce.records import Record, read_record, run_folder
from unskew.runs.config import Config
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
