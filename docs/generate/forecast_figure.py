"""Measures how far calibration's forecast can be trusted: docs/how-to/forecast.svg and a table of calibration.md.

`make forecast-figure`: FedAvg on digits, and on 10,000 images of CIFAR-10 if UNSKEW_DATA names its folder. What a run
gave is kept in the work folder, so an interrupted measurement goes on where it stopped.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from methods_table import replaced

import unskew
from unskew.charts import Axis, Chart, Dots, Line, Mark
from unskew.charts.files import svg
from unskew.core.files import write_whole
from unskew.data.sources import load

PAGE = Path(__file__).parents[1] / "how-to" / "calibration.md"
CALIBRATIONS = ("lda", "ridge", "ccvr", "uscc", "qda", "oracle")
SEEDS, CIFAR = (0, 1, 2), "CIFAR-10, simple-cnn, 8 rounds of 2 epochs"
DIGITS = {rounds: f"digits, tiny-cnn, {rounds} rounds of 2 epochs" for rounds in (3, 10)}


def settings(work: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: the group that it is shown with, and the options of its run."""
    found = {}
    for seed in SEEDS:
        for alpha in (0.05, 0.1, 0.5):
            for rounds, group in DIGITS.items():
                options = {"partition": f"dirichlet(alpha={alpha})", "rounds": rounds, "lr": 0.02, "seed": seed}
                found[f"digits-{alpha}-{rounds}-{seed}"] = group, options
    if "UNSKEW_DATA" in os.environ:
        data = work / "cifar.npz"
        if not data.exists():
            images, index = load("cifar10", Path(os.environ["UNSKEW_DATA"])), np.random.default_rng(0)
            some = np.sort(index.permutation(50_000)[:10_000])
            pixels = [part.transpose(0, 2, 3, 1) for part in (images.train.images[some], images.test.images[:4000])]
            labels = images.train.labels[some], images.test.labels[:4000]
            np.savez(data, x_train=pixels[0], y_train=labels[0], x_test=pixels[1], y_test=labels[1])
        common = {"data": f"arrays:{data}", "model": "simple-cnn", "rounds": 8, "augment": False}
        for partition in ("dirichlet(alpha=0.1)", "dirichlet(alpha=0.05)", "dirichlet(alpha=0.5)", "iid"):
            found[f"cifar-{partition}-0"] = CIFAR, {"partition": partition, "seed": 0, **common}
    return found


def measure(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The accuracy before, after each calibration, and the forecast of both."""
    forecasts: list[Any] = []

    def see(event: Any) -> None:
        if getattr(getattr(event, "forecast", None), "before", None) is not None:
            forecasts.append(event.forecast)

    unskew.run(out=path, epochs=2, clients=10, engine="loop", evaluate_every=100, progress=False, **options)
    result = unskew.calibrate_run(path, *CALIBRATIONS, observe=see, progress=False)
    after = {name: row.accuracy for name, row in result.calibrations.items()}
    return {"accuracy": result.accuracy, "calibrations": after, "forecast": [forecasts[0].before, forecasts[0].after]}


def main() -> None:
    """Measure what is missing, then write the figure and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/forecast"), help="where runs and results are kept")
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    file, asked = work / "results.json", settings(work)
    known = json.loads(file.read_text()) if file.exists() else {}
    for name, (_, options) in asked.items():
        if name not in known:
            known[name] = measure(work / name, options)
            write_whole(file, json.dumps(known).encode())
    marks: list[Mark] = []
    names = ["accuracy forecast without calibration", "is off by at most", "gain forecast", "lda", "best", "came true"]
    lines = ["| runs | " + " | ".join(names) + " |", "| --- | " + " | ".join(["---:"] * len(names)) + " |"]
    for number, group in enumerate(dict.fromkeys(group for group, _ in asked.values())):
        rows = [known[name] for name, (mine, _) in asked.items() if mine == group]
        before = [100 * row["forecast"][0] for row in rows]
        forecast = [100 * (row["forecast"][1] - row["forecast"][0]) for row in rows]
        lda = [100 * (row["calibrations"]["lda"] - row["accuracy"]) for row in rows]
        best = [100 * (max(row["calibrations"][name] for name in CALIBRATIONS[:4]) - row["accuracy"]) for row in rows]
        off = max(abs(one - 100 * row["accuracy"]) for one, row in zip(before, rows, strict=True))
        shares = [real / promised for real, promised in zip(best, forecast, strict=True)]
        cells = [f"{fmean(before):.1f} %", f"{off:.1f} points", f"{fmean(forecast):.1f}", f"{fmean(lda):.1f}",
                 f"{fmean(best):.1f}", f"{min(shares):.2f} to {max(shares):.2f}"]  # fmt: skip
        lines.append(f"| {len(rows)}: {group} | " + " | ".join(cells) + " |")
        marks.append(Dots(forecast, best, number, radius=4.0, name=group))
    ends = [0.0, 90.0]
    marks.append(Line(ends, ends, "as forecast", "quiet", dashed=True))
    alt = "The gain of the best calibration by its forecast: close to it on digits, below it on CIFAR-10."
    axes = Axis("forecast gain, points"), Axis("gain of the best calibration, points")
    chart = Chart("forecast", "Forecast and gain", alt, marks, x=axes[0], y=axes[1], width=520, height=380)
    (PAGE.parent / "forecast.svg").write_text(svg(chart), encoding="utf-8")
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "forecast", lines), encoding="utf-8")


if __name__ == "__main__":
    main()
