"""How the features of each client's local model differ from the server's, class by class.

Shapes: k clients, C classes, n test images, d features.
"""

from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from unskew.analysis.measure import Comparison, Measure, list_by_run, name_clients, retrain
from unskew.charts import Chart, axis_of, heat_map
from unskew.core.errors import Missing
from unskew.runs.finished import FinishedRun
from unskew.runs.recording import silhouette_of, some_features


@dataclass(frozen=True)
class ClientFeatures:
    """How far the class means of test features shift from the server's model to each client's, in class spreads."""

    round: int
    clients: list[str]
    classes: list[str]
    shifts: list[list[float]]  # [k][C], ‖μ_local − μ_server‖ / √tr Σ_server
    held: list[list[bool]]  # [k][C], whether the client has training examples of the class
    server: float | None  # silhouette of the server's features
    local: list[float | None]  # [k], silhouettes of the clients' features

    def mean(self, held: bool) -> float | None:
        """The mean shift over the classes that clients have, or over those that they lack."""
        rows = zip(self.shifts, self.held, strict=True)
        shifts = [shift for row, marks in rows for shift, mark in zip(row, marks, strict=True) if mark is held]
        return fmean(shifts) if shifts else None


def take_client_features(run: FinishedRun, *, clients: int = 10, round: int = -1) -> ClientFeatures:
    """Features of the same test images by the server's model and by local models trained from it.

    Reference: Zeng et al. 2023, contribution 1: the features of clients and of the server differ in distribution.
    """
    number, side = run.number(round), run.side
    models, _ = retrain(run, clients, round)
    side.load(run.state(number).tensors, training=False)
    features, labels = some_features(side, run.key)
    present = torch.unique(labels).tolist()
    if not present:
        raise Missing("the test images are at the nodes of the federation")
    own, spread = _class_means(features, labels, present)
    shifts, silhouettes = [], []
    for model in models.values():
        side.load(model, training=False)
        local, _ = some_features(side, run.key)
        means, _ = _class_means(local, labels, present)
        shifts.append(((means - own).norm(dim=1) / spread).tolist())
        silhouettes.append(silhouette_of(local, labels))
    owner, label, _ = run.holdings.cells.T
    held = set(zip(owner.tolist(), label.tolist(), strict=True))
    return ClientFeatures(
        round=number,
        clients=name_clients(run, models),
        classes=[run.classes[label] for label in present],
        shifts=shifts,
        held=[[(client, label) in held for label in present] for client in models],
        server=silhouette_of(features, labels),
        local=silhouettes,
    )


def _class_means(features: Tensor, labels: Tensor, classes: list[int]) -> tuple[Tensor, Tensor]:
    """The mean feature of each class [C, d], and its spread √tr Σ [C]."""
    groups = [features[labels == label].double() for label in classes]
    means = torch.stack([group.mean(0) for group in groups])
    spread = torch.stack([(group - group.mean(0)).square().sum(1).mean().sqrt() for group in groups])
    return means, spread.clamp(min=1e-12)


def _draw(values: ClientFeatures) -> list[Chart]:

    def tip(client: int, label: int) -> str:
        what, held = f"client {values.clients[client]}, {values.classes[label]}", values.held[client][label]
        return f"{what}: {values.shifts[client][label]:.2f}, {'has' if held else 'has no'} examples of it"

    x, y = axis_of("class", values.classes, most=20), axis_of("client", values.clients)
    alt = f"How far the class means of {len(values.clients)} clients' features are from the server's."
    title = "Shift of each class's mean feature, in spreads of the class"
    high = max(max(row) for row in values.shifts) or 1.0
    return [heat_map("client-features", title, alt, values.shifts, tip, x, y, high=high, numbers=".2f", height=360)]


def _findings(values: ClientFeatures) -> list[str]:
    means = {"they have": values.mean(held=True), "they lack": values.mean(held=False)}
    shifts = [f"{shift:.2f} spreads for classes {which}" for which, shift in means.items() if shift is not None]
    sentence = f"After one visit, mean features of clients' models differ from the server's by {' and '.join(shifts)}"
    local = [value for value in values.local if value is not None]
    if local and values.server is not None:
        sentence += f"; the silhouette of clients' features is {fmean(local):.3f}, of the server's {values.server:.3f}"
    return [f"{sentence}."]


CLIENT_FEATURES = Measure(
    name="features",
    values=ClientFeatures,
    take=take_client_features,
    draw=_draw,
    findings=_findings,
    title="Features of clients and of the server",
    text=(
        "Clients train the server's model once more, each on its own images. Shown is, for every class of the test "
        "images, the distance between the mean features of a client's model and of the server's, as a multiple of the "
        "spread of the class's features."
    ),
    compare=Comparison(
        findings=lambda runs: list_by_run(
            "Mean shift of class features between clients and server",
            {name: fmean(shift for row in values.shifts for shift in row) for name, values in runs.items()},
            ".2f",
        ),
    ),
    headline=None,
)
