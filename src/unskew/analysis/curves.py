"""How training went: accuracy by round, by batch, by byte, by second; several runs with mean and band over seeds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import isfinite
from statistics import fmean, stdev

from unskew.charts import Axis, Band, Chart, Line, Mark
from unskew.core.errors import UserError
from unskew.core.units import format_bytes, format_duration
from unskew.runs.options import OPTIONS
from unskew.runs.study import FinishedRun

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
    train_loss: list[float]  # of every round
    calibrated: dict[str, float]  # accuracy after each calibration


def measure(subject: FinishedRun) -> Curves:
    """Accuracy and loss against rounds, batches, bytes and seconds, from metrics.jsonl; no data set is needed.

    Reference: Hsu, Qi and Brown 2020, Figures 6 and 7.
    """
    rows, result = subject.rows, subject.result
    batches = list(accumulate(int(row.get("batches_max", 0)) for row in rows))
    sent = list(accumulate(int(row["bytes_up"] + row["bytes_down"]) for row in rows))
    seconds = list(accumulate(float(row["seconds"]) for row in rows))
    known = [place for place, row in enumerate(rows) if row.get("accuracy") is not None]
    for row in rows:
        for name in ("accuracy", "loss", "train_loss", "batches_max", "bytes_up", "bytes_down", "seconds"):
            value = row.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                file = subject.path / "metrics.jsonl"
                raise UserError(f"{file}: round {row['round']} has the {name} {value!r}, which is no number")
    return Curves(
        run=subject.path.name,
        settings=settings(subject),
        seed=result.seed,
        round=[int(rows[place]["round"]) for place in known],
        batches=[batches[place] for place in known],
        bytes=[sent[place] for place in known],
        seconds=[seconds[place] for place in known],
        accuracy=[float(rows[place]["accuracy"]) for place in known],
        loss=[float(rows[place].get("loss", 0.0)) for place in known],
        train_loss=[float(row.get("train_loss", 0.0)) for row in rows],
        calibrated={name: each.accuracy for name, each in result.calibrations.items()},
    )


def settings(subject: FinishedRun) -> dict[str, str]:
    """What a run was told, without its seed and what does not change the result: the same for runs of other seeds."""
    left_out = {"seed", "evaluate_every"} | {option.name for option in OPTIONS.values() if not option.decides}
    return {key: str(value) for key, value in asdict(subject.config).items() if key not in left_out}


def named(found: Sequence[dict[str, str]]) -> list[str]:
    """A name for each of these settings: the method, and whatever else is not the same in all of them."""
    apart = [key for key in found[0] if len({each.get(key, "") for each in found}) > 1 and key != "method"]
    words = [[each["method"], *(_knob(key, each.get(key, "")) for key in apart)] for each in found]
    return [" · ".join(each) for each in words]


def _knob(key: str, value: str) -> str:
    return value if key in ("data", "partition", "model") else f"{key.replace('_', ' ')} {value}"


def draw(found: Curves) -> list[Chart]:
    """One run's accuracy against each of the four, and its losses."""
    charts = draw_together([found])
    rounds = list(range(1, len(found.train_loss) + 1))
    losses: list[Mark] = [
        Line(rounds, found.train_loss, "clients, while training", 1, dashed=True),
        Line(found.round, found.loss, "server, on test images", 0, points=len(found.round) <= 40),
    ]
    alt = f"Loss by round; the last on test images is {found.loss[-1]:.3f}." if found.loss else "Loss by round."
    return [*charts, Chart("curves-loss", "Loss by round", alt, losses, x=Axis("round", kind="count"), y=Axis("loss"))]


def draw_together(found: Sequence[Curves]) -> list[Chart]:
    """Accuracy of several runs; those that differ in the seed alone become one line, the mean, with a band."""
    groups: dict[str, list[Curves]] = {}
    for name, each in zip(named([each.settings for each in found]) if found else [], found, strict=True):
        groups.setdefault(name, []).append(each)
    charts = []
    for against, (words, kind) in AGAINST.items():
        marks: list[Mark] = []
        for colour, (label, runs) in enumerate(groups.items()):
            x, mean, spread = _averaged(runs, against)
            seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
            name = label + seeds if len(found) > 1 else ""
            if len(runs) > 1:
                low = [m - s for m, s in zip(mean, spread, strict=True)]
                high = [m + s for m, s in zip(mean, spread, strict=True)]
                marks.append(Band(x, low, high, colour % 10))
            tips = [f"{name or against} {_said(at, kind)}: {m:.2%}" for at, m in zip(x, mean, strict=True)]
            marks.append(Line(x, mean, name, colour % 10, points=len(x) <= 40, tips=tips if len(x) <= 200 else ()))
        best = max((each.accuracy[-1] for each in found if each.accuracy), default=0.0)
        charts.append(
            Chart(
                f"curves-{against}", f"Accuracy by {words.split(',')[0]}",
                f"Test accuracy against {words}; the best run ends at {best:.2%}.", marks,
                x=Axis(words, low=0, kind=kind), y=Axis("accuracy", low=0, kind="percent"),
            )
        )  # fmt: skip
    return charts


def _said(value: float, kind: str) -> str:
    return f"{value / 1e6:,.1f} MB" if kind == "bytes" else f"{value:,.0f}{' s' if kind == 'seconds' else ''}"


def _averaged(runs: Sequence[Curves], against: str) -> tuple[list[float], list[float], list[float]]:
    """At the rounds that all of them evaluated: the mean of what was spent, the mean accuracy, its deviation."""
    common = sorted(set.intersection(*(set(each.round) for each in runs)))
    spent, mean, spread = [], [], []
    for number in common:
        places = [each.round.index(number) for each in runs]
        spent.append(fmean(getattr(each, against)[place] for each, place in zip(runs, places, strict=True)))
        values = [each.accuracy[place] for each, place in zip(runs, places, strict=True)]
        mean.append(fmean(values))
        spread.append(stdev(values) if len(values) > 1 else 0.0)
    return spent, mean, spread


def findings(found: Curves) -> list[str]:
    """Where accuracy ended, whether it was still rising, what it cost."""
    if not found.accuracy:
        return ["The run was never evaluated."]
    last, best = found.accuracy[-1], max(found.accuracy)
    when = found.round[found.accuracy.index(best)]
    peak = "its best" if best == last else f"its best was {best:.2%} in round {when}"
    words = f"After {found.round[-1]} rounds the model gets {last:.2%} of the test images right ({peak}), for "
    return [
        f"{words}{format_bytes(found.bytes[-1])} sent and {format_duration(found.seconds[-1])} of clients' training."
    ]
