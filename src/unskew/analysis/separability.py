"""How far apart the classes lie in feature space: what calibration can work with.

Shapes: C classes, d features.
"""

from dataclasses import dataclass

import torch

from unskew.calibration.covariances import Full, Shared
from unskew.calibration.forecast import apart, forecast
from unskew.calibration.forms import Form, statistics_bytes
from unskew.calibration.request import StatisticsRequest, width_of
from unskew.calibration.statistics import ClassStatistics
from unskew.charts import Axis, Cells, Chart, Line
from unskew.core import tensors
from unskew.core.types import Visit
from unskew.round.jobs import job_text
from unskew.runs.recording import silhouette_of, some_features
from unskew.runs.study import FinishedRun, Missing

MOST_BYTES = 256 * 2**20  # of one client's full covariances; beyond, they are shared


@dataclass(frozen=True)
class Separability:
    """Sliced Wasserstein distances between the classes' Gaussians, and silhouettes of features."""

    classes: list[str]  # those that anybody holds
    distances: list[list[float]]  # [C][C]
    mean: float
    form: str  # of the covariances
    before: float | None  # the share of features drawn from the Gaussians that the classifier gets right
    after: float | None  # the same, by their linear discriminant
    silhouette: float | None  # of the final model's features of test images
    rounds: list[tuple[int, float]]  # silhouettes recorded while training


def measure(subject: FinishedRun) -> Separability:
    """Class Gaussians summed up over the clients, as calibration would have them; the silhouette of test features.

    Reference: Luo et al. 2021, section 5.4 and Figure 6; Zeng et al. 2023, Figure 3.
    """
    recorded = [
        (int(row["round"]), float(row["silhouette"])) for row in subject.during if row.get("silhouette") is not None
    ]
    try:
        side = subject.side
    except Missing as error:
        if not recorded:
            raise
        subject.notes.append(f"silhouettes are shown as they were recorded, distances between classes not: {error}")
        return Separability([], [], 0.0, "", None, None, recorded[-1][1], recorded)
    side.load(subject.model, training=False)
    width = width_of(side.network.encoder, tuple(side.train.images.shape[1:]))
    small = statistics_bytes(Full(), len(subject.classes), width) <= MOST_BYTES
    form: Form = Full() if small else Shared()
    statistics = _gathered(subject, StatisticsRequest(form))
    held = statistics.held.tolist()
    table = torch.zeros(len(held), len(held), dtype=torch.float64)
    if len(held) > 1:
        upper = torch.triu_indices(len(held), len(held), 1)
        table[upper[0], upper[1]] = table[upper[1], upper[0]] = apart(statistics, subject.key)
    foretold = forecast(side.network.classifier, statistics, len(subject.classes), subject.key)
    return Separability(
        classes=[subject.classes[label] for label in held],
        distances=table.tolist(),
        mean=foretold.separability,
        form=str(form),
        before=foretold.before,
        after=foretold.after,
        silhouette=silhouette_of(*some_features(side, subject.key)),
        rounds=recorded,
    )


def _gathered(subject: FinishedRun, ask: StatisticsRequest) -> ClassStatistics:
    engine = subject.engine
    visits = [Visit(client, 1.0) for client in engine.roster.inhabited.tolist()]
    engine.progress = lambda done, total: subject.say("class statistics", done, total)
    try:
        outcome = engine.map_sum(job_text("moments", ask.to_text()), subject.model, visits, subject.key.fold("moments"))
    finally:
        engine.progress = None
    if outcome.failures:
        raise Missing(f"client {outcome.failures[0].client}, class statistics: {outcome.failures[0].reason}")
    return ClassStatistics.gathered(tensors.under(outcome.sums, "stat/moments/"), ask.form)


def draw(found: Separability) -> list[Chart]:
    """The table of distances, and the silhouette by round where it was recorded."""
    charts = []
    if len(found.classes) > 1:
        high = max(map(max, found.distances)) or 1.0
        tips = [
            [f"{a} and {b}: {value:.2f}" for b, value in zip(found.classes, row, strict=True)]
            for a, row in zip(found.classes, found.distances, strict=True)
        ]
        ticks = tuple(enumerate(found.classes)) if len(found.classes) <= 30 else None
        charts.append(
            Chart(
                "separability-pairs", "Distance between the classes' Gaussians",
                f"Sliced Wasserstein distances of {len(found.classes)} classes, mean {found.mean:.2f}.",
                [Cells(found.distances, 0, high, numbers=".1f" if len(found.classes) <= 12 else "", tips=tips)],
                x=Axis("class", ticks=ticks), y=Axis("class", ticks=ticks), width=480, height=460, square=True,
            )
        )  # fmt: skip
    if len(found.rounds) > 1:
        rounds, values = [number for number, _ in found.rounds], [value for _, value in found.rounds]
        tips1 = [f"round {number}: {value:.4f}" for number, value in found.rounds]
        charts.append(
            Chart(
                "separability-silhouette", "Silhouette of the features, by round",
                f"Silhouette coefficient of test features; the last is {values[-1]:.3f}.",
                [Line(rounds, values, points=len(rounds) <= 40, tips=tips1)], x=Axis("round", kind="count"),
                y=Axis("silhouette"),
            )
        )  # fmt: skip
    return charts


def findings(found: Separability) -> list[str]:
    """What a classifier could still gain from these features, and the classes that lie closest."""
    said = []
    if found.before is not None and found.after is not None:
        shares = round(100 * found.before, 1), round(100 * found.after, 1)
        said.append(
            f"Of features drawn from the class Gaussians the classifier gets {shares[0]:.1f}% right, their "
            f"discriminant {shares[1]:.1f}%: calibration has {max(0.0, shares[1] - shares[0]):.1f} points to gain."
        )
    if len(found.classes) > 2:
        pairs = [(found.distances[a][b], a, b) for a in range(len(found.classes)) for b in range(a)]
        near, a, b = min(pairs)
        said.append(
            f"Closest together lie {found.classes[a]} and {found.classes[b]}, {near:.3g} apart; the mean is "
            f"{found.mean:.3g}."
        )
    if found.silhouette is not None:
        said.append(f"The silhouette of the test features is {found.silhouette:.4f}.")
    return said
