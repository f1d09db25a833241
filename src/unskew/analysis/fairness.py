"""What each client gets: accuracy under its own label distribution, before calibration and after.

Shapes: K clients, C classes, m classifiers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unskew.analysis.measure import CellValue, Column, Comparison, Element, Measure, Table, pick_calibrations
from unskew.calibration import is_bound
from unskew.charts import Axis, Chart, Line, grouped, shares_in_bins
from unskew.core.errors import Missing
from unskew.core.units import counted
from unskew.round.evaluation import Evaluation
from unskew.runs.client_accuracy import ByClient, measure_clients, read_clients, summarise_clients
from unskew.runs.finished import FinishedRun
from unskew.runs.result import Result

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
    rows: list[list[CellValue]] = []
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
    usable = [row for name, row in values.spreads.items() if name != "before" and not is_bound(name)]
    return max(usable, key=lambda row: float(row["mean"]), default=None)


ONE_BY_ONE = 100  # clients: the curve has a point for each of that many; beyond that, one for each per cent of them
GROUPS = 10  # of clients, by size and by distance

Floats = npt.NDArray[np.float64]


def take_fairness(run: FinishedRun, *, calibrations: int = 3, model: bool = True) -> Fairness:
    """Accuracy of each client: Σ_c q_k(c)·acc_c, with acc_c measured on the test set; and on its own test images.

    Shown are the run's own classifier and its best ``calibrations``. ``model=false`` takes what the run stored at its
    end and nothing else; a run of before then has no figures.

    Reference: Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020; Jain, Chiu and Hawe, 1984.
    """
    chosen = pick_calibrations(run, calibrations)
    seen = _stored(run, chosen) or (_measured(run, chosen) if model else {})
    if not seen:
        raise Missing(f"the run did not store it; unskew analyse {run.path} fairness measures it from the model")
    spreads = {name: summarise_clients(*each) for name, each in seen.items()}
    if spreads["before"] is None:
        raise Missing("no client has examples of a class that has test images")
    share = np.linspace(0, 1, 101)
    if (count := spreads["before"].clients) <= ONE_BY_ONE:
        share = np.linspace(0, 1, count)
    held, known = run.holdings, ~np.isnan(seen["before"][0].accuracy)
    accuracies = {name: each.accuracy[known] for name, (each, _) in seen.items()}
    own = {name: each for name, (_, each) in seen.items() if each is not None}
    counts = next(iter(own.values())).counted if own else np.zeros(0)
    return Fairness(
        spreads={name: asdict(each) for name, each in spreads.items() if each is not None},
        share=share.tolist(),
        curves={name: _curve(each, share) for name, each in accuracies.items()},
        bins={name: np.histogram(each, BINS, (0, 1))[0].tolist() for name, each in accuracies.items()},
        by_size=_groups(held.sizes[known].astype(np.float64), accuracies),
        by_distance=_groups(held.distances[known], accuracies),
        own_curves={name: _curve(each.accuracy[each.counted > 0], share) for name, each in own.items()},
        images=int(np.median(counts[counts > 0])) if own else 0,
    )


def _stored(run: FinishedRun, chosen: Sequence[str]) -> dict[str, tuple[ByClient, ByClient | None]]:
    """What the run wrote at its end; empty where one of the classifiers is not in it."""
    arrays, sizes = read_clients(run.path), run.holdings.sizes
    places = {str(name): place for place, name in enumerate(arrays.get("classifiers", ()))}
    if any(name not in places for name in chosen) or arrays["accuracy"].shape[1] != len(sizes):
        return {}
    seen: dict[str, tuple[ByClient, ByClient | None]] = {}
    measured = arrays["counted"].astype(np.int64)
    for name in chosen:
        accuracy, own = arrays["accuracy"][places[name]].astype(np.float64), None
        if "own_images" in arrays:
            counts = arrays["own_counts"].astype(np.int64)
            own = ByClient(
                arrays["own_images"][places[name]].astype(np.float64), counts, np.ones(len(counts), np.bool_)
            )
        seen[name or "before"] = (ByClient(accuracy, measured, measured == sizes), own)
    return seen if _agrees(run.result, seen) else {}


def _agrees(result: Result, seen: Mapping[str, tuple[ByClient, ByClient | None]]) -> bool:
    """Whether the file is of the models that the result tells of: an earlier version may have added a calibration."""
    for name, (each, _) in seen.items():
        there = result.clients_accuracy if name == "before" else result.calibrations[name].clients_accuracy
        here = summarise_clients(each)
        if there is None or here is None or abs(there.mean - here.mean) > 1e-4:
            return False
    return True


def _measured(run: FinishedRun, chosen: Sequence[str]) -> dict[str, tuple[ByClient, ByClient | None]]:
    """From the models, on the test images: for runs of before."""
    outputs, prepared, classes = run.outputs, run.prepared, len(run.classes)
    total = torch.bincount(outputs.labels, minlength=classes).double().numpy()
    seen = {}
    for name in chosen:
        marks = outputs.predicted[name] == outputs.labels
        right = torch.bincount(outputs.labels[marks], minlength=classes).double().numpy()
        score = Evaluation(float(marks.double().mean()), 0.0, right, total, marks.double().numpy())
        labels = prepared.images.train.labels
        seen[name or "before"] = measure_clients(prepared.partition, labels, prepared.test_owners, score)
    return seen


def _curve(accuracy: Floats, share: Floats) -> list[float]:
    return np.quantile(accuracy, share).tolist() if len(accuracy) else []


def _groups(by: Floats, accuracies: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """Groups of about as many clients each, ordered by ``by``; clients with the same value are in one group."""
    edges = np.unique(np.quantile(by, np.linspace(0, 1, GROUPS + 1)[1:-1], method="inverted_cdf"))
    group = np.searchsorted(edges, by)
    rows = []
    for place in np.unique(group):
        mine = group == place
        row = {name: float(each[mine].mean()) for name, each in accuracies.items()}
        rows.append({"low": float(by[mine].min()), "high": float(by[mine].max()), "middle": float(np.median(by[mine])),
                     "clients": int(mine.sum()), "accuracy": row})  # fmt: skip
    return rows


def draw_fairness(values: Fairness) -> list[Chart]:
    """The clients in the order of their accuracy, how many have which, and accuracy by size and by distance."""
    charts = [sorted_clients(values), histogram(values)]
    charts += by_group(values.by_size, "size", "examples of a client", "size", log=True)
    charts += by_group(
        values.by_distance, "distance", "distance of a client's labels from the whole", "distance of labels"
    )
    if values.own_curves:
        charts.append(on_own_images(values))
    return charts


def fairness_findings(values: Fairness) -> list[str]:
    """The worst client, a tenth, the median; what the best calibration changes; who is left out."""
    before = values.spreads["before"]
    many = before["clients"] > 1
    if not many:
        return [f"The one client has an accuracy of {before['mean']:.1%} under its own labels."]
    sentences = [
        f"Under its own label distribution the worst client has {before['worst']:.1%} accuracy, a tenth of the clients "
        f"at most {before['p10']:.1%}, half of them at most {before['p50']:.1%}; Jain's index is {before['jain']:.3f}."
    ]
    usable = {name: row for name, row in values.spreads.items() if name != "before" and not is_bound(name)}
    if usable:
        name = max(usable, key=lambda each: float(usable[each]["mean"]))
        row = usable[name]
        sentences[0] = sentences[0][:-1] + (
            f"; after {name} the worst has {row['worst']:.1%}, the tenth {row['p10']:.1%}, the half {row['p50']:.1%}, "
            f"and the index is {row['jain']:.3f}."
        )
    if before["partly"] or before["left_out"]:
        sentences.append(
            f"{counted(before['left_out'], 'client')} of {before['clients'] + before['left_out']:,} left out, without "
            f"examples of a class that has test images; of {before['partly']:,} more some classes have none, and their "
            "other classes are counted."
        )
    return sentences


def show_fairness(run: FinishedRun, values: Fairness) -> list[Element]:
    """The table of summaries, and the charts."""
    return [summaries(values), *draw_fairness(values)]


FAIRNESS = Measure(
    name="fairness",
    values=Fairness,
    take=take_fairness,
    draw=draw_fairness,
    findings=fairness_findings,
    show=show_fairness,
    title="What each client gets",
    text=(
        "The accuracy of a client is that of the classes it has, each weighted by its share of the client's examples. "
        "It is the experimenter's view of a simulation: the server of a federation does not know these shares. Jain's "
        "index is 1 where all clients have the same accuracy, and s where a share s of them has it all."
    ),
    compare=Comparison(
        title="Accuracy over clients",
        text="The accuracy of clients under their own label distributions: the worst, the tenth from below, the median "
        "and the mean.",
        draw=compare_fairness,
    ),
    calibrations=True,
    folder_only="fairness(model=false)",
    headline=3,
)
