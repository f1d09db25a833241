"""Measures every method on CIFAR-10 and writes the table of docs/reference/methods/measured.md: `make methods-table`.

Each run is one process on one core, as many at a time as there are cores. Finished runs in the work folder are kept, so
that an interrupted table goes on where it stopped. Rows of the page whose runs are not in the work folder stay as they
are: `--methods fedlc fedrs` measures two rows and leaves the others. UNSKEW_DATA names the folder with CIFAR-10.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unskew.core.key import Key
from unskew.core.machine import cores
from unskew.data import partition_files
from unskew.data.population import Partition
from unskew.data.sources import load
from unskew.runs import journal
from unskew.runs.folder import write_arrays
from unskew.runs.journal import read_metrics
from unskew.runs.result import Result, read_result

DOCS = Path(__file__).parents[1]
PAGE, PICTURE = DOCS / "reference" / "methods" / "measured.md", DOCS / "pictures" / "fedvc.png"

SKEWED = ["--partition", "dirichlet(alpha=0.1)", "--clients", "10", "--rounds", "20", "--epochs", "5"]
METHODS = {  # run folder -> method
    "centralised": "centralised",
    "fedavg": "fedavg",
    "fedprox": "fedprox",
    "fedprox0001": "fedprox(mu=0.001)",  # the CCVR paper's for this alpha
    "moon": "moon(mu=1)",
    "fedntd": "fedntd",
    "feddecorr": "feddecorr",
    "feddecorr64": "feddecorr(beta=6.4)",  # the authors' code at this batch size
    "fedetf": "fedetf",
    "fedsam": "fedsam",
    "fedlesam": "fedlesam",
    "clsprox": "clsprox",
    "clsnorm": "clsnorm",
    "prototypes": "prototypes",
    "fedlc": "fedlc",
    "fedrs": "fedrs",
    "balanced": "balanced",
    "fedir": "fedir",
    "fedvc": "fedvc(5000, epochs=5)",  # as many examples a round as the ten clients hold, five times
    "scaffold": "scaffold",
    "fednova": "fednova",
    "feddyn": "feddyn",
    "fedavgm01": "fedavgm(0.1)",
    "fedavgm": "fedavgm(0.9)",
    "fedadam": "fedadam",
    "fedyogi": "fedyogi",
    "fedadagrad": "fedadagrad",
}

CROWD, LARGEST, SIGMA = 150, 4000, 1.5  # clients of the imbalanced population, and how unlike their sizes are
UNEVEN = ["--per-round", "10", "--epochs", "1", "--lr", "0.1", "--momentum", "0", "--rounds", "200"]
CURVES = {"fedavg": ("FedAvg", "#D55E00"), "fedvc(256)": ("FedAvg + FedVC", "#0072B2")}
SEEDS = range(2)


def train(out: Path, method: str, options: Sequence[str]) -> Path:
    """The folder of a finished run: the one that is there, or a new one."""
    if (out / "result.json").exists():
        return out
    command = [sys.executable, "-m", "unskew"]
    command += ["resume", str(out)] if (out / "config.toml").exists() else [
        "run", "--data", "cifar10", "--method", method, "--engine", "loop", "--out", str(out), *options
    ]  # fmt: skip
    with open(f"{out}.log", "ab") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return out


def table(results: dict[str, Result], page: str) -> list[str]:
    """Markdown: what every method reached, what it sent, how long it took; rows of the page that have no run stay."""
    last = page.partition("<!-- table -->")[2].partition("<!-- /table -->")[0]
    rows_there = {line.split("`")[1]: line for line in last.splitlines() if line.startswith("| `")}
    if "centralised" in results:
        base = results["centralised"].accuracy
    else:
        base = float(rows_there["centralised"].split("|")[2]) / 100
    lines = [
        "| method | accuracy, % | relative, % | rounds to 50 % relative | seconds |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, method in METHODS.items():
        if name not in results:
            lines += [rows_there[method]] if method in rows_there else []
            continue
        result = results[name]
        rows = read_metrics(result.path)
        seconds = len(rows) * np.quantile([row["seconds"] for row in rows[1:]], 0.25)
        half = journal.rounds_to(rows, 0.5 * base)
        cells = [
            f"`{result.method}`", f"{100 * result.accuracy:.2f}", f"{100 * result.accuracy / base:.1f}",
            str(half or "-"),
            f"{seconds:.0f}" if result.engine == "loop" else "-",  # several cores say nothing about one
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def uneven_partition(work: Path, seed: int) -> Path:
    """CIFAR-10 on clients of log-normal sizes from 1 to some thousand examples, each with its own mix of classes."""
    folder = os.environ.get("UNSKEW_DATA")
    images = load("cifar10", Path(folder) if folder else None)
    labels, draw = images.train.labels, Key(seed).fold("uneven").numpy()
    sizes = np.sort(draw.lognormal(0, SIGMA, CROWD))[::-1]
    sizes = np.clip(sizes / sizes.sum() * len(labels), 1, LARGEST).astype(int)
    left = [draw.permutation(np.flatnonzero(labels == c)).tolist() for c in range(10)]
    client = np.full(len(labels), -1, np.int32)
    for k, size in enumerate(sizes):
        for c in draw.choice(10, size, p=draw.dirichlet([0.5] * 10)):
            own = c if left[c] else max(range(10), key=lambda other: len(left[other]))
            if left[own]:
                client[left[own].pop()] = k
    partition = Partition(client, CROWD, f"lognormal(sigma={SIGMA})", seed)
    path = work / f"uneven-{seed}.npz"
    write_arrays(path, partition_files.to_arrays(partition, labels, 10))
    return path


def curves(work: Path) -> Figure:
    """Accuracy by round and by batches of the largest client, mean and range over the seeds."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for method, (label, colour) in CURVES.items():
        metrics = [read_metrics(work / f"uneven-{_word(method)}-{seed}") for seed in SEEDS]
        for axis, by_batch in zip(axes, (False, True), strict=True):
            lines = [_line(rows, by_batch) for rows in metrics]
            grid = np.linspace(0, min(x[-1] for x, _ in lines), 400)
            values = np.array([np.interp(grid, x, y) for x, y in lines])
            axis.fill_between(grid, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
            axis.plot(grid, values.mean(0), color=colour, lw=2, label=f"{label}: {values.mean(0)[-1]:.1f} %")
    axes[0].set(xlabel="round", ylabel="test accuracy, %", ylim=(5, None))
    axes[1].set(xlabel="batches of each round's largest client, summed (log scale)", xscale="log")
    for axis in axes:
        axis.grid(color="#E8E8E8")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower right")
    figure.suptitle(
        f"CIFAR-10 on {CROWD} clients of log-normal sizes, 10 a round; mean and range of {len(SEEDS)} seeds",
        x=0.01, ha="left", size=11,
    )  # fmt: skip
    return figure


def steadiness(work: Path) -> list[str]:
    """Markdown: how far accuracy jumps between evaluations, and what it is at the same number of batches."""
    metrics = {m: [read_metrics(work / f"uneven-{_word(m)}-{seed}") for seed in SEEDS] for m in CURVES}
    budget = min(journal.batches(rows) for runs in metrics.values() for rows in runs)
    lines = [
        f"| method | accuracy, % | at {budget:,} batches, % | batches in all | mean fall between evaluations, points |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for method, runs in metrics.items():
        last = np.mean([100 * rows[-1]["accuracy"] for rows in runs])
        at = np.mean([100 * (journal.accuracy_at_batch(rows, budget) or 0) for rows in runs])
        total = np.mean([journal.batches(rows) for rows in runs])
        steps = np.concatenate([np.diff([100 * r["accuracy"] for r in rows if "accuracy" in r]) for rows in runs])
        lines.append(f"| `{method}` | {last:.2f} | {at:.2f} | {total:,.0f} | {-np.minimum(steps, 0).mean():.2f} |")
    return lines


def _line(rows: list[dict], by_batch: bool) -> tuple[np.ndarray, np.ndarray]:
    batches = np.cumsum([row["batches_max"] for row in rows])
    seen = [at for at, row in enumerate(rows) if "accuracy" in row]
    x = batches[seen] if by_batch else np.array([rows[at]["round"] for at in seen])
    return x.astype(float), np.array([100 * rows[at]["accuracy"] for at in seen])


def _word(method: str) -> str:
    return method.partition("(")[0]


def replaced(page: str, name: str, lines: list[str]) -> str:
    """The page with the part between its two marks replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = page.partition(start)
    return before + start + "\n".join([*lines, end]) + rest.partition(end)[2]


def main() -> None:
    """Train what is missing, then write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/methods"), help="the folder of the runs")
    parser.add_argument("--only", choices=["table", "curves"], help="one of the two")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="measure these rows only")
    parser.add_argument(
        "--no-training", action="store_true", help="write what the finished runs say, and train nothing"
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    jobs = []
    if options.only != "curves":
        jobs += [(options.work / name, METHODS[name], SKEWED) for name in options.methods]
    if options.only != "table":
        for seed in SEEDS:
            flags = ["--partition", f"file:{uneven_partition(options.work, seed)}", "--seed", str(seed), *UNEVEN]
            flags += ["--evaluate-every", "5"]
            jobs += [(options.work / f"uneven-{_word(method)}-{seed}", method, flags) for method in CURVES]
    if not options.no_training:
        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(lambda job: train(*job), jobs))
    page = PAGE.read_text(encoding="utf-8")
    if options.only != "curves":
        done = [name for name in METHODS if (options.work / name / "result.json").exists()]
        page = replaced(page, "table", table({name: read_result(options.work / name) for name in done}, page))
    if options.only != "table":
        page = replaced(page, "uneven", steadiness(options.work))
        curves(options.work).savefig(PICTURE, dpi=110)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
