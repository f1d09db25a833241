"""Words that several measures use in their sentences."""

from collections.abc import Mapping
from typing import Any

from unskew.analysis.measure import Cell, Column, Table
from unskew.calibration import is_bound
from unskew.core.errors import UserError
from unskew.runs.finished import FinishedRun

COUNTED_AT_A_GLANCE = 20  # clients
MAX_RUNS_NAMED = 8  # in a sentence


def after(number: int, rounds: int) -> str:
    """When local models were made from the model after that round."""
    return "after the last round" if number == rounds > 0 else f"in round {number + 1}"


def layer_words(layer: str) -> str:
    """A layer in a sentence."""
    return "the classifier" if layer == "classifier" else layer


def bound(calibration: str) -> bool:
    """Whether it is an upper bound for study, which uses what must not be pooled."""
    return is_bound(calibration)


def requested_round(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The round that the measure was asked for; the last one where all were recorded while training."""
    return next((row for row in rows if row.get("asked")), rows[-1])


def shown_of(models: int, clients: int) -> list[str]:
    """A note where local models of a small part of the clients are shown."""
    few = models < clients and clients > COUNTED_AT_A_GLANCE
    return [f"the local models of {models:,} of {clients:,} clients are shown"] if few else []


def in_figures(what: str, runs: Mapping[str, float], digits: str) -> list[str]:
    """A figure of each run, the highest first; none where there is only one run, or too many for a sentence."""
    if not 2 <= len(runs) <= MAX_RUNS_NAMED:
        return []
    ranked = sorted(runs.items(), key=lambda pair: -pair[1])
    return [f"{what}, each of one run: {', '.join(f'{name} {value:{digits}}' for name, value in ranked)}."]


def best_calibrations(run: FinishedRun, count: int) -> list[str]:
    """The run's own classifier, "", and the ``count`` best of its calibrations, in the order they were made."""
    if count < 0:
        raise UserError(f"calibrations={count}: give 0 or more")
    results = {name: each for name, each in run.result.calibrations.items() if name in run.calibrated}
    ranked = sorted(results, key=lambda name: -results[name].accuracy)
    if len(ranked) > count > 0:
        run.notes.append(f"{count} of {len(ranked)} calibrations are shown, those with the best accuracy")
    return ["", *(name for name in results if name in ranked[:count])]


def calibrations_table(run: FinishedRun) -> list[Table]:
    """The classifiers of this run with accuracy, gain and cost; no table where it has no calibrations."""
    result = run.result
    if not result.calibrations:
        return []
    rows: list[list[Cell]] = [["before", result.accuracy, None, result.loss, None, None]]
    for each in result.calibrations.values():
        rows.append([each.name, each.accuracy, each.accuracy - result.accuracy, each.loss, each.bytes_up, each.seconds])
    kinds = ("text", "percent", "points", "number", "bytes", "seconds")
    names = ("classifier", "accuracy", "gain, points", "loss", "sent for it", "time")
    columns = [Column(name, kind) for name, kind in zip(names, kinds, strict=True)]
    return [Table("Classifiers of this run", columns, rows)]
