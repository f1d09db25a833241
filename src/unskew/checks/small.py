"""A small federation of random images: what the laws are tried on. Seconds matter, pictures do not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from unskew import engines, methods, models
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import ImageSet, Local, ServerState, Split, Tensors
from unskew.data.population import Partition, Population
from unskew.engines.blueprint import Blueprint, build, dataset
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.runs.checkpoint import open_memories


@dataclass(frozen=True)
class Federation:
    """Everything that some rounds need."""

    blueprint: Blueprint
    data: Tensors
    key: Key

    @property
    def algorithm(self) -> Algorithm:
        """What the method's text stands for."""
        return methods.parse_method(self.blueprint.method, self.blueprint.local)

    def state(self) -> ServerState:
        """The state before the first round."""
        side = build(self.blueprint, self.data)
        models.initialise(side.network, self.key.fold("model"))
        return driver.start(self.algorithm, tensors.of_module(side.network), side.network.classifier_names)

    def run(
        self, rounds: int = 2, engine: str = "loop", workers: int = 2, per_round: int | None = None,
        state: ServerState | None = None, skip_failures: bool = False, folder: Path | None = None,
        rounds_planned: int | None = None,
    ) -> ServerState:  # fmt: skip
        """The state after so many rounds, from the given one or from the start.

        What clients remember is kept in the folder, where one is given; a state that refers to it needs it.
        ``rounds_planned`` is how many there will be in all, where this is a part of them.
        """
        algorithm = self.algorithm
        memories = open_memories(folder) if folder and algorithm.remember else None
        opened = engines.open_engine(engine, self.blueprint, self.data, workers, memories)
        last = state or self.state()
        if opened.memories is not None:
            opened.memories.pin(last.clients)
        per_round = per_round or opened.population.clients
        try:
            while last.round < rounds:
                last, _ = driver.run_round(
                    algorithm, opened, last, self.key, per_round=per_round, rounds=rounds_planned or rounds,
                    skip_failures=skip_failures,
                )  # fmt: skip
        finally:
            opened.close()
        return last

    def with_method(self, method: str) -> "Federation":
        """The same federation under another method."""
        return replace(self, blueprint=replace(self.blueprint, method=method))


def federation(
    method: str = "fedavg", sizes: Sequence[int] = (40, 30, 1, 20, 9), images: ImageSet | None = None,
    model: str = "tiny-cnn", dtype: str = "float64", seed: int = 0, local: Local | None = None,
) -> Federation:  # fmt: skip
    """Clients of just these sizes, one of them with a single example."""
    images = images or image_set(sum(sizes))
    settings = local or Local(epochs=2, batch=16, lr=0.05)
    blueprint = Blueprint(method, model, images.shape, len(images.classes), settings, dtype)
    population = Population.from_partition(partition_of(sizes, len(images.train)))
    return Federation(blueprint, dataset(images, population), Key(seed))


def image_set(examples: int = 120, classes: int = 4, side: int = 8, channels: int = 1, seed: int = 0) -> ImageSet:
    """Random images whose brightness follows the class, so that there is something to learn."""
    draw = Key(seed).fold("images").numpy()
    labels = np.arange(examples) % classes
    noise = draw.integers(0, 128, (examples, channels, side, side))
    images = (noise + (labels * 30)[:, None, None, None]).clip(0, 255).astype(np.uint8)
    test = Split(images[::3].copy(), labels[::3].copy())
    names = tuple(f"class {c}" for c in range(classes))
    return ImageSet("random", names, Split(images, labels), test, (0.4,) * channels, (0.2,) * channels)


def partition_of(sizes: Sequence[int], examples: int | None = None, seed: int = 0) -> Partition:
    """Clients of just these sizes; what is left over belongs to nobody."""
    examples = examples or sum(sizes)
    client = np.full(examples, -1, np.int32)
    order = Key(seed).fold("who").numpy().permutation(examples)
    client[order[: sum(sizes)]] = np.repeat(np.arange(len(sizes)), sizes)
    return Partition(client, len(sizes), "test", seed)


def largest_difference(left: Tensors, right: Tensors) -> float:
    """The largest distance between two entries of the same name and place."""
    if list(left) != list(right):
        return float("inf")
    return max((float((left[name].double() - right[name].double()).abs().max()) for name in left), default=0.0)


def same(left: ServerState, right: ServerState) -> bool:
    """Bit for bit: round, weights, memory, what is sent, what clients remember (by its checksum)."""
    kept = [{client: checksum for client, (_, checksum) in state.clients.items()} for state in (left, right)]
    if left.round != right.round or kept[0] != kept[1]:
        return False
    pairs = [(left.tensors, right.tensors), (left.memory, right.memory), (left.sent, right.sent)]
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
