"""A sweep from start to finish: check, train and judge settings; write its folder, table, charts and best recipe.

``lr=0.01,0.1`` lists values of an option, ``fedprox.mu=0.01,0.1`` those of a method's knob, and ``lr=0.001..0.3 log``
is a range to search.
"""

import csv
import hashlib
import inspect
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import isfinite, nan, prod
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from unskew import methods
from unskew.calibration.federated import named
from unskew.charts import Axis, Band, Cells, Chart, Dots, Line, Mark, Words
from unskew.charts.files import chart_bytes, check_format
from unskew.core import language
from unskew.core.errors import UserError, a_kind, nearest
from unskew.core.files import read_json, usable_path, write_whole
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.plugins import require_extra
from unskew.core.units import counted
from unskew.data.photographs import Say, silent
from unskew.round.local_optimizers import check_rounds, uses_sgd
from unskew.runs import config as configs
from unskew.runs.config import OPTIONS, Config, Option, Value
from unskew.runs.finished import plain_name
from unskew.runs.folder import json_bytes, locked_folder, unused_path
from unskew.runs.prepare import parse_start, prepare
from unskew.runs.result import RESULT, Result, read_result
from unskew.runs.seeds import SeedSpread, parse_seeds, spread_over_seeds
from unskew.runs.train import slug
from unskew.sweeps.tasks import Progress, RunFailure, Task, run_tasks

MAX_SETTINGS = 10_000
LONGEST = 80  # characters of a folder's name
KINDS = {int: "an integer", float: "a number", bool: "true or false"}

_RANGE = re.compile(r"(.+?)\.\.(.+?)(\blog)?")
_VALUE = re.compile(r"""(?:[^,(\['"]|\([^)]*\)|\[[^\]]*\]|'[^']*'|"[^"]*")+""")  # with its brackets and quotes
_OTHERWISE = {"seed": "give --seeds 0,1,2 for several seeds", "validation": "give --validation SHARE"}


@dataclass(frozen=True)
class Dimension:
    """An option that a sweep varies, or a knob such as ``fedprox.mu``: the values to try, or the ends of a range."""

    option: str
    text: str  # as typed
    kind: type
    values: tuple[Any, ...]
    ranged: bool = False
    log: bool = False


def parse_over(texts: Sequence[str], flag: str = "--over") -> tuple[Dimension, ...]:
    """Parse the options to vary and check their values."""
    if not texts:
        raise UserError('a sweep needs an option to vary; give --over "lr=0.01,0.03,0.1"')
    dimensions: dict[str, Dimension] = {}
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{flag} must be texts such as 'lr=0.01,0.1', not {a_kind(text)}")
        try:
            new = _parse_dimension(text)
            if new.option in dimensions:
                raise UserError(f"{new.option} is given twice; list all of its values once")
        except UserError as error:
            raise UserError(f"{flag} {language.cut(text)}: {error}") from error
        dimensions[new.option] = new
    return tuple(dimensions.values())


def _parse_dimension(text: str) -> Dimension:
    name, _, rest = (part.strip() for part in text.partition("="))
    option = _knob_option(name) if "." in name else OPTIONS.get(name.removeprefix("--").replace("-", "_"))
    if option is None:
        names = [known for known in OPTIONS if OPTIONS[known].decides and known not in _OTHERWISE]
        hint = nearest(name, names)
        raise UserError(f'no option is called {name!r}; write NAME=VALUES, such as "lr=0.01,0.1"; {hint}')
    if not option.decides or option.name in _OTHERWISE:
        reason = _OTHERWISE.get(option.name, "it does not affect the result")
        raise UserError(f"{option.name} cannot be varied; {reason}")
    ends = _RANGE.fullmatch(rest) if option.kind in (int, float) else None
    values = [_parse_value(option, part) for part in (ends.group(1, 2) if ends else _VALUE.findall(rest))]
    if not values:
        raise UserError('no values are given; write NAME=VALUES, such as "lr=0.01,0.1"')
    if option.name in OPTIONS:  # the method checks its knobs when it is built
        for value in values:
            configs.checked(configs.with_values(Config(), {option.name: value}, "--over"))
    if ends is None:
        return Dimension(option.name, text, option.kind, tuple(dict.fromkeys(values)))
    if not values[0] < values[1] or (ends[3] and values[0] <= 0):
        raise UserError("give the lower end of a range first; a logarithmic range must be above 0")
    return Dimension(option.name, text, option.kind, tuple(values), ranged=True, log=bool(ends[3]))


def _knob_option(name: str) -> Option:
    method, _, knob = name.rpartition(".")
    knobs = _knobs(method)
    if knob not in knobs:
        raise UserError(f"{method} has no knob {knob!r}; {nearest(knob, knobs) if knobs else 'it has no knobs'}")
    declared = knobs[knob].annotation
    kinds = [kind for kind in (get_args(declared) or (declared,)) if kind in (int, float, bool, str)]
    return Option(name, float if float in kinds else kinds[0] if kinds else str, None, "")


def _knobs(method: str) -> Mapping[str, inspect.Parameter]:
    build = methods.find_method(method)
    if build is None:
        raise UserError(f"no method is called {method!r}; {nearest(method, methods.METHODS)}")
    return inspect.signature(build, eval_str=True).parameters


def _parse_value(option: Option, text: str) -> Any:
    text = text.strip()
    if option.kind is str:
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        return {"true": True, "false": False}[text.lower()] if option.kind is bool else option.kind(text)
    except (ValueError, KeyError):
        raise UserError(f"{option.name} must be {KINDS[option.kind]}, not {language.cut(text)!r}") from None


def grid(dimensions: Sequence[Dimension]) -> list[dict[str, Value]]:
    """Every combination of the values, the last option changing fastest."""
    if ranges := [dimension.text for dimension in dimensions if dimension.ranged]:
        raise UserError(f"--over {ranges[0]}: a range needs --trials N; add it, or list values")
    names, values = [dimension.option for dimension in dimensions], [dimension.values for dimension in dimensions]
    if (count := prod(map(len, values))) > MAX_SETTINGS:
        hint = "list fewer values, or give --trials N"
        raise UserError(f"{count:,} settings exceed the limit of {MAX_SETTINGS:,}; {hint}")
    return [dict(zip(names, combination, strict=True)) for combination in product(*values)]


def with_setting(base: Config, values: Mapping[str, Value]) -> Config:
    """The configuration with these values; knobs are written into the method's parentheses."""
    config = configs.with_values(base, {name: value for name, value in values.items() if "." not in name}, "--over")
    knobs = {name: value for name, value in values.items() if "." in name}
    calls = language.parse_calls(config.method, "method") if knobs else []
    for name, value in knobs.items():
        method, _, knob = name.rpartition(".")
        index = next((index for index, call in enumerate(calls) if call.name == method), None)
        if index is None or knob in (*calls[index].knobs, *list(_knobs(method))[: len(calls[index].values)]):
            raise UserError(f"--over {name}: --method {config.method!r} must contain {method} without its {knob}")
        calls[index] = replace(calls[index], knobs={**calls[index].knobs, knob: value})
    return replace(config, method=" + ".join(map(str, calls))) if knobs else config


def describe_values(values: Mapping[str, Value]) -> str:
    """A setting as text: ``lr 0.01, momentum 0.9``."""
    return ", ".join(f"{name.replace('_', ' ')} {spell_value(value)}" for name, value in values.items())


def spell_value(value: Value) -> str:
    """A value as a user writes it."""
    return f"{value:.12g}" if isinstance(value, float) else value if isinstance(value, str) else language.spell(value)


def folder_name(values: Mapping[str, Value]) -> str:
    """A setting as a folder name; if characters were dropped, a hash keeps it unique."""
    text = "_".join(f"{name.replace('_', '-')}-{spell_value(value)}" for name, value in values.items())
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-.")
    if plain == text and len(plain) <= LONGEST:
        return plain
    return f"{plain[:LONGEST].strip('-.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


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
        scores = []
        for run in self.runs:
            if isinstance(run, RunFailure):
                return None
            calibrated = run.calibrations.get(self.by) if self.by not in SCORES else None
            scores.append(calibrated.accuracy if calibrated else getattr(run, self.by, nan))
        return spread_over_seeds(scores) if all(map(isfinite, scores)) else None

    @property
    def failure(self) -> str:
        """What went wrong; empty if nothing did."""
        failures = [run for run in self.runs if isinstance(run, RunFailure)]
        if not failures:
            return "" if self.score else f"no finite {self.by}"
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


def effective_rate(config: Config) -> tuple[float, str] | None:
    """γ·η / ((1 − μ)·(1 − β)), and the momenta as text; None for methods with a server optimizer of their own.

    η and μ are the clients' rate and momentum (μ = 0 for Adam), γ and β the server's (fedavg, fedavgm).

    Reference: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, with μ = 0 and γ = 1.
    """
    knobs: dict[str, Any] = {}
    for call in language.parse_calls(config.method, "method"):
        if call.name in ("fedadam", "fedyogi", "fedadagrad", "feddyn"):
            return None
        if call.name in ("fedavg", "fedavgm"):
            bound = inspect.signature(methods.METHODS[call.name]).bind(*call.values, **call.knobs)
            bound.apply_defaults()
            knobs = bound.arguments
    own, momentum = config.momentum if uses_sgd(config.local()) else 0.0, knobs.get("beta", 0.0)
    rate = knobs.get("lr", 1.0) * (1 - momentum if knobs.get("damped") else 1)
    described = f"momentum {own:g}" + (f", server's {momentum:g}" if momentum else "")
    return rate * config.lr / ((1 - own) * (1 - momentum)), described


def effective_rates(outcomes: Sequence[TriedSetting]) -> list[tuple[float, str]] | None:
    """The effective rate of each setting and its momenta; None unless the settings differ in rate and momentum."""
    known = [rate for item in outcomes if (rate := effective_rate(item.config)) is not None]
    several = len({item.config.lr for item in outcomes}) > 1 and len({momentum for _, momentum in known}) > 1
    return known if several and len(known) == len(outcomes) else None


LOGARITHMIC = 8.0  # values whose ratio exceeds this are drawn on a logarithmic axis
LINES = 10  # with distinguishable colors


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """A chart for each option, a heat map for each pair of listed ones, and one by effective rate."""
    varied = [item for item in sweep.over if len(_tried_values(sweep, item)) > 1]
    charts = [_draw_option(sweep, item) for item in varied]
    charts += [_draw_heat_map(sweep, *pair) for pair in combinations(varied, 2) if not any(one.ranged for one in pair)]
    rates = effective_rates(sweep.outcomes)
    return [*charts, *([_draw_effective_rate(sweep, rates)] if rates else [])]


def _draw_option(sweep: Sweep, option: Dimension) -> Chart:
    """The best score for each value of an option, over the other varied options."""
    tried, name, numeric = _tried_values(sweep, option), _label(option), option.kind in (int, float)
    best = [_best_with(sweep, {option.option: value}) for value in tried]
    scores = [item.score if item else None for item in best]
    means = [score.mean if score else None for score in scores]
    positions = [float(value) for value in (tried if numeric else range(len(tried)))]
    ticks = None if option.ranged else tuple(zip(positions, map(spell_value, tried), strict=True))
    marks: list[Mark] = []
    if any(score and score.deviation is not None for score in scores):
        pairs = [(score.mean, score.deviation or 0.0) if score else (None, 0.0) for score in scores]
        low, high = ([None if mean is None else mean + sign * span for mean, span in pairs] for sign in (-1, 1))
        marks.append(Band(positions, low, high, 0))
    tips = [describe_trial(item) if item else "all diverged or failed" for item in best]
    dots = Dots(positions, means, 0, radius=4.0, tips=tips)
    marks.append(Line(positions, means, "", 0, points=True, tips=tips) if numeric and not option.ranged else dots)
    log = option.log or (numeric and min(positions) > 0 and max(positions) / min(positions) > LOGARITHMIC)
    title = f"{_score_name(sweep)} by {name}" + (", best over the other options" if len(sweep.over) > 1 else "")
    x = Axis(name, ticks=ticks, log=log)
    return Chart(f"sweep-{option.option}", title.capitalize(), f"Validation {title}.", marks, x=x, y=_score_axis(sweep))


def _draw_heat_map(sweep: Sweep, across: Dimension, upwards: Dimension) -> Chart:
    """A heat map of the best score over the other options."""
    columns, rows = _tried_values(sweep, across), _tried_values(sweep, upwards)
    best = [[_best_with(sweep, {across.option: column, upwards.option: row}) for column in columns] for row in rows]
    scale, spelling, unit = (1, ".3f", "") if sweep.by == "loss" else (100, ".1f", ", %")
    values = [[scale * item.score.mean if item and item.score else None for item in line] for line in best]
    known = [value for line in values for value in line if value is not None] or [0.0, 1.0]
    tips = [[describe_trial(item) if item else "diverged or failed" for item in line] for line in best]
    marks: list[Mark] = [Cells(values, min(known), max(known), spelling, tips)]
    empty = [(x, y) for y, line in enumerate(values) for x, value in enumerate(line) if value is None]
    marks += [Words(float(x), float(y), "×", "quiet") for x, y in empty]
    rest = "" if len(sweep.over) == 2 else ", best over the other options"
    name, x, y = _score_name(sweep), _label(across), _label(upwards)
    return Chart(
        f"sweep-{across.option}-{upwards.option}",
        f"Validation {name}{unit}{rest}",
        f"Validation {name} by {x} and {y}{rest}; × diverged or failed.",
        marks,
        x=Axis(x, ticks=tuple((float(at), spell_value(value)) for at, value in enumerate(columns))),
        y=Axis(y, ticks=tuple((float(at), spell_value(value)) for at, value in enumerate(rows))),
        width=max(440, 160 + 44 * len(columns)),
        height=max(220, 110 + 34 * len(rows)),
    )


def _draw_effective_rate(sweep: Sweep, rates: Sequence[tuple[float, str]]) -> Chart:
    """The best score by effective rate, a line for each momentum."""
    lines: dict[str, list[tuple[float, TriedSetting]]] = {}
    for item, (rate, momentum) in zip(sweep.outcomes, rates, strict=True):
        lines.setdefault(momentum, []).append((rate, item))
    if len(lines) > LINES or max(map(len, lines.values())) == 1:  # a search: settings rarely share a momentum
        lines = {"": [point for points in lines.values() for point in points]}
    marks: list[Mark] = []
    for colour, (name, points) in enumerate(sorted(lines.items())):
        best: dict[float, TriedSetting] = {}
        for rate, item in sorted(points, key=lambda point: sweep.ranked.index(point[1])):
            best.setdefault(rate, item)  # the best of settings with the same rate
        ordered = sorted(best.items())
        scores = [item.score.mean if item.score else None for _, item in ordered]
        tips = [f"η_eff {rate:.4g}: {describe_trial(item)}" for rate, item in ordered]
        x = [rate for rate, _ in ordered]
        marks.append(Line(x, scores, name, colour, points=True, tips=tips) if name else Dots(x, scores, 0, tips=tips))
    title = f"{_score_name(sweep)} by effective learning rate"
    x_axis = Axis("effective learning rate η / (1 − β)", log=True)
    alt = f"Validation {title}, the rate over 1 − momentum."
    return Chart("sweep-effective-rate", title.capitalize(), alt, marks, x=x_axis, y=_score_axis(sweep))


def _tried_values(sweep: Sweep, option: Dimension) -> list[Value]:
    """The values of an option that were tried: numbers sorted, texts in the order listed."""
    tried = {item.values[option.option] for item in sweep.outcomes}
    return sorted(tried) if option.kind in (int, float) else [value for value in option.values if value in tried]


def _best_with(sweep: Sweep, values: Mapping[str, Value]) -> TriedSetting | None:
    """The best setting that has these values."""
    return next((item for item in sweep.ranked if item.score and values.items() <= item.values.items()), None)


def describe_trial(outcome: TriedSetting) -> str:
    """A setting with its score, or why it has none."""
    return f"{describe_values(outcome.values)}: {_format_score(outcome) if outcome.score else outcome.failure}"


def _format_score(outcome: TriedSetting) -> str:
    assert outcome.score is not None
    return f"loss {outcome.score.format(decimals=4)}" if outcome.by == "loss" else f"{outcome.score.format(100)} %"


def _label(option: Dimension) -> str:
    return option.option.replace("_", " ")


def _score_name(sweep: Sweep) -> str:
    return sweep.by if sweep.by in SCORES else f"accuracy after {sweep.by}"


def _score_axis(sweep: Sweep) -> Axis:
    return Axis(f"validation {_score_name(sweep)}", kind="number" if sweep.by == "loss" else "percent")


def tabulate(sweep: Sweep) -> list[dict[str, str]]:
    """A row for each setting, the best first: values, score and deviation over the seeds, failure."""
    rates = effective_rates(sweep.outcomes)
    by_name = {item.name: rate for item, (rate, _) in zip(sweep.outcomes, rates or (), strict=False)}
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
        files[sweep.path / "figures" / f"{chart.name}.{form}"] = chart_bytes([chart], form)
    for path, content in files.items():
        write_whole(path, content)
    return list(files)


def best_recipe(sweep: Sweep, best: TriedSetting) -> str:
    """The best setting as a recipe that trains on all training images and evaluates on the test images."""
    several = len(sweep.seeds) > 1
    lines = configs.to_toml(replace(best.config, seed=sweep.seeds[0])).splitlines()[1:]
    left_out = ("validation =", "seed =") if several else ("validation =",)
    over = f" over {counted(len(sweep.seeds), 'seed')}" if several else ""
    lines = [
        f"# The best of {counted(len(sweep.outcomes), 'setting')}: {describe_values(best.values)}.",
        f"# On the validation images: {_format_score(best)}{over}. This recipe trains on all training images.",
        *(line for line in lines if not line.startswith(left_out)),
        *([f"seeds = {list(sweep.seeds)}"] if several else []),
    ]
    return "\n".join(lines) + "\n"


ABOUT, RUNS = "sweep.json", "runs"


Finished = Callable[[TriedSetting, int, int], None]  # a setting, how many are done, the total


@dataclass(frozen=True)
class Trials:
    """What a sweep tries and its folder: one folder per setting, one run per seed, ``jobs`` at a time."""

    path: Path
    base: Config  # shared by all settings, except the varied options and the seed
    over: tuple[Dimension, ...]
    seeds: tuple[int, ...]
    by: str
    trials: int | None = None  # settings for Optuna to choose; None: the whole grid
    jobs: int | None = None
    finished: Finished | None = None
    progress: Progress | None = None
    failures: dict[str, RunFailure] = field(default_factory=dict)  # by run: "lr-0.1/seed0"
    known: dict[str, TriedSetting] = field(default_factory=dict)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the sweep's folder and read which runs diverged; another sweep's folder is rejected."""
        path, begun = self.path, (self.path / ABOUT).exists()
        try:
            if path.exists() and not begun and any(file.name != ".lock" for file in path.iterdir()):
                raise UserError(f"{path} exists but is not a sweep folder; choose another --out")
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {path}: {error.strerror}; choose another --out") from error
        with locked_folder(path):
            if begun:
                self._read_failures()
            self._write_about()
            yield

    def run(self, settings: Sequence[Mapping[str, Value]]) -> list[TriedSetting]:
        """The outcome of each of these settings; unfinished runs are trained."""
        new = {name: values for values in settings if (name := folder_name(values)) not in self.known}
        tasks = [task for name, values in new.items() for task in self._tasks(name, values)]
        left = [task for task in tasks if _run_name(task) not in self.failures and not (task.path / RESULT).exists()]
        waiting = Counter(task.path.parent.name for task in left)

        def end(index: int, failure: RunFailure | None) -> None:
            name = left[index].path.parent.name
            if failure is not None:
                self.failures[_run_name(left[index])] = failure
                self._write_about()
            waiting[name] -= 1
            if not waiting[name]:
                self._conclude(name, new[name])

        for name in [name for name in new if name not in waiting]:
            self._conclude(name, new[name])
        run_tasks(left, self.jobs, end, self.progress)
        return [self.known[folder_name(values)] for values in settings]

    def _tasks(self, name: str, values: Mapping[str, Value]) -> list[Task]:
        config, folder = with_setting(self.base, values), self.path / RUNS / name
        return [Task(replace(config, seed=seed), folder / f"seed{seed}") for seed in self.seeds]

    def _conclude(self, name: str, values: Mapping[str, Value]) -> None:
        tasks = self._tasks(name, values)
        runs = tuple(self.failures.get(_run_name(task)) or read_result(task.path) for task in tasks)
        self.known[name] = TriedSetting(name, values, tasks[0].config, runs, self.by)
        if self.finished is not None:
            self.finished(self.known[name], len(self.known), self.trials or prod(len(one.values) for one in self.over))

    def _write_about(self) -> None:
        """Write sweep.json: what is tried, and which runs diverged."""
        about = {
            "settings": self._shared_settings(),
            "over": [dimension.text for dimension in self.over],
            "seeds": list(self.seeds),
            "by": self.by,
            "trials": self.trials,
            "diverged": {run: failure.reason for run, failure in self.failures.items() if failure.diverged},
        }
        write_whole(self.path / ABOUT, json_bytes(about))

    def _shared_settings(self) -> dict[str, Value]:
        varied = {"seed", *(dimension.option for dimension in self.over)}
        return {name: value for name, value in configs.deciding(self.base).items() if name not in varied}

    def _read_failures(self) -> None:
        """Read sweep.json, which must be of this sweep; values, seeds and trials may have been added."""
        file, searched = self.path / ABOUT, self.trials is not None
        before = read_json(file)
        try:
            over = parse_over(before["over"])
            same = searched == (before["trials"] is not None) and before["settings"] == self._shared_settings()
            if searched:
                same = same and over == self.over and before["by"] == self.by
            failures = {run: RunFailure(str(reason), diverged=True) for run, reason in before["diverged"].items()}
        except (LookupError, TypeError, AttributeError, UserError) as error:
            raise UserError(f"{file} is damaged: {error!r}; restore it from a backup, or delete it") from error
        if not same or {one.option for one in over} != {one.option for one in self.over}:
            texts = "; ".join(one.text for one in over)
            raise UserError(f"{self.path} contains a different sweep (over {texts}); choose another --out")
        self.failures.update(failures)


def _run_name(task: Task) -> str:
    return f"{task.path.parent.name}/{task.path.name}"


TOGETHER = 4  # settings that Optuna chooses before it learns their scores
DIGITS = 4  # significant digits of the numbers to try


def _suggest(trial: Any, dimension: Dimension) -> Any:
    if not dimension.ranged:
        index: int = trial.suggest_categorical(dimension.option, list(range(len(dimension.values))))
        return dimension.values[index]
    low, high = dimension.values
    if dimension.kind is int:
        return int(trial.suggest_int(dimension.option, low, high, log=dimension.log))
    value = trial.suggest_float(dimension.option, low, high, log=dimension.log)
    return min(max(float(f"{value:.{DIGITS}g}"), low), high)


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
    progress: Progress | None = None,
    begun: Callable[[Path], Any] | None = None,
    home: Path = Path(),
    say: Say = silent,
    trust: bool = False,
    **options: Any,
) -> Sweep:
    """Try every combination of the values of ``over``, or ``trials`` settings that Optuna chooses.

    The parameters are those of ``unskew.sweep``. ``finished`` is called with each finished setting, ``progress`` with
    the rounds done so far, ``begun`` with the sweep's folder, ``say`` while images are read; ``home`` contains
    ``runs/`` and a relative ``out``.
    """
    dimensions = parse_over(over)
    if seeds is not None and options.get("seed") is not None:
        raise UserError("seed and seeds are both given; give one of them")
    if both := next((varied for varied in dimensions if options.get(varied.option) is not None), None):
        raise UserError(f"{both.option} is both fixed and varied (--over {both.text}); leave one of them out")
    if trials is not None and not 1 <= trials <= MAX_SETTINGS:
        raise UserError(f"--trials {trials}: give 1 to {MAX_SETTINGS:,}")
    base, listed = configs.read_recipe(Path(recipe), trust=trust) if recipe else (Config(), ())
    base = configs.with_values(base, options, "sweep")
    share = validation if validation is not None else base.validation or 0.15  # as in the papers
    if not share > 0:
        raise UserError(f"--validation {share:g}: a sweep never uses the test images; give a share above 0")
    base = configs.checked(replace(base, validation=float(share)))
    if base.engine == "torchrun":
        raise UserError("--engine torchrun: a sweep spreads its runs over this machine's cores; leave --engine out")
    numbers = parse_seeds(seeds if seeds is not None else listed or [base.seed])
    name = f"sweep-{slug(base, seed=False)}-over-{'-'.join(varied.option for varied in dimensions)}"[:100]
    path = home / usable_path(out) if out else home / "runs" / name
    by = by if by in SCORES else plain_name(by)
    work = Trials(path, base, dimensions, numbers, by, trials, jobs, finished, progress)
    settings = grid(dimensions) if trials is None else None
    _check_settings(work, settings, say)
    if not out:
        try:
            with work.opened():  # this sweep has begun there, or nothing
                pass
        except UserError:
            work = replace(work, path=unused_path(home / "runs", name))
    with work.opened():
        if begun is not None:
            begun(work.path)
        outcomes = _search(work) if settings is None else work.run(settings)
        unique = {outcome.name: outcome for outcome in outcomes}  # a search may return to a setting
        return Sweep(work.path, dimensions, numbers, by, tuple(unique.values()))


def _check_settings(trials: Trials, settings: Sequence[dict[str, Value]] | None, say: Say) -> None:
    """Refuse settings that cannot run: parse every combination, and prepare one run for each value."""
    first = {varied.option: varied.values[0] for varied in trials.over}
    tried = [first, *({**first, varied.option: value} for varied in trials.over for value in varied.values[1:])]
    costly = {varied.option for varied in trials.over if varied.kind in (str, bool)} | {"clients", "per_round"}
    for values in settings or tried:
        try:
            config = configs.checked(with_setting(trials.base, values))
            algorithm = methods.parse_method(config.method, config.local())
            check_rounds(algorithm.local, config.rounds)
            if config.start:
                parse_start(config.start, algorithm)
            calibrations = [named(finisher, algorithm) for finisher in algorithm.finish]
            if trials.by not in (*SCORES, *calibrations):
                raise UserError(f"--by {trials.by}: {config.method} has only the calibrations {calibrations}; add it")
            changed = {name for name in values if values[name] != first[name]}
            if values == first or (values in tried and changed & costly):
                prepare(replace(config, seed=trials.seeds[0]), say=say)
        except UserError as error:
            raise UserError(f"with {describe_values(values)}: {error}") from error


def _search(trials: Trials) -> list[TriedSetting]:
    optuna = require_extra("optuna", "sweeps")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=Key(trials.seeds[0]).fold("sweep").number() % 2**32)
    study = optuna.create_study(sampler=sampler, direction="minimize" if trials.by == "loss" else "maximize")
    worst = 1e6 if trials.by == "loss" else 0.0  # the score of a failed setting
    count, outcomes = trials.trials or 0, list[TriedSetting]()
    for start in range(0, count, TOGETHER):
        chosen = [study.ask() for _ in range(min(TOGETHER, count - start))]
        tried = trials.run([{varied.option: _suggest(trial, varied) for varied in trials.over} for trial in chosen])
        for trial, outcome in zip(chosen, tried, strict=True):
            study.tell(trial, outcome.score.mean if outcome.score else worst)
        outcomes += tried
    return outcomes
