"""A partition as a picture: who holds how much of what.

Up to 60 clients every one is shown; beyond, the sizes by rank, the number of classes a client holds, and a
sample.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from unskew.data.population import Ints, Partition, Population, cells, counts_table, emd

MOST = 60  # clients shown one by one
NAMED = 30  # classes shown as bubbles, with their names
ROWS = 150  # classes shown as rows of a heat map; beyond, a row would be thinner than a hair
BLUE, ORANGE, INK, GREY, PALE = (
    "#0072B2",
    "#D55E00",
    "#222222",
    "#666666",
    "#E8E8E8",
)  # told apart by all eyes
SHADES = ("#CFE3F1", "#5BA3D0", "#0072B2", "#00304D")  # light to dark: read without colour as well
LEFT, RIGHT, TOP, BOTTOM = 1.3, 0.8, 1.1, 0.85  # margins in inches

COMMAS = FuncFormatter(lambda value, _: f"{value:,.0f}")
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g}%")


def partition_figure(partition: Partition, labels: Ints, class_names: Sequence[str]) -> Figure:
    """The partition of these labels; ``figure.savefig(file)`` writes it, and nothing global is touched."""
    population = Population.from_partition(partition)
    draw = _each if partition.clients <= MOST else _many
    figure = draw(population, partition, labels, class_names)
    below = f" ({MOST} of them below)" if partition.clients > MOST else ""
    facts = [f"seed {partition.seed}", _count(partition.clients, "client") + below]
    facts.append(_count(len(population.order), "example"))
    if left := len(labels) - len(population.order):
        facts.append(f"{left:,} held by nobody")
    facts.append(f"EMD {emd(partition.client, labels, len(class_names)):.2f}")
    scheme = partition.scheme if len(partition.scheme) <= MOST else f"…{partition.scheme[-MOST:]}"
    width, height = figure.get_size_inches()
    figure.text(LEFT / width, 1 - 0.42 / height, scheme, size=14, weight="bold", color=INK, parse_math=False)
    figure.text(LEFT / width, 1 - 0.66 / height, "  ·  ".join(facts), size=9.5, color=GREY)
    return figure


def _each(population: Population, partition: Partition, labels: Ints, names: Sequence[str]) -> Figure:
    """Label distribution above, sizes below, one column a client."""
    clients, classes = population.clients, len(names)
    width = float(np.clip(0.62 * clients, 5, 13))
    height = float(np.clip(0.42 * classes, 1.2, 6.5))
    figure, grid = _page(width, [height, 1.5], gap=0.45)
    above, below = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    table = counts_table(population, labels, classes)  # [K, C]
    if classes <= NAMED:
        _bubbles(above, table, cell=72 * min(width / clients, height / classes))
    else:
        _shades(above, table)
        _dress(above, "share of each class among a client's examples")
    _class_axis(above, names)
    above.set_xticks(range(clients), [""] * clients)
    sizes = population.sizes
    below.bar(np.arange(clients), sizes, width=0.72, color=BLUE)
    if clients <= 20:
        for at, size in enumerate(sizes.tolist()):
            below.annotate(
                f"{size:,}", (at, size), (0, 2), textcoords="offset points", ha="center", size=7.5, color=INK
            )
    below.set_ylim(0, 1.15 * max(1, sizes.max()))
    _dress(below, "examples of each client", across="client")
    _client_axis(below, np.arange(clients), partition)
    for axes in (above, below):
        axes.set_xlim(-0.5, clients - 0.5)
    below.yaxis.set_major_formatter(COMMAS)
    return figure


def _many(population: Population, partition: Partition, labels: Ints, names: Sequence[str]) -> Figure:
    """Sizes by rank and classes a client above, a sample of the clients below."""
    classes = len(names)
    figure, grid = _page(10, [2.3, float(np.clip(0.27 * classes, 1.2, 4.2))], gap=1.0)
    upper = grid[0].subgridspec(1, 2, width_ratios=[3, 2], wspace=0.16)
    order = np.argsort(-population.sizes, kind="stable")
    _ranks(figure.add_subplot(upper[0]), population.sizes[order])
    owner, _, _ = cells(partition.client, labels, classes)
    _classes_held(figure.add_subplot(upper[1]), np.bincount(owner, minlength=population.clients), classes)
    shown = order[np.linspace(0, population.clients - 1, MOST).round().astype(int)]  # the extremes included
    table = np.stack([np.bincount(labels[population.examples(k)], minlength=classes) for k in shown.tolist()])
    sample = figure.add_subplot(grid[1])
    _shades(sample, table)
    title = f"share of each class: {MOST} clients, evenly by rank, the largest left, the smallest right"
    _dress(sample, title, across="client")
    _client_axis(sample, shown, partition)
    _class_axis(sample, names)
    return figure


def _ranks(axes: Any, sizes: Ints) -> None:
    """Sizes, largest first; logarithmic when the largest dwarfs the median."""
    clients, median = len(sizes), float(np.median(sizes))
    rank = np.arange(1, clients + 1)
    axes.fill_between(rank, sizes, color=BLUE, alpha=0.12, linewidth=0, step="mid")
    axes.plot(rank, sizes, color=BLUE, linewidth=2, drawstyle="steps-mid")
    axes.axhline(median, color=ORANGE, linewidth=1, linestyle="--")
    at = {"textcoords": "offset points", "ha": "right", "color": ORANGE, "size": 8.5}
    axes.annotate(f"median {median:,.0f}", (clients, median), (-2, 3), **at)
    if sizes[0] > 20 * max(1.0, median):
        axes.set_yscale("symlog", linthresh=1)  # linear from 0 to 1: empty clients stay in the picture
        axes.set_ylim(0, 2 * sizes[0])
    else:
        axes.set_ylim(0, 1.12 * max(1, sizes[0]))
    axes.set_xlim(1, clients)
    _dress(axes, "examples of each client, by rank", across="rank")
    axes.xaxis.set_major_formatter(COMMAS)
    axes.yaxis.set_major_formatter(COMMAS)


def _classes_held(axes: Any, held: Ints, classes: int) -> None:
    """How many clients hold so many classes; logarithmic bins when some hold very many."""
    most = max(1, int(held.max()))
    bins = np.arange(-0.5, most + 1)
    if most > MOST:
        axes.set_xscale("symlog", linthresh=1)
        bins = np.concatenate([[0], np.unique(np.geomspace(1, most + 1, 25).round())])
    axes.hist(held, bins=bins, color=BLUE, edgecolor="white", linewidth=0.6)
    if most <= MOST:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    _dress(axes, "number of clients, by classes held", across=f"classes, of {classes:,}")
    axes.xaxis.set_major_formatter(COMMAS)
    axes.yaxis.set_major_formatter(COMMAS)


def _bubbles(axes: Any, table: Ints, cell: float) -> None:
    """Area ∝ count; the largest fills its cell, ``cell`` points wide."""
    client, label = np.nonzero(table)
    counts = table[client, label]
    largest = int(counts.max(initial=1))
    full = (0.94 * min(cell, 60)) ** 2  # marker area is the square of the diameter, in points
    axes.grid(True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.scatter(client, label, s=np.maximum(full * counts / largest, 1.0), color=BLUE, alpha=0.88, linewidths=0)
    _dress(axes, f"examples of each class by area: the largest circle is {largest:,}")


def _shades(axes: Any, table: Ints) -> None:
    """[clients, C] as shares of each client's examples, light to dark; white where it has none."""
    share = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    scale = {
        "cmap": LinearSegmentedColormap.from_list("blues", SHADES),
        "norm": PowerNorm(0.5, 0, max(float(share.max()), 1e-9)),  # the square root spreads small shares
    }
    if table.shape[1] <= ROWS:
        picture = axes.imshow(np.ma.masked_equal(share, 0).T, aspect="auto", interpolation="nearest", **scale)
    else:
        client, label = np.nonzero(table)
        axes.grid(True, axis="x", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        picture = axes.scatter(client, label, c=share[client, label], s=14, marker="s", linewidths=0, **scale)
        axes.set_xlim(-0.5, len(table) - 0.5)
    bar = axes.figure.colorbar(picture, cax=axes.inset_axes([1.012, 0, 0.014, 1]), format=PERCENT)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8.5, length=2, color=GREY)


def _class_axis(axes: Any, names: Sequence[str]) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)  # class 0 on top
    if len(names) <= NAMED:
        texts = [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
        axes.set_yticks(range(len(names)), texts, parse_math=False)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_ylabel("class", color=GREY, size=9)


def _client_axis(axes: Any, shown: npt.NDArray[Any], partition: Partition) -> None:
    """Each client's number or user id under its column; upright and thinned out when there is no room."""
    texts = [str(k) if partition.names is None else partition.names[k] for k in shown.tolist()]
    texts = [text if len(text) <= 7 else f"{text[:6]}…" for text in texts]
    upright = max(map(len, texts)) > 2 and len(texts) > 10
    at = range(0, len(texts), 2 if upright and len(texts) > 40 else 1)
    kind = {"rotation": 90 if upright else 0, "size": 8 if len(texts) > 20 else 9}
    axes.set_xticks(at, [texts[i] for i in at], parse_math=False, **kind)


def _dress(axes: Any, title: str, *, across: str = "") -> None:
    """Title on the left, quiet axes."""
    axes.set_title(title, loc="left", size=10, color=INK, pad=7)
    axes.set_xlabel(across, size=9, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#AAAAAA")
    axes.tick_params(labelsize=9, length=2.5, color="#AAAAAA", labelcolor=INK)


def _page(width: float, heights: list[float], gap: float) -> tuple[Figure, Any]:
    """A figure on its own Agg canvas, and a grid of rows of these heights in inches."""
    tall = sum(heights) + gap + TOP + BOTTOM
    wide = width + LEFT + RIGHT
    figure = Figure(figsize=(wide, tall), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        len(heights),
        1,
        height_ratios=heights,
        hspace=gap / (sum(heights) / len(heights)),
        left=LEFT / wide,
        right=1 - RIGHT / wide,
        top=1 - TOP / tall,
        bottom=BOTTOM / tall,
    )
    return figure, grid


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
