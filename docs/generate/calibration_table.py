"""Measures calibrations on CIFAR-10 and writes the tables of docs/how-to/calibration.md.

`make calibration-table`. FedAvg, dirichlet, 10 clients, 40 rounds of 5 epochs, then every calibration of the finished
runs. Settings are chosen with `--choose`: on runs that never saw the 5,000 training images they are judged by. Finished
runs and calibrations in the work folder are kept. `--sizes` trains nothing and only computes the MB column again.
UNSKEW_DATA names the folder with CIFAR-10.
"""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from methods_table import replaced, train

import unskew
from unskew import models
from unskew.calibration import parse_calibration
from unskew.calibration.covariances import Diagonal, statistics_bytes
from unskew.calibration.finisher import RealFeatures
from unskew.calibration.jobs import PASSES
from unskew.core.key import Key
from unskew.core.machine import cores
from unskew.data.partition import partition_examples
from unskew.data.sources import load
from unskew.runs.finished import plain_name
from unskew.runs.result import Result, read_result

DOCS = Path(__file__).parents[1]
BUDGET = ["--clients", "10", "--rounds", "40", "--epochs", "5", "--evaluate-every", "5"]
RUNS = [("0.1", 0), ("0.1", 1), ("0.1", 2), ("0.5", 0), ("0.05", 0)]  # alpha, seed
SMALLER, BEST = "lda(layers=4, expand=2000)", "lda(layers=4, expand=4000)"
COLUMNS = {  # calibration -> heading
    "ccvr": "ccvr",
    "ccvr(relu=true, tukey=0.5)": "ccvr, ReLU and Tukey",
    "uscc": "uscc",
    "uscc(lr=0.001)": "uscc(lr=0.001)",
    "lda": "lda",
    "oracle": "oracle",
    "oracle(paper=true)": "oracle(paper=true)",
    "ccvr(layers=4)": "ccvr(layers=4)",
    "ccvr(layers=4, components=16)": "ccvr(layers=4, components=16)",
    SMALLER: SMALLER,
    BEST: BEST,
    "oracle(layers=5, epochs=10)": "oracle(layers=5)",
}
CANDIDATES = [  # what --choose compares
    *(f"ccvr(per_class={count})" for count in (500, 2000, 5000)),
    *(f"lda(ridge={ridge})" for ridge in (0.0001, 0.001, 0.01, 0.1)),
    *(f"lda(layers={layers})" for layers in (2, 3, 4, 5)),
    *(f"lda(ridge={ridge}, layers=5, expand={more})" for more in (1000, 2000) for ridge in (0.0001, 0.001, 0.01)),
    *(f"lda(layers={layers}, expand=2000)" for layers in (1, 2, 3, 4)),
    *(f"lda(layers=4, expand={more})" for more in (500, 1000, 4000)),
    *(f"ccvr(layers={layers})" for layers in (2, 3, 4, 5)),
    "ccvr(layers=5, lr=0.003)",
    *(f"ccvr(layers=5, components={parts})" for parts in (4, 16)),
    *(f"ccvr(layers=4, components={parts})" for parts in (4, 16)),
    "oracle",
    "oracle(paper=true)",
    *(f"oracle(layers={layers}, epochs=10)" for layers in (4, 5)),
]
RELEASED = ("lda(ridge=1.0)", "ccvr(covariance=diagonal)", "ccvr")  # what --choose tries under privacy
CLIPS = (5, 10, 20, 40)  # of which --choose takes one


def calibrated(path: Path, *sources: str) -> Result:
    """The run with these calibrations; those that it has are not made again."""
    there = read_result(path).calibrations
    missing = [source for source in sources if plain_name(source) not in there]
    return unskew.calibrate_run(path, *missing, engine="loop") if missing else read_result(path)


def table(results: dict[tuple[str, int], Result]) -> list[str]:
    """Markdown: accuracy before and after each calibration, and how much of the oracle's gain ccvr keeps."""
    lines = [
        "| α | seed | before | " + " | ".join(COLUMNS.values()) + " |",
        "| --- | ---: | ---: | " + " | ".join("---:" for _ in COLUMNS) + " |",
    ]
    for (alpha, seed), result in results.items():
        after = [f"{100 * result.calibrations[plain_name(source)].accuracy:.2f}" for source in COLUMNS]
        lines.append(f"| {alpha} | {seed} | {100 * result.accuracy:.2f} | " + " | ".join(after) + " |")
    return lines


def costs(result: Result) -> list[str]:
    """Markdown: bytes that all clients send, and seconds, of one run's calibrations."""
    lines = ["", "| calibration | MB up, all clients | seconds |", "| --- | ---: | ---: |"]
    for source in COLUMNS:
        row = result.calibrations[plain_name(source)]
        lines.append(f"| `{source}` | {row.bytes_up / 1e6:.1f} | {row.seconds:.1f} |")
    return lines


def sizes(page: str) -> list[str]:
    """The page's tables with the megabytes that the clients of the first run send today."""
    folder, (alpha, seed) = os.environ.get("UNSKEW_DATA"), RUNS[0]
    images = load("cifar10", Path(folder) if folder else None)
    scheme, labels, classes = f"dirichlet(alpha={alpha})", images.train.labels, len(images.classes)
    client = partition_examples(scheme, labels, clients=10, key=Key(seed), classes=classes).client
    held = [len(np.unique(labels[client == number])) for number in range(10)]
    network = models.build("simple-cnn", images.shape, classes)

    def megabytes(source: str) -> float:
        needs = parse_calibration(source).needs
        if isinstance(needs, RealFeatures):
            return 0.0
        width, parts = needs.encoder(network, images.shape)[1], needs.components
        exchanges = [(needs.form, 1)]
        if parts > 1:  # the parts are found in several passes
            exchanges += [(needs.form, parts), *[(Diagonal(), parts)] * PASSES]
        return sum(statistics_bytes(form, own * parts, width) for form, parts in exchanges for own in held) / 1e6

    lines = page.partition("<!-- table -->\n")[2].partition("\n<!-- /table -->")[0].splitlines()
    for number, line in enumerate(lines):
        if line.startswith("| `"):
            source, _, seconds = line.strip("| ").split(" | ")
            lines[number] = f"| {source} | {megabytes(source.strip('`')):.1f} | {seconds} |"
    return lines


def promised(source: str, epsilon: float, clip: float) -> str:
    """A calibration with differential privacy, as the run names it."""
    return f"{source} + private(epsilon={epsilon:g}, delta=1e-05, clip={clip:g})"


def validation_set(work: Path) -> Path:
    """CIFAR-10's training images as a set of its own: 45,000 to train on and 5,000 to judge settings by."""
    folder = os.environ.get("UNSKEW_DATA")
    train_part = load("cifar10", Path(folder) if folder else None).train
    order = np.random.default_rng(1234).permutation(len(train_part))
    judged, trained = np.sort(order[:5000]), np.sort(order[5000:])
    images = train_part.images.transpose(0, 2, 3, 1)
    path = work / "validation.npz"
    np.savez(path, x_train=images[trained], y_train=train_part.labels[trained], x_test=images[judged],
             y_test=train_part.labels[judged])  # fmt: skip
    return path


def choose(work: Path) -> list[str]:
    """Markdown: every candidate's accuracy on images that neither training nor statistics saw."""
    flags = ["--data", f"arrays:{validation_set(work)}", "--augment", "--partition", "dirichlet(alpha=0.1)"]
    run = train(work / "validation", "fedavg", [*flags, "--seed", "7", *BUDGET])
    ridges = ["lda", *(f"lda(ridge={ridge})" for ridge in (0.01, 0.1, 1.0))]
    noise = [promised(source, 4, clip) for source in (*RELEASED, *ridges) for clip in CLIPS]
    noise = list(dict.fromkeys(noise))
    result = calibrated(run, *CANDIDATES, *noise)
    lines = ["| calibration | accuracy on the 5,000, % |", "| --- | ---: |"]
    lines.append(f"| none | {100 * result.accuracy:.2f} |")
    for source in (*CANDIDATES, *noise):
        lines.append(f"| `{source}` | {100 * result.calibrations[plain_name(source)].accuracy:.2f} |")
    return lines


def main() -> None:
    """Train what is missing, calibrate, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/calibration"), help="where the runs lie")
    parser.add_argument("--choose", action="store_true", help="compare settings on a validation part, write nothing")
    parser.add_argument("--sizes", action="store_true", help="compute the MB column again, train nothing")
    options = parser.parse_args()
    guide = DOCS / "how-to" / "calibration.md"
    if options.sizes:
        page = guide.read_text(encoding="utf-8")
        guide.write_text(replaced(page, "table", sizes(page)), encoding="utf-8")
        return
    options.work.mkdir(parents=True, exist_ok=True)
    if options.choose:
        print("\n".join(choose(options.work)))  # noqa: T201
        return
    jobs = [
        (options.work / f"a{alpha}-{seed}", "fedavg",
         ["--partition", f"dirichlet(alpha={alpha})", "--seed", str(seed), *BUDGET])
        for alpha, seed in RUNS
    ]  # fmt: skip
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(lambda job: train(*job), jobs))
    results = {named: calibrated(job[0], *COLUMNS) for named, job in zip(RUNS, jobs, strict=True)}
    words = [*table(results), *costs(results[RUNS[0]])]
    guide.write_text(replaced(guide.read_text(encoding="utf-8"), "table", words), encoding="utf-8")


if __name__ == "__main__":
    main()
