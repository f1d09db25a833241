"""How training went: accuracy by round, by batch, by byte, by second; several runs with mean and band over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from statistics import fmean, stdev

from unskew.analysis.measure import Column, Comparison, Element, Measure, Table
from unskew.analysis.ranking import list_settings, name_settings
from unskew.charts import Axis, Band, Chart, Line, Mark
from unskew.core.errors import Missing, UserError
from unskew.core.units import counted, format_bytes, format_duration
from unskew.runs.finished import FinishedRun

AGAINST = {
    "round": ("rounds", "count"),
    "batches": ("batches of the largest client, summed", "count"),
    "bytes": ("bytes sent, up and down", "bytes"),
    "seconds": ("seconds of training", "seconds"),
}


@dataclass(frozen=True)
class Curves:
    """One run's evaluations, and what had been spent by each."""

    run: str
    settings: dict[str, str]  # all that decides the result but the seed
    seed: int
    round: list[int]
    batches: list[int]
    bytes: list[int]
    seconds: list[float]
    accuracy: list[float]
    loss: list[float]
    train_loss: list[float | None]  # of every round; None where nobody came
    calibrated: dict[str, float]  # accuracy after each calibration
    kept: int | None = None  # with --patience: the round whose model the run ended with


def take_curves(run: FinishedRun) -> Curves:
    """Accuracy and loss against rounds, batches, bytes and seconds, from metrics.jsonl; no data set is needed.

    Reference: Hsu, Qi and Brown 2020, Figures 6 and 7.
    """
    rows, result = run.rows, run.result
    if run.config.rounds == 0:
        raise Missing("the run has no rounds (--rounds 0): nothing was trained, and there is no curve")
    batches = list(accumulate(int(row.get("batches_max", 0)) for row in rows))
    sent = list(accumulate(int(row["bytes_up"] + row["bytes_down"]) for row in rows))
    seconds = list(accumulate(float(row["seconds"]) for row in rows))
    known = [place for place, row in enumerate(rows) if row.get("accuracy") is not None]
    for row in rows:
        for name in ("accuracy", "loss", "train_loss", "batches_max", "bytes_up", "bytes_down", "seconds"):
            value = row.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                file = run.path / "metrics.jsonl"
                raise UserError(f"{file}: round {row['round']} has the {name} {value!r}, which is not a number")
    return Curves(
        run=run.path.name,
        settings=list_settings(run),
        seed=result.seed,
        round=[int(rows[place]["round"]) for place in known],
        batches=[batches[place] for place in known],
        bytes=[sent[place] for place in known],
        seconds=[seconds[place] for place in known],
        accuracy=[float(rows[place]["accuracy"]) for place in known],
        loss=[float(rows[place].get("loss", 0.0)) for place in known],
        train_loss=[float(row["train_loss"]) if "train_loss" in row else None for row in rows],
        calibrated={name: each.accuracy for name, each in result.calibrations.items()},
        kept=result.best_round,
    )


def draw_curves(values: Curves) -> list[Chart]:
    """One run's accuracy against each of the four, and its losses."""
    charts = draw_together([values])
    trained = [(number, loss) for number, loss in enumerate(values.train_loss, 1) if loss is not None]
    losses: list[Mark] = [
        Line(
            [number for number, _ in trained], [loss for _, loss in trained], "clients, while training", 1, dashed=True
        ),
        Line(values.round, values.loss, f"server, on {_on(values)} images", 0, points=len(values.round) <= 40),
    ]
    alt = (
        f"Loss by round; the last on {_on(values)} images is {values.loss[-1]:.3f}."
        if values.loss
        else "Loss by round."
    )
    return [*charts, Chart("curves-loss", "Loss by round", alt, losses, x=Axis("round", kind="count"), y=Axis("loss"))]


def _on(values: Curves) -> str:
    """Which images accuracy and loss were measured on."""
    return "validation" if "validation" in values.settings else "test"


def _by_setting(runs: Sequence[Curves]) -> dict[str, list[Curves]]:
    """The runs of each setting, by its name; those of one setting differ in the seed alone."""
    groups: dict[str, list[Curves]] = {}
    for name, each in zip(name_settings([each.settings for each in runs]), runs, strict=True):
        groups.setdefault(name, []).append(each)
    return groups


def draw_together(runs: Sequence[Curves]) -> list[Chart]:
    """Accuracy of several runs; those that differ in the seed alone become one line, their mean, with a band."""
    groups, charts = _by_setting(runs), list[Chart]()
    for against, (words, kind) in AGAINST.items():
        marks: list[Mark] = []
        for colour, (label, group) in enumerate(groups.items()):
            x, mean, spread = _averaged(group, against)
            seeds = f" ({len(group)} seeds)" if len(group) > 1 else ""
            name = label + seeds if len(runs) > 1 else ""
            if len(group) > 1:
                low = [m - s for m, s in zip(mean, spread, strict=True)]
                high = [m + s for m, s in zip(mean, spread, strict=True)]
                marks.append(Band(x, low, high, colour % 10))
            tips = [f"{name or against} {_amount(at, kind)}: {m:.2%}" for at, m in zip(x, mean, strict=True)]
            look = {"dashed": colour // 10 % 2 == 1, "points": len(x) <= 40}  # after ten colours, dashes
            marks.append(Line(x, mean, name, colour % 10, **look, tips=tips if len(x) <= 200 else ()))
        best = max((each.accuracy[-1] for each in runs if each.accuracy), default=0.0)
        charts.append(
            Chart(
                f"curves-{against}", f"Accuracy by {words.split(',')[0]}",
                f"Accuracy against {words}; the best run ends at {best:.2%}.", marks,
                x=Axis(words, low=0, kind=kind), y=Axis("accuracy", low=0, kind="percent"),
            )
        )  # fmt: skip
    return charts


def _amount(value: float, kind: str) -> str:
    return f"{value / 1e6:,.1f} MB" if kind == "bytes" else f"{value:,.0f}{' s' if kind == 'seconds' else ''}"


def _averaged(runs: Sequence[Curves], against: str) -> tuple[list[float], list[float], list[float]]:
    """At the rounds that all of them evaluated: the mean of what was spent, the mean accuracy, its deviation."""
    common = sorted(set.intersection(*(set(each.round) for each in runs)))
    spent, mean, spread = [], [], []
    for number in common:
        places = [each.round.index(number) for each in runs]
        spent.append(fmean(getattr(each, against)[place] for each, place in zip(runs, places, strict=True)))
        accuracies = [each.accuracy[place] for each, place in zip(runs, places, strict=True)]
        mean.append(fmean(accuracies))
        spread.append(stdev(accuracies) if len(accuracies) > 1 else 0.0)
    return spent, mean, spread


def curves_findings(values: Curves) -> list[str]:
    """Where accuracy ended, whether it was still rising, what it cost."""
    if not values.accuracy:
        return ["The run was never evaluated."]
    last, best, trained = values.accuracy[-1], max(values.accuracy), counted(values.round[-1], "round")
    when = values.round[values.accuracy.index(best)]
    if values.kept in values.round:
        kept = values.accuracy[values.round.index(values.kept)]
        told = f"The model is that of round {values.kept}, the best of {trained}: it gets {kept:.2%}"
        peak = ""
    else:
        told = f"After {trained} the model gets {last:.2%}"
        peak = " (its best)" if best == last else f" (its best was {best:.2%} in round {when})"
    spent = f"{format_bytes(values.bytes[-1])} sent and {format_duration(values.seconds[-1])} of clients' training"
    return [f"{told} of the {_on(values)} images right{peak}, for {spent}."]


def show_curves(run: FinishedRun, values: Curves) -> list[Element]:
    """The charts, and a table of every round."""
    shown = [
        ("round", "count", "round"), ("accuracy", "percent", "accuracy"), ("loss", "number", "loss"),
        ("train_loss", "number", "training loss"), ("clients", "count", "clients"), ("examples", "count", "examples"),
        ("batches_max", "count", "batches, most"), ("bytes_up", "bytes", "sent up"), ("seconds", "seconds", "time"),
    ]  # fmt: skip
    if any("epsilon" in row for row in run.rows):
        shown.append(("epsilon", "number", "ε so far"))
    columns = [Column(title, kind) for _, kind, title in shown]
    table = Table("Every round", columns, [[row.get(name) for name, *_ in shown] for row in run.rows])
    return [*draw_curves(values), table]


def cut_short(runs: Mapping[str, Curves]) -> list[str]:
    """Which lines end before some of their runs do: a mean is over all seeds or it is not drawn."""
    said = []
    for name, group in _by_setting(list(runs.values())).items():
        ends = [max(each.round, default=0) for each in group]
        if len(set(ends)) > 1:
            said.append(
                f"{name}: what comes after round {min(ends):,}, as not all of its seeds went on (up to {max(ends):,})"
            )
    return said


def compare_curves(runs: Mapping[str, Curves]) -> list[Chart]:
    """Accuracy of the runs; the lines are named by what the runs differ in."""
    return draw_together(list(runs.values()))


CURVES = Measure(
    name="curves",
    values=Curves,
    take=take_curves,
    draw=draw_curves,
    findings=curves_findings,
    show=show_curves,
    title="How training went",
    text=(
        "Accuracy against rounds, against the batches of the largest client (the others wait for it), against bytes "
        "and against time."
    ),
    compare=Comparison(
        title="How training went",
        text="Runs that differ only in the seed are one line, their mean, with a band of one standard deviation.",
        draw=compare_curves,
        left_out=cut_short,
    ),
    calibrations=True,
    folder_only="curves",
    headline=1,
)
