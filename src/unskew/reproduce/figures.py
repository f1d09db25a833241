"""The papers' figures, drawn from records: charts of measures, comparisons of runs, tables as lines or shades."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import Any

from unskew.analysis import parse_measure
from unskew.analysis.measure import MeasureRequest, slug
from unskew.analysis.norms import correlation
from unskew.charts import Axis, Band, Cells, Chart, Dots, Line, Mark, Words
from unskew.charts.builders import average, grouped
from unskew.reproduce.cells import RunView, fill_in, parse_reading
from unskew.reproduce.recipe import RecipeColumn, matches
from unskew.reproduce.results import CellResult, TableResult
from unskew.runs.finished import plain_name
from unskew.runs.seeds import spread_over_seeds

AXIS_LABELS = {"round": "rounds", "batches": "batches of the largest client, summed"}
FARTHEST = 2.0  # the largest EMD
BINS = 20
BY_CALIBRATION = {"calibrated", "predicted"}  # fields of measures' values with one entry per calibration

Spec = Mapping[str, Any]


def draw_figures(result: TableResult) -> list[Chart]:
    """Every chart of a recipe that has records, with unique names."""
    charts = [chart for spec in result.recipe.figures for chart in KINDS[spec["kind"]](result, spec)]
    table = result.recipe.name.partition("/")[2]
    return [replace(chart, name=slug(f"{table}-{number}-{chart.name}")) for number, chart in enumerate(charts, 1)]


def _draw_curves(result: TableResult, spec: Spec) -> Iterator[Chart]:
    """A chart for each column, with a line for each training; rows with the same training share a line.

    ``what`` is accuracy, relative (to the baseline) or silhouette. ``rows`` and ``columns`` select some, ``only`` is
    the common ending of the rows' names, and ``until`` is the end of the lines at the paper's scale.
    """
    what, against, only = spec.get("what", "accuracy"), spec.get("against", "round"), spec.get("only", "")
    until = float(spec.get("until", inf)) if result.variant.scale == "paper" else inf
    for column in result.recipe.columns:
        if not matches(column.name, spec.get("columns", ("*",))):
            continue
        lines: dict[str, tuple[str, CellResult]] = {}
        for one in _list_column(result, column):
            runs = one.baselines if what == "relative" else one.records
            if runs and matches(one.cell.row_name, spec.get("rows", ("*",))):
                name = (one.cell.row.line or one.cell.row_name).removesuffix(f", {only}")
                lines.setdefault(one.cell.training(), (name, one))
        marks: list[Mark] = []
        for colour, (name, one) in enumerate(lines.values()):
            x, y, bands = average(_list_points(one, what, against, until), colour)
            marks += [*bands, Line(x, y, name, colour, points=len(x) <= 40)] if x else []
        if not marks:
            continue
        x_label, where = AXIS_LABELS[against], ", ".join(filter(None, (column.name, only)))
        title = f"{where or result.recipe.title}: {what} by {x_label.partition(',')[0]}"
        alt = f"{what.capitalize()} by {x_label}, {where}: {', '.join(name for name, _ in lines.values())}."
        y_label = "relative accuracy" if what == "relative" else what
        x_axis = Axis(x_label, low=0, kind="count")
        y_axis = Axis(y_label, kind="number" if what == "silhouette" else "percent")
        yield Chart(f"curves-{what}-{against}-{where}", title, alt, marks, x_axis, y_axis, 520, 340)


def _list_column(result: TableResult, column: RecipeColumn) -> list[CellResult]:
    return [one for one in result.cells if one.cell.column is column]


def _list_points(one: CellResult, what: str, against: str, until: float) -> list[dict[int, tuple[float, float]]]:
    """For each run of a cell, the cost, up to ``until``, and the value by round."""
    runs = []
    for seed, record in one.records.items():
        batches = accumulate(row["batches_max"] for row in record.curve)
        costs = [row["round"] for row in record.curve] if against == "round" else batches
        rows = [(row["round"], cost, row["accuracy"]) for row, cost in zip(record.curve, costs, strict=True)]
        if what == "silhouette":
            rows = [(number, number, value) for number, value in record.silhouettes]
        elif what == "relative":
            if seed not in one.baselines:
                continue
            reference = max(one.baselines[seed].result.accuracy, 1e-9)
            rows = [(number, cost, accuracy / reference) for number, cost, accuracy in rows]
        runs.append({number: (float(cost), value) for number, cost, value in rows if cost <= until})
    return runs


def _draw_lines(result: TableResult, spec: Spec) -> Iterator[Chart]:
    """A chart for each column with rows as lines: ours with a band over the seeds, the paper's dashed.

    x is the rank of a row's value, which grow tenfold.
    """
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
        yield Chart(f"lines-{column.name}", title, alt, marks, x=x_axis, y=Axis("accuracy, %"))


def _draw_measure(result: TableResult, spec: Spec) -> Iterator[Chart]:
    """The charts of a measure for each run, or those that compare the runs."""
    request = parse_measure(_fill_in(result, spec["measure"]))
    values, compare = _load_values(result, request), request.measure.compare
    if spec["kind"] == "compare":
        yield from compare.draw(values) if compare is not None and len(values) > 1 else ()
        return
    patterns = [_fill_in(result, pattern) for pattern in spec.get("charts", ["*"])]
    for name, stored in values.items():
        for chart in request.measure.draw(stored):
            if matches(chart.name, patterns):
                yield replace(chart, title=f"{name}: {chart.title}", name=f"{name}-{chart.name}")


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


def _draw_scatter(result: TableResult, spec: Spec) -> Iterator[Chart]:
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
    if count := sum(len(dots.x) for dots in marks):
        title, alt = result.recipe.title, f"{count} points: {spec['label_y']} by {spec['label_x']}."
        yield Chart("scatter", title, alt, marks, Axis(spec["label_x"]), Axis(spec["label_y"]), 520, 340)


def _draw_against_emd(result: TableResult, spec: Spec) -> Iterator[Chart]:
    """The rows as lines over the mean EMD of each column."""
    marks: list[Mark] = []
    for colour, name in enumerate(dict.fromkeys(one.cell.row_name for one in result.cells)):
        points = []
        for one in result.cells:
            distance = spread_over_seeds(record.result.emd for record in one.records.values())
            if one.cell.row_name == name and one.ours and distance:
                points.append((distance.mean, one.ours.mean, one))
        if points and matches(name, spec.get("rows", ("*",))):
            points.sort(key=lambda point: point[0])
            tips = [f"{name}, {one.cell.column.name}, EMD {x:.2f}: {one.format()}" for x, _, one in points]
            x, y = [x for x, _, _ in points], [y for _, y, _ in points]
            marks.append(Line(x, y, name, colour, points=True, tips=tips))
    if marks:
        label = spec["label"]
        alt = f"{result.recipe.title}: {label} by the mean distance between clients and population."
        x_axis = Axis("mean EMD between clients and population", low=0, high=FARTHEST)
        yield Chart("emd", label.capitalize(), alt, marks, x_axis, Axis(label, low=0), 520, 340)


def _draw_histogram(result: TableResult, spec: Spec) -> Iterator[Chart]:
    """A histogram for each column: how far its clients are from the population."""
    for column in result.recipe.columns:
        skew = _find_skew(_list_column(result, column))
        if skew is None:
            continue
        counts = Counter(min(BINS - 1, int(distance / FARTHEST * BINS)) for distance in skew["distances"])
        ticks = tuple((at * BINS / 4 - 0.5, f"{at * FARTHEST / 4:g}") for at in range(5))
        title = f"{column.name}: {counts.total()} clients, mean EMD {skew['emd']:.2f}"
        alt = f"How many clients are how far from the population, {column.name}: mean {skew['emd']:.2f}."
        x, y = Axis("EMD of a client", low=-0.5, high=BINS - 0.5, ticks=ticks), Axis("clients", low=0, kind="count")
        marks = grouped({"clients": [counts[bin] for bin in range(BINS)]})
        yield Chart(f"histogram-{column.name}", title, alt, marks, x, y, height=200)


RANKED = {"classes": "classes of a client", "examples": "examples of a client", "by-class": "examples of a class"}


def _draw_ranked(result: TableResult, spec: Spec) -> Iterator[Chart]:
    """The clients' numbers of classes or examples, or the classes' of examples, in descending order: a line per cell.

    One chart for each of ``what``, and for each row with its own runs.
    """
    rows = {
        tuple(one.cell.training() for one in result.cells if one.cell.row is row): row for row in result.recipe.rows
    }
    for what in spec["what"]:
        for row in rows.values():
            marks, highest = list[Mark](), 0.0
            for one in result.cells:
                if one.cell.row is row and (skew := _find_skew([one])) is not None:
                    # [101] quantiles instead of each client's classes if there are many clients
                    classes = skew["ranked"].get("classes") or [sum(map(bool, row)) for row in skew["counts"]]
                    counts = {"by-class": skew["total"], "examples": skew["sizes"], "classes": classes}[what]
                    ranked = sorted((float(count) for count in counts if count), reverse=True)
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
            yield Chart(name, title, alt, marks, x, y, 520, 340)


def _find_skew(cells: Sequence[CellResult]) -> dict[str, Any] | None:
    """The values of the measure ``skew`` of the first of these cells' runs that has them."""
    records = (record for one in cells for record in one.records.values())
    return next((values for record in records if (values := record.measure("skew")) is not None), None)


def _draw_grid(result: TableResult, spec: Spec) -> Iterator[Chart]:
    """A variable of the rows against the columns; each cell shows the best over the other variables."""
    name, label = spec["by"], spec["label"]
    levels = sorted({float(one.cell.variables[name]) for one in result.cells if one.cell.done}, reverse=True)
    columns = [column for column in result.recipe.columns if any(one.values for one in _list_column(result, column))]
    if not columns:
        return

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
    yield Chart("grid", result.recipe.title, alt, marks, x, y, width, height)


def _fill_in(result: TableResult, text: str) -> str:
    return fill_in(text, result.cells[0].cell.variables if result.cells else {}, f"recipe {result.recipe.name}")


KINDS: dict[str, Callable[[TableResult, Spec], Iterable[Chart]]] = {
    "lines": _draw_lines,
    "measure": _draw_measure,
    "compare": _draw_measure,
    "scatter": _draw_scatter,
    "against-emd": _draw_against_emd,
    "histogram": _draw_histogram,
    "grid": _draw_grid,
    "ranked": _draw_ranked,
    "curves": _draw_curves,
}
