"""A million clients of 1 to 50 examples: start-up, a round, and what a client costs beyond its examples.

Each population has a process of its own. What a client costs is the difference between the same examples dealt to a
million clients and to a thousand, so that everything that grows with the examples cancels out.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from measure import at_most
from unskew.core.key import Key
from unskew.core.types import ImageSet, Split

MILLION, THOUSAND = 1_000_000, 1_000
CLASSES = 20


def suite(repeats):
    many = _apart(MILLION, MILLION, 100, 5 * repeats)
    few = _apart(THOUSAND, THOUSAND, 100, 5 * repeats)
    same = _apart(THOUSAND, MILLION, 1, 1)  # the million's examples, dealt to a thousand
    ratio = many["second_an_example"] / few["second_an_example"]
    memory, disk = ((many[what] - same[what]) / MILLION for what in ("memory", "disk"))
    return [
        at_most("1,000,000 clients: start-up to the first round", many["start"], "s", 15, "after the imports"),
        at_most("1,000,000 clients: a round's cost against 1,000", ratio, "", 1.2, "100 clients a round, an example"),
        at_most("1,000,000 clients: memory beyond the data", memory, "bytes a client", 100),
        at_most("1,000,000 clients: disk beyond the data", disk, "bytes a client", 100),
    ]


def population(clients, users):
    """Random 4×4 images of that many users with 1 to 50 examples each, dealt in a row to that many clients."""
    draw = Key(0).fold("million").numpy()
    owner = np.repeat(np.arange(users, dtype=np.int32), draw.integers(1, 51, users)) // np.int32(users // clients)
    parts = [
        Split(draw.integers(0, 256, (count, 1, 4, 4), dtype=np.uint8), draw.integers(0, CLASSES, count))
        for count in (len(owner), 500)
    ]
    return ImageSet("million", tuple(map(str, range(CLASSES))), *parts, (0.5,), (0.25,)), owner


def _apart(clients, users, per_round, rounds):
    """What a run of this population costs, in a process that starts for it."""
    command = [sys.executable, __file__, str(clients), str(users), str(per_round), str(rounds)]
    done = subprocess.run(command, cwd=sys.path[0], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _measure(clients, users, per_round, rounds):
    import unskew

    images, owner = population(clients, users)
    before, began, seen, costs = _resident(), time.perf_counter(), [], {}

    def observe(event):
        if not hasattr(event, "train_loss"):
            costs.setdefault("start", time.perf_counter() - began)
            return
        seen.append(event.seconds / event.examples)
        if len(seen) == rounds:
            costs["memory"] = _resident() - before

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        unskew.run(
            data=images, partition=owner, clients=clients, per_round=per_round, rounds=rounds, epochs=1, batch=16,
            evaluate_every=rounds, engine="loop", out=out, observe=observe,
        )  # fmt: skip
        costs["disk"] = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return costs | {"second_an_example": statistics.median(seen)}


if __name__ == "__main__":
    print(json.dumps(_measure(*map(int, sys.argv[1:]))))
