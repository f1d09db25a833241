"""How far local models move from the model they were sent, by layer and round: ‖local − global‖ / ‖global‖.

Shapes: k clients, L layers.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from unskew.analysis.measure import Measure, describe_when, find_requested_round, name_clients, name_layer, note_sample
from unskew.charts import Axis, Bars, Cells, Chart, Line, Mark
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
    number, rows = run.number(round), []
    for recorded in (row for row in run.during if "drift" in row):
        drift = recorded["drift"]
        layers, sizes = drift["layers"], [max(size, 1e-12) for size in drift["server"]]
        local = [[distance / size for distance, size in zip(row, sizes, strict=True)] for row in drift["local"]]
        when = f"in round {recorded['round']}"
        named = name_clients(run, drift["clients"])
        rows.append({"round": recorded["round"], "when": when, "clients": named, "local": local})
    try:
        models, state = run.local_models(number, clients), run.state(number)
        run.notes += note_sample(len(models), len(run.engine.roster.inhabited))
        sent = {name: state.tensors[name] for name in run.side.weights}  # in the order of the network
        size = layer_norms(sent)
        local = [(distances(model, sent) / size.clamp(min=1e-12)).tolist() for model in models.values()]
        when, named = describe_when(number, run.result.final_round), name_clients(run, models)
        rows.append({"round": number + 1, "when": when, "asked": True, "clients": named, "local": local})
        layers = list(by_layer(parameters(sent)))
    except Missing as error:
        if not rows:
            raise
        run.notes.append(f"drift is shown only as recorded during training, not after the last round: {error}")
    unique = {row["round"]: row for row in rows}.values()  # a round may be recorded and also retrained
    return Drift(layers, sorted(unique, key=lambda row: int(row["round"])))


def means(row: dict[str, Any]) -> list[float]:
    """[L], over the clients."""
    return [fmean(values) for values in zip(*row["local"], strict=True)]


def draw_drift(values: Drift) -> list[Chart]:
    """The mean by layer in the requested round, the same by client, and by round if several are known."""
    last, layers = find_requested_round(values.rounds), values.layers
    pairs = list(zip(layers, means(last), strict=True))
    x, y = Axis("layer", ticks=tuple(enumerate(layers))), Axis("distance / norm of the layer", low=0, kind="percent")
    title = f"How far local models move from the server's model {last['when']}"
    alt = f"Mean relative distance by layer: {', '.join(f'{layer} {mean:.0%}' for layer, mean in pairs)}."
    tips = [f"{layer}: {mean:.1%}" for layer, mean in pairs]
    bars = Bars(list(range(len(pairs))), [mean for _, mean in pairs], tips=tips)
    charts = [Chart("drift-layers", title, alt, [bars], x=x, y=y)]
    cell_tips = [
        [f"client {client}, {layer}: {value:.1%}" for layer, value in zip(layers, row, strict=True)]
        for client, row in zip(last["clients"], last["local"], strict=True)
    ]
    count, high = len(last["clients"]), max(max(row) for row in last["local"]) or 1.0
    numbers = "" if count > 12 else ".0%" if high >= 0.1 else ".1%"
    cells = Cells(last["local"], 0, high, numbers=numbers, tips=cell_tips)
    alt = f"Relative distance of {count} clients by layer."
    clients = Axis("client", ticks=tuple((at, str(client)) for at, client in enumerate(last["clients"])))
    charts.append(Chart("drift-clients", "The same, client by client", alt, [cells], x=x, y=clients, height=340))
    if len(values.rounds) > 1:
        rounds = [int(row["round"]) for row in values.rounds]
        by_round = list(zip(*map(means, values.rounds), strict=True))  # [L][rounds]
        marks: list[Mark] = [
            Line(rounds, by_round[at], layer, at % 10, points=len(rounds) <= 40) for at, layer in enumerate(layers)
        ]
        title, alt = "Distance by layer and round", "Mean relative distance of local models by round."
        charts.append(Chart("drift-rounds", title, alt, marks, x=Axis("round", kind="count"), y=y))
    return charts


def drift_findings(values: Drift) -> list[str]:
    """Which layer moves most."""
    row = find_requested_round(values.rounds)
    pairs = list(zip(means(row), values.layers, strict=True))
    (most, top), (least, bottom) = max(pairs), min(pairs)
    start = f"In one visit {row['when']}, clients change"
    if len(pairs) == 1:
        return [f"{start} {name_layer(top)} by {most:.1%} of its norm."]
    if f"{most:.1%}" == f"{least:.1%}":
        return [f"{start} every layer by {most:.1%} of its norm."]
    return [
        f"{start} {name_layer(top)} most, by {most:.1%} of its norm, and {name_layer(bottom)} least, by {least:.1%}."
    ]


DRIFT = Measure(
    name="drift",
    values=Drift,
    take=take_drift,
    draw=draw_drift,
    findings=drift_findings,
    title="How far local models move",
    text="The distance between the model that a client receives and the one it sends back, layer by layer.",
    headline=None,
)
