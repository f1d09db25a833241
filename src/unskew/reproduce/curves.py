"""Curves of a recipe's runs: accuracy by round or by batch, or the silhouette by round; the mean over seeds."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

from unskew.charts import Axis, Band, Chart, Line, Mark, Rule
from unskew.reproduce.recipe import matches
from unskew.reproduce.records import Record
from unskew.reproduce.results import TableResult

WORDS = {"round": "rounds", "batches": "batches of the largest client, summed"}


def draw_curves(result: TableResult, spec: Mapping[str, Any]) -> list[Chart]:
    """A chart for each column, with a line for each training; rows that share one are one line.

    ``rows`` may name some of the rows, and ``only`` what these have in common, which ends their names.
    """
    what, against, only = spec.get("what", "accuracy"), spec.get("against", "round"), spec.get("only", "")
    charts = []
    for column in result.recipe.columns:
        lines: dict[str, tuple[str, list[Record]]] = {}
        for each in result.cells:
            if each.cell.column is column and each.records and matches(each.cell.row.name, spec.get("rows", ("*",))):
                name = (each.cell.row.line or each.cell.row.name).removesuffix(f", {only}")
                lines.setdefault(each.cell.training, (name, list(each.records.values())))
        marks: list[Mark] = []
        for place, (name, records) in enumerate(lines.values()):
            marks += _line(name, [_points(record, what, against) for record in records], place % 10)
        if not marks:
            continue
        if "rule" in spec and not result.asked.data:
            marks.append(Rule(y=float(spec["rule"]) / 100, label=spec.get("rule_label", "the paper's")))
        words, named = WORDS[against], ", ".join(name for name, _ in lines.values())
        where = ", ".join(filter(None, (column.name, only)))
        charts.append(
            Chart(
                f"curves-{what}-{against}-{where}",
                f"{where or result.recipe.title}: {what} by {words.partition(',')[0]}",
                f"{what.capitalize()} by {words}, {where}: {named}.", marks, x=Axis(words, low=0, kind="count"),
                y=Axis(what, kind="percent" if what == "accuracy" else "number"), width=520, height=340,
            )
        )  # fmt: skip
    return charts


def _points(record: Record, what: str, against: str) -> dict[int, tuple[float, float]]:
    """By round, where the point is."""
    if what == "silhouette":
        return {number: (float(number), value) for number, value in record.silhouettes}
    spent = accumulate(row["batches_max"] for row in record.curve)
    return {
        row["round"]: (float(row["round"] if against == "round" else batches), row["accuracy"])
        for row, batches in zip(record.curve, spent, strict=True)
    }


def _line(name: str, runs: Sequence[dict[int, tuple[float, float]]], colour: int) -> list[Mark]:
    """The mean over the runs at the rounds that all have, with a band of one deviation."""
    common = sorted(set.intersection(*(set(each) for each in runs)))
    if not common:
        return []
    x = [fmean(each[number][0] for each in runs) for number in common]
    y = [fmean(each[number][1] for each in runs) for number in common]
    marks: list[Mark] = []
    if len(runs) > 1:
        wide = [stdev(each[number][1] for each in runs) for number in common]
        low = [a - b for a, b in zip(y, wide, strict=True)]
        marks.append(Band(x, low, [a + b for a, b in zip(y, wide, strict=True)], colour))
    return [*marks, Line(x, y, name, colour, points=len(x) <= 40)]
