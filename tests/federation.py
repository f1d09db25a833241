"""A small federation of random images for tests: seconds matter, pictures do not."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from unskew import engines, methods, models, tensors
from unskew.data.population import Partition, Population
from unskew.engines.blueprint import Blueprint, build, dataset
from unskew.key import Key
from unskew.round import driver
from unskew.types import ImageSet, Local, ServerState, Split, Tensors


def image_set(examples=120, classes=4, side=8, channels=1, seed=0) -> ImageSet:
    """Random images whose brightness follows the class, so that there is something to learn."""
    draw = Key(seed).fold("images").numpy()
    labels = np.arange(examples) % classes
    images = draw.integers(0, 128, (examples, channels, side, side)) + (labels * 30)[:, None, None, None]
    images = images.astype(np.uint8)
    test = Split(images[::3].copy(), labels[::3].copy())
    names = tuple(f"class {c}" for c in range(classes))
    return ImageSet("random", names, Split(images, labels), test, (0.4,) * channels, (0.2,) * channels)


def partition_of(sizes, examples=None, seed=0) -> Partition:
    """Clients of just these sizes; what is left over belongs to nobody."""
    examples = examples or sum(sizes)
    client = np.full(examples, -1, np.int32)
    order = Key(seed).fold("who").numpy().permutation(examples)
    client[order[: sum(sizes)]] = np.repeat(np.arange(len(sizes)), sizes)
    return Partition(client, len(sizes), "test", seed)


@dataclass
class Federation:
    """Everything that a run of some rounds needs."""

    blueprint: Blueprint
    data: Tensors
    key: Key

    def state(self) -> ServerState:
        bench = build(self.blueprint, self.data)
        models.initialise(bench.network, self.key.fold("model"))
        return driver.start(self.algorithm, tensors.of_module(bench.network))

    @property
    def algorithm(self):
        return methods.parse(self.blueprint.method, self.blueprint.local)

    def run(self, rounds=2, engine="loop", workers=2, per_round=None, state=None, **options) -> ServerState:
        opened = engines.open_engine(engine, self.blueprint, self.data, workers)
        try:
            state = state or self.state()
            per_round = per_round or opened.population.clients
            for state, _ in driver.run(  # noqa: B020
                self.algorithm, opened, state, self.key, rounds=rounds, per_round=per_round, **options
            ):
                pass
            return state
        finally:
            opened.close()

    def with_method(self, method) -> "Federation":
        return Federation(replace(self.blueprint, method=method), self.data, self.key)


def federation(
    method="fedavg", sizes=(40, 30, 1, 20, 9), images=None, model="tiny-cnn", dtype="float64", seed=0, **local
) -> Federation:
    images = images or image_set(sum(sizes))
    settings = Local(**{"epochs": 2, "batch": 16, "lr": 0.05, **local})
    blueprint = Blueprint(method, model, images.shape, len(images.classes), settings, dtype)
    population = Population.from_partition(partition_of(sizes, len(images.train)))
    return Federation(blueprint, dataset(images, population), Key(seed))


def largest_difference(left: Tensors, right: Tensors) -> float:
    assert list(left) == list(right)
    return max((float((left[name].double() - right[name].double()).abs().max()) for name in left), default=0.0)


def same(left: ServerState, right: ServerState) -> bool:
    """Bit for bit: round, weights, memory."""
    if left.round != right.round:
        return False
    pairs = [(left.tensors, right.tensors), (left.memory, right.memory)]
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
