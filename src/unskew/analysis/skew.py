"""Who has what: the labels of each client, the clients' sizes, and how far each is from the population.

Shapes: K clients, k of them shown, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unskew.analysis.measure import Choice, Comparison, Element, Measure, draw_by_run
from unskew.charts import Axis, Bars, Cells, Chart, Dots, Line, Mark, Picture, Words
from unskew.charts.scales import wrap
from unskew.core.errors import UserError
from unskew.core.types import ImageSet
from unskew.core.units import counted
from unskew.data.partition_files import Holdings
from unskew.data.population import Ints, Partition, cells, describe_sizes, emd
from unskew.runs.finished import FinishedRun

NAMED = 30  # classes at most that are shown as circles, with their names
COLOURED = 10  # classes at most that have a color each
MAX_CLASSES = 100  # drawn for one client; with more, only its largest
MAX_SIZES = 10_000  # clients whose sizes are stored one by one
MAX_ROWS = 10  # classes whose images are shown
THUMBNAILS, THUMBNAIL = 8, 48  # images per class, and the pixels of a side at most
SHARE = 0.9  # of a client's examples, for the number of classes that make up most of them


@dataclass(frozen=True)
class Skew:
    """Label counts of the clients shown, the sizes of all, and the distance of each client from the population."""

    scheme: str
    emd: float  # Σ n_k/n · ‖q_k − p‖₁
    classes: list[str]
    sizes: list[int]  # of all clients; their ascending quantiles if there are very many
    shown: list[int]  # the clients below; if not all, evenly spaced by size
    names: list[str]
    counts: list[list[int]]  # [k][C]
    distances: list[float]  # [k], ‖q_k − p‖₁
    total: list[int]  # [C]
    few: float  # median over clients of the number of classes that make up 90 % of their examples
    clients: int  # the total
    ranked: dict[str, list[float]] = field(default_factory=dict)  # [101] quantiles over many clients: classes, distance


def take_skew(run: FinishedRun, *, clients: int = 60) -> Skew:
    """How many examples of each class every client of a run has; does not need the data set.

    Reference: Hsu, Qi and Brown 2020, section 6.1; Luo et al. 2021, Figure 3.
    """
    if clients < 1:
        raise UserError(f"skew(clients={clients}): give at least one client")
    if len(run.holdings.sizes) > clients:
        run.notes.append(f"{clients} of {len(run.holdings.sizes):,} clients are shown, evenly spaced by size")
    return measure_skew(run.holdings, run.classes, clients)


def measure_skew(held: Holdings, classes: Sequence[str], clients: int = 60) -> Skew:
    """The skew of a partition, with at most ``clients`` of its clients in detail."""
    owner, label, count = held.cells.T
    population, width = len(held.sizes), max(len(classes), int(label.max(initial=0)) + 1)
    shown = np.arange(population)
    ranked: dict[str, list[float]] = {}
    if population > clients:
        order = np.argsort(-held.sizes, kind="stable")
        shown = np.sort(order[np.linspace(0, population - 1, clients).round().astype(int)])
        inhabited, at = held.sizes > 0, np.linspace(0, 1, 101)
        if inhabited.any():
            per_client = np.bincount(owner, minlength=population)[inhabited]
            ranked["classes"] = np.quantile(per_client, at).tolist()
            ranked["distance"] = np.quantile(held.distances[inhabited], at).tolist()
    row = np.full(population, -1)
    row[shown] = np.arange(len(shown))
    counts = np.zeros((len(shown), width), np.int64)
    detailed = row[owner] >= 0
    counts[row[owner[detailed]], label[detailed]] = count[detailed]
    total = np.bincount(label, count, minlength=width).astype(np.int64)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    sizes = held.sizes if population <= MAX_SIZES else np.quantile(held.sizes, np.linspace(0, 1, 1001)).round()
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
    """The median over clients of the smallest number of classes that make up 90 % of their examples."""
    order = np.lexsort((-cells[:, 2], cells[:, 0]))
    owner, count = cells[order, 0], cells[order, 2]
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    running = np.cumsum(count)
    before = np.repeat(np.r_[0, running[starts[1:] - 1]], np.diff(np.r_[starts, len(owner)]))
    enough = (running - count - before) < SHARE * sizes[owner] - 1e-9  # below 90 % without this class
    needed = np.bincount(owner, enough, minlength=len(sizes))[np.unique(owner)]
    return float(np.median(needed)) if len(needed) else 0.0


def draw_skew(values: Skew) -> list[Chart]:
    """Clients × classes as circles or shades, stacked bars, sizes, and for many clients sorted quantiles."""
    charts = [_draw_table(values)]
    if len(values.classes) <= COLOURED:
        charts.append(_draw_stacked(values))
    charts.append(_draw_sizes(values))
    titles = {"classes": "Classes of each client", "distance": "Distance of each client's labels from the population"}
    for name, quantiles in values.ranked.items():
        at = [step / (len(quantiles) - 1) for step in range(len(quantiles))]
        alt = f"{titles[name]}, all {values.clients:,} clients sorted: {quantiles[0]:.3g} to {quantiles[-1]:.3g}."
        y = Axis("distance", low=0, high=2)
        if name == "classes":
            y = Axis("classes", kind="count", log=quantiles[-1] > 20 * max(1.0, quantiles[50]))
        x = Axis(f"share of the {values.clients:,} clients", low=0, high=1, kind="percent")
        charts.append(Chart(f"skew-{name}", f"{titles[name]}, sorted", alt, [Line(at, quantiles)], x=x, y=y))
    return charts


def draw_clients(values: Skew) -> dict[str, Chart]:
    """Each client's share of every class, compared with the share over all clients."""
    population = np.array(values.total) / max(sum(values.total), 1)
    charts = {}
    for client, name, counts, apart in zip(values.shown, values.names, values.counts, values.distances, strict=True):
        size = sum(counts)
        largest = sorted(range(len(counts)), key=lambda label: -counts[label])
        shown, what = list(range(len(counts))), "class"
        if len(counts) > MAX_CLASSES:
            shown = [label for label in largest[:NAMED] if counts[label]] or largest[:1]
            what = f"class, the largest of {len(counts):,}"
        at, share = list(range(len(shown))), [counts[label] / max(size, 1) for label in shown]
        ticks = tuple(enumerate(values.classes[label] for label in shown)) if len(shown) <= NAMED else None
        tips = [f"{values.classes[c]}: {counts[c]:,} of {size:,} ({s:.1%})" for c, s in zip(shown, share, strict=True)]
        marks: list[Mark] = [
            Bars(at, share, tips=tips, name="this client"),
            Line(at, population[shown].tolist(), name="all clients", colour="ink", points=True, dashed=True),
        ]
        title = f"Client {name}: {counted(size, 'example')}, distance {apart:.2f} from the population"
        most = ", ".join(f"{values.classes[c]} {counts[c] / max(size, 1):.0%}" for c in largest[:3] if counts[c])
        alt = f"Label distribution of client {name}: mostly {most}."
        x, y = Axis(what, ticks=ticks, kind="count"), Axis("share of its examples", low=0, kind="percent")
        charts[name] = Chart(f"skew-client-{client}", title, alt, marks, x=x, y=y)
    return charts


def _draw_table(values: Skew) -> Chart:
    clients, classes = len(values.shown), len(values.classes)
    tips = [
        [f"client {name}, {label}: {count:,}" for label, count in zip(values.classes, row, strict=True)]
        for name, row in zip(values.names, values.counts, strict=True)
    ]
    width = int(np.clip(90 + 34 * clients, 440, 900))
    alt = f"Examples of each class, {counted(clients, 'client')} by {classes} classes; EMD {values.emd:.2f}."
    ticks = tuple(enumerate(values.names))
    if classes <= NAMED:
        largest = max((count for row in values.counts for count in row), default=0) or 1
        spots = [(k, c, n) for k, row in enumerate(values.counts) for c, n in enumerate(row) if n]
        room = min((width - 120) / max(clients, 1), 300 / max(classes, 1))
        area, spot_tips = [n / largest for _, _, n in spots], [tips[k][c] for k, c, _ in spots]
        x_spots, y_spots = [k for k, _, _ in spots], [c for _, c, _ in spots]
        dots = Dots(x_spots, y_spots, area=area, radius=max(2.0, 0.5 * room), tips=spot_tips)
        y = Axis("", low=-0.6, high=classes - 0.4, ticks=tuple(enumerate(values.classes)), reverse=True)
        x, title = Axis("client", low=-0.6, high=clients - 0.4, ticks=ticks), "Examples of each class, by client"
        return Chart("skew-circles", title, alt, [dots], x=x, y=y, width=width, height=380)
    shares = [[n / max(sum(row), 1) for n in row] for row in values.counts]
    table = [[row[c] or None for row in shares] for c in range(classes)]
    cell_tips = [[row[c] for row in tips] for c in range(classes)] if classes <= 150 else ()
    cells = Cells(table, 0, max(max(row) for row in shares) or 1.0, tips=cell_tips)
    part = f", {clients} of {values.clients:,} clients" if clients < values.clients else ""
    title, x = f"Share of each class among a client's examples{part}", Axis("client", ticks=ticks)
    y = Axis("class", ticks=tuple((c, str(c)) for c in range(0, classes, max(1, classes // 10))))
    return Chart("skew-shades", title, alt, [cells], x=x, y=y, width=width, height=420)


def _draw_stacked(values: Skew) -> Chart:
    at, base, marks = list(range(len(values.shown))), [0.0] * len(values.shown), list[Mark]()
    sizes = [max(sum(row), 1) for row in values.counts]
    for label, name in enumerate(values.classes):
        share = [row[label] / size for row, size in zip(values.counts, sizes, strict=True)]
        tips = [f"client {k}, {name}: {s:.1%}" for k, s in zip(values.names, share, strict=True)]
        marks.append(Bars(at, share, list(base), 0.9, label, name, tips=tips))
        base = [low + more for low, more in zip(base, share, strict=True)]
    title, alt = "Share of each class, by client", f"Stacked label shares of {counted(len(at), 'client')}."
    x, y = Axis("client", ticks=tuple(enumerate(values.names))), Axis("", low=0, high=1, kind="percent")
    return Chart("skew-bars", title, alt, marks, x=x, y=y, width=int(np.clip(90 + 26 * len(at), 440, 900)), height=340)


def _draw_sizes(values: Skew) -> Chart:
    sizes, count = values.sizes, values.clients
    alt = f"Sizes of {counted(count, 'client')}, {min(sizes):,} to {max(sizes):,}."
    if len(values.shown) == count:
        tips = [f"client {name}: {size:,}" for name, size in zip(values.names, sizes, strict=True)]
        bars = Bars(list(range(len(sizes))), sizes, tips=tips)
        x, y = Axis("client", ticks=tuple(enumerate(values.names))), Axis("examples", low=0, kind="count")
        return Chart("skew-sizes", "Examples of each client", alt, [bars], x=x, y=y)
    ranked = sorted(sizes, reverse=True)
    at = sorted({int(rank) for rank in np.linspace(0, len(ranked) - 1, 400)})
    step = (count - 1) / max(len(ranked) - 1, 1)
    line = Line([1 + rank * step for rank in at], [max(ranked[rank], 0.5) for rank in at])
    y = Axis("examples", kind="count", log=ranked[0] > 20 * max(1.0, float(np.median(ranked))))
    return Chart("skew-sizes", "Examples of each client, by rank", alt, [line], x=Axis("rank", kind="count"), y=y)


def skew_findings(values: Skew) -> list[str]:
    """How unequal the clients are, in sizes and in labels."""
    if len(values.sizes) == 1:
        return [f"One client has all {values.sizes[0]:,} examples, so nothing is skewed."]
    skew = "nearly the same labels everywhere" if values.emd < 0.1 else f"EMD {values.emd:.2f} on a scale from 0 to 2"
    return [
        f"{values.clients:,} clients hold {describe_sizes(np.asarray(values.sizes))}; for half of them, "
        f"{int(values.few):,} or fewer of the {len(values.classes):,} classes "
        f"make up 90% of their examples. Label skew: {skew}."
    ]


def compare_skew(runs: Mapping[str, Skew]) -> list[Chart]:
    """The EMD of each run's partition."""
    groups = {"": [values.emd for values in runs.values()]}
    return draw_by_run("compare-emd", "EMD of the partition", groups, runs, Axis("EMD", low=0), ".3f")


def show_skew(run: FinishedRun, values: Skew) -> list[Element]:
    """The charts; if the data set is available, also a map of the clients and a few images."""
    more: list[Element] = []
    if run.has_data:
        images, clients = run.images, run.prepared.partition.client
        more += [*draw_map(images.places, clients, values), _draw_thumbnails(images)]
    return [*draw_skew(values), Choice("client", draw_clients(values)), *more]


def draw_map(places: np.ndarray | None, clients: np.ndarray, values: Skew) -> list[Element]:
    """The mean coordinates of each client's examples; no chart without coordinates."""
    if places is None:
        return []
    known = ~np.isnan(places).any(1)
    spots = []
    for client, name, counts in zip(values.shown, values.names, values.counts, strict=True):
        located = known & (clients == client)
        if located.any():
            latitude, longitude = places[located].mean(0)
            spots.append((float(longitude), float(latitude), sum(counts), name))
    if not spots:
        return []
    largest = max(size for _, _, size, _ in spots)
    tips = [f"client {name}: {counted(size, 'example')}, {y:.2f}°, {x:.2f}°" for x, y, size, name in spots]
    x_spots, y_spots, area = [s[0] for s in spots], [s[1] for s in spots], [s[2] / largest for s in spots]
    dots = Dots(x_spots, y_spots, area=area, radius=10.0, tips=tips)
    alt = f"The mean coordinates of {counted(len(spots), 'client')}; larger circles have more examples."
    x, y = Axis("longitude"), Axis("latitude")
    return [Chart("skew-map", "Where the clients are", alt, [dots], x=x, y=y, square=True, height=360)]


def _draw_thumbnails(images: ImageSet) -> Chart:
    """Thumbnails of the first training images of each class."""
    classes = list(range(min(len(images.classes), MAX_ROWS)))
    marks: list[Mark] = []
    for line, label in enumerate(classes):
        marks.append(Words(-0.7, line, images.classes[label], anchor="end"))
        for at, example in enumerate(np.flatnonzero(images.train.labels == label)[:THUMBNAILS].tolist()):
            row = example if images.train.rows is None else int(images.train.rows[example])
            pixels = np.asarray(images.train.images[row : row + 1])[0].transpose(1, 2, 0)
            step = -(-max(pixels.shape[:2]) // THUMBNAIL)
            marks.append(Picture(pixels[::step, ::step].tolist(), at, line, 0.94, 0.94, tip=images.classes[label]))
    longest = max(len(images.classes[label]) for label in classes)
    x = Axis(low=-1.0 - min(longest, 20) * 0.2, high=THUMBNAILS - 0.5)
    y = Axis(low=-0.5, high=len(classes) - 0.5, reverse=True)
    count = len(images.classes)
    part = f"the first {MAX_ROWS} of {count:,} classes" if count > MAX_ROWS else "each class"
    title, alt = f"Training images of {part}", f"The first training images of {part}."
    height = 60 + 44 * len(classes)
    return Chart("skew-images", title, alt, marks, x=x, y=y, height=height, frame=False, square=True)


SKEW = Measure(
    name="skew",
    values=Skew,
    take=take_skew,
    draw=draw_skew,
    findings=skew_findings,
    show=show_skew,
    title="Who has what",
    text=(
        "The labels of each client. EMD is the distance between a client's label distribution and that of all clients, "
        "averaged by size: 0 if all are equal, 2 if they have nothing in common."
    ),
    compare=Comparison(
        title="Skew of the partitions",
        text="How far the clients' label distributions are from the population's: 0 if all are equal, 2 if they have "
        "nothing in common.",
        draw=compare_skew,
    ),
    folder_only="skew",
    headline=3,
)


MAX_CLIENTS = 60  # shown one by one
LINE, MARGIN = 17, 8  # units of the picture
FULL_WIDTH = 640  # minimum, so that the facts fit on a line


def partition_charts(partition: Partition, labels: Ints, class_names: Sequence[str]) -> list[Chart]:
    """A heading with the facts of a partition, then the charts of its skew, all equally wide."""
    held = holdings_of(partition, labels, len(class_names))
    values = measure_skew(held, class_names, MAX_CLIENTS)
    charts = draw_skew(values)
    width = max(FULL_WIDTH, *(chart.width for chart in charts))
    total = int(held.sizes.sum())
    shown = f" ({MAX_CLIENTS} shown, evenly spaced by size)" if partition.clients > MAX_CLIENTS else ""
    facts = [f"seed {partition.seed}", counted(partition.clients, "client") + shown, counted(total, "example")]
    facts += [f"{left:,} without a client"] if (left := len(labels) - total) else []
    text = " · ".join([*facts, f"EMD {held.emd:.2f}"])
    room = width - 2 * MARGIN
    lines = [line for sentence in (text, *(skew_findings(values) if total else ())) for line in wrap(sentence, room)]
    marks = [Words(0, row, line, "quiet", "start") for row, line in enumerate(lines)]
    height = 3 * MARGIN + 18 * len(wrap(partition.scheme, room / 1.15, 14)) + LINE * len(lines)
    x, y = Axis(low=0, high=1), Axis(low=-0.7, high=len(lines) - 0.3, reverse=True)
    scheme = partition.scheme
    heading = Chart("partition", scheme, text, marks, x=x, y=y, width=width, height=height, frame=False)
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
