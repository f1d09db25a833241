"""How local models differ from the model they were sent: their weights by layer and round, their features by class.

Shapes: k clients, L layers, C classes, n test images, d features.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from unskew.analysis.measure import (
    Comparison,
    Measure,
    list_by_run,
    name_clients,
    name_layer,
    order_rounds,
    pick_round,
    retrain,
)
from unskew.charts import Axis, Bars, Chart, Line
from unskew.charts.builders import axis_of, heat_map
from unskew.core.errors import Missing
from unskew.core.tensors import parameters
from unskew.models.networks import by_layer
from unskew.round.client import distances, layer_norms
from unskew.runs.finished import FinishedRun
from unskew.runs.recording import silhouette_of, some_features


@dataclass(frozen=True)
class Drift:
    """Relative distances of local models from the one they were sent."""

    layers: list[str]
    rounds: list[dict[str, Any]]  # "round", "when", "clients" [k], "local" [k][L] relative to the server's layer


def take_drift(run: FinishedRun, *, clients: int = 10, round: int = -1) -> Drift:
    """Distances recorded during training, and those of the visit after ``round`` (−1: the last)."""
    rows: list[dict[str, Any]] = []
    for recorded in (row for row in run.during if "drift" in row):
        drift, number = recorded["drift"], recorded["round"]
        layers, sizes = drift["layers"], [max(size, 1e-12) for size in drift["server"]]
        local = [[distance / size for distance, size in zip(row, sizes, strict=True)] for row in drift["local"]]
        rows.append({"round": number, "when": f"in round {number}", "clients": drift["clients"], "local": local})
    try:
        models, row = retrain(run, clients, round)
        state = run.state(run.number(round))
        sent = {name: state.tensors[name] for name in run.side.weights}  # in the order of the network
        size = layer_norms(sent).clamp(min=1e-12)
        rows.append(row | {"local": [(distances(model, sent) / size).tolist() for model in models.values()]})
        layers = list(by_layer(parameters(sent)))
    except Missing as error:
        if not rows:
            raise
        run.notes.append(f"drift is shown only as recorded during training, not after the last round: {error}")
    return Drift(layers, [row | {"clients": name_clients(run, row["clients"])} for row in order_rounds(rows)])


def means(row: dict[str, Any]) -> list[float]:
    """[L], over the clients."""
    return [fmean(values) for values in zip(*row["local"], strict=True)]


def _draw(values: Drift) -> list[Chart]:
    last, layers = pick_round(values.rounds), values.layers
    clients, local = last["clients"], last["local"]
    texts = [f"{layer}: {mean:.1%}" for layer, mean in zip(layers, means(last), strict=True)]
    x, y = axis_of("layer", layers), Axis("distance / norm of the layer", low=0, kind="percent")
    title = f"How far local models move from the server's model {last['when']}"
    alt = f"Mean relative distance by layer: {', '.join(texts)}."
    charts = [Chart("drift-layers", title, alt, [Bars(range(len(layers)), means(last), tips=texts)], x, y)]

    def tip(client: int, layer: int) -> str:
        return f"client {clients[client]}, {layers[layer]}: {local[client][layer]:.1%}"

    high = max(max(row) for row in local) or 1.0
    title, alt = "The same, client by client", f"Relative distance of {len(clients)} clients by layer."
    numbers, by_client = ".0%" if high >= 0.1 else ".1%", axis_of("client", clients)
    charts.append(heat_map("drift-clients", title, alt, local, tip, x, by_client, high=high, numbers=numbers))
    if len(values.rounds) > 1:
        rounds = [int(row["round"]) for row in values.rounds]
        by_round = zip(layers, zip(*map(means, values.rounds), strict=True), strict=True)
        few = len(rounds) <= 40
        marks = [Line(rounds, distances, layer, at, points=few) for at, (layer, distances) in enumerate(by_round)]
        title, alt = "Distance by layer and round", "Mean relative distance of local models by round."
        charts.append(Chart("drift-rounds", title, alt, marks, Axis("round", kind="count"), y))
    return charts


def _findings(values: Drift) -> list[str]:
    row = pick_round(values.rounds)
    pairs = list(zip(means(row), values.layers, strict=True))
    (most, top), (least, bottom) = max(pairs), min(pairs)
    start = f"In one visit {row['when']}, clients change {name_layer(top)}"
    if len(pairs) == 1:
        return [f"{start} by {most:.1%} of its norm."]
    return [f"{start} most, by {most:.1%} of its norm, and {name_layer(bottom)} least, by {least:.1%}."]


DRIFT = Measure(
    name="drift",
    values=Drift,
    take=take_drift,
    draw=_draw,
    findings=_findings,
    title="How far local models move",
    text="The distance between the model that a client receives and the one it sends back, layer by layer.",
    headline=None,
)


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


def _draw_features(values: ClientFeatures) -> list[Chart]:

    def tip(client: int, label: int) -> str:
        what, held = f"client {values.clients[client]}, {values.classes[label]}", values.held[client][label]
        return f"{what}: {values.shifts[client][label]:.2f}, {'has' if held else 'has no'} examples of it"

    x, y = axis_of("class", values.classes, most=20), axis_of("client", values.clients)
    alt = f"How far the class means of {len(values.clients)} clients' features are from the server's."
    title = "Shift of each class's mean feature, in spreads of the class"
    high = max(max(row) for row in values.shifts) or 1.0
    return [heat_map("client-features", title, alt, values.shifts, tip, x, y, high=high, numbers=".2f", height=360)]


def _describe_features(values: ClientFeatures) -> list[str]:
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
    draw=_draw_features,
    findings=_describe_features,
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
        )
    ),
    headline=None,
)
