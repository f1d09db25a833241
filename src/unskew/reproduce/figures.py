"""The papers' figures, drawn from records: charts of a measure, runs compared, a table's values as lines or shades."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

from unskew.analysis import parse_measure
from unskew.analysis.measure import MeasureRequest, slug
from unskew.analysis.norms import correlation
from unskew.charts import Axis, Band, Cells, Chart, Dots, Line, Mark, Rule, Words, grouped
from unskew.core.errors import UserError, nearest
from unskew.reproduce.cells import RunView, parse_reading
from unskew.reproduce.recipe import matches
from unskew.reproduce.records import RunRecord
from unskew.reproduce.results import CellResult, TableResult
from unskew.runs.finished import plain_name

WORDS = {"round": "rounds", "batches": "batches of the largest client, summed"}


def draw_curves(result: TableResult, spec: Mapping[str, Any]) -> list[Chart]:
    """A chart for each column, with a line for each training; rows that share one are one line.

    ``rows`` may name some of the rows, and ``only`` what these have in common, which ends their names.
    """
    what, against, only = spec.get("what", "accuracy"), spec.get("against", "round"), spec.get("only", "")
    charts = []
    for column in result.recipe.columns:
        lines: dict[str, tuple[str, list[RunRecord]]] = {}
        for each in result.cells:
            if each.cell.column is column and each.records and matches(each.cell.row.name, spec.get("rows", ("*",))):
                name = (each.cell.row.line or each.cell.row.name).removesuffix(f", {only}")
                lines.setdefault(each.cell.training, (name, list(each.records.values())))
        marks: list[Mark] = []
        for place, (name, records) in enumerate(lines.values()):
            marks += _curve_line(name, [_points(record, what, against) for record in records], place % 10)
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


def _points(record: RunRecord, what: str, against: str) -> dict[int, tuple[float, float]]:
    """By round, where the point is."""
    if what == "silhouette":
        return {number: (float(number), value) for number, value in record.silhouettes}
    spent = accumulate(row["batches_max"] for row in record.curve)
    return {
        row["round"]: (float(row["round"] if against == "round" else batches), row["accuracy"])
        for row, batches in zip(record.curve, spent, strict=True)
    }


def _curve_line(name: str, runs: Sequence[dict[int, tuple[float, float]]], colour: int) -> list[Mark]:
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


FARTHEST = 2.0  # that a client's labels can be from the whole
BINS = 20
BY_CALIBRATION = ("calibrated", "predicted")  # fields of measures' values that have an entry for each calibration

Spec = Mapping[str, Any]


def draw_figures(result: TableResult) -> list[Chart]:
    """Every chart of a recipe that the records have something for, each with its own name."""
    charts: list[Chart] = []
    for spec in result.recipe.figures:
        kind = spec["kind"]
        if kind not in KINDS:
            raise UserError(f"recipe {result.recipe.name}: no figure is called {kind!r}; {nearest(kind, KINDS)}")
        charts += KINDS[kind](result, spec)
    word = result.recipe.name.partition("/")[2]
    return [replace(chart, name=slug(f"{word}-{place}-{chart.name}")) for place, chart in enumerate(charts, 1)]


def _lines(result: TableResult, spec: Spec) -> list[Chart]:
    """For each column the rows as lines: ours with a band over the seeds, the paper's dashed in the same colour."""
    charts = []
    for column in result.recipe.columns:
        cells = [each for each in result.cells if each.cell.column is column and each.cell.row.line]
        names = list(dict.fromkeys(each.cell.row.line for each in cells))
        marks = [mark for place, name in enumerate(names)
                 for mark in _line([each for each in cells if each.cell.row.line == name], name, place)]  # fmt: skip
        if not any(each.values for each in cells):
            continue
        places = sorted({float(each.cell.row.x or 0) for each in cells})
        ticks = tuple((float(at), f"{value:,.0f}") for at, value in enumerate(places))  # by rank: they grow tenfold
        marks = [_ranked(mark, places) for mark in marks]
        charts.append(
            Chart(
                f"lines-{column.name}", column.name or result.recipe.title,
                f"{result.recipe.title}, {column.name}: ours as lines, the paper's dashed.", marks,
                x=Axis(spec.get("label", ""), ticks=ticks), y=Axis("accuracy, %"),
            )
        )  # fmt: skip
    return charts


def _line(cells: list[CellResult], name: str, colour: int) -> list[Mark]:
    x = [float(each.cell.row.x or 0) for each in cells]
    order = sorted(range(len(cells)), key=lambda place: x[place])
    cells, x = [cells[place] for place in order], sorted(x)
    ours = [each.ours for each in cells]
    means = [each.mean if each else None for each in ours]
    wide = [each.deviation or 0.0 if each else 0.0 for each in ours]
    low = [None if mean is None else mean - half for mean, half in zip(means, wide, strict=True)]
    high = [None if mean is None else mean + half for mean, half in zip(means, wide, strict=True)]
    tips = [f"{each.cell.row.name}: {each.words()}" for each in cells]
    marks: list[Mark] = [Band(x, low, high, colour), Line(x, means, name, colour, points=True, tips=tips)]
    paper = [each.paper.mean if each.paper and each.judged else None for each in cells]
    if any(value is not None for value in paper):
        said = [f"the paper: {each.paper}" for each in cells]
        marks.append(Line(x, paper, f"{name}, the paper", colour, dashed=True, points=True, tips=said))
    return marks


def _ranked(mark: Mark, places: list[float]) -> Mark:
    """The mark with each value of x at its rank."""
    if isinstance(mark, Line | Band):
        return replace(mark, x=[float(places.index(float(x or 0))) for x in mark.x])
    return mark


def _measure(result: TableResult, spec: Spec) -> list[Chart]:
    """Charts of a measure, of the first run of every row and column."""
    request = _request(result, spec["measure"])
    wanted = [_filled(result, pattern) for pattern in spec.get("charts", ["*"])]
    charts = []
    for name, values in _values(result, request).items():
        found = [chart for chart in request.measure.draw(values) if matches(chart.name, wanted)]
        charts += [replace(chart, title=f"{name}: {chart.title}", name=f"{name}-{chart.name}") for chart in found]
    return charts


def _compare(result: TableResult, spec: Spec) -> list[Chart]:
    """A measure of all runs in one chart."""
    request = _request(result, spec["measure"])
    values = _values(result, request)
    compare = request.measure.compare
    if compare is None or len(values) < 2:
        return []
    return list(compare.draw(values))


def _values(result: TableResult, request: MeasureRequest) -> dict[str, Any]:
    """The values of a measure by the run's label; of rows that share a run the first counts."""
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for each in result.cells:
        record = next(iter(each.records.values()), None)
        if record is None or record.training in seen or request.text not in record.measures:
            continue
        seen.add(record.training)
        stored = _as_in_the_table(result, record, record.measures[request.text])
        found[_label(result, each)] = request.measure.values(**stored)
    return found


def _as_in_the_table(result: TableResult, record: RunRecord, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """A measure's values with the calibrations that this table has alone, called as its rows."""
    names = {each.cell.after: each.cell.row.name for each in result.cells if each.cell.training == record.training}
    names["before"] = "before"  # the run's own classifier stays
    of_calibrations = {
        field: {names[key]: values for key, values in stored[field].items() if key in names}
        for field in BY_CALIBRATION
        if field in stored
    }
    return {**stored, **of_calibrations}


def _label(result: TableResult, one: CellResult) -> str:
    """What a run is called in a chart: its row where rows differ in what is trained, its column where there are two."""
    beside = {each.cell.training for each in result.cells if each.cell.column is one.cell.column}
    row = one.cell.row.line or one.cell.row.name if len(beside) > 1 else ""
    column = one.cell.column.name if len(result.recipe.columns) > 1 else ""
    alone = one.cell.row.name if result.asked.data else one.cell.column.name  # other data are not the column's
    return ", ".join(filter(None, (row, column))) or alone or one.cell.config.method


def _scatter(result: TableResult, spec: Spec) -> list[Chart]:
    """One reading of every run against another: a dot for each run, a colour for each calibration."""
    x, marks = parse_reading(spec["x"]), list[Mark]()
    y, known = parse_reading(spec["y"]), 0
    for colour, after in enumerate(spec.get("after", [""])):
        name = plain_name(_filled(result, after)) if after else ""
        points = [(_seen(x.read, each, name), _seen(y.read, each, name), each) for each in result.records]
        there = [(a, b, each) for a, b, each in points if a is not None and b is not None]
        tips = [f"{each.result.method}, seed {each.result.seed}: {a:.3f}, {b:+.2f}" for a, b, each in there]
        related = correlation([a for a, _, _ in there], [b for _, b, _ in there])
        label = spec.get("names", {}).get(after, name) + (f", correlation {related:.2f}" if related is not None else "")
        marks.append(
            Dots([a for a, _, _ in there], [b for _, b, _ in there], colour, radius=4.0, name=label, tips=tips)
        )
        known += len(there)
    if not known:
        return []
    return [
        Chart(
            "scatter", spec.get("title", result.recipe.title),
            f"{known} points: {spec['label_y']} by {spec['label_x']}.", marks,
            x=Axis(spec["label_x"]), y=Axis(spec["label_y"]), width=520, height=340,
        )
    ]  # fmt: skip


def _seen(read: Callable[[RunView], float | None], record: RunRecord, after: str) -> float | None:
    return read(RunView(record, after))


def _against_emd(result: TableResult, spec: Spec) -> list[Chart]:
    """The rows as lines over how unlike the clients of each column are."""
    marks: list[Mark] = []
    for colour, row in enumerate(result.recipe.rows):
        points = []
        for each in result.cells:
            unlike = [one.result.emd for one in each.records.values() if one.result.emd is not None]
            if each.cell.row is row and each.ours is not None and unlike:
                points.append((fmean(unlike), each))
        points.sort(key=lambda pair: pair[0])
        tips = [f"{row.name}, {each.cell.column.name}, EMD {x:.2f}: {each.words()}" for x, each in points]
        means = [each.ours.mean if each.ours else None for _, each in points]
        if points:
            marks.append(Line([x for x, _ in points], means, row.name, colour, points=True, tips=tips))
    if not marks:
        return []
    alt = f"{result.recipe.title}: {spec['label']} by the mean distance between clients and population."
    x = Axis("mean EMD between clients and population", low=0, high=FARTHEST)
    return [
        Chart("emd", spec["label"].capitalize(), alt, marks, x=x, y=Axis(spec["label"], low=0), width=520, height=340)
    ]


def _histogram(result: TableResult, spec: Spec) -> list[Chart]:
    """How far the clients of every column are from the population: a histogram of each."""
    charts = []
    for column in result.recipe.columns:
        records = [record for each in result.cells if each.cell.column is column for record in each.records.values()]
        skews = [values for record in records if (values := record.measure("skew")) is not None]
        if not skews:
            continue
        bins = [0] * BINS
        for distance in skews[0]["distances"]:
            bins[min(BINS - 1, int(distance / FARTHEST * BINS))] += 1
        ticks = tuple((at * BINS / 4 - 0.5, f"{at * FARTHEST / 4:g}") for at in range(5))
        emd = skews[0]["emd"]
        charts.append(
            Chart(
                f"histogram-{column.name}", f"{column.name}: {sum(bins)} clients, mean EMD {emd:.2f}",
                f"How many clients are how far from the population, {column.name}: mean {emd:.2f}.",
                grouped({"clients": bins}), x=Axis("EMD of a client", low=-0.5, high=BINS - 0.5, ticks=ticks),
                y=Axis("clients", low=0, kind="count"), height=200,
            )
        )  # fmt: skip
    return charts


def _grid(result: TableResult, spec: Spec) -> list[Chart]:
    """A variable of the rows against the columns, in each cell the best of what else is varied."""
    name = spec["by"]
    levels = sorted({float(each.cell.variables[name]) for each in result.cells if each.cell.done}, reverse=True)
    columns = [column for column in result.recipe.columns
               if any(each.values for each in result.cells if each.cell.column is column)]  # fmt: skip
    if not columns:
        return []
    table: list[list[float | None]] = []
    for level in levels:
        found = [[each.ours.mean for each in result.cells
                  if each.ours and each.cell.column is column and float(each.cell.variables[name]) == level]
                 for column in columns]  # fmt: skip
        table.append([max(some) if some else None for some in found])
    known = [value for line in table for value in line if value is not None]
    marks: list[Mark] = [Cells(table, min(known), max(known), ".1f")]
    marks += [
        Words(float(j), float(i), "×", "quiet") for i, line in enumerate(table) for j, v in enumerate(line) if v is None
    ]
    x, y = (tuple((float(at), each) for at, each in enumerate(those))
            for those in ([column.name for column in columns], [f"{level:.3g}" for level in levels]))  # fmt: skip
    alt = f"{result.recipe.title}: the best of each {spec['label']} and column; × is what diverged or was not run."
    return [
        Chart("grid", spec.get("title", result.recipe.title), alt, marks, x=Axis("", ticks=x),
              y=Axis(spec["label"], ticks=y), width=max(440, 160 + 56 * len(columns)),
              height=max(220, 120 + 34 * len(levels)))
    ]  # fmt: skip


def _request(result: TableResult, text: str) -> MeasureRequest:
    return parse_measure(_filled(result, text))


def _filled(result: TableResult, text: str) -> str:
    """A text of the recipe with the variables of its first cell."""
    variables = result.cells[0].cell.variables if result.cells else {}
    return text.format_map({key: str(value) for key, value in variables.items()})


KINDS: dict[str, Callable[[TableResult, Spec], list[Chart]]] = {
    "lines": _lines, "measure": _measure, "compare": _compare, "scatter": _scatter, "against-emd": _against_emd,
    "histogram": _histogram, "grid": _grid, "curves": draw_curves,
}  # fmt: skip
