"""Where the classifier is biased: the norm of each class's row against its number of examples.

Shapes: C classes, k clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from unskew.analysis.measure import Comparison, Measure, draw_by_run, name_clients, order_rounds, pick_round, retrain
from unskew.calibration import is_bound
from unskew.charts import Axis, Chart, Dots, Line
from unskew.charts.builders import axis_of, grouped, heat_map, sorted_chart
from unskew.core.errors import Missing, UserError
from unskew.core.units import counted
from unskew.runs.finished import FinishedRun


def row_lengths(weight: torch.Tensor) -> list[float]:
    """[C], norms of the rows minus their mean, because adding a vector to every row does not change predictions.

    Departs from the paper, which does not subtract the mean: the rows of a discriminant have a common component that
    is thousands of times longer than the differences between classes.
    """
    rows = weight.cpu().double()
    return list((rows - rows.mean(0)).norm(dim=1).tolist())


def correlation(counts: Any, norms: Sequence[float]) -> float | None:
    """Pearson's correlation; None if one of the two is constant."""
    counts, lengths = np.asarray(counts, float), np.asarray(norms, float)
    if len(counts) < 3 or counts.std() == 0 or lengths.std() == 0:
        return None
    return float(np.corrcoef(counts, lengths)[0, 1])


def unevenness(norms: Sequence[float]) -> float:
    """The standard deviation of the rows' norms over their mean: 0 if all are equal."""
    mean = fmean(norms)
    return float(np.std(norms)) / mean if mean else 0.0


FOLLOWS, HARDLY = 0.5, 0.2  # correlations above which rows follow counts, or hardly follow them
MAX_NAMED_CLASSES = 30  # classes with names on an axis
MAX_CALIBRATIONS = 4  # drawn side by side
MAX_BARS = 100  # classes with a bar each; with more, rows are sorted by norm
MAX_DOTS = 2000  # in a chart of local rows; beyond, a sample is shown


@dataclass(frozen=True)
class Norms:
    """Row norms of the run's own classifier, of calibrated ones, and of local ones in recorded rounds."""

    classes: list[str]
    total: list[int]  # [C], training examples
    server: list[float]  # [C], the run's final classifier, rows minus their mean
    calibrated: dict[str, list[float]]  # [C] each, likewise
    # by round: "round", "when", "server" [C] or None, "clients" [k], "local" [k][C], means over clients
    rounds: list[dict[str, Any]]
    counts: list[list[int]]  # [K][C], in the order of ``clients``
    clients: list[str]


def take_norms(run: FinishedRun, *, clients: int = 10, round: int = -1, local: bool = True) -> Norms:
    """Row norms before and after calibration, and of local classifiers: as recorded, and in the visit after ``round``.

    −1 is the last round, 0 means the local models of the first. ``local=false`` does not need the data set.

    Reference: Luo et al. 2021, Figure 3.
    """
    held, classes = run.holdings, run.classes
    recorded = (row for row in run.during if "norms" in row)
    rows = [{"round": row["round"], "when": f"in round {row['round']}", **row["norms"]} for row in recorded]
    try:
        if local:
            models, row = retrain(run, clients, round)
            rows.append(row | {"server": None, "local": [_rows(run, model) for model in models.values()]})
    except Missing as error:
        run.notes.append(f"norms of local classifiers are shown only as recorded during training: {error}")
    rows = order_rounds(rows)
    known = sorted({client for row in rows for client in row["clients"] if client >= 0})
    strange = any(len(norms) != len(classes) for row in rows for norms in row["local"])
    if strange or max(known, default=0) >= len(held.sizes):
        raise UserError(f"{run.path / 'during.jsonl'} is damaged: its clients or classes are not those of the run")
    cells = held.cells[np.isin(held.cells[:, 0], known)]
    counts = np.zeros((len(known), len(classes)), np.int64)
    counts[np.searchsorted(known, cells[:, 0]), cells[:, 1]] = cells[:, 2]
    for row in rows:
        pairs = [(known.index(c), norms) for c, norms in zip(row["clients"], row["local"], strict=True) if c >= 0]
        correlations = [r for at, norms in pairs if (r := correlation(counts[at], norms)) is not None]
        row["unevenness"] = fmean(map(unevenness, row["local"])) if row["local"] else None
        row["correlation"] = fmean(correlations) if correlations else None
        row["clients"] = name_clients(run, row["clients"])
    if len(run.calibrated) > MAX_CALIBRATIONS:
        run.notes.append(f"the rows of the first {MAX_CALIBRATIONS} of {len(run.calibrated)} calibrations are drawn")
    return Norms(
        classes=classes,
        total=np.bincount(held.cells[:, 1], held.cells[:, 2], len(classes)).astype(int).tolist(),
        server=row_lengths(run.classifier_weight),
        calibrated={
            name: row_lengths(head["head.weight" if "head.weight" in head else "head.classifier.weight"])
            for name, head in run.calibrated.items()
        },
        rounds=rows,
        counts=counts.tolist(),
        clients=name_clients(run, known),
    )


def _rows(run: FinishedRun, model: dict[str, torch.Tensor]) -> list[float]:
    names, head = run.side.classifier, run.algorithm.head
    weight = model[names[0]]
    if head is not None:
        weight, _ = head(weight, model[names[1]] if len(names) > 1 else None)
    return list(weight.cpu().double().norm(dim=1).tolist())


def _draw(values: Norms) -> list[Chart]:
    charts = [_draw_calibrated(values), *(_draw_scatter(values, row) for row in _ends(values))]
    charts += [_draw_local(values, pick_round(values.rounds))] if values.rounds else []
    return [*charts, *([_draw_rounds(values)] if len(values.rounds) > 1 else [])]


def _ends(values: Norms) -> list[dict[str, Any]]:
    """The first known round, and the requested one."""
    if not values.rounds:
        return []
    first, last = values.rounds[0], pick_round(values.rounds)
    return [first] if first is last else [first, last]


def _draw_calibrated(values: Norms) -> Chart:
    groups = {"before": values.server, **dict(list(values.calibrated.items())[:MAX_CALIBRATIONS])}
    relative = {name: [norm / (fmean(norms) or 1.0) for norm in norms] for name, norms in groups.items()}

    def tip(name: str, label: int) -> str:
        return f"{values.classes[label]}, {name}: {groups[name][label]:.3f}, {relative[name][label]:.2f} of the mean"

    count, y = len(values.classes), Axis("norm / mean norm", low=0)
    uneven = f"their unevenness is {', '.join(f'{name} {unevenness(norms):.3f}' for name, norms in groups.items())}."
    if count > MAX_BARS:
        curves = {name: sorted(norms) for name, norms in relative.items()}
        title, alt = f"Row norms of {count:,} classes, rows minus their mean", f"Row norms, sorted; {uneven}"
        return sorted_chart("norms-classes", title, alt, curves, "classes", y)
    title, alt = "Norm of each class's row, rows minus their mean", f"Row norms of the classifier by class; {uneven}"
    x, width = axis_of("class", values.classes, most=MAX_NAMED_CLASSES), 880 if count * len(groups) > 20 else 440
    return Chart("norms-classes", title, alt, grouped(relative, tip), x, y, width)


def _draw_scatter(values: Norms, row: dict[str, Any]) -> Chart:
    points = []
    for client, norms in zip(row["clients"], row["local"], strict=True):
        if client in values.clients:
            counts = values.counts[values.clients.index(client)]
            points += [(count, norms[label], client, label) for label, count in enumerate(counts)]
    suffix = "" if row["correlation"] is None else f", correlation {row['correlation']:.2f}"
    if (every := len(points)) > MAX_DOTS:
        points = sorted(points, key=lambda point: not point[0])[:MAX_DOTS]  # first the classes that clients have
        suffix += f" ({len(points):,} of {every:,} rows shown)"
    tips = [
        f"client {client}, {values.classes[label]}: {counted(count, 'example')}, norm {norm:.3f}"
        for count, norm, client, label in points
    ]
    x, y, colours = ([point[at] for point in points] for at in (0, 1, 3))
    name, title = f"norms-round-{row['round']}", f"Local rows {row['when']}{suffix}"
    alt = f"Norms of local classifier rows against the client's examples of that class{suffix}."
    axis = Axis("examples of the class on the client", low=0, kind="count")
    return Chart(name, title, alt, [Dots(x, y, colours, radius=3.5, tips=tips)], axis, Axis("norm of its row"))


def _draw_local(values: Norms, row: dict[str, Any]) -> Chart:
    clients, count = row["clients"], len(values.classes)
    shown = range(0, count, -(-count // MAX_BARS))
    table = [[norms[label] for label in shown] for norms in row["local"]]
    low, high = min(map(min, table)), max(map(max, table))

    def tip(client: int, at: int) -> str:
        return f"client {clients[client]}, {values.classes[shown[at]]}: {table[client][at]:.3f}"

    x, part = axis_of("class", values.classes, most=MAX_NAMED_CLASSES), ""
    if len(shown) < count:
        part = f", {len(shown)} of {count:,} classes"
        x = Axis("class", ticks=tuple((at, str(label)) for at, label in enumerate(shown) if not at % 20))
    title = f"Row norms of local classifiers {row['when']}{part}"
    alt = f"Row norms of {len(table)} local classifiers, {low:.2f} to {high:.2f}."
    ends = {"low": low, "high": high if high > low else low + 1}
    return heat_map("norms-clients", title, alt, table, tip, x, axis_of("client", clients), **ends)


def _draw_rounds(values: Norms) -> Chart:
    rounds = [int(row["round"]) for row in values.rounds]
    lines = {
        "correlation": ([row["correlation"] for row in values.rounds], 0),
        "local unevenness": ([row["unevenness"] for row in values.rounds], 2),
        "server's unevenness": ([unevenness(row["server"]) if row["server"] else None for row in values.rounds], 1),
    }
    marks = [Line(rounds, y, name, colour, points=True) for name, (y, colour) in lines.items()]
    alt = "How closely row norms follow label counts, and how uneven they are, by round."
    return Chart("norms-rounds", "Row norms by round", alt, marks, x=Axis("round", kind="count"))


def _findings(values: Norms) -> list[str]:
    sentences, before, after = [], unevenness(values.server), _calibrated_unevenness(values)
    if ends := [row for row in _ends(values) if row["correlation"] is not None]:
        shown = ", and ".join(f"{row['correlation']:z.2f} {row['when']}" for row in ends)
        value = ends[0]["correlation"]
        how = "follow" if value > FOLLOWS else "hardly follow" if value > HARDLY else "do not follow"
        sentences.append(f"Rows of local classifiers {how} the clients' label counts: mean correlation {shown}.")
    if after:
        evener = sum(value < before for value in after.values())
        shown = ", ".join(f"{value:.1%} after {name}" for name, value in after.items())
        sentences.append(
            f"{evener} of {len(after)} calibrations make the classifier's rows more even: their deviation is "
            f"{before:.1%} of their mean before, {shown}."
        )
    return sentences


def _calibrated_unevenness(values: Norms) -> dict[str, float]:
    return {name: unevenness(rows) for name, rows in values.calibrated.items() if not is_bound(name)}


def _compare(runs: Mapping[str, Norms]) -> list[Chart]:
    all_values = runs.values()
    groups: dict[str, Sequence[float | None]] = {
        "local classifiers": [values.rounds[-1]["unevenness"] if values.rounds else None for values in all_values],
        "before calibration": [unevenness(values.server) for values in all_values],
        "after calibration": [min(_calibrated_unevenness(values).values(), default=None) for values in all_values],
    }
    y = Axis("", low=0, kind="percent")
    return draw_by_run("compare-norms", "Deviation of row norms / their mean", groups, runs, y, ".1%")


NORMS = Measure(
    name="norms",
    values=Norms,
    take=take_norms,
    draw=_draw,
    findings=_findings,
    title="Where the bias is: the classifier's rows",
    text=(
        "Each class has a row in the classifier; the larger its norm, the more often the class is predicted. Local "
        "rows that grow with a client's label counts are a sign of bias. The mean of all rows does not affect "
        "predictions and is subtracted. In the chart by round, the last point is one more visit after the last round."
    ),
    compare=Comparison(draw=_compare),
    calibrations=True,
    folder_only="norms(local=false)",
    headline=5,
)
