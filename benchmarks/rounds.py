"""The speed of a round: against the plain loop, with clients that do nothing, with 100,000 clients."""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from measure import Row, at_least, at_most, medians
from unskew import engines, models
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.types import ImageSet, Local, Split
from unskew.data.partition import partition_examples
from unskew.data.population import Partition, Population
from unskew.engines.blueprint import Blueprint, build, dataset
from unskew.round import driver


class Federation:
    """An engine and the state of its server."""

    def __init__(self, images, population, local, engine, workers=2, per_round=None, method="fedavg", model=None):
        model = model or models.choose_model(images.shape)
        self.blueprint = Blueprint(method, model, images.shape, len(images.classes), local)
        data = dataset(images, population)
        self.side = side = build(self.blueprint, data)
        models.initialise(side.network, Key(0))
        self.algorithm, self.per_round = side.algorithm, per_round or population.clients
        self.state = driver.start(side.algorithm, tensors.of_module(side.network))
        self.engine = engines.open_engine(engine, engines.EngineSetup(self.blueprint, data, workers))

    @neutral()  # as in a run: one thread on the server's side too
    def round(self):
        self.state, metrics = driver.run_round(
            self.algorithm, self.engine, self.state, Key(0), per_round=self.per_round, rounds=1000
        )
        return metrics


def random_images(train, test=500, side=32, channels=3, classes=10) -> ImageSet:
    draw = Key(0).fold("images").numpy()
    parts = [
        Split(draw.integers(0, 256, (count, channels, side, side), dtype=np.uint8), draw.integers(0, classes, count))
        for count in (train, test)
    ]
    names = tuple(map(str, range(classes)))
    return ImageSet("random", names, *parts, (0.5,) * channels, (0.25,) * channels, augment=True)


def against_plain(images, population, repeats, label):
    """Examples a second of the plain loop on 1 and 2 threads, the loop and the pool, over the same clients.

    The plain loop has a process of its own: our engines set how PyTorch allocates, and it should not profit from that.
    """
    local = Local(epochs=1, augment=True)
    ours = {name: Federation(images, population, local, name) for name in ("loop", "pool")}
    with PlainProcess(images, population) as plain:
        variants = {
            "plain, 1 thread": lambda: plain.round(threads=1),
            "plain, 2 threads": lambda: plain.round(threads=2),
            "loop": ours["loop"].round,
            "pool": ours["pool"].round,
        }
        seconds = medians(variants, repeats)
    ours["pool"].engine.close()
    speed = {name: len(population.order) / value for name, value in seconds.items()}
    best = max(speed["plain, 1 thread"], speed["plain, 2 threads"])
    rows = [Row(f"{label}: {name}", value, "examples/s") for name, value in speed.items()]
    return rows, speed, best


class PlainProcess:
    """plain.py in a process that does a round whenever it is told to."""

    def __init__(self, images, population):
        self.folder = tempfile.TemporaryDirectory()
        client = np.full(len(images.train), -1, np.int32)
        client[population.order] = np.repeat(np.arange(population.clients), population.sizes)
        arrays = {"images": images.train.images, "labels": images.train.labels, "client": client}
        np.savez(f"{self.folder.name}/data.npz", mean=images.mean, std=images.std, model="simple-cnn", **arrays)

    def __enter__(self):
        command = [sys.executable, str(Path(__file__).with_name("plain.py")), f"{self.folder.name}/data.npz"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process.stdout.readline()
        return self

    def round(self, threads):
        self.process.stdin.write(f"{threads}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def ten_large(images):
    labels, classes = images.train.labels, len(images.classes)
    found = partition_examples("dirichlet(alpha=0.5)", labels, clients=10, key=Key(0), classes=classes)
    return Population.from_partition(found)


def hundred_small(images):
    client = np.full(len(images.train), -1, np.int32)
    client[:1300] = np.arange(1300) // 13
    return Population.from_partition(Partition(client, 100, "blocks", 0))


def large_clients(images, repeats):
    rows, speed, best = against_plain(images, ten_large(images), repeats, "10 large clients")
    remark = "batch 64, one epoch, crops and flips"
    return [
        *rows,
        at_least("10 large clients: pool / better plain", speed["pool"] / best, "", 1.6, remark),
        at_least("10 large clients: loop / plain, 1 thread", speed["loop"] / speed["plain, 1 thread"], "", 1.0, remark),
    ]


def small_clients(images, repeats):
    rows, speed, best = against_plain(images, hundred_small(images), repeats, "100 clients of 13")
    return [
        *rows,
        at_least("100 clients of 13: pool / better plain", speed["pool"] / best, "", 0.9),
        at_least("100 clients of 13: loop / plain, 1 thread", speed["loop"] / speed["plain, 1 thread"], "", 1.0),
    ]


def idle_clients(repeats):
    images = random_images(1000)
    population = Population.from_partition(Partition((np.arange(1000) % 10).astype(np.int32), 10, "blocks", 0))
    rows = []
    for name, bound in (("loop", 20), ("pool", 50)):
        idle = Federation(images, population, Local(epochs=0), name)
        seconds = medians({name: idle.round}, 5 * repeats)[name]
        rows.append(at_most(f"10 clients that do nothing: {name}", 1000 * seconds, "ms a round", bound))
        idle.engine.close()
    return rows


def crowd(clients):
    """A population of so many clients of 1 to 30 examples."""
    sizes = Key(0).fold("sizes").numpy().integers(1, 31, clients)
    return np.repeat(np.arange(clients, dtype=np.int32), sizes)


def large_population(repeats):
    """100 clients a round out of 1,000 and out of 100,000; the same visits cost the same, if nothing grows."""
    variants, loops, rows = {}, {}, []
    for clients in (1_000, 100_000):
        owner = crowd(clients)
        images = random_images(len(owner), side=8, channels=1)
        began = time.perf_counter()
        population = Population.from_partition(Partition(owner, clients, "crowd", 0))
        loops[clients] = Federation(images, population, Local(epochs=1), "loop", per_round=100)
        start = time.perf_counter() - began
        variants[clients] = loops[clients].round
        if clients == 100_000:
            rows.append(at_most("100,000 clients: start-up in the process", start, "s", 5))
            arrays = (population.order, population.offsets, population.roster.inhabited, population.roster.sizes)
            own = sum(array.nbytes for array in arrays)
            rows.append(at_most("100,000 clients: memory beyond the data", own / clients, "bytes a client", 200))
    seconds = medians(variants, 10 * repeats)
    ratio = seconds[100_000] / seconds[1_000]
    rows.append(at_most("100,000 clients: a round's cost against 1,000", ratio, "", 1.1, "100 clients a round"))
    rows.append(at_most("100,000 clients: whole start-up from the command line", _command_line_start(), "s", 5))
    return rows


def _command_line_start():
    """From the shell to the first round: `python -c` that builds the same and trains one round, less that round."""
    code = (
        "import sys, time; began = time.perf_counter()\n"
        "from rounds import Federation, Local, Partition, Population, crowd, random_images\n"
        "owner = crowd(100_000); images = random_images(len(owner), side=8, channels=1)\n"
        "population = Population.from_partition(Partition(owner, 100_000, 'crowd', 0))\n"
        "Federation(images, population, Local(epochs=1), 'loop', per_round=100)\n"
        "print(time.perf_counter() - began)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=sys.path[0], capture_output=True, text=True, check=True)
    return float(done.stdout)


def partitions(repeats):
    labels = Key(0).numpy().integers(0, 1203, 120_000)
    rows = []
    for scheme in ("dirichlet(alpha=0.5, min_size=0)", "dirichlet-client(alpha=0.5)", "iid", "shards"):
        work = partial(partition_examples, scheme, labels, clients=10_000, key=Key(0), classes=1203)
        seconds = medians({scheme: work}, repeats)[scheme]
        rows.append(at_most(f"120,000 examples on 10,000 clients: {scheme}", seconds, "s", 1))
    return rows
