"""How far clients go from the model they are sent, by layer and round: ‖local − global‖ / ‖global‖.

Shapes: k clients, L layers.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from unskew.analysis.measure import Measure, describe_when, find_requested_round, name_layer, note_sample
from unskew.charts import Axis, Bars, Cells, Chart, Line, Mark
from unskew.core.errors import Missing
from unskew.core.tensors import parameters
from unskew.models.networks import by_layer
from unskew.round.watch import distances, lengths
from unskew.runs.finished import FinishedRun


@dataclass(frozen=True)
class Drift:
    """Relative distances of local models from the one they were sent."""

    layers: list[str]
    rounds: list[dict[str, Any]]  # "round", "when", "clients" [k], "local" [k][L], each divided by the server's layer


def take_drift(run: FinishedRun, *, clients: int = 10, round: int = -1) -> Drift:
    """Distances recorded while training, and those of the visit after ``round`` (−1: the last)."""
    number = run.number(round)
    recorded = [row for row in run.during if "drift" in row]
    rows = [_recorded_row(row) for row in recorded]
    try:
        models, state = run.local_models(number, clients), run.state(number)
        run.notes += note_sample(len(models), len(run.engine.roster.inhabited))
        sent = {name: state.tensors[name] for name in run.side.weights}  # in the order of the network
        size = lengths(sent)
        local = [(distances(model, sent) / size.clamp(min=1e-12)).tolist() for model in models.values()]
        when = describe_when(number, run.result.final_round)
        rows.append({"round": number + 1, "when": when, "asked": True, "clients": list(models), "local": local})
        layers = list(by_layer(parameters(sent)))
    except Missing as error:
        if not recorded:
            raise
        run.notes.append(f"drift is shown as it was recorded while training, not after the last round: {error}")
        layers = recorded[-1]["drift"]["layers"]
    once = {row["round"]: row for row in rows}.values()  # a recorded round that was also trained again counts once
    return Drift(layers, sorted(once, key=lambda row: int(row["round"])))


def _recorded_row(row: dict[str, Any]) -> dict[str, Any]:
    seen = row["drift"]
    scaled = [[far / max(own, 1e-12) for far, own in zip(each, seen["server"], strict=True)] for each in seen["local"]]
    return {"round": row["round"], "when": f"in round {row['round']}", "clients": seen["clients"], "local": scaled}


def means(row: dict[str, Any]) -> list[float]:
    """[L], over the clients."""
    return [fmean(values) for values in zip(*row["local"], strict=True)]


def draw_drift(values: Drift) -> list[Chart]:
    """The layers' means at the end, client by client, and by round where rounds are known."""
    last, names = find_requested_round(values.rounds), tuple(enumerate(values.layers))
    mean = means(last)
    words = ", ".join(f"{layer} {value:.0%}" for layer, value in zip(values.layers, mean, strict=True))
    tips = [f"{layer}: {value:.1%}" for layer, value in zip(values.layers, mean, strict=True)]
    charts = [
        Chart(
            "drift-layers", f"How far clients go from the server's model {last['when']}",
            f"Mean relative distance by layer: {words}.", [Bars(list(range(len(mean))), mean, tips=tips)],
            x=Axis("layer", ticks=names), y=Axis("distance / length of the layer", low=0, kind="percent"),
        )
    ]  # fmt: skip
    high = max(max(row) for row in last["local"]) or 1.0
    tips2 = [
        [f"client {k}, {layer}: {value:.1%}" for layer, value in zip(values.layers, row, strict=True)]
        for k, row in zip(last["clients"], last["local"], strict=True)
    ]
    ticks = tuple((place, str(client)) for place, client in enumerate(last["clients"]))
    charts.append(
        Chart(
            "drift-clients", "The same, client by client", f"Relative distance of {len(ticks)} clients by layer.",
            [Cells(last["local"], 0, high, numbers=".0%" if len(ticks) <= 12 else "", tips=tips2)],
            x=Axis("layer", ticks=names), y=Axis("client", ticks=ticks), height=340,
        )
    )  # fmt: skip
    if len(values.rounds) > 1:
        rounds = [int(row["round"]) for row in values.rounds]
        by_round = [means(row) for row in values.rounds]
        marks: list[Mark] = [
            Line(rounds, [row[place] for row in by_round], layer, place % 10, points=len(rounds) <= 40)
            for place, layer in enumerate(values.layers)
        ]
        charts.append(
            Chart(
                "drift-rounds", "Distance by layer and round", "Mean relative distance of local models by round.",
                marks, x=Axis("round", kind="count"), y=Axis("distance / length of the layer", low=0, kind="percent"),
            )
        )  # fmt: skip
    return charts


def drift_findings(values: Drift) -> list[str]:
    """Which layer moves most."""
    row = find_requested_round(values.rounds)
    mean = means(row)
    most, least = (pick(range(len(mean)), key=lambda place: mean[place]) for pick in (max, min))
    return [
        f"In one visit {row['when']} clients change {name_layer(values.layers[most])} most, by {mean[most]:.1%} "
        f"of its length, and {name_layer(values.layers[least])} least, by {mean[least]:.1%}."
    ]


DRIFT = Measure(
    name="drift",
    values=Drift,
    take=take_drift,
    draw=draw_drift,
    findings=drift_findings,
    title="How far clients go",
    text="The distance between the model that a client gets and the one it sends back, layer by layer.",
    headline=None,
)
