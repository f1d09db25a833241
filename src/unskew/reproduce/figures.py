"""The papers' figures, drawn from records: charts of measures, comparisons of runs, tables as lines or shades."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from statistics import fmean
from typing import Any

from unskew.analysis import parse_measure
from unskew.analysis.measure import MeasureRequest, slug
from unskew.analysis.norms import correlation
from unskew.charts import Axis, Band, Cells, Chart, Dots, Line, Mark, Words, average, grouped
from unskew.reproduce.cells import RunView, fill_in, parse_reading
from unskew.reproduce.recipe import RecipeColumn, matches
from unskew.reproduce.results import CellResult, TableResult
from unskew.runs.finished import plain_name

AXIS_LABELS = {"round": "rounds", "batches": "batches of the largest client, summed"}
FARTHEST = 2.0  # the largest EMD
BINS = 20
BY_CALIBRATION = {"calibrated", "predicted"}  # fields of measures' values with one entry per calibration

Spec = Mapping[str, Any]


def draw_figures(result: TableResult) -> list[Chart]:
    """Every chart of a recipe that has records, with unique names."""
    charts: list[Chart] = []
    for spec in result.recipe.figures:
        charts += KINDS[spec["kind"]](result, spec)
    table = result.recipe.name.partition("/")[2]
    return [replace(chart, name=slug(f"{table}-{number}-{chart.name}")) for number, chart in enumerate(charts, 1)]


def draw_curves(result: TableResult, spec: Spec) -> list[Chart]:
    """A chart for each column, with a line for each training; rows with the same training share a line.

    ``what`` is accuracy, relative (to the baseline) or silhouette. ``rows`` and ``columns`` select some, ``only`` is
    the common ending of the rows' names, and ``until`` is the end of the lines at the paper's scale.
    """
    what, against, only = spec.get("what", "accuracy"), spec.get("against", "round"), spec.get("only", "")
    until = float(spec.get("until", inf)) if result.variant.scale == "paper" else inf
    charts = []
    for column in result.recipe.columns:
        if not matches(column.name, spec.get("columns", ("*",))):
            continue
        lines: dict[str, tuple[str, CellResult]] = {}
        for one in _list_column(result, column):
            if one.records and matches(one.cell.row_name, spec.get("rows", ("*",))):
                name = (one.cell.row.line or one.cell.row_name).removesuffix(f", {only}")
                lines.setdefault(one.cell.training(), (name, one))
        marks: list[Mark] = []
        for colour, (name, one) in enumerate(lines.values()):
            runs = _list_points(one, what, against)
            runs = [{number: point for number, point in points.items() if point[0] <= until} for points in runs]
            x, y, bands = average(runs, colour)
            marks += [*bands, Line(x, y, name, colour, points=len(x) <= 40)] if x else []
        if not marks:
            continue
        x_label, where = AXIS_LABELS[against], ", ".join(filter(None, (column.name, only)))
        title = f"{where or result.recipe.title}: {what} by {x_label.partition(',')[0]}"
        alt = f"{what.capitalize()} by {x_label}, {where}: {', '.join(name for name, _ in lines.values())}."
        y_label = "relative accuracy" if what == "relative" else what
        x_axis = Axis(x_label, low=0, kind="count")
        y_axis = Axis(y_label, kind="number" if what == "silhouette" else "percent")
        charts.append(Chart(f"curves-{what}-{against}-{where}", title, alt, marks, x_axis, y_axis, 520, 340))
    return charts


def _list_column(result: TableResult, column: RecipeColumn) -> list[CellResult]:
    return [one for one in result.cells if one.cell.column is column]


def _list_points(one: CellResult, what: str, against: str) -> list[dict[int, tuple[float, float]]]:
    """For each run of a cell, the cost and the value by round."""
    runs = []
    for seed, record in one.records.items():
        if what == "silhouette":
            runs.append({number: (float(number), value) for number, value in record.silhouettes})
            continue
        reference = 1.0
        if what == "relative":
            if seed not in one.baselines:
                continue
            reference = max(one.baselines[seed].result.accuracy, 1e-9)
        batches = accumulate(row["batches_max"] for row in record.curve)
        rows = zip(record.curve, batches, strict=True)
        by_round = against == "round"
        runs.append({r["round"]: (float(r["round"] if by_round else at), r["accuracy"] / reference) for r, at in rows})
    return runs


def _draw_lines(result: TableResult, spec: Spec) -> list[Chart]:
    """A chart for each column with rows as lines: ours with a band over the seeds, the paper's dashed.

    x is the rank of a row's value, which grow tenfold.
    """
    charts = []
    for column in result.recipe.columns:
        cells = [one for one in _list_column(result, column) if one.cell.row.line]
        cells.sort(key=lambda one: float(one.cell.row.x or 0))
        if not any(one.values for one in cells):
            continue
        values = sorted({float(one.cell.row.x or 0) for one in cells})
        marks: list[Mark] = []
        for colour, name in enumerate(dict.fromkeys(one.cell.row.line for one in cells)):
            line = [one for one in cells if one.cell.row.line == name]
            x = [float(values.index(float(one.cell.row.x or 0))) for one in line]
            ours = [(one.ours.mean, one.ours.deviation or 0.0) if one.ours else None for one in line]
            low, mean, high = ([one and one[0] + sign * one[1] for one in ours] for sign in (-1, 0, 1))
            tips = [f"{one.cell.row_name}: {one.format()}" for one in line]
            marks += [Band(x, low, high, colour), Line(x, mean, name, colour, points=True, tips=tips)]
            paper = [one.paper.mean if one.paper and one.judged else None for one in line]
            if any(value is not None for value in paper):
                tips = [f"the paper: {one.paper}" for one in line]
                marks.append(Line(x, paper, f"{name}, the paper", colour, dashed=True, points=True, tips=tips))
        x_axis = Axis(spec.get("label", ""), ticks=tuple((float(at), f"{x:,.0f}") for at, x in enumerate(values)))
        alt = f"{result.recipe.title}, {column.name}: ours as lines, the paper's dashed."
        title = column.name or result.recipe.title
        charts.append(Chart(f"lines-{column.name}", title, alt, marks, x=x_axis, y=Axis("accuracy, %")))
    return charts


def _draw_measure(result: TableResult, spec: Spec) -> list[Chart]:
    """The charts of a measure for each run, or those that compare the runs."""
    request = parse_measure(_fill_in(result, spec["measure"]))
    values, compare = _load_values(result, request), request.measure.compare
    if spec["kind"] == "compare":
        return list(compare.draw(values)) if compare is not None and len(values) > 1 else []
    patterns = [_fill_in(result, pattern) for pattern in spec.get("charts", ["*"])]
    charts = []
    for name, stored in values.items():
        drawn = [chart for chart in request.measure.draw(stored) if matches(chart.name, patterns)]
        charts += [replace(chart, title=f"{name}: {chart.title}", name=f"{name}-{chart.name}") for chart in drawn]
    return charts


def _load_values(result: TableResult, request: MeasureRequest) -> dict[str, Any]:
    """The values of a measure by the run's label; each run counts once."""
    values: dict[str, Any] = {}
    seen: set[str] = set()
    for one in result.cells:
        record = next(iter(one.records.values()), None)
        if record is None or record.training in seen or request.text not in record.measures:
            continue
        seen.add(record.training)
        stored = record.measures[request.text]
        sharing = [other.cell for other in result.cells if other.cell.training(record.result.seed) == record.training]
        names = {"before": "before"} | {cell.after: cell.row_name for cell in sharing}  # the run's own, calibrations
        for field in BY_CALIBRATION & stored.keys():  # only the calibrations of this table, named after its rows
            renamed = {names[key]: value for key, value in stored[field].items() if key in names}
            stored = {**stored, field: renamed}
        values[_label_run(result, one)] = request.measure.values(**stored)
    return values


def _label_run(result: TableResult, one: CellResult) -> str:
    """A run's name in a chart: its row if rows have different trainings, its column if there are several."""
    trainings = {other.cell.training() for other in _list_column(result, one.cell.column)}
    row = one.cell.row.line or one.cell.row_name if len(trainings) > 1 else ""
    column = one.cell.column.name if len(result.recipe.columns) > 1 else ""
    alone = one.cell.row_name if result.variant.data else one.cell.column.name  # other data are not the column's
    return ", ".join(filter(None, (row, column))) or alone or one.cell.config.method


def _draw_scatter(result: TableResult, spec: Spec) -> list[Chart]:
    """One reading of every run against another, with a color for each calibration."""
    x, y, marks = parse_reading(spec["x"]), parse_reading(spec["y"]), list[Dots]()
    for colour, after in enumerate(spec.get("after", [""])):
        name = plain_name(_fill_in(result, after)) if after else ""
        views = [RunView(record, name) for record in result.records]
        points = [(a, b, view) for view in views if (a := x.read(view)) is not None and (b := y.read(view)) is not None]
        runs = [view.record.result for _, _, view in points]
        xs, ys = [a for a, _, _ in points], [b for _, b, _ in points]
        tips = [f"{run.method}, seed {run.seed}: {a:.3f}, {b:+.2f}" for run, a, b in zip(runs, xs, ys, strict=True)]
        related = correlation(xs, ys)
        label = spec.get("names", {}).get(after, name) + (f", correlation {related:.2f}" if related is not None else "")
        marks.append(Dots(xs, ys, colour, radius=4.0, name=label, tips=tips))
    if not (count := sum(len(dots.x) for dots in marks)):
        return []
    title, alt = spec.get("title", result.recipe.title), f"{count} points: {spec['label_y']} by {spec['label_x']}."
    x_axis, y_axis = Axis(spec["label_x"]), Axis(spec["label_y"])
    return [Chart("scatter", title, alt, marks, x=x_axis, y=y_axis, width=520, height=340)]


def _draw_against_emd(result: TableResult, spec: Spec) -> list[Chart]:
    """The rows as lines over the mean EMD of each column."""
    marks: list[Mark] = []
    for colour, name in enumerate(dict.fromkeys(one.cell.row_name for one in result.cells)):
        points = []
        for one in result.cells:
            distances = [record.result.emd for record in one.records.values() if record.result.emd is not None]
            if one.cell.row_name == name and one.ours is not None and distances:
                points.append((fmean(distances), one.ours.mean, one))
        if points and matches(name, spec.get("rows", ("*",))):
            points.sort(key=lambda point: point[0])
            tips = [f"{name}, {one.cell.column.name}, EMD {x:.2f}: {one.format()}" for x, _, one in points]
            x, y = [x for x, _, _ in points], [y for _, y, _ in points]
            marks.append(Line(x, y, name, colour, points=True, tips=tips))
    if not marks:
        return []
    label = spec["label"]
    alt = f"{result.recipe.title}: {label} by the mean distance between clients and population."
    x_axis = Axis("mean EMD between clients and population", low=0, high=FARTHEST)
    return [Chart("emd", label.capitalize(), alt, marks, x=x_axis, y=Axis(label, low=0), width=520, height=340)]


def _draw_histogram(result: TableResult, spec: Spec) -> list[Chart]:
    """A histogram for each column: how far its clients are from the population."""
    charts = []
    for column in result.recipe.columns:
        skew = _find_skew(_list_column(result, column))
        if skew is None:
            continue
        bins = [0] * BINS
        for distance in skew["distances"]:
            bins[min(BINS - 1, int(distance / FARTHEST * BINS))] += 1
        ticks = tuple((at * BINS / 4 - 0.5, f"{at * FARTHEST / 4:g}") for at in range(5))
        title = f"{column.name}: {sum(bins)} clients, mean EMD {skew['emd']:.2f}"
        alt = f"How many clients are how far from the population, {column.name}: mean {skew['emd']:.2f}."
        x, y = Axis("EMD of a client", low=-0.5, high=BINS - 0.5, ticks=ticks), Axis("clients", low=0, kind="count")
        marks = grouped({"clients": bins})
        charts.append(Chart(f"histogram-{column.name}", title, alt, marks, x=x, y=y, height=200))
    return charts


RANKED = {"classes": "classes of a client", "examples": "examples of a client", "by-class": "examples of a class"}


def _draw_ranked(result: TableResult, spec: Spec) -> list[Chart]:
    """The clients' numbers of classes or examples, or the classes' of examples, in descending order: a line per cell.

    One chart for each of ``what``, and for each row with its own runs.
    """
    rows = {
        tuple(one.cell.training() for one in result.cells if one.cell.row is row): row for row in result.recipe.rows
    }
    charts = []
    for what in spec["what"]:
        for row in rows.values():
            marks, highest = list[Mark](), 0.0
            for one in result.cells:
                if one.cell.row is row and (skew := _find_skew([one])) is not None:
                    ranked = sorted(_list_counts(skew, what), reverse=True)
                    share = [at / max(len(ranked) - 1, 1) for at in range(len(ranked))]
                    highest = max(highest, ranked[0])
                    marks.append(Line(share, ranked, one.cell.column.name or one.cell.row_name, len(marks)))
            if not marks:
                continue
            title = f"{RANKED[what].capitalize()}, in descending order" + (f": {row.name}" if len(rows) > 1 else "")
            alt = f"{title}; {len(marks)} lines."
            x = Axis(f"share of the {'classes' if what == 'by-class' else 'clients'}", low=0, high=1, kind="percent")
            y = Axis(RANKED[what], kind="count", log=highest > 1000)
            name = f"ranked-{what}" + (f"-{row.name}" if len(rows) > 1 else "")
            charts.append(Chart(name, title, alt, marks, x=x, y=y, width=520, height=340))
    return charts


def _find_skew(cells: Sequence[CellResult]) -> dict[str, Any] | None:
    """The values of the measure ``skew`` of the first of these cells' runs that has them."""
    records = (record for one in cells for record in one.records.values())
    return next((values for record in records if (values := record.measure("skew")) is not None), None)


def _list_counts(skew: Mapping[str, Any], what: str) -> list[float]:
    if what == "by-class":
        return [float(count) for count in skew["total"] if count]
    if what == "examples":
        return [float(size) for size in skew["sizes"] if size]
    ranked = skew["ranked"].get("classes")  # quantiles if there are many clients
    return list(ranked) if ranked else [float(sum(map(bool, row))) for row in skew["counts"] if any(row)]


def _draw_grid(result: TableResult, spec: Spec) -> list[Chart]:
    """A variable of the rows against the columns; each cell shows the best over the other variables."""
    name, label = spec["by"], spec["label"]
    levels = sorted({float(one.cell.variables[name]) for one in result.cells if one.cell.done}, reverse=True)
    columns = [column for column in result.recipe.columns if any(one.values for one in _list_column(result, column))]
    if not columns:
        return []

    def pick_best(level: float, column: RecipeColumn) -> float | None:
        cells = [one for one in _list_column(result, column) if float(one.cell.variables[name]) == level]
        return max((one.ours.mean for one in cells if one.ours), default=None)

    table = [[pick_best(level, column) for column in columns] for level in levels]
    values = [value for row in table for value in row if value is not None]
    marks: list[Mark] = [Cells(table, min(values), max(values), ".1f")]
    empty = [(j, i) for i, row in enumerate(table) for j, value in enumerate(row) if value is None]
    marks += [Words(float(j), float(i), "×", "quiet") for j, i in empty]
    alt = f"{result.recipe.title}: the best of each {label} and column; × diverged or was not run."
    x = Axis("", ticks=tuple((float(at), column.name) for at, column in enumerate(columns)))
    y = Axis(label, ticks=tuple((float(at), f"{level:.3g}") for at, level in enumerate(levels)))
    width, height = max(440, 160 + 56 * len(columns)), max(220, 120 + 34 * len(levels))
    return [Chart("grid", spec.get("title", result.recipe.title), alt, marks, x=x, y=y, width=width, height=height)]


def _fill_in(result: TableResult, text: str) -> str:
    return fill_in(text, result.cells[0].cell.variables if result.cells else {}, f"recipe {result.recipe.name}")


KINDS: dict[str, Callable[[TableResult, Spec], list[Chart]]] = {
    "lines": _draw_lines,
    "measure": _draw_measure,
    "compare": _draw_measure,
    "scatter": _draw_scatter,
    "against-emd": _draw_against_emd,
    "histogram": _draw_histogram,
    "grid": _draw_grid,
    "ranked": _draw_ranked,
    "curves": draw_curves,
}
