"""Measures one exchange of statistics against rounds of training, and writes a table of docs/how-to/one-exchange.md.

`make one-exchange-table` measures digits with a small encoder that saw five of them: minutes. Any other settings of
`unskew run` make another table, under the name that they are given:

    python docs/generate/one_exchange_table.py --name cifar100 -- --data cifar100 --model efficientnet-lite0 --train …

Each run is one process. Finished runs in the work folder are kept, so that an interrupted table goes on where it
stopped.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import nn

import unskew
from unskew import models
from unskew.core import tensors
from unskew.core.files import write_whole
from unskew.core.key import Key
from unskew.core.machine import cores
from unskew.core.types import ImageSet, Split
from unskew.data.sources import load
from unskew.runs.journal import accuracy_at_round, read_metrics
from unskew.runs.result import Result, read_result

HERE = Path(__file__).parent
PAGE = HERE.parent / "how-to" / "one-exchange.md"
WORK = "ONE_EXCHANGE_WORK"  # the work folder, for the processes that train
EXCHANGES = ("lda", "ridge", "ridge(expand=500)")
PARTITIONS = {"iid": "iid", "dirichlet(alpha=0.1)": "α = 0.1", "dirichlet(alpha=0.01, min_size=0)": "α = 0.01"}
SEEDS = (0, 1, 2)
DIGITS = ["--data", "one_exchange_table:rest", "--model", "one_exchange_table:half_seen", "--epochs", "1",
          "--lr", "0.01"]  # fmt: skip


def _public() -> tuple[ImageSet, np.ndarray]:
    """The digits, and which training examples are public: every second one of 0 to 4."""
    images = load("digits", None)
    low = np.flatnonzero(images.train.labels < 5)[::2]
    return images, low


def _part(split: Split, index: np.ndarray) -> Split:
    return replace(split, images=split.images[index], labels=split.labels[index])


def rest() -> ImageSet:
    """What the clients have: all training digits but the public ones."""
    images, low = _public()
    return replace(images, name="digits", train=_part(images.train, np.setdiff1d(np.arange(len(images.train)), low)))


def half_seen(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """tiny-cnn whose encoder was trained on the public digits 0 to 4, with a classifier that knows nothing."""
    network = models.build("tiny-cnn", shape, classes)
    models.initialise(network, Key(0).fold("half seen"))
    weights = load_file(Path(os.environ[WORK]) / "encoder" / "model.safetensors")
    network.encoder.load_state_dict(tensors.under(weights, "encoder."))
    return network


def _five() -> ImageSet:
    images, low = _public()
    return replace(images, name="digits 0 to 4", train=_part(images.train, low))


def trained(out: Path, options: Sequence[str]) -> Result:
    """The finished run in this folder: the one that is there, or a new one."""
    if not (out / "result.json").exists():
        command = [sys.executable, "-m", "unskew"]
        begun = (out / "config.toml").exists()
        command += ["resume", str(out)] if begun else ["run", "--engine", "loop", "--out", str(out), *options]
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        with open(f"{out}.log", "ab") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)
    return read_result(out)


def measured(
    work: Path, settings: Sequence[str], exchanges: Sequence[str], start: Sequence[str], marks: Sequence[int]
) -> list[str]:
    """The table's lines: a row for each exchange and for each number of rounds, a column for each partition.

    ``start`` is a calibration and the learning rate of the runs that start from it.
    """
    plans = {}
    for text, seed in ((text, seed) for text in PARTITIONS for seed in SEEDS):
        own = [*settings, "--partition", text, "--seed", str(seed)]
        place = work / f"{list(PARTITIONS).index(text)}-{seed}"
        plans[text, seed, "exchange"] = (Path(f"{place}-exchange"), [*own, "--rounds", "0"])
        plans[text, seed, "rounds"] = (Path(f"{place}-rounds"), [*own, "--rounds", str(marks[-1])])
        plans[text, seed, "start"] = (Path(f"{place}-start"), [*own, "--rounds", str(marks[-1]), "--start", *start])
    with ThreadPoolExecutor(cores()) as pool:
        runs = dict(zip(plans, pool.map(lambda plan: trained(*plan), plans.values()), strict=True))
    for text, seed in ((text, seed) for text in PARTITIONS for seed in SEEDS):
        run = runs[text, seed, "exchange"]
        lacking = [each for each in exchanges if each not in run.calibrations]
        if lacking:
            sys.path.insert(0, str(HERE))
            runs[text, seed, "exchange"] = unskew.calibrate_run(run.path, *lacking)
    lines = [
        f"Means of {len(SEEDS)} seeds.\n",
        "| classifier | " + " | ".join(f"{words}, %" for words in PARTITIONS.values()) + " | MB up |",
        "| --- |" + " ---: |" * (len(PARTITIONS) + 1),
    ]
    for name in exchanges:
        found = {text: [runs[text, seed, "exchange"].calibrations[name] for seed in SEEDS] for text in PARTITIONS}
        sent = [each.bytes_up for every in found.values() for each in every]
        lines.append(_line(f"one exchange: `{name}`", [[e.accuracy for e in every] for every in found.values()], sent))
    for kind, words in (("rounds", "FedAvg"), ("start", f"FedAvg from `{start[0]}`, rate {start[-1]}")):
        for mark in marks:
            accuracies, sent = [], []
            for text in PARTITIONS:
                rows = [read_metrics(runs[text, seed, kind].path) for seed in SEEDS]
                accuracies.append([_reached(each, mark) for each in rows])
                sent += [sum(row["bytes_up"] for row in each[:mark]) for each in rows]
            lines.append(_line(f"{words}, {mark} {'round' if mark == 1 else 'rounds'}", accuracies, sent))
    return lines


def _reached(rows: Sequence[Mapping[str, Any]], mark: int) -> float:
    accuracy = accuracy_at_round(rows, mark)
    if accuracy is None:
        sys.exit(f"round {mark} was not evaluated: give marks that are multiples of --evaluate-every")
    return accuracy


def _line(name: str, accuracies: Sequence[Sequence[float]], sent: Sequence[int]) -> str:
    cells = [f"{100 * fmean(each):.2f}" for each in accuracies]
    return f"| {name} | {' | '.join(cells)} | {fmean(sent) / 1e6:.2f} |"


def with_table(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with this table between the marks of its name, which are added at the end where they are missing."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    if begin not in page:
        page += f"\n## Measured: {name}\n{begin}{end}"
    before, _, after = page.partition(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after.partition(end)[2]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="digits", help="the table's name on the page")
    parser.add_argument("--work", type=Path, default=Path("work/one-exchange"), help="where the runs are kept")
    parser.add_argument("--exchanges", nargs="+", default=EXCHANGES, metavar="CALIBRATION")
    parser.add_argument("--start", default="ridge", metavar="CALIBRATION", help="what the second runs start from")
    parser.add_argument("--start-lr", default="0.0001", metavar="X", help="their learning rate")
    parser.add_argument("--marks", nargs="+", type=int, default=(1, 5, 30), metavar="ROUND")
    parser.add_argument("settings", nargs="*", help="options of unskew run, after --")
    asked = parser.parse_args()
    work = asked.work.absolute() / asked.name
    work.mkdir(parents=True, exist_ok=True)
    os.environ[WORK] = str(work)
    if not asked.settings:
        folder = work / "encoder"
        if not (folder / "result.json").exists():
            unskew.run(data=_five(), method="centralised", rounds=20, epochs=1, lr=0.05, out=folder)
    start = (asked.start, "--lr", asked.start_lr)
    lines = measured(work, asked.settings or DIGITS, asked.exchanges, start, sorted(asked.marks))
    write_whole(PAGE, with_table(PAGE.read_text(encoding="utf-8"), asked.name, lines).encode())


if __name__ == "__main__":
    main()
