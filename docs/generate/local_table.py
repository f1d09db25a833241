"""Measures schedules, optimisers, clipping and absent clients on digits: the table of docs/how-to/local-training.md.

`python docs/generate/local_table.py [FOLDER]`, about a minute on one core. Finished runs in the folder are kept.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import unskew
from unskew.core.files import write_whole
from unskew.runs.result import RESULT, Result, read_result

PAGE = Path(__file__).parents[1] / "how-to" / "local-training.md"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
SEEDS = (0, 1, 2)
BUDGET = {"clients": 5, "partition": "dirichlet(alpha=0.5)", "rounds": 12, "epochs": 1, "batch": 32}
ROWS: dict[str, dict[str, str | float | int]] = {
    "SGD, rate 0.1": {"lr": 0.1},
    "SGD, rate 0.1, `--schedule cosine`": {"lr": 0.1, "schedule": "cosine"},
    "SGD, rate 0.4": {"lr": 0.4},
    "SGD, rate 0.4, `--clip 1`": {"lr": 0.4, "clip": 1.0},
    "adam, rate 0.003": {"lr": 0.003, "optimizer": "adam"},
    "adamw, rate 0.003, `--schedule cosine`": {"lr": 0.003, "optimizer": "adamw", "schedule": "cosine"},
    "SGD, rate 0.1, `absent(0.5)`": {"lr": 0.1, "method": "fedavg + absent(0.5)"},
    "SGD, rate 0.1, `available(share=0.5, period=6)`": {"lr": 0.1, "method": "available(share=0.5, period=6)"},
}  # fmt: skip


def run(folder: Path, name: str, settings: dict[str, str | float | int], seed: int) -> Result:
    """The finished run, from the folder where it is there already."""
    path = folder / f"{list(ROWS).index(name)}-{seed}"
    if not (path / RESULT).exists():
        unskew.run(out=path, seed=seed, engine="loop", **(BUDGET | settings))  # type: ignore[arg-type]
    return read_result(path)


def cells(name: str, results: list[Result]) -> list[str]:
    """A row of the table: the last accuracy, its deviation over the last five rounds, the mean over the seeds."""
    last = [100 * each.accuracy for each in results]
    shake = [100 * statistics.stdev(row["accuracy"] for row in each.history[-5:]) for each in results]
    spread = f"{statistics.mean(last):.1f} ± {statistics.stdev(last):.1f}"
    return [name, spread, f"{statistics.mean(shake):.1f}"]


def table(folder: Path) -> str:
    """The measured rows as Markdown."""
    lines = [
        "| setting | accuracy, % | deviation over the last 5 rounds |",
        "| --- | --- | --- |",
    ]
    for name, settings in ROWS.items():
        row = cells(name, [run(folder, name, settings, seed) for seed in SEEDS])
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    work = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    measured = table(work)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    write_whole(PAGE, (before + BEGIN + "\n" + measured + "\n" + END + rest.partition(END)[2]).encode())
