"""A small federation of random images that the laws are tried on: quick to train, not good to look at."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from unskew import engines, methods, models
from unskew.checks.candidate import Candidate
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import Engine, ImageSet, Local, ServerState, Split, Tensors
from unskew.data.population import Partition, Population
from unskew.engines.blueprint import Blueprint, build, dataset
from unskew.engines.loop import Loop
from unskew.privacy.sessions import Sessions
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.round.client_memory import ClientMemory, anonymous_file
from unskew.runs.checkpoint import open_memories


@dataclass(frozen=True)
class Federation:
    """All that a few rounds need. ``value`` is an algorithm in place of the blueprint's method, for the loop alone."""

    blueprint: Blueprint
    data: Tensors
    key: Key
    value: Algorithm | None = None

    @property
    def algorithm(self) -> Algorithm:
        """What the rounds do."""
        return self.value or methods.parse_method(self.blueprint.method, self.blueprint.local)

    def state(self) -> ServerState:
        """The state before the first round."""
        side = build(self.blueprint, self.data)
        models.initialise(side.network, self.key.fold("model"))
        return driver.start(self.algorithm, tensors.of_module(side.network), side.network.classifier_names)

    def states(
        self, rounds: int = 2, engine: str = "loop", workers: int = 2, per_round: int | None = None,
        state: ServerState | None = None, skip_failures: bool = False, folder: Path | None = None,
        rounds_planned: int | None = None,
    ) -> Iterator[ServerState]:  # fmt: skip
        """The state after each round up to ``rounds``, from the given one or from the start.

        What clients remember is kept in the folder, where one is given; a state that refers to it needs it.
        ``rounds_planned`` is how many there will be in all, where this is a part of them.
        """
        algorithm = self.algorithm
        last = state or self.state()
        opened = self._open(algorithm, engine, workers, folder)
        opened.pin(last.clients.values())
        per_round = per_round or opened.roster.clients
        try:
            while last.round < rounds:
                last, _ = driver.run_round(
                    algorithm, opened, last, self.key, per_round=per_round, rounds=rounds_planned or rounds,
                    skip_failures=skip_failures,
                )  # fmt: skip
                yield last
        finally:
            opened.close()

    def run(
        self, rounds: int = 2, engine: str = "loop", workers: int = 2, per_round: int | None = None,
        state: ServerState | None = None, skip_failures: bool = False, folder: Path | None = None,
        rounds_planned: int | None = None,
    ) -> ServerState:  # fmt: skip
        """The last of ``states``; the given state, or the first one, where no round is left."""
        last = state or self.state()
        for now in self.states(rounds, engine, workers, per_round, last, skip_failures, folder, rounds_planned):
            last = now
        return last

    def with_method(self, method: str) -> "Federation":
        """The same federation under another method."""
        return replace(self, blueprint=replace(self.blueprint, method=method), value=None)

    def with_candidate(self, method: Candidate) -> "Federation":
        """The same federation under a candidate: by its text where it has one, by its value otherwise."""
        if method.text is not None:
            return self.with_method(method.text)
        return self.with_algorithm(method.algorithm(self.blueprint.local))

    def with_algorithm(self, algorithm: Algorithm) -> "Federation":
        """The same federation under an algorithm that has no text."""
        return replace(self, value=algorithm)

    def _open(self, algorithm: Algorithm, engine: str, workers: int, folder: Path | None) -> Engine:
        memories = open_memories(folder) if folder and algorithm.remember else None
        if self.value is None:
            return engines.open_engine(engine, engines.EngineSetup(self.blueprint, self.data, workers, memories))
        side = replace(build(self.blueprint, self.data), algorithm=algorithm)
        side = replace(side, secret=os.urandom(32), sessions=Sessions.temporary())
        if algorithm.remember:
            descriptor = anonymous_file() if memories is None else memories
            side = replace(side, memory=ClientMemory(algorithm.remember, tensors.of_module(side.network), descriptor))
        return Loop(side)


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
    """Clients of just these sizes; what is left over belongs to no client."""
    examples = examples or sum(sizes)
    client = np.full(examples, -1, np.int32)
    order = Key(seed).fold("who").numpy().permutation(examples)
    client[order[: sum(sizes)]] = np.repeat(np.arange(len(sizes)), sizes)
    return Partition(client, len(sizes), "test", seed)


def largest_difference(left: Tensors, right: Tensors) -> float:
    """The largest distance between two entries of the same name and place."""
    if left.keys() != right.keys():
        return float("inf")
    return max((float((left[name].double() - right[name].double()).abs().max()) for name in left), default=0.0)


def same(left: ServerState, right: ServerState) -> bool:
    """Bit for bit: round, weights, memory, what is sent, what clients keep (by the checksum in its ticket)."""
    kept = [{client: ticket.partition("-")[2] for client, ticket in state.clients.items()} for state in (left, right)]
    if left.round != right.round or kept[0] != kept[1]:
        return False
    pairs = [(left.tensors, right.tensors), (left.memory, right.memory), (left.sent, right.sent)]
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
