"""Makes the picture of README from real runs on the embedded digits: `make pictures`."""

import statistics
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import unskew
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.sources import load

DOCS = Path(__file__).parents[1]
SKEW, CLIENTS, SEEDS = "dirichlet(alpha=0.1)", 10, range(10)
CALIBRATIONS = {"ccvr": "CCVR", "lda": "LDA", "lda(layers=2, expand=500)": "LDA, random\nfeatures"}
GREY, ORANGE, BLUE = "#666666", "#D55E00", "#0072B2"


def measure() -> dict[str, list[float]]:
    """The test accuracy of recipes/digits.toml in per cent before and after each calibration, a value for each seed."""
    found: dict[str, list[float]] = {"FedAvg": [], **{label: [] for label in CALIBRATIONS.values()}}
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            out = Path(folder) / str(seed)
            run = unskew.run(DOCS.parent / "recipes" / "digits.toml", method="fedavg", seed=seed, out=out)
            found["FedAvg"].append(100 * run.accuracy)
            run = unskew.calibrate_run(out, *CALIBRATIONS)
            for name, label in CALIBRATIONS.items():
                found[label].append(100 * run.calibrations[name].accuracy)
    return found


def draw_clients(axes: Axes) -> None:
    """Who holds what: a bubble for each client and class, seed 0."""
    digits = load("digits", None)
    labels = np.asarray(digits.train.labels)
    dealt = partition_examples(SKEW, digits.train.labels, clients=CLIENTS, key=Key(0), classes=10)
    owner = np.asarray(dealt.client)
    for client in range(CLIENTS):
        counts = np.bincount(labels[owner == client], minlength=10)
        axes.scatter([client] * 10, range(10), s=1.6 * counts, color=BLUE, lw=0)
    axes.set(
        xlabel="client", ylabel="digit", xticks=range(CLIENTS), yticks=range(10), xlim=(-0.7, 9.7), ylim=(-0.8, 9.8)
    )
    axes.set_title("Ten clients, each with a few classes …", loc="left", size=10.5)


def draw_accuracies(axes: Axes, found: dict[str, list[float]]) -> None:
    """A dot for each seed, a bar for the mean, lines that join the seeds."""
    labels = list(found)
    for seed in range(len(SEEDS)):
        axes.plot(range(len(labels)), [found[label][seed] for label in labels], color=GREY, lw=0.6, alpha=0.35)
    for place, label in enumerate(labels):
        color = BLUE if place else ORANGE
        values = found[label]
        axes.scatter([place] * len(values), values, s=16, color=color, alpha=0.6, lw=0, zorder=3)
        axes.hlines(statistics.mean(values), place - 0.22, place + 0.22, color=color, lw=2.5, zorder=4)
        text = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
        axes.annotate(text, (place, 102.5), ha="center", va="bottom", color=color, size=10, weight="bold")
    axes.set(ylabel="test accuracy, %", xticks=range(len(labels)), xlim=(-0.5, len(labels) - 0.5), ylim=(45, 108))
    axes.set_xticklabels(["FedAvg", *(f"+ {label}" for label in labels[1:])])
    axes.set_yticks(range(50, 101, 10))
    axes.set_title(f"… and what calibration makes of FedAvg ({len(SEEDS)} seeds)", loc="left", size=10.5)


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(9.6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    draw_clients(left)
    draw_accuracies(right, measure())
    for axes in (left, right):
        axes.grid(color="#E8E8E8")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "pictures" / "effect.png", dpi=170)


if __name__ == "__main__":
    main()
