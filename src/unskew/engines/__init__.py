"""The table of engines: where the clients' work is done, by name or as ``package.module:function(knobs)``.

An engine is opened from an ``EngineSetup`` and used through the ``Engine`` protocol; no code outside this package
depends on which one it is.
"""

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from unskew.core import language
from unskew.core.errors import UserError, a_kind, nearest
from unskew.core.key import Key, seeded
from unskew.core.machine import deterministic, neutral, resolve_device, synchronize
from unskew.core.plugins import load_function
from unskew.core.types import Engine, Tensors
from unskew.core.units import counted
from unskew.engines.blueprint import Blueprint, build, with_shares
from unskew.engines.loop import Loop
from unskew.engines.pool import Pool
from unskew.engines.results import SharedFile
from unskew.engines.torchrun import Rank, Ranks, follow, gather, launched, listen
from unskew.engines.torchrun import check_command as check_command
from unskew.privacy.sessions import Sessions
from unskew.round.client import ClientSide
from unskew.round.client_memory import ClientMemory, anonymous_file
from unskew.round.driver import NO_MEMORY
from unskew.round.local_optimizers import make_optimizer

START_SECONDS = 3.0  # until a pool's first visit: each worker imports PyTorch


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is opened with.

    Parameters
    ----------
    blueprint, data : the simulation as text, numbers and tensors, for other processes.
    workers : how many processes to use, if the engine has several.
    memories : the descriptor of the file for what clients keep between visits; None: a temporary file.
    built : the client side, if this process has already built it.
    sessions : the descriptor of the file for the record of secure sums; None: a temporary file.
    secret : what the clients' masks are derived from; empty: a new one.
    """

    blueprint: Blueprint
    data: Tensors
    workers: int = 1
    memories: int | None = None
    built: ClientSide | None = None
    sessions: int | None = None
    secret: bytes = b""

    def client_side(self) -> ClientSide:
        """Everything that this process needs to do any client's work; the engine closes it."""
        side = self.built or build(self.blueprint, self.data)
        if side.algorithm.remember:
            descriptor = anonymous_file() if self.memories is None else self.memories
            side = replace(side, memory=ClientMemory(side.algorithm.remember, side.weights, descriptor))
        sessions = Sessions.temporary() if self.sessions is None else Sessions(self.sessions)
        return replace(side, secret=self.secret or os.urandom(32), sessions=sessions)

    def copy_side(self, side: ClientSide) -> ClientSide:
        """Another client side for a second thread; it shares the files of the first, which must close them."""
        own = build(self.blueprint, self.data)
        return replace(own, memory=side.memory, secret=side.secret, sessions=side.sessions)


def open_loop(setup: EngineSetup) -> Engine:
    """One client after another in this process."""
    return Loop(setup.client_side())


def open_pool(setup: EngineSetup) -> Engine:
    """One process per core; the data are copied into shared memory."""
    return _pool(setup, max(1, setup.workers))


def open_torchrun(setup: EngineSetup) -> Engine:
    """The processes that torchrun started, here and on other machines; this one is rank 0."""
    launch, device = launched(), resolve_device(setup.blueprint.device)
    ranks = gather(launch, processors=device.type == "cpu")
    setup = replace(setup, blueprint=replace(setup.blueprint, device=str(device)))
    return Ranks(_pool(setup, 1, launch.local_ranks, ranks), ranks, by_torchrun=launch.by_torchrun)


def _pool(setup: EngineSetup, workers: int, processes: int = 0, ranks: Sequence[Rank] = ()) -> Pool:
    shared = SharedFile()
    layout = shared.write(with_shares(setup.data, processes or workers))
    own = replace(setup, blueprint=replace(setup.blueprint, device="cpu"))  # only the workers use the device
    return Pool(setup.blueprint, shared, layout, workers, own.client_side(), ranks)


ENGINES: Mapping[str, Callable[[EngineSetup], Engine]] = {
    "loop": open_loop,
    "pool": open_pool,
    "torchrun": open_torchrun,
}
NAMES = ("auto", *ENGINES)
PARTS = ("roster", "visit", "close")  # required members of an engine


def check_name(name: str) -> None:
    """Reject the name of an unknown engine."""
    if ":" in name:
        load_function(language.parse_call(name, "engine").name, "engine")
    elif name not in NAMES:
        raise UserError(f"no engine is called {name!r}; {nearest(name, NAMES)}, or package.module:function")


def choose(name: str, workers: int, work: float, visits: int) -> str:
    """Resolve ``auto``: the pool if it saves more of ``work`` seconds on one core than its start costs."""
    check_name(name)
    if name != "auto":
        return name
    useful = min(workers, visits)
    return "pool" if useful > 1 and work * (1 - 1 / useful) > START_SECONDS else "loop"


def open_engine(name: str, setup: EngineSetup) -> Engine:
    """The engine of that name, ready to work."""
    if name in ENGINES:
        return ENGINES[name](setup)
    call = language.parse_call(name, "engine")
    engine: Any = language.apply(call, partial(load_function(call.name, "engine"), setup), "engine")
    if missing := [part for part in PARTS if not hasattr(engine, part)]:
        returned = f"engine {call} returns {a_kind(engine)} without {', '.join(missing)}"
        raise UserError(f"{returned}; return an object with every member of unskew.extend.Engine")
    if not hasattr(engine, "memory"):
        engine.memory = None
    return cast(Engine, engine)


def rehearse(name: str, setup: EngineSetup) -> None:
    """Reject an engine that cannot work before a run directory is created; a plug-in is opened and closed."""
    if ":" in name:
        engine = open_engine(name, setup)
        engine.close()
        if engine.memory is None and setup.blueprint.algorithm().remember:
            raise UserError(f"--engine {name} {NO_MEMORY}")
    elif name == "torchrun":
        gather(launched(), processors=resolve_device(setup.blueprint.device).type == "cpu")


def serve_rank_zero(name: object) -> None:
    """In a process that torchrun started with a rank above 0: work for rank 0, and exit when it does."""
    if name == "torchrun" and (launch := launched()).ranks > 1:
        if launch.rank > 0:
            follow(launch)
        listen(launch)


def default_engine(name: str) -> str:
    """The default engine for a command on a run that was trained with this one; never torchrun."""
    return "auto" if name == "torchrun" else name


@dataclass(frozen=True)
class Processes:
    """The processes of an engine."""

    count: int
    working: int  # those that do clients' work
    copies: int  # of the data, over all processes
    description: str


def processes(name: str, workers: int) -> Processes:
    """The processes that an engine would start."""
    if name == "pool":
        return Processes(1 + workers, workers, 2, counted(workers, "worker"))
    if name == "torchrun":
        ranks = launched().ranks
        return Processes(ranks + 1, ranks, ranks + 1, counted(ranks, "rank"))
    return Processes(1, 1, 1, "a plug-in" if ":" in name else "this process")


def seconds_per_step(side: ClientSide, batch: int) -> float:
    """Measure one step of training on one thread; the weights do not change."""
    network, times = copy.deepcopy(side.network), list[float]()
    index = torch.arange(min(batch, len(side.train.labels)))
    values: list[Tensor] = [value for value in network.parameters() if value.requires_grad]
    with torch.no_grad():
        for value in values:
            value.fill_(0.01)
    update = make_optimizer(values, side.algorithm.local)
    with neutral(), seeded(Key(0)), deterministic(side.device):
        for _ in range(4):
            synchronize(side.device)
            began = time.perf_counter()
            images, labels = side.train.batch(index)
            loss = torch.nn.functional.cross_entropy(network.classifier(network.encoder(images)), labels)
            update(torch.autograd.grad(loss, values, materialize_grads=True))
            synchronize(side.device)
            times.append(time.perf_counter() - began)
    return min(times[1:])
