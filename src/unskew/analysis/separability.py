"""How far apart the classes are in feature space: calibration cannot separate classes that overlap.

Shapes: C classes, d features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import stdev
from typing import Any

import numpy as np
import torch

from unskew.analysis.measure import CellValue, Comparison, Element, Measure, draw_by_run, list_by_run, tabulate
from unskew.calibration.covariances import Form, Full, Shared, statistics_bytes
from unskew.calibration.federated import gather_statistics
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.forecast import DIRECTIONS, forecast, pairwise_separability
from unskew.calibration.jobs import client_statistics
from unskew.calibration.statistics import ClassStatistics
from unskew.charts import Axis, Chart, Line
from unskew.charts.builders import axis_of, heat_map, sorted_chart
from unskew.core.errors import Missing, UserError
from unskew.core.types import EVERYONE, Visit
from unskew.models.cut import width_of
from unskew.runs.finished import FinishedRun
from unskew.runs.recording import silhouette_of, some_features

DRAWS = 5  # of directions, for the deviation of the distances
MAX_TABLE_CLASSES = 100  # a larger table of distances cannot be read
MAX_PAIRS = 20  # of the closest classes, shown instead
MAX_ASKED = 1000  # clients; with more, all examples are measured at once: faster and equal up to rounding
MAX_COVARIANCE_BYTES = 256 * 2**20  # of one client's full covariances; larger ones are shared


@dataclass(frozen=True)
class Separability:
    """Sliced Wasserstein distances between the classes' Gaussians, and silhouettes of features."""

    classes: list[str]  # those that clients have
    distances: list[list[float]]  # [C][C]; empty if there are too many classes for a table
    mean: float
    form: str  # of the covariances
    before: float | None  # the share of features drawn from the Gaussians that the classifier classifies correctly
    after: float | None  # the share that their linear discriminant classifies correctly
    silhouette: float | None  # of the final model's features of test images
    rounds: list[tuple[int, float]]  # silhouettes recorded during training
    deviations: list[list[float]] = field(default_factory=list)  # [C][C], of the distances over draws of directions
    deviation: float | None = None  # of their mean
    closest: list[tuple[int, int, float, float]] = field(default_factory=list)  # classes, distance, its deviation
    quantiles: list[float] = field(default_factory=list)  # [101], of the distances, if there is no table


def take_separability(run: FinishedRun) -> Separability:
    """Class Gaussians summed over the clients, as for calibration, and the silhouette of test features.

    Reference: Luo et al. 2021, section 5.4 and Figure 6; Zeng et al. 2023, Figure 3.
    """
    rows = [row for row in run.during if row.get("silhouette") is not None]
    recorded = [(int(row["round"]), float(row["silhouette"])) for row in rows]
    try:
        side = run.side
    except Missing as error:
        if not recorded:
            raise
        run.notes.append(f"silhouettes were recorded during training; distances between classes are missing: {error}")
        return Separability([], [], 0.0, "", None, None, recorded[-1][1], recorded)
    side.load(run.model, training=False)
    width = width_of(side.network.encoder, side.train.shape)
    form: Form = Full() if statistics_bytes(Full(), len(run.classes), width) <= MAX_COVARIANCE_BYTES else Shared()
    statistics = _gather_statistics(run, StatisticsRequest(form))
    held = statistics.held.tolist()
    distances, spread = torch.zeros(2, len(held), len(held), dtype=torch.float64)
    means, quantiles, closest = list[float](), list[float](), list[tuple[int, int, float, float]]()
    if len(held) > 1:
        i, j = torch.triu_indices(len(held), len(held), 1)
        keys = [run.key, *(run.key.fold("draw", n) for n in range(1, DRAWS))]
        draws = torch.stack([pairwise_separability(statistics, key) for key in keys])
        distances[i, j] = distances[j, i] = draws[0]
        spread[i, j] = spread[j, i] = draws.std(0)
        means = [float(draw.mean()) for draw in draws]
        if len(held) > MAX_TABLE_CLASSES:
            quantiles = np.quantile(draws[0].numpy(), np.linspace(0, 1, 101)).tolist()
            nearest = torch.argsort(draws[0], stable=True)[:MAX_PAIRS]
            closest = list(zip(*(part[nearest].tolist() for part in (i, j, draws[0], draws.std(0))), strict=True))
            distances, spread = distances[:0], spread[:0]
    predicted = forecast(side.network.classifier, statistics, len(run.classes), run.key)
    return Separability(
        classes=[run.classes[label] for label in held],
        distances=distances.tolist(),
        mean=predicted.separability,
        form=str(form),
        before=predicted.before,
        after=predicted.after,
        silhouette=silhouette_of(*some_features(side, run.key)),
        rounds=recorded,
        deviations=spread.tolist(),
        deviation=stdev(means) if means else None,
        closest=closest,
        quantiles=quantiles,
    )


def _gather_statistics(run: FinishedRun, request: StatisticsRequest) -> ClassStatistics:
    if run.prepared.population.clients > MAX_ASKED:
        run.say("class statistics", 0, 0)
        return client_statistics(run.side, run.model, Visit(EVERYONE, 1.0), request)
    try:
        return gather_statistics(run.engine, run.model, request, run.key, partial(run.say, "class statistics"))
    except UserError as error:
        raise Missing(str(error)) from error


def _draw(values: Separability) -> list[Chart]:
    charts, classes, name = list[Chart](), values.classes, "separability-pairs"
    title = "Distance between the classes' Gaussians"
    if values.quantiles:
        pairs = len(classes) * (len(classes) - 1) // 2
        alt = f"Sliced Wasserstein distances of {pairs:,} pairs of classes, sorted; mean {values.mean:.2f}."
        y, curves = Axis("at most this distance", low=0), {"": values.quantiles}
        charts.append(sorted_chart(name, f"{title}, all pairs", alt, curves, f"{pairs:,} pairs", y))
    elif len(classes) > 1:
        high = max(map(max, values.distances)) or 1.0
        decimals, axis = ".1f" if high >= 1 else ".2f" if high >= 0.1 else ".3f", axis_of("class", classes, most=30)
        alt = f"Sliced Wasserstein distances of {len(classes)} classes, mean {values.mean:.2f}."

        def tip(a: int, b: int) -> str:
            return f"{classes[a]} and {classes[b]}: {_format_distance(values, a, b)}"

        look: dict[str, Any] = {"high": high, "numbers": decimals, "width": 480, "height": 460, "square": True}
        charts.append(heat_map(name, title, alt, values.distances, tip, axis, axis, **look))
    if len(values.rounds) > 1:
        rounds, silhouettes = zip(*values.rounds, strict=True)
        tips = [f"round {number}: {value:.4f}" for number, value in values.rounds]
        line = Line(rounds, silhouettes, points=len(rounds) <= 40, tips=tips)
        name, title = "separability-silhouette", "Silhouette of the features, by round"
        alt = f"Silhouette coefficient of test features; the last is {silhouettes[-1]:.3f}."
        charts.append(Chart(name, title, alt, [line], Axis("round", kind="count"), Axis("silhouette")))
    return charts


def _findings(values: Separability) -> list[str]:
    sentences = []
    if values.before is not None and values.after is not None:
        before, after = round(100 * values.before, 1), round(100 * values.after, 1)
        sentences.append(
            f"Of features drawn from the class Gaussians, the classifier gets {before:.1f}% right and their linear "
            f"discriminant {after:.1f}%, so calibration is forecast to gain {max(0.0, after - before):.1f} points."
        )
    if len(values.classes) > 2:
        if values.closest:
            a, b, distance, spread = values.closest[0]
            text = _with_deviation(distance, spread)
        else:
            pairs = [(a, b) for a in range(len(values.classes)) for b in range(a)]
            a, b = min(pairs, key=lambda pair: values.distances[pair[0]][pair[1]])
            text = _format_distance(values, a, b)
        draws = f" (± over {DRAWS} draws of {DIRECTIONS} directions)" if values.deviation is not None else ""
        mean = _with_deviation(values.mean, values.deviation)
        closest = f"{values.classes[int(a)]} and {values.classes[int(b)]}"
        sentences.append(f"The closest classes are {closest}, {text} apart; the mean is {mean}{draws}.")
    if values.silhouette is not None:
        sentences.append(f"The silhouette of the test features is {values.silhouette:.4f}.")
    return sentences


def _show(run: FinishedRun, values: Separability) -> list[Element]:
    rows: list[list[CellValue]] = [
        [values.classes[int(a)], values.classes[int(b)], distance, spread] for a, b, distance, spread in values.closest
    ]
    columns = {"class": "text", "and": "text", "distance": "number", "± deviation": "number"}
    note = f"The {MAX_PAIRS} closest pairs of {len(values.classes):,} classes."
    return [*_draw(values), *([tabulate("Closest classes", columns, rows, note)] if rows else [])]


def _format_distance(values: Separability, a: int, b: int) -> str:
    return _with_deviation(values.distances[a][b], values.deviations[a][b] if values.deviations and a != b else None)


def _with_deviation(value: float, deviation: float | None) -> str:
    return f"{value:.3g}" if deviation is None else f"{value:.3g} ± {deviation:.2g}"


def _compare(runs: Mapping[str, Separability]) -> list[Chart]:
    ends = _list_silhouettes(runs)
    charts = draw_by_run("compare-silhouette", "Final silhouette", {"": [*ends.values()]}, ends, Axis(), ".4f")
    recorded = [(at, name, values.rounds) for at, (name, values) in enumerate(runs.items()) if len(values.rounds) > 1]
    lines = [Line([x for x, _ in row], [y for _, y in row], name, colour) for colour, name, row in recorded]
    alt, x = f"Silhouette of test features by round, for {len(lines)} runs.", Axis("round", kind="count")
    by_round = Chart("compare-silhouette-rounds", "Silhouette by round", alt, lines, x)
    return [*(charts if len(ends) > 1 else []), *([by_round] if lines else [])]


def _list_silhouettes(runs: Mapping[str, Separability]) -> dict[str, float]:
    return {name: values.silhouette for name, values in runs.items() if values.silhouette is not None}


SEPARABILITY = Measure(
    name="separability",
    values=Separability,
    take=take_separability,
    draw=_draw,
    findings=_findings,
    show=_show,
    title="How well the features separate the classes",
    text=(
        "The classes as Gaussians in feature space, summed over the clients as for calibration. The distance between "
        "two is the sliced Wasserstein distance; calibration can only separate classes that are apart."
    ),
    compare=Comparison(
        title="Silhouette of the features",
        text="How much closer test features are to their own class than to the next one, from −1 to 1.",
        draw=_compare,
        findings=lambda runs: list_by_run("Silhouette of the features", _list_silhouettes(runs), ".4f"),
    ),
    headline=6,
)
