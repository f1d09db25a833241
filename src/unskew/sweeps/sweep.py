"""A sweep from start to finish: its folder, every setting checked, trained and judged."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from unskew import methods
from unskew.calibration.feasible import named
from unskew.core.errors import UserError
from unskew.core.files import read_json, write_whole
from unskew.core.key import Key
from unskew.core.limits import usable_path
from unskew.core.machine import cores, neutral, resolve_device
from unskew.core.plugins import require_extra
from unskew.data.photographs import Say, silent
from unskew.round.local_optimizers import check_rounds, uses_sgd
from unskew.runs import config as configs
from unskew.runs.config import CONFIG, OPTIONS, Config, Value, with_values
from unskew.runs.finished import plain_name
from unskew.runs.folder import json_bytes, locked_folder, unused_path
from unskew.runs.prepare import parse_start, prepare
from unskew.runs.result import RESULT, read_result
from unskew.runs.seeds import parse_seeds
from unskew.runs.train import slug
from unskew.sweeps.outcomes import SCORES, Sweep, TriedSetting
from unskew.sweeps.space import MAX_SETTINGS, Dimension, describe_values, folder_name, grid, parse_over
from unskew.sweeps.tasks import RunFailure, Task, do_tasks

ABOUT, RUNS = "sweep.json", "runs"


@dataclass(frozen=True)
class SweepRequest:
    """What a sweep tries."""

    base: Config  # what all settings share; varied options and the seed do not count
    over: tuple[Dimension, ...]
    seeds: tuple[int, ...]
    by: str
    trials: int | None = None  # that are chosen from earlier results; None: the whole grid


@contextmanager
def open_sweep(path: Path, asked: SweepRequest) -> Iterator[dict[str, RunFailure]]:
    """Open and lock the sweep's folder; yields the known failures by run. Another sweep's folder is rejected."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder; choose another --out")
    there = (path / ABOUT).exists()
    if path.exists() and not there and any(one.name != ".lock" for one in path.iterdir()):
        raise UserError(f"{path} exists but is not the folder of a sweep; choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {path} cannot be created: {error.strerror}") from error
    with locked_folder(path):
        failures = _read_failures(path, asked) if there else {}
        write_about(path, asked, failures)
        yield failures


def write_about(path: Path, asked: SweepRequest, failures: Mapping[str, RunFailure]) -> None:
    """Write sweep.json: what is tried, and which runs diverged."""
    kept = {run: failure.reason for run, failure in failures.items() if failure.diverged}
    write_whole(path / ABOUT, json_bytes({**_describe_request(asked), "diverged": kept}))


def check_run(path: Path, task: Task, asked: SweepRequest) -> None:
    """Reject a run directory whose varied options, seed or validation part differ from the task's."""
    if not (path / CONFIG).exists():
        return
    found = configs.read_run(path)
    for name in ("seed", "validation", *(one.option for one in asked.over)):
        there, here = getattr(found, name), getattr(task.config, name)
        if OPTIONS[name].kind is not str and here is not None and there != here:
            raise UserError(
                f"{path} contains a run with {name} {there}, not {here}; move it away, or choose another --out"
            )


def _describe_request(asked: SweepRequest) -> dict[str, Any]:
    varied = {"seed", *(one.option for one in asked.over)}
    return {
        "settings": {name: value for name, value in configs.deciding(asked.base).items() if name not in varied},
        "over": [one.text for one in asked.over],
        "seeds": list(asked.seeds),
        "by": asked.by,
        "trials": asked.trials,
    }


def _read_failures(path: Path, asked: SweepRequest) -> dict[str, RunFailure]:
    """The failures in a folder that already has this sweep; values, seeds and trials may have been added."""
    found, now = read_json(path / ABOUT), _describe_request(asked)
    try:
        settings, over, kept = found["settings"], found["over"], found["diverged"]
        names = [one.option for one in parse_over(over)]
        failures = {run: RunFailure(str(reason), diverged=True) for run, reason in kept.items()}
    except (LookupError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{path / ABOUT} is damaged: {error!r}; restore it from a backup, or delete it") from error
    asked_names = [one.option for one in asked.over]
    searched = asked.trials is not None
    same = over == now["over"] and found.get("by") == asked.by if searched else set(names) == set(asked_names)
    if not same or (found.get("trials") is None) == searched:
        raise UserError(f"{path} contains another sweep, over {'; '.join(map(str, over))}; choose another --out")
    if differing := [
        name for name in {**settings, **now["settings"]} if settings.get(name) != now["settings"].get(name)
    ]:
        there = ", ".join(f"{name} {settings.get(name, 'not set')} there" for name in differing)
        raise UserError(f"{path} contains another sweep: {there}; choose another --out")
    return failures


TOGETHER = 4  # settings that are asked for before the next is answered
DIGITS = 4  # of a number that is tried: folders and tables have it in full


class Search:
    """Optuna's search: ``ask`` for settings, ``tell`` their scores. A failed setting counts as ``worst``."""

    def __init__(self, dimensions: Sequence[Dimension], key: Key, *, maximise: bool, worst: float) -> None:
        optuna = require_extra("optuna", "sweeps")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=key.fold("sweep").number() % 2**32)
        self._study = optuna.create_study(sampler=sampler, direction="maximize" if maximise else "minimize")
        self._dimensions, self._worst = dimensions, worst

    def ask(self) -> tuple[Any, dict[str, Value]]:
        """The next setting, and its handle for ``tell``."""
        trial = self._study.ask()
        return trial, {one.option: _suggest(trial, one) for one in self._dimensions}

    def tell(self, trial: Any, score: float | None) -> None:
        """Report a setting's score; None if it failed."""
        self._study.tell(trial, self._worst if score is None else score)


def _suggest(trial: Any, dimension: Dimension) -> Value:
    if dimension.values:
        index: int = trial.suggest_categorical(dimension.option, list(range(len(dimension.values))))
        return dimension.values[index]
    if dimension.whole:
        return int(trial.suggest_int(dimension.option, int(dimension.low), int(dimension.high), log=dimension.log))
    value = trial.suggest_float(dimension.option, dimension.low, dimension.high, log=dimension.log)
    return min(max(float(f"{value:.{DIGITS}g}"), dimension.low), dimension.high)


Finished = Callable[[TriedSetting, int, int], None]  # a setting, how many are done, of how many
Rounds = Callable[[int, int], None]  # rounds that are done, of how many


@dataclass(frozen=True)
class Trials:
    """The runs of a sweep's folder, ``jobs`` at a time: one folder per setting, one run per seed."""

    path: Path
    asked: SweepRequest
    failures: dict[str, RunFailure]  # by run: "lr-0.1/seed0"
    jobs: int
    total: int  # how many settings are tried
    finished: Finished | None
    rounds: Rounds | None
    known: dict[str, TriedSetting] = field(default_factory=dict)

    def do(self, settings: Sequence[Mapping[str, Value]]) -> list[TriedSetting]:
        """The outcome of each of these settings; unfinished runs are trained."""
        named = {folder_name(values): values for values in settings}
        new = {name: values for name, values in named.items() if name not in self.known}
        tasks = {run: task for name, values in new.items() for run, task in self._tasks(name, values).items()}
        for task in tasks.values():
            check_run(task.path, task, self.asked)
        left = [run for run in tasks if run not in self.failures and not (tasks[run].path / RESULT).exists()]
        waiting = {name: sum(_setting(run) == name for run in left) for name in new}
        rounds, whole = dict.fromkeys(left, 0), sum(tasks[run].config.rounds for run in left)

        def ended(index: int, failure: RunFailure | None) -> None:
            run = left[index]
            if failure is not None:
                self.failures[run] = failure
                write_about(self.path, self.asked, self.failures)
            waiting[_setting(run)] -= 1
            if not waiting[_setting(run)]:
                self._conclude(_setting(run), new[_setting(run)])

        def progressed(index: int, number: int) -> None:
            rounds[left[index]] = number
            if self.rounds is not None:
                self.rounds(sum(rounds.values()), whole)

        for name in [name for name, count in waiting.items() if not count]:
            self._conclude(name, new[name])
        do_tasks([tasks[run] for run in left], self.jobs, ended, progressed)
        return [self.known[folder_name(values)] for values in settings]

    def _tasks(self, name: str, values: Mapping[str, Value]) -> dict[str, Task]:
        config = with_values(self.asked.base, values, "--over")
        run_names = {seed: f"{name}/seed{seed}" for seed in self.asked.seeds}
        return {run: Task(replace(config, seed=seed), self.path / RUNS / run) for seed, run in run_names.items()}

    def _conclude(self, name: str, values: Mapping[str, Value]) -> None:
        tasks = self._tasks(name, values)
        runs = tuple(self.failures.get(run) or read_result(task.path) for run, task in tasks.items())
        config = with_values(self.asked.base, values, "--over")
        self.known[name] = TriedSetting(name, values, config, runs, self.asked.by)
        if self.finished is not None:
            self.finished(self.known[name], len(self.known), self.total)


def _setting(run: str) -> str:
    return run.rpartition("/")[0]


VALIDATION = 0.15  # of the training images, as in the papers
WORST = {"loss": 1e6}  # what a setting that failed counts as in a search; 0 for an accuracy


@neutral()
def sweep(
    recipe: str | PathLike[str] | None = None, *, over: Sequence[str], seeds: str | Iterable[int] | None = None,
    trials: int | None = None, validation: float | None = None, by: str = "accuracy", jobs: int | None = None,
    out: str | PathLike[str] | None = None, finished: Finished | None = None, progress: Rounds | None = None,
    begun: Callable[[Path], Any] | None = None, home: Path = Path(), say: Say = silent, **options: Any,
) -> Sweep:  # fmt: skip
    """Try every combination of the values of ``over``, or ``trials`` settings that Optuna chooses.

    Each setting is judged on the validation part. Called again with the same folder, the sweep goes on where it
    stopped. Whatever is refused is refused before anything runs; ``say`` is told how far the images are read for that.
    """
    asked = _asked(recipe, over, seeds, trials, validation, by, options)
    settings = grid(asked.over) if trials is None else None
    _check_settings(asked, settings, say)
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: give at least 1")
    path = home / usable_path(out) if out else _own_folder(home / "runs", asked)
    with open_sweep(path, asked) as failures:
        if begun is not None:
            begun(path)
        jobs = jobs or (cores() if resolve_device(asked.base.device).type == "cpu" else 1)  # on a GPU one at a time
        work = Trials(path, asked, failures, jobs, trials or len(settings or ()), finished, progress)
        outcomes = _search(work, asked) if settings is None else work.do(settings)
        once = {one.name: one for one in outcomes}  # a search may come back to a setting
        return Sweep(path, asked.over, asked.seeds, asked.by, tuple(once.values()))


def _asked(
    recipe: str | PathLike[str] | None, over: Sequence[str], seeds: str | Iterable[int] | None, trials: int | None,
    validation: float | None, by: str, options: dict[str, Any],
) -> SweepRequest:  # fmt: skip
    dimensions = parse_over(over)
    base, listed = configs.read_recipe(Path(recipe)) if recipe else (Config(), ())
    for one in dimensions:
        if options.get(one.option) is not None:
            raise UserError(f"{one.option} is given and varied (--over {one.text}); leave one of them out")
    if seeds is not None and options.get("seed") is not None:
        raise UserError("seed and seeds were both given; give one of them")
    config = configs.with_values(base, options, "sweep")
    share = validation if validation is not None else config.validation or VALIDATION
    if not share > 0:
        raise UserError(f"--validation {share:g}: a sweep never looks at the test images; give a share above 0")
    config = configs.checked(replace(config, validation=float(share)))
    if config.engine == "torchrun":
        raise UserError("--engine torchrun: a sweep spreads its runs over this machine's cores; leave --engine out")
    numbers = parse_seeds(seeds if seeds is not None else listed or [config.seed])
    if trials is not None and not 1 <= trials <= MAX_SETTINGS:
        raise UserError(f"--trials {trials}: give 1 to {MAX_SETTINGS:,}")
    return SweepRequest(config, dimensions, numbers, by if by in SCORES else plain_name(by), trials)


def _check_settings(asked: SweepRequest, settings: Sequence[dict[str, Value]] | None, say: Say) -> None:
    """Refuse what could not run: every combination as texts, and each value once with the whole set-up of a run."""
    first = {one.option: one.ends[0] for one in asked.over}
    tried = [first, *({**first, one.option: value} for one in asked.over for value in one.ends[1:])]
    use_sgd = [_check_texts(asked, values) for values in settings or tried]
    if "momentum" in first and not any(use_sgd):
        raise UserError(
            f"--over momentum: --optimizer {asked.base.optimizer} has none; vary it with sgd, or leave it out"
        )
    costly = {one.option for one in asked.over if OPTIONS[one.option].kind in (str, bool)} | {"clients", "per_round"}
    for index, values in enumerate(tried):
        changed = {name for name in values if values[name] != first[name]}
        if index and not changed & costly:
            continue
        with _name_setting(values):
            prepare(replace(configs.with_values(asked.base, values, "--over"), seed=asked.seeds[0]), say=say)


def _check_texts(asked: SweepRequest, values: dict[str, Value]) -> bool:
    """Refuse a setting whose options do not go together, as far as their texts tell; whether it steps with SGD."""
    with _name_setting(values):
        config = configs.checked(configs.with_values(asked.base, values, "--over"))
        algorithm = methods.parse_method(config.method, config.local())
        check_rounds(algorithm.local, config.rounds)
        if config.start:
            parse_start(config.start, algorithm)
    made = [named(one, algorithm) for one in algorithm.finish]
    if asked.by not in SCORES and asked.by not in made:
        there = f"makes {', '.join(made)}" if made else "makes no calibration"
        raise UserError(
            f"--by {asked.by}: the method {config.method} {there}; add {asked.by} to it, or judge otherwise"
        )
    return uses_sgd(algorithm.local)


@contextmanager
def _name_setting(values: dict[str, Value]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"with {describe_values(values)}: {error}") from error


def _own_folder(parent: Path, asked: SweepRequest) -> Path:
    """``sweep-name`` if that is unused or contains this sweep, otherwise the first unused ``sweep-name-2``, …"""
    name = f"sweep-{slug(asked.base, seed=False)}-over-{'-'.join(one.option for one in asked.over)}"[:100]
    try:
        with open_sweep(parent / name, asked):
            return parent / name
    except UserError:
        return unused_path(parent, name)


def _search(trials: Trials, asked: SweepRequest) -> list[TriedSetting]:
    count, outcomes = asked.trials or 0, list[TriedSetting]()
    search = Search(asked.over, Key(asked.seeds[0]), maximise=asked.by != "loss", worst=WORST.get(asked.by, 0.0))
    for start in range(0, count, TOGETHER):
        some = [search.ask() for _ in range(min(TOGETHER, count - start))]
        tried = trials.do([values for _, values in some])
        for (trial, _), outcome in zip(some, tried, strict=True):
            search.tell(trial, outcome.score.mean if outcome.score else None)
        outcomes += tried
    return outcomes
