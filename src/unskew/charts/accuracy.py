"""The accuracy of a run by round, as the notebook and the result show it."""

from collections.abc import Mapping, Sequence
from typing import Any

from unskew.charts import Axis, Chart, Line
from unskew.charts.files import svg

MAX_POINTS_MARKED = 40  # of a line in a chart; with more the dots would hide it


def accuracy_picture(
    rows: Sequence[Mapping[str, Any]], calibrated: Mapping[str, float] | None = None, on: str = "the test set"
) -> str:
    """Accuracy by round as inline SVG, with a dashed line for each calibration; empty if no round was evaluated."""
    evaluated = [(row["round"], row["accuracy"]) for row in rows if row.get("accuracy") is not None]
    if not evaluated:
        return ""
    rounds, scores = zip(*evaluated, strict=True)
    marks = [Line(rounds, scores, "trained", 0, points=len(scores) <= MAX_POINTS_MARKED)]
    for colour, (name, accuracy) in enumerate((calibrated or {}).items(), 1):
        ends = [rounds[0], rounds[-1]] if rounds[-1] > rounds[0] else [rounds[0], rounds[0] + 1]
        marks.append(Line(ends, [accuracy, accuracy], f"after {name}", colour % 10, dashed=True))
    alt = f"Accuracy by round; the last is {scores[-1]:.2%}."
    x, y = Axis("round", kind="count"), Axis("accuracy", kind="percent")
    return svg(Chart("accuracy", f"Accuracy on {on}", alt, marks, x=x, y=y))
