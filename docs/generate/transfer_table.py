"""Fine-tunes an ImageNet network on CIFAR-100 and writes the tables of docs/how-to/transfer.md: `make transfer-table`.

EfficientNet-Lite0 with ImageNet weights, the 100 clients of Hsu et al.'s published split at α = 0.5, the classifier
alone and last(2). The clients' rate is chosen first, on a sixth of the training images that no client then has; the
test set is not looked at. Each run is one process on one core, as many at a time as there are cores. Finished runs in
the work folder are kept, so that an interrupted table goes on where it stopped. UNSKEW_DATA names the folder with
CIFAR-100 and hsu-splits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from unskew.core.errors import ClientFailure
from unskew.core.files import write_whole
from unskew.core.key import Key
from unskew.core.machine import cores, neutral
from unskew.data.population import Population
from unskew.engines.blueprint import build
from unskew.engines.loop import Loop
from unskew.methods import METHODS, parse_method
from unskew.round import driver
from unskew.round.evaluation import evaluate
from unskew.runs import config as configs
from unskew.runs.prepare import prepare
from unskew.runs.result import Calibration, Result, read_result

PAGE = Path(__file__).parents[1] / "how-to" / "transfer.md"
MODES = {"classifier": 60, "last(2)": 20}  # what is trained -> rounds
CENTRALISED = 10  # its rounds: each is an epoch of all images
SEEDS = (0, 1, 2)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FIRST = (3, 5)  # the rates tried first, by their places; then on from the best one while it is at the edge of the tried
SEARCH_ROUNDS = {"classifier": 20, "last(2)": 8}
JUDGED = {"classifier": 10, "last(2)": 4}  # the last rounds of a search, whose mean decides: single rounds vary a lot
HELD_OUT = 6  # every sixth training image is for choosing the rate
TRAINING = ("fedavg", "fedavgm(0.9)", "fedvc(256)", "fedavg + fedir", "fedavgm(0.9) + fedir", "fedvc(256) + fedir",
            "centralised")  # fmt: skip
CALIBRATIONS = [
    'ccvr(per_class=100, covariance=shared)', "lda", *(["ridge"] if "ridge" in METHODS else []),
]  # fmt: skip
OPTIONS = {
    "data": "cifar100", "model": "efficientnet-lite0", "pretrained": "imagenet", "resize": 96, "per_round": 10,
    "epochs": 1, "batch": 32, "momentum": 0.0, "weight_decay": 0.0, "evaluate_every": 10,
}  # fmt: skip


def base(method: str) -> str:
    """The method whose rate it takes: FedIR takes that of the method it is added to."""
    return method.removesuffix(" + fedir")


def settings(data_dir: Path, train: str, method: str, rate: float, seed: int) -> dict[str, object]:
    """The options of one run."""
    split = data_dir / "hsu-splits" / "cifar100_alpha_0.50.csv"
    rounds = CENTRALISED if method == "centralised" else MODES[train]
    chosen = {"train": train, "method": method, "lr": rate, "seed": seed, "rounds": rounds}
    return {**OPTIONS, "data_dir": str(data_dir), "partition": f"file:{split}", **chosen}


@neutral()
def held_out_accuracies(data_dir: Path, train: str, method: str) -> dict[float, float]:
    """Mean accuracy of the last rounds by rate, on training images that no client has, with seed 0."""
    config = configs.checked(configs.with_values(configs.Config(), settings(data_dir, train, method, 0.1, 0), "table"))
    prepared = prepare(config)
    data, client = prepared.data, prepared.partition.client.copy()
    out = np.arange(len(client)) % HELD_OUT == 0
    client[out] = -1
    population = Population.from_partition(replace(prepared.partition, client=client))
    rows = torch.from_numpy(np.flatnonzero(out))
    data = data | {
        "test/images": data["train/images"][rows], "test/labels": data["train/labels"][rows],
        "population/order": torch.tensor(population.order), "population/offsets": torch.tensor(population.offsets),
    }  # fmt: skip

    def tried(rate: float) -> float:
        local = replace(prepared.blueprint.local, lr=rate)
        values = replace(prepared.blueprint.values, algorithm=parse_method(method, local))
        side = build(replace(prepared.blueprint, local=local, values=values), data)
        prepared.initialise(side.network)
        engine = Loop(side)
        state = driver.start(side.algorithm, side.weights, side.classifier)
        rounds, judged, accuracies = SEARCH_ROUNDS[train], JUDGED[train], list[float]()
        try:
            for after, _ in driver.run(
                side.algorithm, engine, state, Key(0), rounds=rounds, per_round=OPTIONS["per_round"]
            ):
                if after.round > rounds - judged:
                    accuracies.append(evaluate(engine, after.tensors, len(rows), Key(0)).accuracy)
        except ClientFailure:  # NaN: too large
            return 0.0
        return statistics.mean(accuracies)

    return searched(tried)


def searched(tried: Callable[[float], float]) -> dict[float, float]:
    """What the rates come to that were tried: those in the middle, then on while the best is at the edge of them."""
    found = {rate: tried(rate) for rate in RATES[FIRST[0] : FIRST[1]]}
    while True:
        low, high = RATES.index(min(found)), RATES.index(max(found))
        top = RATES.index(max(sorted(found), key=lambda rate: found[rate]))
        if top == low > 0:
            found[RATES[low - 1]] = tried(RATES[low - 1])
        elif top == high < len(RATES) - 1:
            found[RATES[high + 1]] = tried(RATES[high + 1])
        else:
            return found


def chosen_rates(work: Path, data_dir: Path, modes: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """For each mode and method the held-out accuracies by rate: measured once, kept in the work folder."""
    file = work / "rates.json"
    rates = json.loads(file.read_text()) if file.exists() else {}
    for train in modes:
        for method in dict.fromkeys(map(base, TRAINING)):
            if method not in rates.setdefault(train, {}):
                found = held_out_accuracies(data_dir, train, method)
                rates[train][method] = {f"{rate:g}": accuracy for rate, accuracy in found.items()}
                write_whole(file, json.dumps(rates, indent=2).encode())
    return rates


def best(accuracies: dict[str, float]) -> float:
    """The rate of the highest accuracy, the smaller of two that are level."""
    return float(max(sorted(accuracies, key=float), key=lambda rate: accuracies[rate]))


def run(out: Path, options: dict[str, object]) -> None:
    """A finished run in that folder: the one that is there, or a new one."""
    if (out / "result.json").exists():
        return
    if (out / "config.toml").exists():
        words = ["resume", str(out)]
    else:
        method = " + ".join([str(options["method"]), *CALIBRATIONS])
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**options, "method": method}.items()]
        words = ["run", *flags, "--engine=loop", f"--out={out}"]
    with open(f"{out}.log", "ab") as log:
        command = [sys.executable, "-m", "unskew", *words]
        subprocess.run(command, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def folder(work: Path, train: str, method: str, seed: int) -> Path:
    """The run's folder."""
    words = f"{train} {method}".replace("(", "").replace(")", "").replace(" + ", "-").replace(" ", "-")
    return work / f"{words}-{seed}"


def table(work: Path, train: str, rates: dict[str, dict[str, float]]) -> list[str]:
    """Markdown: mean ± deviation over the seeds, as trained and calibrated; a row where all its runs are finished."""
    names = ["as trained", *(name.partition("(")[0] for name in CALIBRATIONS)]
    lines = [
        f"| `--train {train}`, {MODES[train]} rounds | rate | {' | '.join(names)} |",
        "| --- | ---: | " + " | ".join("---:" for _ in names) + " |",
    ]
    for method in TRAINING:
        folders = [folder(work, train, method, seed) for seed in SEEDS]
        if not all((each / "result.json").exists() for each in folders):
            continue
        results = [read_result(each) for each in folders]
        columns = [[each.accuracy for each in results]]
        columns += [[_calibrated(each, name).accuracy for each in results] for name in names[1:]]
        cells = [f"`{method}`", f"{best(rates[base(method)]):g}", *map(_spread, columns)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _calibrated(result: Result, name: str) -> Calibration:
    return next(each for key, each in result.calibrations.items() if key.partition("(")[0] == name)


def _spread(values: list[float]) -> str:
    return f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"


def replaced(page: str, name: str, lines: list[str]) -> str:
    """The page with the part between its two marks replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = page.partition(start)
    return before + start + "\n".join([*lines, end]) + rest.partition(end)[2]


def main() -> None:
    """Choose the rates, train what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/transfer"), help="the folder of the runs")
    parser.add_argument(
        "--no-training", action="store_true", help="write what the finished runs say, and train nothing"
    )
    parser.add_argument("--train", nargs="+", choices=MODES, default=list(MODES), help="measure these tables only")
    options = parser.parse_args()
    work, data_dir = options.work.absolute(), Path(os.environ.get("UNSKEW_DATA", ".")).absolute()
    work.mkdir(parents=True, exist_ok=True)
    if options.no_training:
        rates = json.loads((work / "rates.json").read_text())
    else:
        rates = chosen_rates(work, data_dir, options.train)
        jobs = [
            (
                folder(work, train, method, seed),
                settings(data_dir, train, method, best(rates[train][base(method)]), seed),
            )
            for train in options.train
            for method in TRAINING
            for seed in SEEDS
        ]
        with ThreadPoolExecutor(cores()) as pool:
            for done in [pool.submit(run, *job) for job in jobs]:
                done.result()
    page = PAGE.read_text(encoding="utf-8")
    for train in MODES:
        if any(work.glob(f"{folder(work, train, 'fedavg', 0).name}/result.json")):
            page = replaced(page, train, table(work, train, rates[train]))
    write_whole(PAGE, page.encode())


if __name__ == "__main__":
    main()
