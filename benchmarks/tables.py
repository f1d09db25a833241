"""Tables of photographs: the first pass, the second, an epoch from the cache and from memory, bounded memory."""

import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from measure import Row, at_least, at_most, medians
from unskew.core.types import ImageSet, Local, Split
from unskew.data.population import Population
from unskew.data.sources import load
from unskew.data.store import Cache
from unskew.data.tables import check_columns, read_csv
from unskew.engines import seconds_per_step
from unskew.engines.blueprint import Blueprint, build, dataset

PHOTOGRAPHS, SIDE, SIZE, BATCH = 1000, (480, 360), 128, 64
ROWS = 579_184  # as many as iNaturalist-2017 has for training
BOUND = 30 * 10**6  # bytes of photographs in memory, for the last row


def suite(repeats):
    """All rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = _write_photographs(Path(folder))
        cache = Cache(Path(folder) / "cache", 10**9, 10**8)
        return [_columns(Path(folder)), *_passes(path, cache), *_epochs(path, cache, repeats), _memory(path)]


def _write_photographs(folder):
    """JPEGs of a camera's kind: smooth, with some noise, about 60 kB each."""
    draw = np.random.default_rng(0)
    base = Image.fromarray(draw.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(SIDE, Image.Resampling.BICUBIC)
    with (folder / "photos.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["path", "label", "user"])
        for number in range(PHOTOGRAPHS):
            pixels = np.asarray(base).astype(np.int16) + draw.integers(-12, 12, (SIDE[1], SIDE[0], 1))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=90)
            lines.writerow([f"{number}.jpg", number % 10, number % 50])
    return folder / "photos.csv"


def _columns(folder):
    path = folder / "large.csv"
    with path.open("w") as file:
        file.write("path,label,user,latitude,longitude,split\n")
        for n in range(ROWS):
            file.write(f"images/{n}.jpg,{n % 5089},{n % 9275},{n % 90}.123456,{n % 180}.123456,train\n")
    began = time.perf_counter()
    check_columns(read_csv(path))
    return at_most(f"the columns of {ROWS:,} rows, read and checked", time.perf_counter() - began, "s", 15)


def _passes(path, cache):
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        load(f"table:{path}(size={SIZE})", None, cache)
        seconds.append(time.perf_counter() - began)
    rates = [PHOTOGRAPHS / each for each in seconds]
    about = f"JPEGs of {SIDE[0]}×{SIDE[1]} to {SIZE}×{SIZE}, {os.cpu_count()} threads"
    return [
        Row(f"{PHOTOGRAPHS:,} photographs, the first time", rates[0], "images/s", remark=about),
        Row("the second time", rates[1], "images/s", remark="nothing is decoded"),
        at_least("second / first", rates[1] / rates[0], "", 10),
    ]


def _epochs(path, cache, repeats):
    images = load(f"table:{path}(size={SIZE})", None, cache)
    held = [Split(np.ascontiguousarray(part.images[:]), part.labels) for part in (images.train, images.test)]
    in_memory = ImageSet("same", images.classes, held[0], held[1], images.mean, images.std)
    order = torch.randperm(len(held[0]), generator=torch.Generator().manual_seed(0)).split(BATCH)
    population = Population(np.arange(len(held[0]), dtype=np.int32), np.array([0, len(held[0])]))
    blueprint = Blueprint("fedavg", "resnet-18", images.shape, 10, Local(batch=BATCH))
    sides = {
        name: build(blueprint, dataset(each, population))
        for name, each in {"cache": images, "memory": in_memory}.items()
    }
    seconds = medians(
        {name: lambda side=side: [side.train.batch(index) for index in order] for name, side in sides.items()}, repeats
    )
    step = seconds_per_step(sides["memory"], BATCH)
    each = {name: 1000 * value / len(order) for name, value in seconds.items()}
    return [
        Row(f"a batch of {BATCH} from memory, normalised", each["memory"], "ms"),
        Row("from the cache, with its checksums", each["cache"], "ms"),
        at_most(
            "what the cache adds to a step of resnet-18", (each["cache"] - each["memory"]) / (1000 * step), "", 0.05,
            f"beside {step:.2f} s for the step, on one thread",
        ),
    ]  # fmt: skip


def _memory(path):
    """How much memory a process takes at most in two epochs with next to no room on disk, beyond an empty one.

    The imports' own peak is forgotten first: it would hide what comes after it.
    """
    code = (
        "import re, sys; from pathlib import Path\n"
        "from unskew.data.store import Cache; from unskew.data.sources import load\n"
        "import tempfile; folder = tempfile.mkdtemp()\n"
        "def kilobytes(name): return int(re.search(name + r':\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "Path('/proc/self/clear_refs').write_text('5'); before = kilobytes('VmRSS')\n"
        f"images = load(sys.argv[1], None, Cache(Path(folder), 0, {BOUND})).train.images\n"
        "for turn in range(2):\n"
        f"    for at in range(0, len(images), {BATCH}): images[at:at + {BATCH}]\n"
        "print(kilobytes('VmHWM') - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"table:{path}(size={SIZE})"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    taken = int(done.stdout) * 1024 / 10**6
    whole = PHOTOGRAPHS * 3 * SIZE**2 / 10**6
    return at_most(
        f"memory for {whole:.0f} MB of photographs, --cache-memory {BOUND // 10**6}MB, --cache-disk 0", taken, "MB",
        BOUND / 10**6 + 30, "30 MB for the batch and the chunk that is decoded",
    )  # fmt: skip
