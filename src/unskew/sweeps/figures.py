"""Charts of a sweep: accuracy by one option, by two at a time as a heat map, by the effective learning rate."""

from collections.abc import Callable, Sequence
from itertools import combinations

from unskew.charts import Axis, Band, Cells, Chart, Dots, Line, Mark, Words
from unskew.core.units import counted
from unskew.runs.options import Value
from unskew.sweeps.outcomes import Outcome, Sweep, effective_rates, momentum_words
from unskew.sweeps.space import Dimension, spelled, words

MOST = 40  # values of an option that a heat map has room for
LOGARITHMIC = 8.0  # a range whose ends are further apart than this factor is drawn on a logarithmic axis
LINES = 10  # that colours tell apart
CELL = 34  # height of a row


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """Every chart that the sweep has something for."""
    varied = [each for each in sweep.over if len(_tried(sweep, each)) > 1]
    charts = [_one(sweep, each) for each in varied]
    for across, upwards in combinations(varied, 2):
        listed = max(len(_tried(sweep, across)), len(_tried(sweep, upwards))) <= MOST
        if listed and not (across.ranged or upwards.ranged):
            charts.append(_two(sweep, across, upwards))
        elif _numeric(across) and _numeric(upwards):
            charts.append(_scattered(sweep, across, upwards))
    rates = effective_rates(sweep.outcomes)
    return [*charts, *([_by_effective_rate(sweep, rates)] if rates else [])]


def _one(sweep: Sweep, option: Dimension) -> Chart:
    """The best score for each value of an option, over all that is varied with it."""
    tried, name = _tried(sweep, option), option.option.replace("_", " ")
    best = [_best(sweep, lambda each, value=value: each.values[option.option] == value) for value in tried]  # type: ignore[misc]
    means = [each.score.mean if each and each.score else None for each in best]
    places = [float(value) for value in tried] if _numeric(option) else [float(at) for at in range(len(tried))]
    ticks = None if option.ranged else tuple((at, spelled(value)) for at, value in zip(places, tried, strict=True))
    marks: list[Mark] = []
    if any(each and each.score and each.score.deviation is not None for each in best):
        spans = [each.score.deviation or 0.0 if each and each.score else 0.0 for each in best]
        low = [None if mean is None else mean - span for mean, span in zip(means, spans, strict=True)]
        high = [None if mean is None else mean + span for mean, span in zip(means, spans, strict=True)]
        marks.append(Band(places, low, high, 0))
    tips = [_tip(each) if each else "all diverged or failed" for each in best]
    if option.ranged or not _numeric(option):
        marks.append(Dots(places, means, 0, radius=4.0, tips=tips))
    else:
        marks.append(Line(places, means, "", 0, points=True, tips=tips))
    others = "" if len(sweep.over) == 1 else ", the best of the rest"
    return Chart(
        f"sweep-{option.option}", f"{_score(sweep).capitalize()} by {name}{others}",
        f"Validation {_score(sweep)} by {name}{others}.", marks,
        x=Axis(name, ticks=ticks, log=_log(option, tried)), y=Axis(_axis(sweep), kind=_kind(sweep)),
    )  # fmt: skip


def _two(sweep: Sweep, across: Dimension, upwards: Dimension) -> Chart:
    """A heat map; where more is varied, each cell is the best of the rest."""
    columns, rows = _tried(sweep, across), _tried(sweep, upwards)
    best = [
        [_best(sweep, _has({across.option: column, upwards.option: row})) for column in columns] for row in rows
    ]  # fmt: skip
    scale = 1 if sweep.by == "loss" else 100
    values = [[scale * each.score.mean if each and each.score else None for each in line] for line in best]
    known = [value for line in values for value in line if value is not None] or [0.0, 1.0]
    tips = [[_tip(each) if each else "diverged or failed" for each in line] for line in best]
    marks: list[Mark] = [Cells(values, min(known), max(known), ".3f" if sweep.by == "loss" else ".1f", tips)]
    marks += [
        Words(float(j), float(i), "×", "quiet")
        for i, line in enumerate(values)
        for j, v in enumerate(line)
        if v is None
    ]
    x, y = across.option.replace("_", " "), upwards.option.replace("_", " ")
    rest = "" if len(sweep.over) == 2 else ", the best of the rest"
    unit = "" if sweep.by == "loss" else ", %"
    return Chart(
        f"sweep-{across.option}-{upwards.option}", f"Validation {_score(sweep)}{unit}{rest}",
        f"Validation {_score(sweep)} by {x} and {y}{rest}; × is what diverged or failed.", marks,
        x=Axis(x, ticks=tuple((float(at), spelled(value)) for at, value in enumerate(columns))),
        y=Axis(y, ticks=tuple((float(at), spelled(value)) for at, value in enumerate(rows))),
        width=max(440, 160 + 44 * len(columns)), height=max(220, 110 + CELL * len(rows)),
    )  # fmt: skip


def _scattered(sweep: Sweep, across: Dimension, upwards: Dimension) -> Chart:
    """Where values were searched: a dot for each setting, the larger the better."""
    scored = [(each, each.score.mean) for each in sweep.outcomes if each.score]
    x, y = across.option.replace("_", " "), upwards.option.replace("_", " ")
    low, high = min((score for _, score in scored), default=0.0), max((score for _, score in scored), default=1.0)
    better = [(score - low) / (high - low) if high > low else 1.0 for _, score in scored]
    area = [0.05 + 0.95 * (1 - share if sweep.by == "loss" else share) for share in better]
    dots = Dots(
        [float(each.values[across.option]) for each, _ in scored],
        [float(each.values[upwards.option]) for each, _ in scored],
        0, area, 9.0, "", [_tip(each) for each, _ in scored],
    )  # fmt: skip
    failed = [each for each in sweep.outcomes if not each.score]
    crosses = [Words(float(each.values[across.option]), float(each.values[upwards.option]), "×", "quiet")
               for each in failed]  # fmt: skip
    return Chart(
        f"sweep-{across.option}-{upwards.option}", f"The larger the dot, the better the validation {_score(sweep)}",
        f"{counted(len(scored), 'setting')} by {x} and {y}; × is what diverged or failed.", [dots, *crosses],
        x=Axis(x, log=_log(across, _tried(sweep, across))), y=Axis(y, log=_log(upwards, _tried(sweep, upwards))),
    )  # fmt: skip


def _by_effective_rate(sweep: Sweep, rates: Sequence[float]) -> Chart:
    """Settings with the same effective rate below each other, a line for each momentum."""
    lines: dict[str, list[tuple[float, Outcome]]] = {}
    for each, rate in zip(sweep.outcomes, rates, strict=True):
        lines.setdefault(momentum_words(each.config), []).append((rate, each))
    if len(lines) > LINES or max(map(len, lines.values())) == 1:  # a search: hardly two settings share a momentum
        lines = {"": [point for points in lines.values() for point in points]}
    marks: list[Mark] = []
    for colour, (name, points) in enumerate(sorted(lines.items())):
        best: dict[float, Outcome] = {}
        for rate, each in points:  # of settings that differ in something else the best
            best[rate] = _better(sweep, best.get(rate), each)
        ordered = sorted(best.items())
        scores = [each.score.mean if each.score else None for _, each in ordered]
        tips = [f"η_eff {rate:.4g}: {_tip(each)}" for rate, each in ordered]
        x = [rate for rate, _ in ordered]
        marks.append(Line(x, scores, name, colour, points=True, tips=tips) if name else Dots(x, scores, 0, tips=tips))
    return Chart(
        "sweep-effective-rate", f"{_score(sweep).capitalize()} by effective learning rate",
        f"Validation {_score(sweep)} by effective learning rate, the rate over 1 − momentum.",
        marks, x=Axis("effective learning rate η / (1 − β)", log=True), y=Axis(_axis(sweep), kind=_kind(sweep)),
        whole_legend=True,
    )  # fmt: skip


def _tried(sweep: Sweep, option: Dimension) -> list[Value]:
    """The values of an option that were tried: numbers in their order, texts as they were listed."""
    found = dict.fromkeys(each.values[option.option] for each in sweep.outcomes)
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


def _has(values: dict[str, Value]) -> Callable[[Outcome], bool]:
    return lambda each: all(each.values[name] == value for name, value in values.items())


def _best(sweep: Sweep, chosen: Callable[[Outcome], bool]) -> Outcome | None:
    return next((each for each in sweep.ranked if chosen(each) and each.score), None)


def _better(sweep: Sweep, one: Outcome | None, other: Outcome) -> Outcome:
    return other if one is None else next(each for each in sweep.ranked if each in (one, other))


def _tip(outcome: Outcome) -> str:
    if outcome.score is None:
        return f"{words(outcome.values)}: {outcome.failure}"
    told = outcome.score.words(decimals=4) if outcome.by == "loss" else f"{outcome.score.words(100)} %"
    return f"{words(outcome.values)}: {told}"


def _score(sweep: Sweep) -> str:
    return sweep.by if sweep.by in ("accuracy", "loss") else f"accuracy after {sweep.by}"


def _axis(sweep: Sweep) -> str:
    return f"validation {_score(sweep)}"


def _kind(sweep: Sweep) -> str:
    return "number" if sweep.by == "loss" else "percent"
