"""Accuracy of each client under its own label distribution, before calibration and after.

Shapes: K clients, C classes, m classifiers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.analysis.measure import CellValue, Comparison, Element, Measure, draw_by_run, pick_calibrations, tabulate
from unskew.calibration import is_bound
from unskew.charts import Axis, Chart, Dots
from unskew.charts.builders import sorted_chart
from unskew.core.errors import Missing
from unskew.core.units import counted
from unskew.runs.finished import FinishedRun
from unskew.runs.result import ByClient, read_clients, summarise_clients

COMPARED = {"worst": "worst client", "p10": "10th percentile", "p50": "median", "mean": "mean"}
ONE_BY_ONE = 100  # clients with a point each on the curve; with more clients, a point for each percent of them
GROUPS = 10  # of clients, by size and by distance

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fairness:
    """Accuracies of clients by classifier ("before" is the run's own), as summaries and in groups of clients."""

    spreads: dict[str, dict[str, Any]]  # ClientSpread by classifier
    share: list[float]  # [p], of clients
    curves: dict[str, list[float]]  # [p] each: the accuracy that this share of the clients does not exceed
    by_size: list[dict[str, Any]]  # groups: "low", "high", "clients", "accuracy" by classifier
    by_distance: list[dict[str, Any]]  # likewise, by ‖q_k − p‖₁
    own_curves: dict[str, list[float]]  # [p] each, on the clients' own test images; empty if they have none
    images: int  # the median number of a client's own test images; 0 if they have none
    names: dict[str, list[str]] = field(default_factory=dict)  # of clients, the worst first; only the worst of many


def take_fairness(run: FinishedRun, *, calibrations: int = 3) -> Fairness:
    """Accuracy of each client: Σ_c q_k(c)·acc_c, with acc_c measured on the test set; and on its own test images.

    Covers the run's own classifier and its best ``calibrations``, as stored with the run.

    Reference: Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020; Jain, Chiu and Hawe, 1984.
    """
    measured = _read_stored(run, pick_calibrations(run, calibrations))
    if "before" not in measured:
        raise Missing("the accuracy of single clients is not known in a federation")
    spreads = {name: summarise_clients(by_client) for name, by_client in measured.items()}
    if spreads["before"] is None:
        raise Missing("no client has examples of any class in the test set")
    count = spreads["before"].clients
    share = np.linspace(0, 1, count if count <= ONE_BY_ONE else 101)
    known = ~np.isnan(measured["before"].accuracy)
    accuracies = {name: by_client.accuracy[known] for name, by_client in measured.items()}
    own = {name: by_client.own for name, by_client in measured.items() if by_client.own is not None}
    counts = next(iter(own.values())).counted if own else np.zeros(0)
    most = count if count <= ONE_BY_ONE else 1
    ranked = {name: np.argsort(values, kind="stable")[:most] for name, values in accuracies.items()}
    clients = np.flatnonzero(known)
    named = list(map(str, range(len(known)))) if run.holdings.names is None else run.holdings.names
    return Fairness(
        spreads={name: asdict(summary) for name, summary in spreads.items() if summary is not None},
        share=share.tolist(),
        curves={name: _curve(values, share) for name, values in accuracies.items()},
        by_size=_groups(run.holdings.sizes[known].astype(np.float64), accuracies),
        by_distance=_groups(run.holdings.distances[known], accuracies),
        own_curves={name: _curve(values.accuracy[values.counted > 0], share) for name, values in own.items()},
        images=int(np.median(counts[counts > 0])) if own else 0,
        names={name: [named[client] for client in clients[order]] for name, order in ranked.items()},
    )


def _read_stored(run: FinishedRun, chosen: Sequence[str]) -> dict[str, ByClient]:
    arrays, measured = read_clients(run.path), dict[str, ByClient]()
    for row, name in enumerate(map(str, arrays.get("classifiers", ()))):
        own, counted, accuracy = None, arrays["counted"].astype(np.int64), arrays["accuracy"][row].astype(np.float64)
        if "own_images" in arrays:
            images, counts = arrays["own_images"][row].astype(np.float64), arrays["own_counts"].astype(np.int64)
            own = ByClient(images, counts, np.ones(len(counts), np.bool_))
        measured[name] = ByClient(accuracy, counted, counted == run.holdings.sizes, own)
    return {name or "before": measured[name] for name in chosen if name in measured}


def _curve(accuracy: Floats, share: Floats) -> list[float]:
    return np.quantile(accuracy, share).tolist() if len(accuracy) else []


def _groups(by: Floats, accuracies: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """Groups of roughly equal size, ordered by ``by``; clients with the same value are in one group."""
    edges = np.unique(np.quantile(by, np.linspace(0, 1, GROUPS + 1)[1:-1], method="inverted_cdf"))
    group = np.searchsorted(edges, by)
    rows = []
    for index in np.unique(group):
        members = group == index
        row = {name: float(accuracy[members].mean()) for name, accuracy in accuracies.items()}
        low, middle, high = (float(reduce(by[members])) for reduce in (np.min, np.median, np.max))
        rows.append({"low": low, "high": high, "middle": middle, "clients": int(members.sum()), "accuracy": row})
    return rows


def _draw(values: Fairness) -> list[Chart]:
    y = Axis("at most this accuracy", low=0, high=1, kind="percent")

    def tip(name: str, at: int) -> str:
        names = values.names.get(name, [])
        who = f"client {names[at]}" if len(names) == len(values.share) else f"{values.share[at]:.0%} of the clients"
        return f"{who}, {name}: {values.curves[name][at]:.1%}"

    worst = "; ".join(f"{n}: worst {row['worst']:.0%}, median {row['p50']:.0%}" for n, row in values.spreads.items())
    title, alt = "Clients sorted by accuracy", f"Accuracy of clients, sorted. {worst}."
    charts = [sorted_chart("fairness-clients", title, alt, values.curves, "clients", y, tip)]
    charts += _draw_groups(values.by_size, "size", "examples of a client", "size", log=True)
    label = "distance of a client's labels from the population's"
    charts += _draw_groups(values.by_distance, "distance", label, "distance of labels")
    if values.own_curves:
        title = "On the clients' own test images"
        alt = f"Accuracy of clients on their own test images, sorted; the median client has {values.images:,}."
        charts.append(sorted_chart("fairness-own-images", title, alt, values.own_curves, "clients", y))
    return charts


def _draw_groups(rows: list[dict[str, Any]], name: str, label: str, title: str, *, log: bool = False) -> list[Chart]:
    """Mean accuracy of groups of clients; no chart if all clients are in one group."""
    if len(rows) < 2:
        return []
    x, marks = [max(row["middle"], 1e-9) for row in rows], []
    groups = [f"{counted(row['clients'], 'client')}, {row['low']:.3g} to {row['high']:.3g}" for row in rows]
    for colour, classifier in enumerate(rows[0]["accuracy"]):
        means = [row["accuracy"][classifier] for row in rows]
        tips = [f"{group}, {classifier}: {mean:.1%}" for group, mean in zip(groups, means, strict=True)]
        marks.append(Dots(x, means, colour, radius=4.0, name=classifier, tips=tips))
    alt = f"Mean accuracy of {len(rows)} groups of clients by {title}."
    x_axis = Axis(label, kind="count" if log else "number", log=log and x[-1] > 20 * x[0])
    y_axis = Axis("mean accuracy", low=0, high=1, kind="percent")
    return [Chart(f"fairness-{name}", f"Accuracy by {title}", alt, marks, x_axis, y_axis)]


def _findings(values: Fairness) -> list[str]:
    before = values.spreads["before"]
    if before["clients"] <= 1:
        return [f"The only client has an accuracy of {before['mean']:.1%} under its own labels."]

    def describe(name: str, row: dict[str, Any]) -> str:
        who = f"the worst client, {values.names[name][0]}," if values.names.get(name) else "the worst client"
        worst = f"{who} has {row['worst']:.1%} accuracy, the 10th percentile is {row['p10']:.1%}, the median"
        return f"{worst} {row['p50']:.1%}, Jain's index {row['jain']:.3f}"

    best = _pick_best(values)
    after = f"; after {best[0]} {describe(*best)}" if best else ""
    sentences = [f"Under its own label distribution {describe('before', before)}{after}."]
    if before["partly"] or before["left_out"]:
        sentences.append(
            f"{before['left_out']:,} of {before['clients'] + before['left_out']:,} clients are left out because none "
            f"of their classes has test images; for {before['partly']:,} more, only the classes with test images count."
        )
    return sentences


def _pick_best(values: Fairness) -> tuple[str, dict[str, Any]] | None:
    usable = [(name, row) for name, row in values.spreads.items() if name != "before" and not is_bound(name)]
    return max(usable, key=lambda pair: float(pair[1]["mean"]), default=None)


def _show(run: FinishedRun, values: Fairness) -> list[Element]:
    columns = {"worst": "worst client", "p10": "10th percentile", "p50": "median", "p90": "90th percentile"}
    columns |= {"mean": "mean", "by_examples": "by examples", "deviation": "deviation", "jain": "Jain's index"}
    rows: list[list[CellValue]] = []
    for name, row in values.spreads.items():
        rows.append([name, *(row[key] for key in columns)])
        if row["own_images"]:
            rows.append([f"{name}, own test images", *(row["own_images"][key] for key in columns)])
    kinds = {"classifier": "text"} | dict.fromkeys(columns.values(), "percent") | {"Jain's index": "number"}
    note = f"Over {counted(values.spreads['before']['clients'], 'client')}, each counted once, except by examples."
    return [tabulate("Accuracy over clients", kinds, rows, note), *_draw(values)]


def _compare(runs: Mapping[str, Fairness]) -> list[Chart]:
    before = {name: values.spreads["before"] for name, values in runs.items()}
    after = {name: best[1] for name, values in runs.items() if (best := _pick_best(values))}

    def draw(name: str, title: str, shown: Mapping[str, dict[str, Any]]) -> list[Chart]:
        groups = {label: [row[key] for row in shown.values()] for key, label in COMPARED.items()}
        y = Axis("", low=0, high=1, kind="percent")
        return draw_by_run(f"compare-clients-{name}", f"Accuracy over clients, {title}", groups, shown, y, ".1%")

    return [*draw("before", "before calibration", before), *draw("after", "after the best calibration", after)]


FAIRNESS = Measure(
    name="fairness",
    values=Fairness,
    take=take_fairness,
    draw=_draw,
    findings=_findings,
    show=_show,
    title="Accuracy of each client",
    text=(
        "A client's accuracy is that of its classes, each weighted by its share of the client's examples. This is the "
        "experimenter's view of a simulation: the server of a real federation does not know these shares. Jain's index "
        "is 1 if all clients have the same accuracy, and s if a share s of them has equal accuracy and the others none."
    ),
    compare=Comparison(draw=_compare),
    calibrations=True,
    folder_only="fairness",
    headline=3,
)
