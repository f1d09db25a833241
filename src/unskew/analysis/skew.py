"""Who has what: the labels of each client, the clients' sizes, how far each is from the population; where it is from.

Shapes: K clients, k of them shown, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unskew.analysis.measure import Choice, Comparison, Element, Measure, draw_by_run
from unskew.charts import PALETTE, Axis, Bars, Chart, Dots, Line, Mark, Picture, Words
from unskew.charts.builders import axis_of, heat_map, sorted_chart
from unskew.charts.scales import wrap
from unskew.core.errors import Missing, UserError, nearest
from unskew.core.types import ImageSet
from unskew.core.units import counted
from unskew.data.partition_files import Holdings, holdings_of
from unskew.data.population import Ints, Partition, describe_sizes
from unskew.runs.finished import FinishedRun

NAMED = 30  # classes at most that are shown as circles, with their names
MAX_CLASSES = 100  # drawn for one client; with more, only its largest
MAX_SIZES = 10_000  # clients whose sizes are stored one by one
MAX_ROWS = 10  # classes whose images are shown
THUMBNAILS, THUMBNAIL = 8, 48  # images per class, and the pixels of a side at most
MAX_PLACES = 2000  # drawn per class
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
    if len(run.holdings.sizes) > clients:
        run.notes.append(f"{clients} of {len(run.holdings.sizes):,} clients are shown, evenly spaced by size")
    return measure_skew(run.holdings, run.classes, max(clients, 1))


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
    counts = np.zeros((len(shown), width), np.int64)
    detailed = np.isin(owner, shown)
    counts[np.searchsorted(shown, owner[detailed]), label[detailed]] = count[detailed]
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


def _draw(values: Skew) -> list[Chart]:
    stacked = [_draw_stacked(values)] if len(values.classes) <= PALETTE else []
    charts = [_draw_table(values), *stacked, _draw_sizes(values)]
    titles = {"classes": "Classes of each client", "distance": "Distance of each client's labels from the population"}
    for name, quantiles in values.ranked.items():
        title, clients = titles[name], f"{values.clients:,} clients"
        alt = f"{title}, all {clients} sorted: {quantiles[0]:.3g} to {quantiles[-1]:.3g}."
        y = Axis(name, low=0, high=2)
        if name == "classes":
            y = Axis(name, kind="count", log=quantiles[-1] > 20 * max(1.0, quantiles[50]))
        charts.append(sorted_chart(f"skew-{name}", f"{title}, sorted", alt, {"": quantiles}, clients, y))
    return charts


def draw_clients(values: Skew) -> dict[str, Chart]:
    """Each client's share of every class, compared with the share over all clients."""
    population = np.array(values.total) / max(sum(values.total), 1)
    charts = {}
    for client, name, counts, apart in zip(values.shown, values.names, values.counts, values.distances, strict=True):
        size = max(sum(counts), 1)
        largest = sorted(range(len(counts)), key=lambda label: -counts[label])
        shown, what = list(range(len(counts))), "class"
        if len(counts) > MAX_CLASSES:
            shown, what = largest[:NAMED], f"class, the largest of {len(counts):,}"
        share = [counts[label] / size for label in shown]
        tips = [f"{values.classes[c]}: {counts[c]:,} of {size:,} ({s:.1%})" for c, s in zip(shown, share, strict=True)]
        own = Bars(range(len(shown)), share, tips=tips, name="this client")
        line = Line(range(len(shown)), population[shown].tolist(), "all clients", "ink", points=True, dashed=True)
        title = f"Client {name}: {counted(sum(counts), 'example')}, distance {apart:.2f} from the population"
        most = ", ".join(f"{values.classes[c]} {counts[c] / size:.0%}" for c in largest[:3] if counts[c])
        alt = f"Label distribution of client {name}: mostly {most}."
        x = axis_of(what, [values.classes[c] for c in shown], most=NAMED)
        y = Axis("share of its examples", low=0, kind="percent")
        charts[name] = Chart(f"skew-client-{client}", title, alt, [own, line], x, y)
    return charts


def _shares(values: Skew) -> np.ndarray:
    """[k, C], each client's share of every class."""
    shares: np.ndarray = np.divide(values.counts, np.maximum(np.sum(values.counts, axis=1, keepdims=True), 1))
    return shares


def _draw_table(values: Skew) -> Chart:
    clients, classes = len(values.shown), len(values.classes)

    def tip(label: int, client: int) -> str:
        return f"client {values.names[client]}, {values.classes[label]}: {values.counts[client][label]:,}"

    width = int(np.clip(90 + 34 * clients, 440, 900))
    alt = f"Examples of each class, {counted(clients, 'client')} by {classes} classes; EMD {values.emd:.2f}."
    if classes <= NAMED:
        counts = np.array(values.counts)
        columns, rows = (at.tolist() for at in counts.nonzero())
        area = (counts[columns, rows] / max(counts.max(initial=0), 1)).tolist()
        room = min((width - 120) / max(clients, 1), 300 / max(classes, 1))
        dots = Dots(columns, rows, area=area, radius=max(2.0, 0.5 * room), tips=list(map(tip, rows, columns)))
        x = replace(axis_of("client", values.names), low=-0.6, high=clients - 0.4)
        y = replace(axis_of("", values.classes), low=-0.6, high=classes - 0.4, reverse=True)
        return Chart("skew-circles", "Examples of each class, by client", alt, [dots], x, y, width, 380)
    shares = _shares(values)
    table = [[share or None for share in row] for row in shares.T.tolist()]
    part = f", {clients} of {values.clients:,} clients" if clients < values.clients else ""
    title, high = f"Share of each class among a client's examples{part}", float(shares.max()) or 1.0
    x, y = axis_of("client", values.names), Axis("class", kind="count")
    return heat_map("skew-shades", title, alt, table, tip, x, y, high=high, width=width, height=420)


def _draw_stacked(values: Skew) -> Chart:
    count, marks, shares = len(values.shown), list[Mark](), _shares(values)
    bases = np.cumsum(shares, axis=1) - shares
    for label, name in enumerate(values.classes):
        share = shares[:, label].tolist()
        tips = [f"client {k}, {name}: {s:.1%}" for k, s in zip(values.names, share, strict=True)]
        marks.append(Bars(range(count), share, bases[:, label].tolist(), 0.9, label, name, tips=tips))
    title, alt = "Share of each class, by client", f"Stacked label shares of {counted(count, 'client')}."
    x, y = axis_of("client", values.names), Axis("", low=0, high=1, kind="percent")
    return Chart("skew-bars", title, alt, marks, x, y, int(np.clip(90 + 26 * count, 440, 900)), 340)


def _draw_sizes(values: Skew) -> Chart:
    sizes, count = values.sizes, values.clients
    alt = f"Sizes of {counted(count, 'client')}, {min(sizes):,} to {max(sizes):,}."
    if len(values.shown) == count:
        tips = [f"client {name}: {size:,}" for name, size in zip(values.names, sizes, strict=True)]
        bars, x = Bars(range(len(sizes)), sizes, tips=tips), axis_of("client", values.names)
        return Chart("skew-sizes", "Examples of each client", alt, [bars], x, Axis("examples", low=0, kind="count"))
    ranked = np.quantile(np.maximum(sizes, 0.5), np.linspace(0, 1, min(len(sizes), 400))).tolist()
    y = Axis("examples", kind="count", log=ranked[-1] > 20 * max(1.0, float(np.median(ranked))))
    return sorted_chart("skew-sizes", "Examples of each client, sorted", alt, {"": ranked}, f"{count:,} clients", y)


def _findings(values: Skew) -> list[str]:
    if len(values.sizes) == 1:
        return [f"One client has all {values.sizes[0]:,} examples, so nothing is skewed."]
    skew = "nearly the same labels everywhere" if values.emd < 0.1 else f"EMD {values.emd:.2f} on a scale from 0 to 2"
    return [
        f"{values.clients:,} clients hold {describe_sizes(np.asarray(values.sizes))}; for half of them, "
        f"{int(values.few):,} or fewer of the {len(values.classes):,} classes "
        f"make up 90% of their examples. Label skew: {skew}."
    ]


def _compare(runs: Mapping[str, Skew]) -> list[Chart]:
    groups = {"": [values.emd for values in runs.values()]}
    return draw_by_run("compare-emd", "EMD of the partition", groups, runs, Axis("EMD", low=0), ".3f")


def _show(run: FinishedRun, values: Skew) -> list[Element]:
    elements: list[Element] = [*_draw(values), Choice("client", draw_clients(values))]
    if run.has_data:
        if run.images.places is not None:
            elements += draw_map(run.images.places, run.prepared.partition.client, values)
        elements.append(_draw_thumbnails(run.images))
    return elements


def draw_map(places: np.ndarray, clients: np.ndarray, values: Skew) -> list[Chart]:
    """The mean coordinates of each client's examples; no chart if none are known."""
    known, spots = ~np.isnan(places).any(1), list[tuple[float, float, int, str]]()
    for client, name, counts in zip(values.shown, values.names, values.counts, strict=True):
        if (located := known & (clients == client)).any():
            north, east = places[located].mean(0).tolist()
            tip = f"client {name}: {counted(sum(counts), 'example')}, {north:.2f}°, {east:.2f}°"
            spots.append((east, north, sum(counts), tip))
    if not spots:
        return []
    x, y, sizes, tips = zip(*spots, strict=True)
    alt = f"The mean coordinates of {counted(len(spots), 'client')}; larger circles have more examples."
    dots = Dots(x, y, area=[size / max(sizes) for size in sizes], radius=10.0, tips=tips)
    axes = Axis("longitude"), Axis("latitude")
    return [Chart("skew-map", "Where the clients are", alt, [dots], *axes, height=360, square=True)]


def _draw_thumbnails(images: ImageSet) -> Chart:
    """Thumbnails of the first training images of each class."""
    classes, marks = images.classes[:MAX_ROWS], list[Mark]()
    for label, name in enumerate(classes):
        marks.append(Words(-0.7, label, name, anchor="end"))
        for at, example in enumerate(np.flatnonzero(images.train.labels == label)[:THUMBNAILS].tolist()):
            row = example if images.train.rows is None else int(images.train.rows[example])
            pixels = np.asarray(images.train.images[row : row + 1])[0].transpose(1, 2, 0)
            step = -(-max(pixels.shape[:2]) // THUMBNAIL)
            marks.append(Picture(pixels[::step, ::step].tolist(), at, label, 0.94, 0.94, tip=name))
    x = Axis(low=-1.0 - min(max(map(len, classes)), 20) * 0.2, high=THUMBNAILS - 0.5)
    y = Axis(low=-0.5, high=len(classes) - 0.5, reverse=True)
    count, height = len(images.classes), 60 + 44 * len(classes)
    title = f"Training images of {f'the first {MAX_ROWS} of {count:,} classes' if count > MAX_ROWS else 'each class'}"
    return Chart("skew-images", title, f"{title}.", marks, x, y, height=height, frame=False, square=True)


SKEW = Measure(
    name="skew",
    values=Skew,
    take=take_skew,
    draw=_draw,
    findings=_findings,
    show=_show,
    title="Who has what",
    text=(
        "The labels of each client. EMD is the distance between a client's label distribution and that of all clients, "
        "averaged by size: 0 if all are equal, 2 if they have nothing in common."
    ),
    compare=Comparison(draw=_compare),
    folder_only="skew",
    headline=3,
)


def partition_charts(partition: Partition, labels: Ints, class_names: Sequence[str]) -> list[Chart]:
    """A heading with the facts of a partition, then the charts of its skew, all equally wide."""
    held = holdings_of(partition, labels, len(class_names))
    values = measure_skew(held, class_names)
    charts = _draw(values)
    width = max(640, *(chart.width for chart in charts))  # the facts fit on a line
    total, shown = int(held.sizes.sum()), len(values.shown)
    part = f" ({shown} shown, evenly spaced by size)" if partition.clients > shown else ""
    facts = [f"seed {partition.seed}", counted(partition.clients, "client") + part, counted(total, "example")]
    facts += [f"{left:,} without a client"] if (left := len(labels) - total) else []
    text = " · ".join([*facts, f"EMD {held.emd:.2f}"])
    lines = [line for part in (text, *(_findings(values) if total else ())) for line in wrap(part, width - 16)]
    marks = [Words(0, row, line, "quiet", "start") for row, line in enumerate(lines)]
    height = 24 + 18 * len(wrap(partition.scheme, width - 16, 16)) + 17 * len(lines)
    x, y = Axis(low=0, high=1), Axis(low=-0.7, high=len(lines) - 0.3, reverse=True)
    heading = Chart("partition", partition.scheme, text, marks, x, y, width, height, frame=False)
    return [heading, *(replace(chart, width=width) for chart in charts)]


@dataclass(frozen=True)
class Places:
    """The coordinates of some classes' training examples."""

    classes: list[str]
    counts: list[int]  # examples with coordinates
    points: list[list[tuple[float, float]]]  # longitude and latitude, at most MAX_PLACES per class


def take_places(run: FinishedRun, *, classes: str = "") -> Places:
    """Where the examples of ``classes``, ``"one; another"``, were taken; by default those of the two largest.

    Reference: Hsu, Qi and Brown 2020, Figure 1.
    """
    images = run.images
    if images.places is None:
        raise Missing("the data have no coordinates; a table of photographs needs the columns latitude and longitude")
    labels, known = np.asarray(images.train.labels), np.isfinite(images.places).all(1)
    names = [name.strip() for name in classes.split(";") if name.strip()]
    if unknown := next((name for name in names if name not in images.classes), None):
        raise UserError(f"places: no class is called {unknown!r}; {nearest(unknown, images.classes)}")
    if not names:
        largest = np.argsort(-np.bincount(labels[known], minlength=len(images.classes)), kind="stable")
        names = [images.classes[label] for label in largest[:2]]
    counts, points = [], []
    for name in names:
        places = images.places[known & (labels == images.classes.index(name))]
        shown = np.linspace(0, len(places) - 1, min(len(places), MAX_PLACES)).round().astype(int)
        counts.append(len(places))
        points.append([(float(east), float(north)) for north, east in places[shown]])
    return Places(names, counts, points)


def _draw_places(values: Places) -> list[Chart]:
    marks: list[Mark] = []
    for colour, (name, points) in enumerate(zip(values.classes, values.points, strict=True)):
        x, y = ([point[at] for point in points] for at in (0, 1))
        marks.append(Dots(x, y, colour, radius=2.5, name=name))
    alt = f"Places of {', '.join(_describe_places(values))}"
    axes = Axis("longitude, degrees"), Axis("latitude, degrees")
    return [Chart("places", "Where the examples were taken", alt, marks, *axes, 620, 380)]


def _describe_places(values: Places) -> list[str]:
    pairs = zip(values.classes, values.counts, strict=True)
    return [f"{name}: {counted(count, 'training example')} with coordinates." for name, count in pairs]


PLACES = Measure(
    name="places",
    values=Places,
    take=take_places,
    draw=_draw_places,
    findings=_describe_places,
    title="Where the examples are from",
    text="Each dot is a training example at its longitude and latitude.",
    headline=None,
)
