"""Measures training under private updates by the noise, over seeds, for docs/explanation/privacy.md.

`make updates-table`, about ten minutes. Digits dealt evenly to a hundred clients, all of which come to every
round: the promise is one for clients, and ten of them would leave nothing but noise.
"""

import statistics
import tempfile
from pathlib import Path

from methods_table import replaced

import unskew

DOCS = Path(__file__).parents[1]
NOISES = (8.0, 4.0, 2.0)
SEEDS = (0, 1, 2)
CLIP = 0.5
SETTINGS = {"partition": "iid", "clients": 100, "rounds": 20, "epochs": 3, "batch": 8, "lr": 0.1, "evaluate_every": 20}


def row(folder: Path, name: str, method: str) -> list[str]:
    """A setting's name, ε of its rounds, and its accuracy over the seeds."""
    runs = [unskew.run(method=method, seed=seed, out=folder / f"{name}-{seed}", **SETTINGS) for seed in SEEDS]
    found = [100 * run.accuracy for run in runs]
    spent = runs[0].privacy
    return [
        name,
        "none promised" if spent is None else f"{spent.epsilon:.2f}",
        f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}",
    ]


def main() -> None:
    """Train, measure, write the table."""
    methods = {f"{noise:g}": f"private-updates(clip={CLIP:g}, noise={noise:g})" for noise in NOISES}
    methods["fedavg, no noise"] = "fedavg"
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(Path(folder), name, method) for name, method in methods.items()]
    lines = ["| noise z | ε | accuracy |", "| ---: | ---: | ---: |", *(f"| {' | '.join(cells)} |" for cells in rows)]
    page = DOCS / "explanation" / "privacy.md"
    page.write_text(replaced(page.read_text(encoding="utf-8"), "updates", lines), encoding="utf-8")


if __name__ == "__main__":
    main()
