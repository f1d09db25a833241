"""How far local models move from the model they were sent, by layer and round: ‖local − global‖ / ‖global‖.

Shapes: k clients, L layers.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from unskew.analysis.measure import Measure, name_clients, name_layer, order_rounds, pick_round, retrain
from unskew.charts import Axis, Bars, Chart, Line, axis_of, heat_map
from unskew.core.errors import Missing
from unskew.core.tensors import parameters
from unskew.models.networks import by_layer
from unskew.round.client import distances, layer_norms
from unskew.runs.finished import FinishedRun


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
