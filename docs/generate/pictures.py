"""Makes the pictures of README and docs from real runs on the embedded digits: `make pictures`."""

import json
import tempfile
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import unskew
from unskew.analysis.skew import partition_charts
from unskew.charts.files import sheet_bytes
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.sources import load

HERE = Path(__file__).parents[1] / "pictures"
SKEWED, EVEN = "dirichlet(alpha=0.1)", "iid"
RUNS = [  # label, partition, method, colour
    ("evenly spread, fedavg", EVEN, "fedavg", "#666666"),
    ("skewed, fedavg", SKEWED, "fedavg", "#D55E00"),
    ("skewed, fedprox(mu=0.1)", SKEWED, "fedprox(mu=0.1)", "#CC79A7"),
    ("skewed, fedavgm(beta=0.5)", SKEWED, "fedavgm(beta=0.5)", "#0072B2"),
]
SEEDS = range(5)


def accuracies(scheme: str, method: str, seed: int, folder: Path) -> list[float]:
    """The test accuracy after each round of one run."""
    out = folder / f"{scheme}-{method}-{seed}"
    unskew.run(partition=scheme, method=method, rounds=30, lr=0.02, seed=seed, out=out, engine="loop")
    return [json.loads(line)["accuracy"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def curves() -> Figure:
    """Accuracy by round, mean and range over the seeds."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    with tempfile.TemporaryDirectory() as folder:
        for label, scheme, method, colour in RUNS:
            seeds = [accuracies(scheme, method, seed, Path(folder)) for seed in SEEDS]
            rounds = range(1, len(seeds[0]) + 1)
            by_round = list(zip(*seeds, strict=True))
            axes.fill_between(
                rounds, *([100 * f(r) for r in by_round] for f in (min, max)), color=colour, alpha=0.15, lw=0
            )
            mean = [100 * sum(row) / len(row) for row in by_round]
            axes.plot(rounds, mean, color=colour, lw=2, label=f"{label}: {mean[-1]:.1f} %")
    axes.set(xlabel="round", ylabel="test accuracy, %", xlim=(1, 30), ylim=(0, 100))
    axes.set_title(f"Ten clients on digits; mean and range of {len(SEEDS)} seeds", loc="left", size=11)
    axes.grid(color="#E8E8E8")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure


def skewed_partition() -> bytes:
    """Ten clients of the digits, as unskew partition --plot draws them."""
    digits = load("digits", None)
    skewed = partition_examples(SKEWED, digits.train.labels, clients=10, key=Key(0), classes=10)
    return sheet_bytes(partition_charts(skewed, digits.train.labels, digits.classes), "png")


def main() -> None:
    """Write both pictures."""
    (HERE / "partition.png").write_bytes(skewed_partition())
    curves().savefig(HERE / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
