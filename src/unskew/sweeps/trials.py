"""The settings of a sweep on their way: what is finished is read, the rest is trained, and every end is told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unskew.runs.config import with_values
from unskew.runs.options import Value
from unskew.runs.result import RESULT, read_result
from unskew.sweeps.folder import RUNS, Asked, check_run, write_about
from unskew.sweeps.jobs import do_all
from unskew.sweeps.outcomes import Outcome
from unskew.sweeps.space import folder_name
from unskew.sweeps.work import Failure, Task

Finished = Callable[[Outcome, int, int], None]  # a setting, how many are done, of how many
Rounds = Callable[[int, int], None]  # rounds that are done, of how many


@dataclass(frozen=True)
class Told:
    """Who is told of what: of ``total`` settings one after another, and of the rounds of those under way."""

    total: int
    finished: Finished | None = None
    rounds: Rounds | None = None


class Trials:
    """The runs of a sweep's folder, ``jobs`` at a time. A setting is a folder, a seed a run in it."""

    def __init__(self, path: Path, asked: Asked, failures: dict[str, Failure], jobs: int, told: Told) -> None:
        self._path, self._asked, self._jobs, self._told = path, asked, jobs, told
        self._failures = failures  # by run: "lr-0.1/seed0"
        self._known: dict[str, Outcome] = {}

    def do(self, settings: Sequence[Mapping[str, Value]]) -> list[Outcome]:
        """An outcome for each of these settings; what is not finished is trained."""
        named = {folder_name(values): values for values in settings}
        new = {name: values for name, values in named.items() if name not in self._known}
        tasks = {run: task for name, values in new.items() for run, task in self._tasks(name, values).items()}
        for task in tasks.values():
            check_run(task.path, task, self._asked)
        left = [run for run in tasks if run not in self._failures and not (tasks[run].path / RESULT).exists()]
        waiting = {name: sum(_setting(run) == name for run in left) for name in new}
        rounds, whole = dict.fromkeys(left, 0), sum(tasks[run].config.rounds for run in left)

        def ended(place: int, failure: Failure | None) -> None:
            run = left[place]
            if failure is not None:
                self._failures[run] = failure
                write_about(self._path, self._asked, self._failures)
            waiting[_setting(run)] -= 1
            if not waiting[_setting(run)]:
                self._conclude(_setting(run), new[_setting(run)])

        def progressed(place: int, number: int) -> None:
            rounds[left[place]] = number
            if self._told.rounds is not None:
                self._told.rounds(sum(rounds.values()), whole)

        for name in [name for name, count in waiting.items() if not count]:
            self._conclude(name, new[name])
        do_all([tasks[run] for run in left], self._jobs, ended, progressed)
        return [self._known[folder_name(values)] for values in settings]

    def _tasks(self, name: str, values: Mapping[str, Value]) -> dict[str, Task]:
        config = with_values(self._asked.base, values, "--over")
        places = {seed: f"{name}/seed{seed}" for seed in self._asked.seeds}
        return {run: Task(replace(config, seed=seed), self._path / RUNS / run) for seed, run in places.items()}

    def _conclude(self, name: str, values: Mapping[str, Value]) -> None:
        tasks = self._tasks(name, values)
        runs = tuple(self._failures.get(run) or read_result(task.path) for run, task in tasks.items())
        config = with_values(self._asked.base, values, "--over")
        self._known[name] = Outcome(name, values, config, runs, self._asked.by)
        if self._told.finished is not None:
            self._told.finished(self._known[name], len(self._known), self._told.total)


def _setting(run: str) -> str:
    return run.rpartition("/")[0]
