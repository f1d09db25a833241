"""Which engine does the work: by name, or the one that will be done first."""

import copy
import time

import torch
from torch import Tensor

from unskew import methods
from unskew.core.errors import UserError, nearest
from unskew.core.key import Key, seeded
from unskew.core.tensors import one_thread
from unskew.core.types import Tensors
from unskew.engines.blueprint import Blueprint, build
from unskew.engines.loop import Loop
from unskew.engines.pool.engine import Pool
from unskew.engines.pool.shared import SharedFile
from unskew.round.client import ClientSide
from unskew.round.client_memory import anonymous_file
from unskew.round.descent import sgd

ENGINES = ("auto", "loop", "pool")
LATER = ("stacked", "torchrun", "flower")

START_SECONDS = 3.0  # what a pool costs before its first visit: each worker imports PyTorch


def check_name(name: str) -> None:
    """Refuse an engine that is not there."""
    if name in LATER:
        raise UserError(f"engine {name!r} belongs to a later version; there are: {', '.join(ENGINES)}")
    if name not in ENGINES:
        raise UserError(f"no engine is called {name!r}; {nearest(name, ENGINES)}")


def choose(name: str, workers: int, work: float, visits: int) -> str:
    """``auto`` resolved: the pool where its start costs less than it saves of ``work`` seconds on one core."""
    check_name(name)
    if name != "auto":
        return name
    useful = min(workers, visits)
    return "pool" if useful > 1 and work * (1 - 1 / useful) > START_SECONDS else "loop"


def open_engine(
    name: str, blueprint: Blueprint, data: Tensors, workers: int, memories: int | None = None
) -> Loop | Pool:
    """The engine, ready to work; ``data`` is copied into shared memory for the pool.

    ``memories`` is the descriptor of a file for what clients remember; it becomes the engine's own. Without one it is
    a file that goes with the engine.
    """
    if memories is None and methods.parse_method(blueprint.method, blueprint.local).remember:
        memories = anonymous_file()
    side = build(blueprint, data, memories)
    if name == "loop":
        return Loop(side)
    shared = SharedFile()
    return Pool(blueprint, shared, shared.write(data), workers, side.memories)


def seconds_per_step(side: ClientSide, batch: int) -> float:
    """What one step of training takes on one thread: measured, on images of the set, weights left as they were."""
    network = copy.deepcopy(side.network)
    index = torch.arange(min(batch, len(side.train.labels)))
    values: list[Tensor] = [value for value in network.parameters() if value.requires_grad]
    with torch.no_grad():
        for value in values:
            value.fill_(0.01)
    update = sgd(values, side.algorithm.local)
    times = []
    with one_thread(), seeded(Key(0)):
        for _ in range(4):
            began = time.perf_counter()
            images, labels = side.train.batch(index)
            loss = torch.nn.functional.cross_entropy(network.classifier(network.encoder(images)), labels)
            update(torch.autograd.grad(loss, values, materialize_grads=True))
            times.append(time.perf_counter() - began)
    return min(times[1:])
