"""What a reader sees of the accuracy of clients: sorted, in bins, by size and by distance; runs side by side.

``analysis.fairness`` takes the values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unskew.analysis.elements import Cell, Column, Table
from unskew.analysis.phrases import bound
from unskew.charts import Axis, Chart, Line
from unskew.charts.groups import grouped, shares_in_bins
from unskew.core.units import counted

BINS = 20  # of accuracy
COMPARED = {"worst": "worst client", "p10": "tenth", "p50": "median", "mean": "mean"}


@dataclass(frozen=True)
class Fairness:
    """Accuracies of clients by classifier ("before" is the run's own), as summaries and in groups of clients."""

    spreads: dict[str, dict[str, Any]]  # runs.client_accuracy.Spread of each classifier
    share: list[float]  # [p], of clients
    curves: dict[str, list[float]]  # [p] each: that share of the clients has at most this accuracy
    bins: dict[str, list[int]]  # [BINS] each, clients by accuracy
    by_size: list[dict[str, Any]]  # groups: "low", "high", "clients", "accuracy" by classifier
    by_distance: list[dict[str, Any]]  # likewise, by ‖q_k − p‖₁
    own_curves: dict[str, list[float]]  # [p] each, on the clients' own test images; empty where they have none
    images: int  # how many test images a client has, at the median; 0 where they have none


def _lines(curves: Mapping[str, list[float]], share: list[float]) -> list[Line]:
    few = len(share) <= 30
    return [
        Line(share, curve, name, colour % 10, points=few,
             tips=[f"{at:.0%} of the clients, {name}: {value:.1%} at most"
                   for at, value in zip(share, curve, strict=True)])
        for colour, (name, curve) in enumerate(curves.items()) if curve
    ]  # fmt: skip


def sorted_clients(values: Fairness) -> Chart:
    """Accuracy against the share of clients that have at most that."""
    words = "; ".join(f"{name}: worst {row['worst']:.0%}, median {row['p50']:.0%}"
                      for name, row in values.spreads.items())  # fmt: skip
    return Chart(
        "fairness-clients", "Clients in the order of their accuracy", f"Accuracy of clients, sorted. {words}.",
        _lines(values.curves, values.share), x=Axis("share of the clients", low=0, high=1, kind="percent"),
        y=Axis("at most this accuracy", low=0, high=1, kind="percent"),
    )  # fmt: skip


def on_own_images(values: Fairness) -> Chart:
    """As ``sorted_clients``, on the test images that are the clients' own."""
    return Chart(
        "fairness-own-images", "On the clients' own test images",
        f"Accuracy of clients on their own test images, sorted; a client has {values.images:,} of them at the median.",
        _lines(values.own_curves, values.share), x=Axis("share of the clients", low=0, high=1, kind="percent"),
        y=Axis("at most this accuracy", low=0, high=1, kind="percent"),
    )  # fmt: skip


def histogram(values: Fairness) -> Chart:
    """Clients in bins of accuracy."""
    title, alt = "How many clients have which accuracy", "Clients by accuracy, before calibration and after."
    return shares_in_bins("fairness-histogram", title, alt, values.bins, "client", "clients")


def by_group(rows: list[dict[str, Any]], name: str, label: str, title: str, *, log: bool = False) -> list[Chart]:
    """Mean accuracy of groups of clients; none where all clients are in one group."""
    if len(rows) < 2:
        return []
    x = [max(row["middle"], 1e-9) for row in rows]
    marks = []
    for colour, classifier in enumerate(rows[0]["accuracy"]):
        means = [row["accuracy"][classifier] for row in rows]
        tips = [f"{counted(row['clients'], 'client')}, {row['low']:.3g} to {row['high']:.3g}, {classifier}: {mean:.1%}"
                for row, mean in zip(rows, means, strict=True)]  # fmt: skip
        marks.append(Line(x, means, classifier, colour % 10, points=True, tips=tips))
    wide = log and x[-1] > 20 * x[0]
    return [Chart(
        f"fairness-{name}", f"Accuracy by {title}",
        f"Mean accuracy of {len(rows)} groups of clients by {title}.", marks,
        x=Axis(label, kind="count" if log else "number", log=wide),
        y=Axis("mean accuracy", low=0, high=1, kind="percent"),
    )]  # fmt: skip


def summaries(values: Fairness) -> Table:
    """A row for each classifier, and one more for the clients' own test images."""
    names = ("worst", "p10", "p50", "p90", "mean", "by_examples", "deviation", "jain")
    words = ("worst client", "tenth", "median", "nine tenths", "mean", "by examples", "deviation", "Jain's index")
    rows: list[list[Cell]] = []
    for name, row in values.spreads.items():
        rows.append([name, *(row[each] for each in names)])
        if row["own_images"]:
            rows.append([f"{name}, own test images", *(row["own_images"][each] for each in names)])
    kinds = ["percent"] * 7 + ["number"]
    columns = [Column("classifier"), *(Column(word, kind) for word, kind in zip(words, kinds, strict=True))]
    note = f"Over {counted(values.spreads['before']['clients'], 'client')}, each counted once, except by examples."
    return Table("Accuracy over clients", columns, rows, note)


def compare_fairness(runs: Mapping[str, Fairness]) -> list[Chart]:
    """The worst client, the tenth, the median and the mean of each run, before calibration and with its best."""
    charts = []
    for title, pick in (("before calibration", _before), ("after the best calibration", _best)):
        shown = {name: row for name, values in runs.items() if (row := pick(values)) is not None}
        if not shown:
            continue
        groups = {word: [row[each] for row in shown.values()] for each, word in COMPARED.items()}
        names = list(shown)
        charts.append(Chart(
            f"compare-clients-{title.split()[0]}", f"Accuracy over clients, {title}",
            f"Worst client, tenth, median and mean of {len(shown)} runs.",
            grouped(groups, lambda word, at, groups=groups, names=names:  # type: ignore[misc]
                    f"{names[at]}, {word}: {groups[word][at]:.1%}"),
            x=Axis("", ticks=tuple(enumerate(names))), y=Axis("", low=0, high=1, kind="percent"),
            width=880 if len(shown) > 4 else 440, height=340,
        ))  # fmt: skip
    return charts


def _before(values: Fairness) -> dict[str, Any] | None:
    return values.spreads["before"]


def _best(values: Fairness) -> dict[str, Any] | None:
    usable = [row for name, row in values.spreads.items() if name != "before" and not bound(name)]
    return max(usable, key=lambda row: float(row["mean"]), default=None)
