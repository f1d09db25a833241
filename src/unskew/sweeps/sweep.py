"""A sweep from start to finish: check, train and judge settings; write its folder, table, charts and best recipe."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

from unskew import methods
from unskew.calibration.feasible import named
from unskew.charts import Axis, Band, Cells, Chart, Dots, Line, Mark, Words
from unskew.charts.files import chart_bytes, check_format
from unskew.core import text
from unskew.core.errors import UserError
from unskew.core.files import read_json, write_whole
from unskew.core.key import Key
from unskew.core.limits import usable_path
from unskew.core.machine import cores, neutral, resolve_device
from unskew.core.plugins import require_extra
from unskew.core.units import counted
from unskew.data.photographs import Say, silent
from unskew.methods.fedavgm import fedavg, fedavgm
from unskew.round.local_optimizers import check_rounds, uses_sgd
from unskew.runs import config as configs
from unskew.runs.config import CONFIG, OPTIONS, Config, Value
from unskew.runs.finished import plain_name
from unskew.runs.folder import json_bytes, locked_folder, unused_path
from unskew.runs.prepare import parse_start, prepare
from unskew.runs.result import RESULT, Result, read_result
from unskew.runs.seeds import SeedSpread, parse_seeds, spread_over_seeds
from unskew.runs.train import slug
from unskew.sweeps.space import (
    MAX_SETTINGS,
    Dimension,
    describe_values,
    folder_name,
    grid,
    parse_over,
    spell_value,
    with_setting,
)
from unskew.sweeps.tasks import RunFailure, Task, run_tasks

OTHER_SERVERS = {"fedadam", "fedyogi", "fedadagrad", "feddyn"}  # their rate is not a single number
TABLE, BEST = "table.csv", "best.toml"
SCORES = ("accuracy", "loss")  # any other score is the name of a calibration


@dataclass(frozen=True)
class TriedSetting:
    """A setting that was tried: a result or a failure for each seed."""

    name: str  # of its folder
    values: Mapping[str, Value]
    config: Config
    runs: tuple[Result | RunFailure, ...]
    by: str  # its score

    @property
    def score(self) -> SeedSpread | None:
        """Its score over the seeds; None if a run failed, lacks the calibration or has an infinite score."""
        scores = [score_of(run, self.by) for run in self.runs]
        return spread_over_seeds(scores) if all(score is not None and isfinite(score) for score in scores) else None

    @property
    def failure(self) -> str:
        """What went wrong; empty if nothing did."""
        failures = [run for run in self.runs if isinstance(run, RunFailure)]
        if not failures:
            return "" if self.score else "no finite loss" if self.by == "loss" else f"no {self.by}"
        return "diverged" if all(failure.diverged for failure in failures) else failures[0].reason


@dataclass(frozen=True, repr=False)
class Sweep:
    """The result of ``unskew.sweep``: the settings in the order they were tried, and their folder."""

    path: Path
    over: tuple[Dimension, ...]
    seeds: tuple[int, ...]
    by: str
    outcomes: tuple[TriedSetting, ...]

    @property
    def ranked(self) -> list[TriedSetting]:
        """The best first, failed ones last; ties in the order they were tried."""
        sign = 1 if self.by == "loss" else -1
        return sorted(self.outcomes, key=lambda item: (item.score is None, sign * item.score.mean if item.score else 0))

    @property
    def best(self) -> TriedSetting | None:
        """The setting with the best mean; None if all failed."""
        first = self.ranked[0]
        return first if first.score else None

    def __repr__(self) -> str:
        best = f"best {dict(self.best.values)}" if self.best else "all failed"
        return f"<Sweep of {len(self.outcomes)} settings: {best}; {self.path}>"


def score_of(run: Result | RunFailure, by: str) -> float | None:
    """A run's score: its accuracy, its loss, or the accuracy after a calibration."""
    if isinstance(run, RunFailure):
        return None
    if by in SCORES:
        return float(getattr(run, by))
    return run.calibrations[by].accuracy if by in run.calibrations else None


def effective_rate(config: Config) -> float | None:
    """γ·η / ((1 − μ)·(1 − β)): η and μ are the clients' rate and momentum, γ and β the server's (fedavg, fedavgm).

    With Adam on the clients, μ = 0. None for methods with another server optimizer.

    Reference: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, with μ = 0 and γ = 1.
    """
    server = server_step(config.method)
    return None if server is None else server[0] * config.lr / ((1 - _momentum(config)) * (1 - server[1]))


def _momentum(config: Config) -> float:
    return config.momentum if uses_sgd(config.local()) else 0.0


def server_step(method: str) -> tuple[float, float] | None:
    """The server's rate γ and momentum β; None for another server optimizer."""

    def plain(lr: float = 1.0) -> tuple[float, float]:
        fedavg(lr)  # checks the knob
        return lr, 0.0

    def with_momentum(beta: float = 0.9, lr: float = 1.0, damped: bool = False) -> tuple[float, float]:
        fedavgm(beta, lr, damped)
        return (lr * (1 - beta) if damped else lr), beta

    step = 1.0, 0.0
    try:
        calls = {call.name: call for call in text.parse_calls(method, "method")}
        if OTHER_SERVERS & set(calls):
            return None
        if "fedavgm" in calls:
            step = text.apply(calls["fedavgm"], with_momentum, "method")
        elif "fedavg" in calls:
            step = text.apply(calls["fedavg"], plain, "method")
    except UserError:
        return None
    return step


def effective_rates(outcomes: Sequence[TriedSetting]) -> list[float] | None:
    """The effective rate of each setting; None unless they differ in rate and momentum."""
    rates = [effective_rate(item.config) for item in outcomes]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or len({item.config.lr for item in outcomes}) < 2:
        return None
    return known if len({describe_momentum(item.config) for item in outcomes}) > 1 else None


def describe_momentum(config: Config) -> str:
    """The clients' momentum, and the server's if it has any."""
    beta = (server_step(config.method) or (1.0, 0.0))[1]
    return f"momentum {_momentum(config):g}" + (f", server's {beta:g}" if beta else "")


MOST = 40  # values of an option that fit in a heat map
LOGARITHMIC = 8.0  # values whose ratio exceeds this are drawn on a logarithmic axis
LINES = 10  # with distinguishable colors
CELL = 34  # height of a row


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """Every chart that the sweep has data for."""
    varied = [item for item in sweep.over if len(_tried_values(sweep, item)) > 1]
    charts = [_draw_option(sweep, item) for item in varied]
    for across, upwards in combinations(varied, 2):
        listed = max(len(_tried_values(sweep, across)), len(_tried_values(sweep, upwards))) <= MOST
        if listed and not (across.ranged or upwards.ranged):
            charts.append(_draw_heat_map(sweep, across, upwards))
        elif _numeric(across) and _numeric(upwards):
            charts.append(_draw_scatter(sweep, across, upwards))
    rates = effective_rates(sweep.outcomes)
    return [*charts, *([_draw_effective_rate(sweep, rates)] if rates else [])]


def _draw_option(sweep: Sweep, option: Dimension) -> Chart:
    """The best score for each value of an option, over the other varied options."""
    tried, name = _tried_values(sweep, option), option.label
    best = [_best_with(sweep, {option.option: value}) for value in tried]
    means = [item.score.mean if item and item.score else None for item in best]
    positions = [float(value) for value in tried] if _numeric(option) else [float(at) for at in range(len(tried))]
    ticks = None if option.ranged else tuple(zip(positions, map(spell_value, tried), strict=True))
    marks: list[Mark] = []
    if any(item and item.score and item.score.deviation is not None for item in best):
        spans = [item.score.deviation or 0.0 if item and item.score else 0.0 for item in best]
        low = [None if mean is None else mean - span for mean, span in zip(means, spans, strict=True)]
        high = [None if mean is None else mean + span for mean, span in zip(means, spans, strict=True)]
        marks.append(Band(positions, low, high, 0))
    tips = [_tip(item) if item else "all diverged or failed" for item in best]
    if option.ranged or not _numeric(option):
        marks.append(Dots(positions, means, 0, radius=4.0, tips=tips))
    else:
        marks.append(Line(positions, means, "", 0, points=True, tips=tips))
    others = "" if len(sweep.over) == 1 else ", best over the other options"
    return Chart(
        f"sweep-{option.option}",
        f"{_score_name(sweep).capitalize()} by {name}{others}",
        f"Validation {_score_name(sweep)} by {name}{others}.",
        marks,
        x=Axis(name, ticks=ticks, log=_log(option, tried)),
        y=_score_axis(sweep),
    )


def _draw_heat_map(sweep: Sweep, across: Dimension, upwards: Dimension) -> Chart:
    """A heat map of the best score over the other options."""
    columns, rows = _tried_values(sweep, across), _tried_values(sweep, upwards)
    best = [[_best_with(sweep, {across.option: column, upwards.option: row}) for column in columns] for row in rows]
    scale = 1 if sweep.by == "loss" else 100
    values = [[scale * item.score.mean if item and item.score else None for item in line] for line in best]
    known = [value for line in values for value in line if value is not None] or [0.0, 1.0]
    tips = [[_tip(item) if item else "diverged or failed" for item in line] for line in best]
    marks: list[Mark] = [Cells(values, min(known), max(known), ".3f" if sweep.by == "loss" else ".1f", tips)]
    marks += [
        Words(float(column), float(row), "×", "quiet")
        for row, line in enumerate(values)
        for column, value in enumerate(line)
        if value is None
    ]
    x, y = across.label, upwards.label
    rest = "" if len(sweep.over) == 2 else ", best over the other options"
    unit = "" if sweep.by == "loss" else ", %"
    return Chart(
        f"sweep-{across.option}-{upwards.option}",
        f"Validation {_score_name(sweep)}{unit}{rest}",
        f"Validation {_score_name(sweep)} by {x} and {y}{rest}; × diverged or failed.",
        marks,
        x=Axis(x, ticks=tuple((float(at), spell_value(value)) for at, value in enumerate(columns))),
        y=Axis(y, ticks=tuple((float(at), spell_value(value)) for at, value in enumerate(rows))),
        width=max(440, 160 + 44 * len(columns)),
        height=max(220, 110 + CELL * len(rows)),
    )


def _draw_scatter(sweep: Sweep, across: Dimension, upwards: Dimension) -> Chart:
    """For a search: a dot for each setting; larger is better."""
    scored = [(item, item.score.mean) for item in sweep.outcomes if item.score]
    x, y = across.label, upwards.label
    low, high = min((score for _, score in scored), default=0.0), max((score for _, score in scored), default=1.0)
    better = [(score - low) / (high - low) if high > low else 1.0 for _, score in scored]
    area = [0.05 + 0.95 * (1 - share if sweep.by == "loss" else share) for share in better]
    dots = Dots(
        [float(item.values[across.option]) for item, _ in scored],
        [float(item.values[upwards.option]) for item, _ in scored],
        0,
        area,
        9.0,
        "",
        [_tip(item) for item, _ in scored],
    )
    failed = [item for item in sweep.outcomes if not item.score]
    crosses = [
        Words(float(item.values[across.option]), float(item.values[upwards.option]), "×", "quiet") for item in failed
    ]
    return Chart(
        f"sweep-{across.option}-{upwards.option}",
        f"Validation {_score_name(sweep)}: larger dots are better",
        f"{counted(len(scored), 'setting')} by {x} and {y}; × diverged or failed.",
        [dots, *crosses],
        x=Axis(x, log=_log(across, _tried_values(sweep, across))),
        y=Axis(y, log=_log(upwards, _tried_values(sweep, upwards))),
    )


def _draw_effective_rate(sweep: Sweep, rates: Sequence[float]) -> Chart:
    """The best score by effective rate, a line for each momentum."""
    lines: dict[str, list[tuple[float, TriedSetting]]] = {}
    for item, rate in zip(sweep.outcomes, rates, strict=True):
        lines.setdefault(describe_momentum(item.config), []).append((rate, item))
    if len(lines) > LINES or max(map(len, lines.values())) == 1:  # a search: settings rarely share a momentum
        lines = {"": [point for points in lines.values() for point in points]}
    marks: list[Mark] = []
    for colour, (name, points) in enumerate(sorted(lines.items())):
        best: dict[float, TriedSetting] = {}
        for rate, item in sorted(points, key=lambda point: sweep.ranked.index(point[1])):
            best.setdefault(rate, item)  # the best of settings with the same rate
        ordered = sorted(best.items())
        scores = [item.score.mean if item.score else None for _, item in ordered]
        tips = [f"η_eff {rate:.4g}: {_tip(item)}" for rate, item in ordered]
        x = [rate for rate, _ in ordered]
        marks.append(Line(x, scores, name, colour, points=True, tips=tips) if name else Dots(x, scores, 0, tips=tips))
    return Chart(
        "sweep-effective-rate",
        f"{_score_name(sweep).capitalize()} by effective learning rate",
        f"Validation {_score_name(sweep)} by effective learning rate, the rate over 1 − momentum.",
        marks,
        x=Axis("effective learning rate η / (1 − β)", log=True),
        y=_score_axis(sweep),
    )


def _tried_values(sweep: Sweep, option: Dimension) -> list[Value]:
    """The values of an option that were tried: numbers sorted, texts in the order listed."""
    tried = {item.values[option.option] for item in sweep.outcomes}
    return sorted(tried) if _numeric(option) else [value for value in option.values if value in tried]


def _numeric(option: Dimension) -> bool:
    return option.ranged or all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in option.values
    )


def _log(option: Dimension, tried: Sequence[Value]) -> bool:
    if option.ranged or not _numeric(option):
        return option.log
    numbers = [float(value) for value in tried]
    return min(numbers) > 0 and max(numbers) / min(numbers) > LOGARITHMIC


def _best_with(sweep: Sweep, values: Mapping[str, Value]) -> TriedSetting | None:
    """The best setting that has these values."""
    return next((item for item in sweep.ranked if item.score and values.items() <= item.values.items()), None)


def _tip(outcome: TriedSetting) -> str:
    if outcome.score is None:
        return f"{describe_values(outcome.values)}: {outcome.failure}"
    score_text = outcome.score.format(decimals=4) if outcome.by == "loss" else f"{outcome.score.format(100)} %"
    return f"{describe_values(outcome.values)}: {score_text}"


def _score_name(sweep: Sweep) -> str:
    return sweep.by if sweep.by in SCORES else f"accuracy after {sweep.by}"


def _score_axis(sweep: Sweep) -> Axis:
    return Axis(f"validation {_score_name(sweep)}", kind="number" if sweep.by == "loss" else "percent")


def tabulate(sweep: Sweep) -> list[dict[str, str]]:
    """A row for each setting, the best first: values, score and deviation over the seeds, failure."""
    rates = effective_rates(sweep.outcomes)
    by_name = dict(zip((item.name for item in sweep.outcomes), rates or (), strict=False))
    score_name = sweep.by if sweep.by in SCORES else f"after {sweep.by}"
    scale, decimals = (1, 4) if sweep.by == "loss" else (100, 2)
    rows = []
    for item in sweep.ranked:
        row = {name.replace("_", " "): spell_value(value) for name, value in item.values.items()}
        if rates:
            row["effective lr"] = f"{by_name[item.name]:.4g}"
        score = item.score
        row[score_name] = f"{scale * score.mean:.{decimals}f}" if score else ""
        if len(sweep.seeds) > 1:
            row["±"] = f"{scale * score.deviation:.{decimals}f}" if score and score.deviation is not None else ""
            row["n"] = str(score.count) if score else ""
        rows.append(row | {"failed": item.failure})
    return rows


def write_summary(sweep: Sweep, form: str = "svg") -> list[Path]:
    """Write table.csv, best.toml and the charts, and return the files."""
    check_format(form)
    rows, text = tabulate(sweep), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files = {sweep.path / TABLE: text.getvalue().encode()}
    if sweep.best:
        files[sweep.path / BEST] = best_recipe(sweep, sweep.best).encode()
    for chart in sweep_charts(sweep):
        files[sweep.path / "figures" / f"{chart.name}.{form}"] = chart_bytes(chart, form)
    for path, content in files.items():
        write_whole(path, content)
    return list(files)


def best_recipe(sweep: Sweep, best: TriedSetting) -> str:
    """The best setting as a recipe that trains on all training images and evaluates on the test images."""
    assert best.score is not None
    several = len(sweep.seeds) > 1
    config = replace(best.config, seed=sweep.seeds[0])
    lines = configs.to_toml(config).splitlines()[1:]
    options = [line for line in lines if not line.startswith(("validation =", *(["seed ="] if several else [])))]
    score = best.score.format(decimals=4) if sweep.by == "loss" else f"{best.score.format(100)} %"
    over = f" over {counted(len(sweep.seeds), 'seed')}" if several else ""
    header = [
        f"# The best of {counted(len(sweep.outcomes), 'setting')}: {describe_values(best.values)}.",
        f"# On the validation images: {sweep.by} {score}{over}. This recipe trains on all training images.",
    ]
    seeds = [f"seeds = {list(sweep.seeds)}"] if several else []
    return "\n".join([*header, *options, *seeds]) + "\n"


ABOUT, RUNS = "sweep.json", "runs"


@dataclass(frozen=True)
class SweepRequest:
    """What a sweep tries."""

    base: Config  # shared by all settings, except the varied options and the seed
    over: tuple[Dimension, ...]
    seeds: tuple[int, ...]
    by: str
    trials: int | None = None  # settings for Optuna to choose; None: the whole grid


@contextmanager
def open_sweep(path: Path, request: SweepRequest) -> Iterator[dict[str, RunFailure]]:
    """Open and lock the sweep's folder, and yield the known failures by run; another sweep's folder is rejected."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder; choose another --out")
    begun = (path / ABOUT).exists()
    if path.exists() and not begun and any(file.name != ".lock" for file in path.iterdir()):
        raise UserError(f"{path} exists but is not the folder of a sweep; choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {path} cannot be created: {error.strerror}") from error
    with locked_folder(path):
        failures = _read_failures(path, request) if begun else {}
        write_about(path, request, failures)
        yield failures


def write_about(path: Path, request: SweepRequest, failures: Mapping[str, RunFailure]) -> None:
    """Write sweep.json: what is tried, and which runs diverged."""
    diverged = {run: failure.reason for run, failure in failures.items() if failure.diverged}
    write_whole(path / ABOUT, json_bytes({**_describe_request(request), "diverged": diverged}))


def check_run(path: Path, task: Task, request: SweepRequest) -> None:
    """Reject a run directory whose varied options, seed or validation share differ from the task's."""
    if not (path / CONFIG).exists():
        return
    existing = configs.read_run(path)
    for name in ("seed", "validation", *(dimension.option for dimension in request.over)):
        old, new = getattr(existing, name, None), getattr(task.config, name, None)
        if name in OPTIONS and OPTIONS[name].kind is not str and new is not None and old != new:
            raise UserError(f"{path} contains a run with {name} {old}, not {new}; move it, or choose another --out")


def _describe_request(request: SweepRequest) -> dict[str, Any]:
    varied = {"seed", *(dimension.option for dimension in request.over)}
    return {
        "settings": {name: value for name, value in configs.deciding(request.base).items() if name not in varied},
        "over": [dimension.text for dimension in request.over],
        "seeds": list(request.seeds),
        "by": request.by,
        "trials": request.trials,
    }


def _read_failures(path: Path, request: SweepRequest) -> dict[str, RunFailure]:
    """The failures in a folder that already has this sweep; values, seeds and trials may have been added."""
    before, now = read_json(path / ABOUT), _describe_request(request)
    try:
        settings, over = before["settings"], before["over"]
        names = {dimension.option for dimension in parse_over(over)}
        failures = {run: RunFailure(str(reason), diverged=True) for run, reason in before["diverged"].items()}
    except (LookupError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{path / ABOUT} is damaged: {error!r}; restore it from a backup, or delete it") from error
    searched = request.trials is not None
    same = over == now["over"] and before.get("by") == request.by
    if not searched:
        same = names == {dimension.option for dimension in request.over}
    if not same or (before.get("trials") is None) == searched:
        raise UserError(f"{path} contains another sweep, over {'; '.join(map(str, over))}; choose another --out")
    new = now["settings"]
    if differing := [name for name in {**settings, **new} if settings.get(name) != new.get(name)]:
        values = ", ".join(f"{name} {settings.get(name, 'unset')}" for name in differing)
        raise UserError(f"{path} contains another sweep, with {values}; choose another --out")
    return failures


TOGETHER = 4  # settings that Optuna chooses before it learns their scores
DIGITS = 4  # significant digits of the numbers to try


def _suggest(trial: Any, dimension: Dimension) -> Value:
    if dimension.values:
        index: int = trial.suggest_categorical(dimension.option, list(range(len(dimension.values))))
        return dimension.values[index]
    if dimension.kind is int:
        return int(trial.suggest_int(dimension.option, int(dimension.low), int(dimension.high), log=dimension.log))
    value = trial.suggest_float(dimension.option, dimension.low, dimension.high, log=dimension.log)
    return min(max(float(f"{value:.{DIGITS}g}"), dimension.low), dimension.high)


Finished = Callable[[TriedSetting, int, int], None]  # a setting, how many are done, the total
Rounds = Callable[[int, int], None]  # rounds done, the total


@dataclass(frozen=True)
class Trials:
    """The runs of a sweep's folder, ``jobs`` at a time: one folder per setting, one run per seed."""

    path: Path
    request: SweepRequest
    failures: dict[str, RunFailure]  # by run: "lr-0.1/seed0"
    jobs: int
    total: int  # settings to try
    finished: Finished | None
    rounds: Rounds | None
    known: dict[str, TriedSetting] = field(default_factory=dict)

    def run(self, settings: Sequence[Mapping[str, Value]]) -> list[TriedSetting]:
        """The outcome of each of these settings; unfinished runs are trained."""
        named = {folder_name(values): values for values in settings}
        new = {name: values for name, values in named.items() if name not in self.known}
        tasks = {run: task for name, values in new.items() for run, task in self._tasks(name, values).items()}
        for task in tasks.values():
            check_run(task.path, task, self.request)
        left = [run for run in tasks if run not in self.failures and not (tasks[run].path / RESULT).exists()]
        waiting = Counter(_setting(run) for run in left)
        rounds, total = dict.fromkeys(left, 0), sum(tasks[run].config.rounds for run in left)

        def end(index: int, failure: RunFailure | None) -> None:
            run, setting = left[index], _setting(left[index])
            if failure is not None:
                self.failures[run] = failure
                write_about(self.path, self.request, self.failures)
            waiting[setting] -= 1
            if not waiting[setting]:
                self._conclude(setting, new[setting])

        def advance(index: int, number: int) -> None:
            rounds[left[index]] = number
            if self.rounds is not None:
                self.rounds(sum(rounds.values()), total)

        for name in [name for name in new if name not in waiting]:
            self._conclude(name, new[name])
        run_tasks([tasks[run] for run in left], self.jobs, end, advance)
        return [self.known[folder_name(values)] for values in settings]

    def _tasks(self, name: str, values: Mapping[str, Value]) -> dict[str, Task]:
        config = with_setting(self.request.base, values)
        run_names = {seed: f"{name}/seed{seed}" for seed in self.request.seeds}
        return {run: Task(replace(config, seed=seed), self.path / RUNS / run) for seed, run in run_names.items()}

    def _conclude(self, name: str, values: Mapping[str, Value]) -> None:
        tasks = self._tasks(name, values)
        runs = tuple(self.failures.get(run) or read_result(task.path) for run, task in tasks.items())
        config = with_setting(self.request.base, values)
        self.known[name] = TriedSetting(name, values, config, runs, self.request.by)
        if self.finished is not None:
            self.finished(self.known[name], len(self.known), self.total)


def _setting(run: str) -> str:
    return run.rpartition("/")[0]


VALIDATION = 0.15  # of the training images, as in the papers
WORST = {"loss": 1e6}  # the score of a failed setting in a search; 0 for an accuracy


@neutral()
def sweep(
    recipe: str | PathLike[str] | None = None,
    *,
    over: Sequence[str],
    seeds: str | Iterable[int] | None = None,
    trials: int | None = None,
    validation: float | None = None,
    by: str = "accuracy",
    jobs: int | None = None,
    out: str | PathLike[str] | None = None,
    finished: Finished | None = None,
    progress: Rounds | None = None,
    begun: Callable[[Path], Any] | None = None,
    home: Path = Path(),
    say: Say = silent,
    trust: bool = False,
    **options: Any,
) -> Sweep:
    """Try every combination of the values of ``over``, or ``trials`` settings that Optuna chooses.

    Each setting is judged on the validation part. Called again with the same folder, the sweep continues where it
    stopped. Mistakes are reported before anything runs.

    Parameters
    ----------
    recipe
        A TOML recipe that all settings start from.
    over
        The options to vary: ``"lr=0.01,0.1"`` or, with ``trials``, ``"lr=0.001..0.3 log"``.
    seeds
        Each setting is trained with each of these: ``"0,1,2"`` or a list.
    trials
        How many settings Optuna chooses. None: all combinations.
    validation
        The share of the training images that settings are judged on. None: 15 %.
    by
        ``"accuracy"``, ``"loss"``, or the calibration whose accuracy counts.
    jobs
        Runs at the same time. None: one per core, or one on a GPU.
    out
        The sweep's folder. None: one in ``runs/``, named after the varied options.
    finished, progress, begun, say
        Called with each finished setting, with the rounds done so far, with the folder, and while images are read.
    home
        The folder that ``runs/`` and a relative ``out`` are in.
    trust
        As in ``unskew.run``.
    **options
        Options of ``unskew.run`` that all settings share.
    """
    request = _parse_request(recipe, over, seeds, trials, validation, by, options, trust)
    settings = grid(request.over) if trials is None else None
    _check_settings(request, settings, say)
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: give at least 1")
    if out:
        path = home / usable_path(out)
    else:
        varied = "-".join(dimension.option for dimension in request.over)
        name = f"sweep-{slug(request.base, seed=False)}-over-{varied}"[:100]
        path = home / "runs" / name
        try:
            with open_sweep(path, request):  # the folder is unused, or this sweep has begun in it
                pass
        except UserError:
            path = unused_path(home / "runs", name)
    with open_sweep(path, request) as failures:
        if begun is not None:
            begun(path)
        jobs = jobs or (cores() if resolve_device(request.base.device).type == "cpu" else 1)  # on a GPU one at a time
        work = Trials(path, request, failures, jobs, trials or len(settings or ()), finished, progress)
        outcomes = _search(work, request) if settings is None else work.run(settings)
        unique = {outcome.name: outcome for outcome in outcomes}  # a search may return to a setting
        return Sweep(path, request.over, request.seeds, request.by, tuple(unique.values()))


def _parse_request(
    recipe: str | PathLike[str] | None,
    over: Sequence[str],
    seeds: str | Iterable[int] | None,
    trials: int | None,
    validation: float | None,
    by: str,
    options: dict[str, Any],
    trust: bool,
) -> SweepRequest:
    dimensions = parse_over(over)
    base, listed = configs.read_recipe(Path(recipe), trust=trust) if recipe else (Config(), ())
    for varied in dimensions:
        if options.get(varied.option) is not None:
            raise UserError(f"{varied.option} is both fixed and varied (--over {varied.text}); leave one of them out")
    if seeds is not None and options.get("seed") is not None:
        raise UserError("seed and seeds are both given; give one of them")
    config = configs.with_values(base, options, "sweep")
    share = validation if validation is not None else config.validation or VALIDATION
    if not share > 0:
        raise UserError(f"--validation {share:g}: a sweep never uses the test images; give a share above 0")
    config = configs.checked(replace(config, validation=float(share)))
    if config.engine == "torchrun":
        raise UserError("--engine torchrun: a sweep spreads its runs over this machine's cores; leave --engine out")
    numbers = parse_seeds(seeds if seeds is not None else listed or [config.seed])
    if trials is not None and not 1 <= trials <= MAX_SETTINGS:
        raise UserError(f"--trials {trials}: give 1 to {MAX_SETTINGS:,}")
    return SweepRequest(config, dimensions, numbers, by if by in SCORES else plain_name(by), trials)


def _check_settings(request: SweepRequest, settings: Sequence[dict[str, Value]] | None, say: Say) -> None:
    """Refuse settings that cannot run: parse every combination, and prepare one run for each value."""
    first = {varied.option: varied.ends[0] for varied in request.over}
    tried = [first, *({**first, varied.option: value} for varied in request.over for value in varied.ends[1:])]
    use_sgd = [_check_texts(request, values) for values in settings or tried]
    if "momentum" in first and not any(use_sgd):
        raise UserError(
            f"--over momentum: --optimizer {request.base.optimizer} has no momentum; use sgd, or leave it out"
        )
    costly = {varied.option for varied in request.over if varied.kind in (str, bool)} | {"clients", "per_round"}
    for index, values in enumerate(tried):
        changed = {name for name in values if values[name] != first[name]}
        if index and not changed & costly:
            continue
        with _name_setting(values):
            prepare(replace(with_setting(request.base, values), seed=request.seeds[0]), say=say)


def _check_texts(request: SweepRequest, values: dict[str, Value]) -> bool:
    """Reject a setting whose options contradict each other; return whether it uses SGD."""
    with _name_setting(values):
        config = configs.checked(with_setting(request.base, values))
        algorithm = methods.parse_method(config.method, config.local())
        check_rounds(algorithm.local, config.rounds)
        if config.start:
            parse_start(config.start, algorithm)
    calibrations = [named(finisher, algorithm) for finisher in algorithm.finish]
    if request.by not in SCORES and request.by not in calibrations:
        raise UserError(
            f"--by {request.by}: the calibrations of {config.method} are: {', '.join(calibrations) or 'none'}; add "
            f"{request.by} to --method, or give another score"
        )
    return uses_sgd(algorithm.local)


@contextmanager
def _name_setting(values: dict[str, Value]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"with {describe_values(values)}: {error}") from error


def _search(trials: Trials, request: SweepRequest) -> list[TriedSetting]:
    """Try the settings that Optuna chooses."""
    optuna = require_extra("optuna", "sweeps")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=Key(request.seeds[0]).fold("sweep").number() % 2**32)
    study = optuna.create_study(sampler=sampler, direction="minimize" if request.by == "loss" else "maximize")
    count, outcomes = request.trials or 0, list[TriedSetting]()
    for start in range(0, count, TOGETHER):
        chosen = [study.ask() for _ in range(min(TOGETHER, count - start))]
        tried = trials.run([{varied.option: _suggest(trial, varied) for varied in request.over} for trial in chosen])
        for trial, outcome in zip(chosen, tried, strict=True):
            study.tell(trial, outcome.score.mean if outcome.score else WORST.get(request.by, 0.0))
        outcomes += tried
    return outcomes
