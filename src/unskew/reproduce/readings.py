"""What a cell reads of a run: its accuracy, accuracy by some round, rounds to a share of a baseline, seconds, CKA, …

A reading gives a number in the paper's unit (accuracies in per cent), or None where the run does not have it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from unskew.analysis.row_lengths import unevenness as uneven
from unskew.core import text
from unskew.core.errors import nearest
from unskew.reproduce.records import Record
from unskew.runs.milestones import accuracy_at_batch, accuracy_at_round, rounds_to

PERCENT, NUMBER, COUNT, SECONDS = "%", "", "rounds", "s"


@dataclass(frozen=True)
class Seen:
    """What a reading may look at: the run, the calibration whose classifier counts, the run it is relative to."""

    record: Record
    after: str = ""
    baseline: Record | None = None


@dataclass(frozen=True)
class Reading:
    """A reading with its knobs: the number, its unit, and whether it needs a baseline."""

    text: str
    read: Callable[[Seen], float | None]
    unit: str
    decimals: int = 2
    relative: bool = False


def accuracy(seen: Seen) -> float | None:
    """Of the final model, with its own classifier or the calibrated one."""
    result = seen.record.result
    if not seen.after:
        return 100 * result.accuracy
    made = result.calibrations.get(seen.after)
    return None if made is None else 100 * made.accuracy


def best(seen: Seen) -> float | None:
    """The best of all evaluated rounds: what a paper that reports its best round has."""
    return max((100 * row["accuracy"] for row in seen.record.curve), default=None)


def gain(seen: Seen) -> float | None:
    """What the calibration gained, in points."""
    after = accuracy(seen)
    return None if after is None or not seen.after else after - 100 * seen.record.result.accuracy


def at_round(seen: Seen, round: int) -> float | None:
    """Accuracy of the last evaluated round up to this one; None for a run that ended before it."""
    if seen.record.result.rounds < round:
        return None
    return _percent(accuracy_at_round(seen.record.curve, round))


def at_batch(seen: Seen, batches: int) -> float | None:
    """Accuracy when the largest clients of all rounds had done that many batches; None for a run that ended before."""
    rows = seen.record.curve
    if sum(row["batches_max"] for row in rows) < batches:
        return None
    return _percent(accuracy_at_batch(rows, batches))


def reached(seen: Seen, share: int) -> float | None:
    """The first evaluated round with that share, in per cent, of the baseline's accuracy; None where it never had."""
    if seen.baseline is None:
        return None
    found = rounds_to(seen.record.curve, share / 100 * seen.baseline.result.accuracy)
    return None if found is None else float(found)


def relative(seen: Seen, round: int = 0) -> float | None:
    """Accuracy in per cent of the baseline's at its end: of the final model, or by that round."""
    own = at_round(seen, round) if round else accuracy(seen)
    if own is None or seen.baseline is None or not seen.baseline.result.accuracy:
        return None
    return own / seen.baseline.result.accuracy


def emd(seen: Seen) -> float | None:
    """How unlike the clients are, from 0 to 2."""
    return seen.record.result.emd


def silhouette(seen: Seen) -> float | None:
    """Of the features after the last round, as recorded while training."""
    return seen.record.silhouettes[-1][1] if seen.record.silhouettes else None


def seconds(seen: Seen) -> float | None:
    """Of training, or of the calibration."""
    result = seen.record.result
    if not seen.after:
        return result.seconds
    made = result.calibrations.get(seen.after)
    return None if made is None else made.seconds


def separability(seen: Seen) -> float | None:
    """The mean sliced Wasserstein distance between the classes' Gaussians."""
    return _number(seen.record.measure("separability"), "mean")


def cka(seen: Seen, layer: str = "classifier") -> float | None:
    """The mean CKA of a layer between two clients' models."""
    values = seen.record.measure("cka")
    if values is None or layer not in values["layers"]:
        return None
    return float(values["means"][values["layers"].index(layer)])


def unevenness(seen: Seen, local: bool = False) -> float | None:
    """How far the lengths of the classifier's rows differ: their deviation over their mean; of local classifiers after
    the last round the mean over clients."""
    values = seen.record.measure("norms")
    if local:
        return _number(_visit(seen), "unevenness")
    rows = None if values is None else values["calibrated"].get(seen.after) if seen.after else values["server"]
    return None if rows is None else uneven(rows)


def correlation(seen: Seen, first: bool = False) -> float | None:
    """How the rows of local classifiers follow the clients' label counts, the mean over clients; in the first round or
    after the last."""
    return _number(_visit(seen, first), "correlation")


def _visit(seen: Seen, first: bool = False) -> dict[str, Any] | None:
    """The rows of local classifiers in the first round, or in the visit after the last."""
    values = seen.record.measures.get("norms(round=0)") if first else seen.record.measure("norms")
    return next((row for row in values["rounds"] if row.get("asked")), None) if values else None


READINGS: dict[str, tuple[Callable[..., float | None], str, int]] = {
    "accuracy": (accuracy, PERCENT, 2), "best": (best, PERCENT, 2), "gain": (gain, PERCENT, 2),
    "at-round": (at_round, PERCENT, 1), "at-batch": (at_batch, PERCENT, 1), "rounds-to": (reached, COUNT, 0),
    "relative": (relative, PERCENT, 1), "emd": (emd, NUMBER, 2), "silhouette": (silhouette, NUMBER, 4),
    "seconds": (seconds, SECONDS, 1), "separability": (separability, NUMBER, 3), "cka": (cka, NUMBER, 3),
    "unevenness": (unevenness, NUMBER, 3), "correlation": (correlation, NUMBER, 2),
}  # fmt: skip
RELATIVE = ("rounds-to", "relative")


def parse_reading(source: str) -> Reading:
    """The reading of a text such as ``accuracy`` or ``at-round(1000)``."""
    call = text.parse_calls(source, "reading")[0]
    if call.name not in READINGS:
        raise text.complain(source, call.start, f"no reading is called {call.name!r}; {nearest(call.name, READINGS)}")
    function, unit, decimals = READINGS[call.name]
    read: Callable[[Seen], float | None] = text.apply(call, _with_knobs(function), "reading")
    return Reading(str(call), read, unit, decimals, call.name in RELATIVE)


def check_reading(source: str) -> str:
    """The text in its plainest spelling, if there is such a reading."""
    return parse_reading(source).text


def _with_knobs(function: Callable[..., float | None]) -> Callable[..., Any]:
    """A function of the knobs alone, which gives a function of what is seen."""

    def bound(**knobs: Any) -> Callable[[Seen], float | None]:
        return partial(function, **knobs)

    knobs = list(inspect.signature(function).parameters.values())[1:]
    bound.__signature__ = inspect.Signature(knobs)  # type: ignore[attr-defined]
    return bound


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _number(values: Any, name: str) -> float | None:
    return None if values is None or values.get(name) is None else float(values[name])
