"""`make bench`: every speed claim of the README as a row, measured side by side in one run.

CIFAR-10 is taken from UNSKEW_DATA; without it random images of its size stand in, since speed does not look at them.
"""

import argparse
import os
import platform
from pathlib import Path

import torch

import analysis
import calibration
import flower
import frozen
import masking
import methods
import million
import photographers
import population
import published
import ranks
import reliability
import rounds
import starting
import tables
from measure import show_table
from unskew.core.errors import UserError
from unskew.data.sources import load


def cifar10():
    folder = os.environ.get("UNSKEW_DATA")
    try:
        return load("cifar10", Path(folder) if folder else None)
    except UserError:
        return rounds.random_images(50_000)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--images", type=int, default=photographers.IMAGES, help="of the suite photographers; all are 120300"
    )
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    parser.add_argument("only", nargs="*", metavar="SUITE", help="which suites; all where none is named")
    options = parser.parse_args()
    images = cifar10()
    suites = {
        "partitions": lambda: rounds.partitions(
            options.repeats
        ),  # first, as in a run: before an engine sets how memory is kept
        "large": lambda: rounds.large_clients(images, options.repeats),
        "small": lambda: rounds.small_clients(images, 3 * options.repeats),
        "idle": lambda: rounds.idle_clients(options.repeats),
        "crowd": lambda: rounds.large_population(options.repeats),
        "million": lambda: million.suite(options.repeats),
        "population": lambda: population.suite(options.repeats),
        "published": published.suite,
        "photographers": lambda: photographers.suite(options.images),
        "methods": lambda: methods.steps(images, 2 * options.repeats),
        "calibration": lambda: calibration.suite(images, 2 * options.repeats),
        "analysis": lambda: analysis.suite(images),
        "flower": lambda: flower.suite(images, 2 * options.repeats),
        "frozen": lambda: frozen.suite(images),
        "masking": lambda: masking.suite(options.repeats),
        "reliability": lambda: reliability.suite(options.repeats),
        "start": lambda: starting.suite(2 * options.repeats),
        "torchrun": lambda: ranks.suite(options.repeats),
        "tables": lambda: tables.suite(options.repeats),
    }
    if unknown := [name for name in options.only if name not in suites]:
        parser.error(f"there is no suite {unknown[0]!r}; there are {', '.join(suites)}")
    heading = (
        f"{images.name} images, {os.cpu_count()} cores ({platform.machine()}), PyTorch {torch.__version__}, "
        f"medians of {options.repeats} or more turns."
    )
    show_table(heading, (row for name in options.only or suites for row in suites[name]()), options.out)


if __name__ == "__main__":
    main()
