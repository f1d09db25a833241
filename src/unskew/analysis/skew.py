"""Who has what: the labels of each client, the clients' sizes, and how far each is from the whole.

Shapes: K clients, k of them shown, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unskew.analysis.measure import Choice, Comparison, Element, Measure
from unskew.charts import Axis, Bars, Cells, Chart, Dots, Line, Mark, Words
from unskew.charts.scales import wrap
from unskew.core.errors import UserError
from unskew.core.units import counted
from unskew.data.partition_files import Holdings
from unskew.data.population import Ints, Partition, cells, describe_sizes, emd
from unskew.runs.finished import FinishedRun

NAMED = 30  # classes shown as circles, with their names
COLOURED = 10  # classes that have a colour each
MAX_CLASSES = 100  # drawn for one client; of more, those that it has most of
MAX_SIZES = 10_000  # clients whose sizes are stored one by one
SHARE = 0.9  # of a client's examples: how many classes make them up


@dataclass(frozen=True)
class Skew:
    """Label counts of the clients shown, the sizes of all, and the distance of each client from the whole."""

    scheme: str
    emd: float  # Σ n_k/n · ‖q_k − p‖₁
    classes: list[str]
    sizes: list[int]  # of all clients; of very many, as many quantiles, ascending
    shown: list[int]  # the clients below, evenly by size where not all are shown
    names: list[str]
    counts: list[list[int]]  # [k][C]
    distances: list[float]  # [k], ‖q_k − p‖₁
    total: list[int]  # [C]
    few: float  # the median over all clients of how many classes make up 90 % of their examples
    clients: int = 0  # how many there are; 0: as many as sizes
    ranked: dict[str, list[float]] = field(default_factory=dict)  # [101] quantiles over all clients, of many: "classes"
    # that a client has, "distance" of its labels from the whole


def take_skew(run: FinishedRun, *, clients: int = 60) -> Skew:
    """The partition of a run: how many examples of each class every client has; no data set is needed.

    Reference: Hsu, Qi and Brown 2020, section 6.1; Luo et al. 2021, Figure 3.
    """
    if clients < 1:
        raise UserError(f"skew(clients={clients}): skew shows at least one client")
    if len(run.holdings.sizes) > clients:
        run.notes.append(f"{clients} of {len(run.holdings.sizes):,} clients are shown, evenly by size")
    return measure_skew(run.holdings, run.classes, clients)


def measure_skew(held: Holdings, classes: Sequence[str], clients: int = 60) -> Skew:
    """The skew of a partition, with at most ``clients`` of its clients in detail."""
    population, width = len(held.sizes), max(len(classes), int(held.cells[:, 1].max(initial=0)) + 1)
    shown = np.arange(population)
    if population > clients:
        order = np.argsort(-held.sizes, kind="stable")
        shown = np.sort(order[np.linspace(0, population - 1, clients).round().astype(int)])
    place = np.full(population, -1)
    place[shown] = np.arange(len(shown))
    counts = np.zeros((len(shown), width), np.int64)
    there = held.cells[place[held.cells[:, 0]] >= 0]
    counts[place[there[:, 0]], there[:, 1]] = there[:, 2]
    total = np.bincount(held.cells[:, 1], held.cells[:, 2], minlength=width).astype(np.int64)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    sizes = held.sizes if population <= MAX_SIZES else np.quantile(held.sizes, np.linspace(0, 1, 1001)).round()
    ranked: dict[str, list[float]] = {}
    if population > clients and held.sizes.any():
        per_client = np.bincount(held.cells[:, 0], minlength=population)[held.sizes > 0]
        at = np.linspace(0, 1, 101)
        ranked = {"classes": np.quantile(per_client, at).tolist(),
                  "distance": np.quantile(held.distances[held.sizes > 0], at).tolist()}  # fmt: skip
    return Skew(
        scheme=held.scheme,
        emd=held.emd,
        classes=[*classes, *map(str, range(len(classes), width))],
        sizes=sizes.astype(np.int64).tolist(),
        shown=shown.tolist(),
        names=[str(client) if held.names is None else held.names[client] for client in shown.tolist()],
        counts=counts.tolist(),
        distances=np.abs(share - total / max(int(total.sum()), 1)).sum(1).tolist(),
        total=total.tolist(),
        few=_median_classes(held.cells, held.sizes),
        clients=population,
        ranked=ranked,
    )


def _median_classes(cells: np.ndarray, sizes: np.ndarray) -> float:
    """The median, over clients with examples, of the least number of classes that make up 90 % of their examples."""
    order = np.lexsort((-cells[:, 2], cells[:, 0]))
    owner, count = cells[order, 0], cells[order, 2]
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    running = np.cumsum(count)
    before = np.repeat(np.r_[0, running[starts[1:] - 1]], np.diff(np.r_[starts, len(owner)]))
    enough = (running - count - before) < SHARE * sizes[owner] - 1e-9  # still short before this class was added
    needed = np.bincount(owner, enough, minlength=len(sizes))[np.unique(owner)]
    return float(np.median(needed)) if len(needed) else 0.0


def draw_skew(values: Skew) -> list[Chart]:
    """Circles or shades of clients × classes, stacked bars, sizes, and each client's own labels beside the whole."""
    charts = [_table(values)]
    if len(values.classes) <= COLOURED:
        charts.append(_stacked(values))
    charts.append(_sizes(values))
    words = {"classes": "Classes of each client", "distance": "Distance of each client's labels from the whole"}
    for name, quantiles in values.ranked.items():
        at = [place / (len(quantiles) - 1) for place in range(len(quantiles))]
        alt = f"{words[name]}, all {_count(values):,} clients sorted: {quantiles[0]:.3g} to {quantiles[-1]:.3g}."
        y = Axis("distance", low=0, high=2)
        if name == "classes":
            y = Axis("classes", kind="count", log=quantiles[-1] > 20 * max(1.0, quantiles[50]))
        x = Axis(f"share of the {_count(values):,} clients", low=0, high=1, kind="percent")
        charts.append(Chart(f"skew-{name}", f"{words[name]}, sorted", alt, [Line(at, quantiles)], x=x, y=y))
    return charts


def _count(values: Skew) -> int:
    return values.clients or len(values.sizes)


def draw_clients(values: Skew) -> dict[str, Chart]:
    """By client, its share of each class beside the share over all clients."""
    whole = np.array(values.total) / max(sum(values.total), 1)
    charts = {}
    for client, name, counts, apart in zip(values.shown, values.names, values.counts, values.distances, strict=True):
        size = sum(counts)
        some = list(range(len(counts)))
        if len(counts) > MAX_CLASSES:
            some = sorted(some, key=lambda label: -counts[label])[:NAMED]
            some = [label for label in some if counts[label]] or some[:1]
        at = list(range(len(some)))
        ticks = tuple((place, values.classes[c]) for place, c in enumerate(some)) if len(at) <= NAMED else None
        own = [counts[label] / max(size, 1) for label in some]
        tips = [f"{values.classes[c]}: {counts[c]:,} of {size:,} ({s:.1%})" for c, s in zip(some, own, strict=True)]
        what = f"class, the largest of {len(counts):,}" if len(some) < len(counts) else "class"
        charts[name] = Chart(
            f"skew-client-{client}", f"Client {name}: {counted(size, 'example')}, distance {apart:.2f} from the whole",
            f"Label distribution of client {name}: " + _largest(values.classes, counts),
            [
                Bars(at, own, tips=tips, name="this client"),
                Line(at, whole[some].tolist(), name="all clients", colour="ink", points=True, dashed=True),
            ],
            x=Axis(what, ticks=ticks, kind="count"), y=Axis("share of its examples", low=0, kind="percent"),
        )  # fmt: skip
    return charts


def _largest(classes: list[str], counts: list[int]) -> str:
    order = sorted(range(len(counts)), key=lambda label: -counts[label])[:3]
    total = max(sum(counts), 1)
    return "mostly " + ", ".join(f"{classes[c]} {counts[c] / total:.0%}" for c in order if counts[c]) + "."


def _table(values: Skew) -> Chart:
    clients = tuple(enumerate(values.names))
    tips = [
        [f"client {name}, {label}: {count:,}" for label, count in zip(values.classes, row, strict=True)]
        for name, row in zip(values.names, values.counts, strict=True)
    ]
    width = int(np.clip(90 + 34 * len(values.shown), 440, 900))
    who = counted(len(values.shown), "client")
    alt = f"Examples of each class, {who} by {len(values.classes)} classes; EMD {values.emd:.2f}."
    x, title = Axis("client", ticks=clients), "Examples of each class, by client"
    if len(values.classes) <= NAMED:
        largest = max((count for row in values.counts for count in row), default=0) or 1
        spots = [(k, c, n) for k, row in enumerate(values.counts) for c, n in enumerate(row) if n]
        room = min((width - 120) / max(len(values.shown), 1), 300 / max(len(values.classes), 1))
        dots = Dots(
            [k for k, _, _ in spots], [c for _, c, _ in spots], area=[n / largest for _, _, n in spots],
            radius=max(2.0, 0.5 * room), tips=[tips[k][c] for k, c, _ in spots],
        )  # fmt: skip
        y = Axis("", low=-0.6, high=len(values.classes) - 0.4, ticks=tuple(enumerate(values.classes)), reverse=True)
        x = Axis("client", low=-0.6, high=len(values.shown) - 0.4, ticks=clients)
        return Chart("skew-circles", title, alt, [dots], x=x, y=y, width=width, height=380)
    shares = [[n / max(sum(row), 1) for n in row] for row in values.counts]
    highest = max(max(row) for row in shares) or 1.0
    turned = [[row[c] or None for row in shares] for c in range(len(values.classes))]
    words = [[row[c] for row in tips] for c in range(len(values.classes))] if len(values.classes) <= 150 else ()
    marks: list[Mark] = [Cells(turned, 0, highest, tips=words)]
    ten = max(1, len(values.classes) // 10)
    part = f", {len(values.shown)} of {_count(values):,} clients" if len(values.shown) < _count(values) else ""
    ticks = tuple((c, str(c)) for c in range(0, len(values.classes), ten))
    return Chart(
        "skew-shades", f"Share of each class among a client's examples{part}", alt, marks, x=x,
        y=Axis("class", ticks=ticks), width=width, height=420,
    )  # fmt: skip


def _stacked(values: Skew) -> Chart:
    at, base, marks = list(range(len(values.shown))), [0.0] * len(values.shown), list[Mark]()
    sizes = [max(sum(row), 1) for row in values.counts]
    for label, name in enumerate(values.classes):
        share = [row[label] / size for row, size in zip(values.counts, sizes, strict=True)]
        tips = [f"client {k}, {name}: {s:.1%}" for k, s in zip(values.names, share, strict=True)]
        marks.append(Bars(at, share, list(base), 0.9, label, name, tips=tips))
        base = [low + more for low, more in zip(base, share, strict=True)]
    return Chart(
        "skew-bars", "Share of each class, by client", f"Stacked label shares of {counted(len(at), 'client')}.", marks,
        x=Axis("client", ticks=tuple(enumerate(values.names))), y=Axis("", low=0, high=1, kind="percent"),
        width=int(np.clip(90 + 26 * len(at), 440, 900)), height=340,
    )  # fmt: skip


def _sizes(values: Skew) -> Chart:
    sizes, alt = (
        values.sizes,
        f"Sizes of {counted(_count(values), 'client')}, {min(values.sizes):,} to {max(values.sizes):,}.",
    )
    if len(values.shown) == _count(values):
        tips = [f"client {name}: {size:,}" for name, size in zip(values.names, sizes, strict=True)]
        bars = Bars(list(range(len(sizes))), sizes, tips=tips)
        x, y = Axis("client", ticks=tuple(enumerate(values.names))), Axis("examples", low=0, kind="count")
        return Chart("skew-sizes", "Examples of each client", alt, [bars], x=x, y=y)
    ranked = sorted(sizes, reverse=True)
    at = sorted({int(place) for place in np.linspace(0, len(ranked) - 1, 400)})
    step = (_count(values) - 1) / max(len(ranked) - 1, 1)
    line = Line([1 + place * step for place in at], [max(ranked[place], 0.5) for place in at])
    y = Axis("examples", kind="count", log=ranked[0] > 20 * max(1.0, float(np.median(ranked))))
    return Chart("skew-sizes", "Examples of each client, by rank", alt, [line], x=Axis("rank", kind="count"), y=y)


def skew_findings(values: Skew) -> list[str]:
    """How unequal the clients are, in sizes and in labels."""
    if len(values.sizes) == 1:
        return [f"One client holds all {values.sizes[0]:,} examples: nothing is skewed."]
    each = describe_sizes(np.asarray(values.sizes))
    classes = f"{values.few:.0f}" if values.few == round(values.few) else f"{values.few:.1f}"
    words = f"{_count(values):,} clients hold {each}; for half of them, {classes} or fewer of "
    words += f"the {len(values.classes):,} classes make up 90% of their examples."
    how = "nearly the same labels everywhere" if values.emd < 0.1 else f"EMD {values.emd:.2f} on a scale from 0 to 2"
    return [f"{words} Label skew: {how}."]


def show_skew(run: FinishedRun, values: Skew) -> list[Element]:
    """The charts, and one client at a time."""
    return [*draw_skew(values), Choice("client", draw_clients(values))]


def compare_skew(runs: Mapping[str, Skew]) -> list[Chart]:
    """The EMD of each run's partition."""
    if not runs:
        return []
    tips = [f"{name}: {values.emd:.3f}" for name, values in runs.items()]
    bars = Bars(list(range(len(runs))), [values.emd for values in runs.values()], tips=tips)
    x, y = Axis("", ticks=tuple(enumerate(runs))), Axis("EMD", low=0)
    return [Chart("compare-emd", "EMD of the partition", "EMD of each run's partition.", [bars], x=x, y=y)]


SKEW = Measure(
    name="skew",
    values=Skew,
    take=take_skew,
    draw=draw_skew,
    findings=skew_findings,
    show=show_skew,
    title="Who held what",
    text=(
        "The labels of each client. EMD is the distance between a client's label distribution and that of all clients, "
        "averaged by size: 0 where all are the same, 2 where they share nothing."
    ),
    compare=Comparison(
        title="Skew of the partitions",
        text="How far the clients' label distributions are from the whole: 0 where all are the same, 2 where they "
        "share nothing.",
        draw=compare_skew,
    ),
    folder_only="skew",
    headline=3,
)


MAX_CLIENTS = 60  # shown one by one
LINE, MARGIN = 17, 8  # units of the picture
FULL_WIDTH = 640  # at least, so that the facts fit on a line


def partition_charts(partition: Partition, labels: Ints, class_names: Sequence[str]) -> list[Chart]:
    """The partition of these labels: a heading with the facts, then the charts of its skew, all equally wide."""
    held = holdings_of(partition, labels, len(class_names))
    values = measure_skew(held, class_names, MAX_CLIENTS)
    charts = draw_skew(values)
    width = max(FULL_WIDTH, *(chart.width for chart in charts))
    sentences = skew_findings(values) if held.sizes.any() else []
    heading = _heading(partition, _facts(partition, held, len(labels)), sentences, width)
    return [heading, *(replace(chart, width=width) for chart in charts)]


def holdings_of(partition: Partition, labels: Ints, classes: int) -> Holdings:
    """How many examples of each class every client has."""
    held = partition.client[partition.client >= 0]
    return Holdings(
        scheme=partition.scheme,
        names=partition.names,
        sizes=np.bincount(held, minlength=partition.clients).astype(np.int64),
        cells=np.stack(cells(partition.client, labels, classes), axis=1).astype(np.int64),
        emd=emd(partition.client, labels, classes),
        hash=partition.hash,
    )


def _facts(partition: Partition, held: Holdings, examples: int) -> str:
    total = int(held.sizes.sum())
    shown = f" ({MAX_CLIENTS} of them below, evenly by size)" if partition.clients > MAX_CLIENTS else ""
    facts = [
        f"seed {partition.seed}",
        _label_count(partition.clients, "client") + shown,
        _label_count(total, "example"),
    ]
    if left := examples - total:
        facts.append(f"{left:,} in no client")
    return " · ".join([*facts, f"EMD {held.emd:.2f}"])


def _heading(partition: Partition, facts: str, sentences: Sequence[str], width: int) -> Chart:
    """The scheme as a title, the facts and the finding below it."""
    lines = [line for text in (facts, *sentences) for line in wrap(text, width - 2 * MARGIN)]
    marks = [Words(0, place, line, "quiet", "start") for place, line in enumerate(lines)]
    titles = wrap(partition.scheme, (width - 2 * MARGIN) / 1.15, 14)
    height = 3 * MARGIN + 18 * len(titles) + LINE * len(lines)
    return Chart(
        "partition", partition.scheme, facts, marks, x=Axis(low=0, high=1),
        y=Axis(low=-0.7, high=len(lines) - 0.3, reverse=True), width=width, height=height, frame=False,
    )  # fmt: skip


def _label_count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
