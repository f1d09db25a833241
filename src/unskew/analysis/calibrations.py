"""Which of a run's calibrations a measure shows, and what they gained."""

from unskew.analysis.elements import Cell, Column, Table
from unskew.core.errors import UserError
from unskew.runs.study import FinishedRun


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
