"""What storing the frozen part's output saves: a round of EfficientNet-Lite0 on features and through the encoder."""

import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import unskew
from measure import Row, at_least, peak_memory
from unskew.core.files import CACHE_VARIABLE
from unskew.core.types import Split
from unskew.runs import prepare

IMAGES, TEST, CLIENTS, SIDE, ROUNDS = 600, 100, 10, 96, 3


def suite(images):
    """All rows: the same images, the same layers trained, with and without storing."""
    few = replace(
        images,
        train=Split(images.train.images[:IMAGES], images.train.labels[:IMAGES]),
        test=Split(images.test.images[:TEST], images.test.labels[:TEST]),
        users=None,
    )
    with tempfile.TemporaryDirectory() as folder, _cache(folder):
        for train in ("classifier", "last(2)"):
            began = time.perf_counter()
            stored = _round(few, train, Path(folder) / f"stored-{train}")
            first = time.perf_counter() - began - ROUNDS * stored
            share, prepare.MEMORY_SHARE = prepare.MEMORY_SHARE, 1e15  # no memory for features: none are stored
            try:
                through = _round(few, train, Path(folder) / f"through-{train}")
            finally:
                prepare.MEMORY_SHARE = share
            words = f"{IMAGES} images of {SIDE}x{SIDE}: {through:.2f} s through the encoder, {stored:.3f} s on features"
            name = f"--train {train}: a round on stored features"
            if train == "classifier":
                yield at_least(name, through / stored, "times as fast", 20, words)
            else:  # its own layers take most of the time that is left
                yield Row(name, through / stored, "times as fast", remark=words)
            yield Row(f"--train {train}: before the first round, features computed", first, "s")
    yield Row("peak memory of all this", peak_memory() / 1e9, "GB")


def _round(images, train, path):
    """Median seconds of a round, without the test images."""
    result = unskew.run(
        data=images, partition="iid", clients=CLIENTS, rounds=ROUNDS, epochs=1, batch=32, model="efficientnet-lite0",
        pretrained="imagenet", resize=SIDE, train=train, evaluate_every=ROUNDS, engine="loop", out=path,
    )  # fmt: skip
    return sorted(row["seconds"] for row in result.history)[ROUNDS // 2]


@contextmanager
def _cache(folder):
    """The cache folder is a new one, so that features are computed and not found."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = folder
    try:
        yield
    finally:
        os.environ.pop(CACHE_VARIABLE)
        if before is not None:
            os.environ[CACHE_VARIABLE] = before
