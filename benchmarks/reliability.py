"""What care costs: seals, strict reading, limits, long texts, and the oracle taken to its minimum."""

import itertools
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from measure import Row, at_most, medians
from unskew.calibration.oracle import minimise
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.key import Key
from unskew.data.sources import load
from unskew.methods import parse_methods
from unskew.runs.folder import read_sealed, start_manifest, write_sealed

EXAMPLES, WIDTH, CLASSES = 50_000, 256, 10


def suite(repeats):
    """All rows."""
    return [*_seals(repeats), _text(repeats), _evil_file(), *_oracle()]


def _seals(repeats):
    """Files of a run folder with and without their seals."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        start_manifest(path, {})
        number, small = itertools.count(), bytes(1000)
        large = np.random.default_rng(0).bytes(10_000_000)
        write_sealed(path, {"large": large, "small": small})
        seconds = medians(
            {
                "plain": lambda: write_whole(path / "plain", b"%1000d" % next(number)),
                "sealed": lambda: write_sealed(path, {"small": b"%1000d" % next(number)}),
                "read": (path / "large").read_bytes,
                "read sealed": lambda: read_sealed(path, "large"),
            },
            5 * repeats,
        )
    return [
        Row("writing a file of 1 kB, whole or not at all", 1000 * seconds["plain"], "ms"),
        at_most(
            "writing it sealed", 1000 * seconds["sealed"], "ms", 50, "three files are synced; a run seals a handful"
        ),
        at_most(
            "reading 10 MB sealed, beyond reading it", 1000 * (seconds["read sealed"] - seconds["read"]), "ms", 100
        ),
    ]


def _text(repeats):
    """A method's text of 100,000 characters is refused."""

    def parse():
        try:
            parse_methods("fedavg + " * 11_111)
        except UserError:
            return
        raise AssertionError("it was taken")

    return at_most(
        "refusing a method of 100,000 characters", 1000 * medians({"text": parse}, repeats)["text"], "ms", 50
    )


def _evil_file():
    """An .npz of 1 MB that holds 1 GB is refused."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "evil.npz"
        np.savez_compressed(
            file, x_train=np.zeros((1_000_000, 32, 32), np.uint8), y_train=np.zeros(1_000_000, np.uint8)
        )
        began = time.perf_counter()
        try:
            load(f"arrays:{file}", None)
        except UserError:
            return at_most("refusing an .npz that unpacks to 1 GB", 1000 * (time.perf_counter() - began), "ms", 500)
    raise AssertionError("it was taken")


def _oracle():
    """The oracle's minimum on features like CIFAR-10's."""
    draw = Key(0).fold("features").torch()
    labels = torch.arange(EXAMPLES) % CLASSES
    centres = torch.randn(CLASSES, WIDTH, generator=draw) / 8
    features = centres[labels] + torch.randn(EXAMPLES, WIDTH, generator=draw)
    began = time.perf_counter()
    _, gap, steps = minimise(nn.Linear(WIDTH, CLASSES), features, labels, 1e-5)
    seconds = time.perf_counter() - began
    return [
        at_most("oracle, 50,000 features of 256 dimensions, 10 classes", seconds, "s", 60, f"{steps} steps"),
        at_most("its distance to the least training loss", gap, "nats", 1e-8),
    ]
