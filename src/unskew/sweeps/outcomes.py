"""The results of a sweep: every setting with its score over the seeds, the best, the effective learning rate."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isfinite
from pathlib import Path

from unskew.charts import Axis, Band, Cells, Chart, Dots, Line, Mark, Words
from unskew.charts.files import FORMATS, chart_bytes
from unskew.core import text
from unskew.core.errors import UserError, nearest
from unskew.core.files import write_whole
from unskew.core.units import counted
from unskew.methods.fedavgm import fedavg, fedavgm
from unskew.round.local_optimizers import uses_sgd
from unskew.runs import config as configs
from unskew.runs.config import Config, Value
from unskew.runs.result import Result
from unskew.runs.seeds import SeedSpread, spread_over_seeds
from unskew.sweeps.space import Dimension, describe_values, spell_value
from unskew.sweeps.tasks import RunFailure

OTHER_SERVERS = {"fedadam", "fedyogi", "fedadagrad", "feddyn"}  # whose rate is not one number
TABLE, BEST = "table.csv", "best.toml"
SCORES = ("accuracy", "loss")  # besides these a score is a calibration's name


@dataclass(frozen=True)
class TriedSetting:
    """A setting that was tried: a result or a failure for each seed."""

    name: str  # of its folder
    values: Mapping[str, Value]
    config: Config
    runs: tuple[Result | RunFailure, ...]
    by: str  # what it is judged by

    @property
    def score(self) -> SeedSpread | None:
        """Its score over the seeds; None if a run failed, lacks that calibration or has an infinite score."""
        scores = [score_of(item, self.by) for item in self.runs]
        return spread_over_seeds(scores) if all(item is not None and isfinite(item) for item in scores) else None

    @property
    def failure(self) -> str:
        """What went wrong; empty if nothing did."""
        failed = [item for item in self.runs if isinstance(item, RunFailure)]
        if not failed:
            return "" if self.score else "no finite loss" if self.by == "loss" else f"no {self.by}"
        return "diverged" if all(item.diverged for item in failed) else failed[0].reason


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

    μ = 0 for clients that use Adam. None for methods with another server optimizer.

    Reference: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, with μ = 0 and γ = 1.
    """
    server = server_step(config.method)
    return None if server is None else server[0] * config.lr / ((1 - _momentum(config)) * (1 - server[1]))


def _momentum(config: Config) -> float:
    return config.momentum if uses_sgd(config.local()) else 0.0


def server_step(method: str) -> tuple[float, float] | None:
    """The server's rate γ and momentum β; None for another server optimizer."""
    try:
        calls = {call.name: call for call in text.parse_calls(method, "method")}
        if OTHER_SERVERS & set(calls):
            return None
        name = "fedavgm" if "fedavgm" in calls else "fedavg"
        read: Callable[..., tuple[float, float]] = _with_momentum if name == "fedavgm" else _plain
        step: tuple[float, float] = text.apply(calls[name], read, "method") if name in calls else (1.0, 0.0)
    except UserError:
        return None
    return step


def _plain(lr: float = 1.0) -> tuple[float, float]:
    fedavg(lr)
    return lr, 0.0


def _with_momentum(beta: float = 0.9, lr: float = 1.0, damped: bool = False) -> tuple[float, float]:
    fedavgm(beta, lr, damped)
    return (lr * (1 - beta) if damped else lr), beta


def effective_rates(outcomes: Sequence[TriedSetting]) -> list[float] | None:
    """The effective rate of each setting, if they differ in rate and momentum; None otherwise."""
    rates = [effective_rate(item.config) for item in outcomes]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or len({item.config.lr for item in outcomes}) < 2:
        return None
    return known if len({momentum_words(item.config) for item in outcomes}) > 1 else None


def momentum_words(config: Config) -> str:
    """The clients' momentum, and the server's where it has any."""
    beta = (server_step(config.method) or (1.0, 0.0))[1]
    return f"momentum {_momentum(config):g}" + (f", server's {beta:g}" if beta else "")


MOST = 40  # values of an option that a heat map has room for
LOGARITHMIC = 8.0  # a range whose ends are further apart than this factor is drawn on a logarithmic axis
LINES = 10  # that colours tell apart
CELL = 34  # height of a row


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """Every chart that the sweep has data for."""
    varied = [item for item in sweep.over if len(_tried(sweep, item)) > 1]
    charts = [_one(sweep, item) for item in varied]
    for across, upwards in combinations(varied, 2):
        listed = max(len(_tried(sweep, across)), len(_tried(sweep, upwards))) <= MOST
        if listed and not (across.ranged or upwards.ranged):
            charts.append(_two(sweep, across, upwards))
        elif _numeric(across) and _numeric(upwards):
            charts.append(_scattered(sweep, across, upwards))
    rates = effective_rates(sweep.outcomes)
    return [*charts, *([_by_effective_rate(sweep, rates)] if rates else [])]


def _one(sweep: Sweep, option: Dimension) -> Chart:
    """The best score for each value of an option, over all else that is varied."""
    tried, name = _tried(sweep, option), option.option.replace("_", " ")
    best = [_best(sweep, lambda item, value=value: item.values[option.option] == value) for value in tried]  # type: ignore[misc]
    means = [item.score.mean if item and item.score else None for item in best]
    positions = [float(value) for value in tried] if _numeric(option) else [float(at) for at in range(len(tried))]
    ticks = (
        None if option.ranged else tuple((at, spell_value(value)) for at, value in zip(positions, tried, strict=True))
    )
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
        f"sweep-{option.option}", f"{_score(sweep).capitalize()} by {name}{others}",
        f"Validation {_score(sweep)} by {name}{others}.", marks,
        x=Axis(name, ticks=ticks, log=_log(option, tried)), y=_axis(sweep),
    )  # fmt: skip


def _two(sweep: Sweep, across: Dimension, upwards: Dimension) -> Chart:
    """A heat map; each cell shows the best over the other options."""
    columns, rows = _tried(sweep, across), _tried(sweep, upwards)
    best = [
        [_best(sweep, _has({across.option: column, upwards.option: row})) for column in columns] for row in rows
    ]  # fmt: skip
    scale = 1 if sweep.by == "loss" else 100
    values = [[scale * item.score.mean if item and item.score else None for item in line] for line in best]
    known = [value for line in values for value in line if value is not None] or [0.0, 1.0]
    tips = [[_tip(item) if item else "diverged or failed" for item in line] for line in best]
    marks: list[Mark] = [Cells(values, min(known), max(known), ".3f" if sweep.by == "loss" else ".1f", tips)]
    marks += [
        Words(float(j), float(i), "×", "quiet")
        for i, line in enumerate(values)
        for j, v in enumerate(line)
        if v is None
    ]
    x, y = across.option.replace("_", " "), upwards.option.replace("_", " ")
    rest = "" if len(sweep.over) == 2 else ", best over the other options"
    unit = "" if sweep.by == "loss" else ", %"
    return Chart(
        f"sweep-{across.option}-{upwards.option}", f"Validation {_score(sweep)}{unit}{rest}",
        f"Validation {_score(sweep)} by {x} and {y}{rest}; × diverged or failed.", marks,
        x=Axis(x, ticks=tuple((float(at), spell_value(value)) for at, value in enumerate(columns))),
        y=Axis(y, ticks=tuple((float(at), spell_value(value)) for at, value in enumerate(rows))),
        width=max(440, 160 + 44 * len(columns)), height=max(220, 110 + CELL * len(rows)),
    )  # fmt: skip


def _scattered(sweep: Sweep, across: Dimension, upwards: Dimension) -> Chart:
    """For a search: a dot for each setting, larger is better."""
    scored = [(item, item.score.mean) for item in sweep.outcomes if item.score]
    x, y = across.option.replace("_", " "), upwards.option.replace("_", " ")
    low, high = min((score for _, score in scored), default=0.0), max((score for _, score in scored), default=1.0)
    better = [(score - low) / (high - low) if high > low else 1.0 for _, score in scored]
    area = [0.05 + 0.95 * (1 - share if sweep.by == "loss" else share) for share in better]
    dots = Dots(
        [float(item.values[across.option]) for item, _ in scored],
        [float(item.values[upwards.option]) for item, _ in scored],
        0, area, 9.0, "", [_tip(item) for item, _ in scored],
    )  # fmt: skip
    failed = [item for item in sweep.outcomes if not item.score]
    crosses = [Words(float(item.values[across.option]), float(item.values[upwards.option]), "×", "quiet")
               for item in failed]  # fmt: skip
    return Chart(
        f"sweep-{across.option}-{upwards.option}", f"Validation {_score(sweep)}: larger dots are better",
        f"{counted(len(scored), 'setting')} by {x} and {y}; × diverged or failed.", [dots, *crosses],
        x=Axis(x, log=_log(across, _tried(sweep, across))), y=Axis(y, log=_log(upwards, _tried(sweep, upwards))),
    )  # fmt: skip


def _by_effective_rate(sweep: Sweep, rates: Sequence[float]) -> Chart:
    """The best score by effective rate, a line for each momentum."""
    lines: dict[str, list[tuple[float, TriedSetting]]] = {}
    for item, rate in zip(sweep.outcomes, rates, strict=True):
        lines.setdefault(momentum_words(item.config), []).append((rate, item))
    if len(lines) > LINES or max(map(len, lines.values())) == 1:  # a search: settings rarely share a momentum
        lines = {"": [point for points in lines.values() for point in points]}
    marks: list[Mark] = []
    for colour, (name, points) in enumerate(sorted(lines.items())):
        best: dict[float, TriedSetting] = {}
        for rate, item in points:  # keep the best of settings with the same rate
            best[rate] = _better(sweep, best.get(rate), item)
        ordered = sorted(best.items())
        scores = [item.score.mean if item.score else None for _, item in ordered]
        tips = [f"η_eff {rate:.4g}: {_tip(item)}" for rate, item in ordered]
        x = [rate for rate, _ in ordered]
        marks.append(Line(x, scores, name, colour, points=True, tips=tips) if name else Dots(x, scores, 0, tips=tips))
    return Chart(
        "sweep-effective-rate", f"{_score(sweep).capitalize()} by effective learning rate",
        f"Validation {_score(sweep)} by effective learning rate, the rate over 1 − momentum.",
        marks, x=Axis("effective learning rate η / (1 − β)", log=True), y=_axis(sweep),
        whole_legend=True,
    )  # fmt: skip


def _tried(sweep: Sweep, option: Dimension) -> list[Value]:
    """The values of an option that were tried: numbers sorted, texts as they were listed."""
    found = dict.fromkeys(item.values[option.option] for item in sweep.outcomes)
    return sorted(found) if _numeric(option) else [value for value in option.values if value in found]


def _numeric(option: Dimension) -> bool:
    return option.ranged or all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in option.values
    )


def _log(option: Dimension, tried: Sequence[Value]) -> bool:
    if option.ranged or not _numeric(option):
        return option.log
    numbers = [float(value) for value in tried]
    return min(numbers) > 0 and max(numbers) / min(numbers) > LOGARITHMIC


def _has(values: dict[str, Value]) -> Callable[[TriedSetting], bool]:
    return lambda item: all(item.values[name] == value for name, value in values.items())


def _best(sweep: Sweep, chosen: Callable[[TriedSetting], bool]) -> TriedSetting | None:
    return next((item for item in sweep.ranked if chosen(item) and item.score), None)


def _better(sweep: Sweep, one: TriedSetting | None, other: TriedSetting) -> TriedSetting:
    return other if one is None else next(item for item in sweep.ranked if item in (one, other))


def _tip(outcome: TriedSetting) -> str:
    if outcome.score is None:
        return f"{describe_values(outcome.values)}: {outcome.failure}"
    score_text = outcome.score.words(decimals=4) if outcome.by == "loss" else f"{outcome.score.words(100)} %"
    return f"{describe_values(outcome.values)}: {score_text}"


def _score(sweep: Sweep) -> str:
    return sweep.by if sweep.by in ("accuracy", "loss") else f"accuracy after {sweep.by}"


def _axis(sweep: Sweep) -> Axis:
    return Axis(f"validation {_score(sweep)}", kind="number" if sweep.by == "loss" else "percent")


def tabulate(sweep: Sweep) -> list[dict[str, str]]:
    """A row for each setting, the best first: values, score and deviation over the seeds, failure."""
    rates = effective_rates(sweep.outcomes)
    by_name = dict(zip((item.name for item in sweep.outcomes), rates or (), strict=False))
    rows = []
    for item in sweep.ranked:
        row = {name.replace("_", " "): spell_value(value) for name, value in item.values.items()}
        if rates:
            row["effective lr"] = f"{by_name[item.name]:.4g}"
        row |= _scores(sweep, item)
        rows.append(row)
    return rows


def _scores(sweep: Sweep, item: TriedSetting) -> dict[str, str]:
    score, loss = item.score, sweep.by == "loss"
    name = sweep.by if sweep.by in ("accuracy", "loss") else f"after {sweep.by}"
    scale, decimals = (1, 4) if loss else (100, 2)
    row = {name: f"{scale * score.mean:.{decimals}f}" if score else ""}
    if len(sweep.seeds) > 1:
        row["±"] = f"{scale * score.deviation:.{decimals}f}" if score and score.deviation is not None else ""
        row["n"] = str(score.count) if score else ""
    return row | {"failed": item.failure}


def write_summary(sweep: Sweep, form: str = "svg") -> list[Path]:
    """Write table.csv, best.toml and the charts; returns the files."""
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
    kept = [line for line in lines if not line.startswith(("validation =", *(["seed ="] if several else [])))]
    score = best.score.words(decimals=4) if sweep.by == "loss" else f"{best.score.words(100)} %"
    over = f" over {counted(len(sweep.seeds), 'seed')}" if several else ""
    header = [
        f"# The best of {counted(len(sweep.outcomes), 'setting')}: {describe_values(best.values)}.",
        f"# On the validation images: {sweep.by} {score}{over}. This recipe trains on all training images.",
    ]
    seeds = [f"seeds = {list(sweep.seeds)}"] if several else []
    return "\n".join([*header, *kept, *seeds]) + "\n"


def check_format(form: str) -> None:
    """Reject an unknown chart format."""
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
