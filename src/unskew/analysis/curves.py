"""How training went: accuracy by round, by batch, by byte, by second; several runs with mean and band over seeds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from math import sqrt
from operator import attrgetter
from statistics import fmean

from unskew.analysis.measure import Comparison, Element, Measure, tabulate
from unskew.analysis.ranking import group_by_settings, list_settings
from unskew.calibration import is_bound
from unskew.charts import PALETTE, Axis, Chart, Line, Mark
from unskew.charts.builders import average
from unskew.core.errors import Missing
from unskew.core.units import counted, format_bytes, format_duration
from unskew.privacy.ledger import CLIENT
from unskew.runs.finished import FinishedRun

AGAINST = {
    "round": ("rounds", "count"),
    "batches": ("batches of the largest client, summed", "count"),
    "bytes": ("bytes sent, up and down", "bytes"),
    "seconds": ("seconds of training", "seconds"),
}
SETTINGS = attrgetter("settings")


@dataclass(frozen=True)
class Curves:
    """One run's evaluations, and the cost up to each."""

    run: str
    settings: dict[str, str]  # everything that decides the result, except the seed
    seed: int
    round: list[int]
    batches: list[int]
    bytes: list[int]
    seconds: list[float]
    accuracy: list[float]
    loss: list[float]
    train_loss: list[float | None]  # of every round; None if no client took part
    calibrated: dict[str, float]  # accuracy after each calibration
    kept: int | None = None  # with --patience: the round whose model is the result

    def points(self, against: str) -> dict[int, tuple[float, float]]:
        """The cost and the accuracy, by round."""
        rows = zip(self.round, getattr(self, against), self.accuracy, strict=True)
        return {number: (cost, accuracy) for number, cost, accuracy in rows}


def volatility(accuracy: Sequence[float]) -> float | None:
    """How much accuracy jumps from one evaluation to the next; None for fewer than three evaluations.

    The root mean square difference between an evaluation and the mean of its two neighbors, divided by √1.5: 0 for a
    steady rise, and the standard deviation for independent noise.

    Reference: the volatility that FedVC reduces, Hsu, Qi and Brown 2020, section 6.3.
    """
    gaps = [b - (a + c) / 2 for a, b, c in zip(accuracy, accuracy[1:], accuracy[2:], strict=False)]
    return sqrt(sum(gap**2 for gap in gaps) / len(gaps) / 1.5) if gaps else None


def take_curves(run: FinishedRun) -> Curves:
    """Accuracy and loss against rounds, batches, bytes and seconds, from metrics.jsonl; does not need the data set.

    Reference: Hsu, Qi and Brown 2020, Figures 6 and 7.
    """
    rows, result = run.rows, run.result
    if run.config.rounds == 0:
        raise Missing("the run has no rounds (--rounds 0), so there is no curve")
    evaluated = [row.get("accuracy") is not None for row in rows]
    batches = accumulate(int(row.get("batches_max", 0)) for row in rows)
    sent = accumulate(int(row.get("bytes_up", 0) + row.get("bytes_down", 0)) for row in rows)
    seconds = accumulate(float(row.get("seconds", 0)) for row in rows)
    return Curves(
        run=run.path.name,
        settings=list_settings(run),
        seed=result.seed,
        round=[int(row["round"]) for row in compress(rows, evaluated)],
        batches=list(compress(batches, evaluated)),
        bytes=list(compress(sent, evaluated)),
        seconds=list(compress(seconds, evaluated)),
        accuracy=[float(row["accuracy"]) for row in compress(rows, evaluated)],
        loss=[float(row.get("loss", 0.0)) for row in compress(rows, evaluated)],
        train_loss=[float(row["train_loss"]) if "train_loss" in row else None for row in rows],
        calibrated={name: row.accuracy for name, row in result.calibrations.items()},
        kept=result.best_round,
    )


def _draw(values: Curves) -> list[Chart]:
    known = {number: loss for number, loss in enumerate(values.train_loss, 1) if loss is not None}
    on = f"on {_evaluated_on(values)} images"
    clients = Line(list(known), list(known.values()), "clients, during training", 1, dashed=True)
    server = Line(values.round, values.loss, f"server, {on}", 0, points=len(values.round) <= 40)
    alt = f"Loss by round{f'; the last {on} is {values.loss[-1]:.3f}' if values.loss else ''}."
    axes = Axis("round", kind="count"), Axis("loss")
    return [*draw_together([values]), Chart("curves-loss", "Loss by round", alt, [clients, server], *axes)]


def _evaluated_on(values: Curves) -> str:
    return "validation" if "validation" in values.settings else "test"


def draw_together(runs: Collection[Curves]) -> list[Chart]:
    """Accuracy of several runs; those that differ only in the seed become one line, the mean, with a band."""
    groups, charts = group_by_settings(runs, SETTINGS), list[Chart]()
    best = max((run.accuracy[-1] for run in runs if run.accuracy), default=0.0)
    for against, (label, kind) in AGAINST.items():
        if against != "round" and not any(any(getattr(run, against)) for run in runs):
            continue  # left out of a release
        marks: list[Mark] = []
        for colour, (setting, group) in enumerate(groups.items()):
            x, mean, bands = average([run.points(against) for run in group], colour)
            marks += bands
            name = setting + (f" ({len(group)} seeds)" if len(group) > 1 else "") if len(runs) > 1 else ""
            steps = _draw_calibrated(group, x, mean, name, colour if len(groups) > 1 else None)
            own = name or ("before calibration" if steps else "")
            unit = {"bytes": (1e6, ",.1f", " MB"), "seconds": (1, ",.0f", " s")}.get(kind, (1, ",.0f", ""))
            costs = [f"{at / unit[0]:{unit[1]}}{unit[2]}" for at in x]
            tips = [f"{name or against} {cost}: {m:.2%}" for cost, m in zip(costs, mean, strict=True)]
            dashed = colour // PALETTE % 2 == 1  # after ten colors
            marks.append(Line(x, mean, own, colour, dashed, len(x) <= 40, tips if len(x) <= 200 else ()))
            marks += steps
        title, alt = f"Accuracy by {label.split(',')[0]}", f"Accuracy against {label}; the best run ends at {best:.2%}."
        x_axis, y_axis = Axis(label, low=0, kind=kind), Axis("accuracy", low=0, kind="percent")
        charts.append(Chart(f"curves-{against}", title, alt, marks, x_axis, y_axis))
    return charts


def _draw_calibrated(
    group: Sequence[Curves], x: Sequence[float], mean: Sequence[float], name: str, colour: int | None
) -> list[Mark]:
    """A step at the end of a line to the accuracy after the best calibration; for a single line, after each one."""
    common = [key for key in group[0].calibrated if all(key in run.calibrated for run in group) and not is_bound(key)]
    after = {key: fmean(run.calibrated[key] for run in group) for key in common}
    if not after or not x:
        return []
    best = max(after, key=after.__getitem__)
    steps: list[Mark] = []
    for number, (key, accuracy) in enumerate(after.items() if colour is None else [(best, after[best])], 1):
        tip, label = f"after {key}: {accuracy:.2%}", ", ".join(filter(None, (name, f"after {key}")))
        own = number if colour is None else colour
        steps.append(Line([x[-1], x[-1]], [mean[-1], accuracy], label, own, True, True, (tip, tip)))
    return steps


def _findings(values: Curves) -> list[str]:
    if not values.accuracy:
        return ["The run was never evaluated."]
    last, best, trained = values.accuracy[-1], max(values.accuracy), counted(values.round[-1], "round")
    sent, spent = values.bytes[-1], format_duration(values.seconds[-1])
    cost = f", for {format_bytes(sent)} sent and {spent} of client training" if sent else ""
    on = f"on the {_evaluated_on(values)} images"
    if values.kept in values.round:
        accuracy = values.accuracy[values.round.index(values.kept)]
        return [f"The model of round {values.kept}, the best of {trained}, reaches {accuracy:.2%} {on}{cost}."]
    peak = f"its best was {best:.2%} in round {values.round[values.accuracy.index(best)]}"
    return [f"After {trained} the model reaches {last:.2%} {on} ({'its best' if best == last else peak}){cost}."]


def _show(run: FinishedRun, values: Curves) -> list[Element]:
    columns = {"round": ("round", "count"), "accuracy": ("accuracy", "percent"), "loss": ("loss", "number")}
    columns |= {"train_loss": ("training loss", "number"), "clients": ("clients", "count")}
    columns |= {"examples": ("examples", "count"), "batches_max": ("most batches", "count")}
    columns |= {"bytes_up": ("sent up", "bytes"), "seconds": ("time", "seconds")}
    if spent := [row for row in run.rows if "epsilon" in row]:
        columns["epsilon"] = (f"ε so far, for every {spent[-1].get('unit', CLIENT)}", "number")
    if run.result.released:
        columns = {name: column for name, column in columns.items() if any(name in row for row in run.rows)}
    rows = [[row.get(name) for name in columns] for row in run.rows]
    return [*_draw(values), tabulate("Every round", dict(columns.values()), rows)]


def _compare_volatility(runs: Mapping[str, Curves]) -> list[str]:
    ranked = []
    for name, group in group_by_settings(runs.values(), SETTINGS).items():
        if values := [value for run in group if (value := volatility(run.accuracy)) is not None]:
            ranked.append((fmean(values), name))
    (least, steady), (most, unsteady) = min(ranked, default=(0.0, "")), max(ranked, default=(0.0, ""))
    if most - least < 1e-4:  # equal as printed
        return []
    return [
        f"Accuracy is steadiest from one evaluation to the next with {steady} (volatility {100 * least:.2f} points) "
        f"and least steady with {unsteady} ({100 * most:.2f} points)."
    ]


def _cut_short(runs: Mapping[str, Curves]) -> list[str]:
    notes = []
    for name, group in group_by_settings(runs.values(), SETTINGS).items():
        ends = [max(run.round, default=0) for run in group]
        if min(ends) < max(ends):
            notes.append(f"{name} after round {min(ends):,}: not all of its seeds continue (up to {max(ends):,})")
    return notes


CURVES = Measure(
    name="curves",
    values=Curves,
    take=take_curves,
    draw=_draw,
    findings=_findings,
    show=_show,
    title="How training went",
    text="Accuracy against rounds, the batches of the largest client (the others wait for it), bytes and time.",
    compare=Comparison(
        text="Runs that differ only in the seed are one line, their mean, with a band of one standard deviation.",
        draw=lambda runs: draw_together(runs.values()),
        findings=_compare_volatility,
        left_out=_cut_short,
    ),
    calibrations=True,
    folder_only="curves",
    headline=1,
)
