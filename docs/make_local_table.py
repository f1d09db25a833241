"""Measures schedules, optimisers, clipping and absent clients on digits: the table of docs/local-training.md.

`python docs/make_local_table.py [FOLDER]`, some minutes on one core. Finished runs in the folder are kept.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import unskew
from unskew.core.files import write_whole
from unskew.runs.result import RESULT, Result, read_result

PAGE = Path(__file__).parent / "local-training.md"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
SEEDS = (0, 1, 2)
BUDGET = {
    "clients": 10,
    "partition": "dirichlet(alpha=0.3)",
    "rounds": 15,
    "epochs": 2,
    "batch": 32,
    "evaluate_every": 1,
}
ROWS: dict[str, dict[str, str | float | int]] = {
    "SGD, rate 0.05": {"lr": 0.05},
    "`--schedule cosine`": {"lr": 0.05, "schedule": "cosine"},
    "SGD, rate 0.2": {"lr": 0.2},
    "rate 0.2, `--clip 1`": {"lr": 0.2, "clip": 1.0},
    "rate 0.2, `--schedule \"cosine(warmup=3)\"`": {"lr": 0.2, "schedule": "cosine(warmup=3)"},
    "`--optimizer adam`, rate 0.003": {"lr": 0.003, "optimizer": "adam"},
    "adamw, `--schedule cosine`": {"lr": 0.003, "optimizer": "adamw", "weight_decay": 0.01, "schedule": "cosine"},
    "rate 0.05, `absent(0.5)`": {"lr": 0.05, "method": "fedavg + absent(0.5)"},
    "rate 0.05, `available`": {"lr": 0.05, "method": "fedavg + available"},
    "rate 0.05, `--patience 5`": {"lr": 0.05, "patience": 5},
}  # fmt: skip


def run(folder: Path, name: str, settings: dict[str, str | float | int], seed: int) -> Result:
    """The finished run, from the folder where it is there already."""
    path = folder / f"{list(ROWS).index(name)}-{seed}"
    if not (path / RESULT).exists():
        unskew.run(out=path, seed=seed, engine="loop", **(BUDGET | settings))  # type: ignore[arg-type]
    return read_result(path)


def cells(name: str, results: list[Result]) -> list[str]:
    """A row of the table: the last accuracy, the mean of the last five rounds' deviation, rounds."""
    last = [100 * each.accuracy for each in results]
    shake = [100 * statistics.stdev(row["accuracy"] for row in each.history[-5:]) for each in results]
    rounds = [each.rounds for each in results]
    spread = f"{statistics.mean(last):.1f} ± {statistics.stdev(last):.1f}"
    return [name, spread, f"{statistics.mean(shake):.1f}", f"{statistics.mean(rounds):.0f}"]


def table(folder: Path) -> str:
    """The measured rows as Markdown."""
    lines = [
        "| setting | accuracy, % | deviation over the last 5 rounds | rounds |",
        "| --- | --- | --- | --- |",
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
