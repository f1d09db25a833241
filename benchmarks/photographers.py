"""Ten rounds on a drawn population in the shape of iNaturalist-User-120k, on frozen features of EfficientNet-Lite0.

The whole has 120,300 images, which take long through the encoder on two cores: ``--images`` says how many are drawn.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Row, at_most, peak_memory
from unskew.core.units import format_bytes
from unskew.data.synthetic_set import Shape, write_population

IMAGES, TEST, SIDE = 12_030, 1203, 64
ROUNDS, PER_ROUND = 10, 100
CACHE_DISK, CACHE_MEMORY = 2 * 10**9, 50 * 10**6
FEATURES, FLOAT = 1280, 4  # numbers of an image's feature, bytes of each
FEW = 1203  # images of the smaller population: one of each class
METHOD = "fedavgm(0.9) + fedvc(64)"


def suite(images=IMAGES):
    """All rows; what the images add to memory is seen beside a run on a few of them, with the same network."""
    found, few = _apart(images), _apart(FEW)
    features = FLOAT * FEATURES * (images - FEW)
    about = f"{images:,} of 120,300 images, {SIDE}x{SIDE} pixels, {found['clients']:,} users"
    name = f"{METHOD}, {PER_ROUND} a round, on features of efficientnet-lite0"
    settings = f"--cache-memory {format_bytes(CACHE_MEMORY)}, --cache-disk {format_bytes(CACHE_DISK)}"
    return [
        Row(f"{name}: {ROUNDS} rounds", found["rounds"], "s", remark=f"{about}, engine loop"),
        Row("a round of it, the median", found["round"], "s", remark=f"with evaluation on {TEST:,} images"),
        Row("before the first round: photographs decoded, features computed", found["before"], "s", remark=about),
        Row("its memory, the whole process", found["memory"] / 1e6, "MB", remark=settings),
        at_most(
            f"of this, beyond a run on {FEW:,} images", (found["memory"] - few["memory"]) / 1e6, "MB",
            (CACHE_MEMORY + features) / 1e6, f"{format_bytes(features)} of features and --cache-memory",
        ),
    ]  # fmt: skip


def _apart(images):
    """What a run on so many images took, in a process of its own."""
    shape = Shape(users=min(Shape.users, images), classes=Shape.classes, examples=images, test=TEST)
    with tempfile.TemporaryDirectory() as folder:
        write_population(Path(folder) / "population.parquet", shape, size=32)
        done = subprocess.run(
            [sys.executable, __file__, f"{folder}/population.parquet", folder], cwd=sys.path[0], stdout=subprocess.PIPE,
            text=True, check=True, env={**os.environ, "UNSKEW_CACHE": f"{folder}/cache"},
        )  # fmt: skip
    return json.loads(done.stdout)


def _run(table, folder):
    """The run in this process: what it took, as JSON."""
    import unskew

    began = time.perf_counter()
    result = unskew.run(
        data=f"table:{table}(size={SIDE})", partition="users", method=METHOD, per_round=PER_ROUND, rounds=ROUNDS,
        epochs=1, batch=64, lr=0.01, model="efficientnet-lite0", pretrained="imagenet", train="classifier",
        engine="loop", cache_memory=f"{CACHE_MEMORY}B", cache_disk=f"{CACHE_DISK}B", out=Path(folder) / "run",
    )  # fmt: skip
    whole, rounds = time.perf_counter() - began, [row["seconds"] for row in result.history]
    about = {
        "rounds": sum(rounds), "round": statistics.median(rounds), "before": whole - sum(rounds),
        "memory": peak_memory(), "clients": result.clients,
    }  # fmt: skip
    print(json.dumps(about))


if __name__ == "__main__":
    _run(*sys.argv[1:])
