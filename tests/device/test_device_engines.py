"""What engines do about devices: which worker has which, what is deterministic, when the clock is read."""

from typing import ClassVar

import pytest
import torch
from placed import on, side_of, small

from federation import total
from unskew import engines
from unskew.core.key import Key
from unskew.core.types import Local, Reply, Visit
from unskew.engines import pool as pool_engine
from unskew.engines.scheduler import Scheduler
from unskew.round.client import Train
from unskew.round.jobs import answer


class Silent:
    """In a worker's place: it is started, and says nothing."""

    started: ClassVar = []

    def __init__(self, shared, side, hello, number):
        self.number, self.ready, self.tasks, self.child = number, False, {}, self
        self.started.append((number, hello.blueprint["device"]))

    def exit_reason(self):
        return "signal 9"

    def running(self):
        return None

    def send(self, message):
        return

    def close(self):
        return


@pytest.fixture
def started(monkeypatch):
    """(number, device) of every worker that a pool starts."""
    monkeypatch.setattr(Silent, "started", [])
    monkeypatch.setattr(pool_engine, "Worker", Silent)
    monkeypatch.setattr(pool_engine.selectors, "DefaultSelector", Unselective)
    return Silent.started


class Unselective:
    def register(self, *_):
        return

    unregister = close = register


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("cuda", ["cuda:0", "cuda:1", "cuda:0"]),
        ("auto", ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", ["cuda:1"] * 3),
        ("cpu", ["cpu"] * 3),
    ],
)
def test_a_pool_spreads_its_workers_and_a_new_one_takes_the_old_ones_device(monkeypatch, started, device, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    federated = on(device, small("scaffold"))
    pool = engines.open_engine("pool", engines.EngineSetup(federated.blueprint, federated.data, 3))
    assert started == list(enumerate(wanted))
    pool._replace(pool._workers[1], Scheduler(Train(), [], pool.roster, Local(), {}), None)
    assert started[3:] == [(1, wanted[1])]
    pool.close()


def test_real_workers_train_on_the_device_that_they_are_told():
    federated = on("auto", small())
    pool = engines.open_engine("pool", engines.EngineSetup(federated.blueprint, federated.data, 2))
    try:
        outcome = total(pool, Train(), federated.state().tensors, [Visit(0, 1.0), Visit(1, 1.0)], Key(0))
    finally:
        pool.close()
    assert not outcome.failures


def test_every_job_is_deterministic_on_cuda_alone(each_home):
    seen = {}

    def settings(side, shared, visit, key):
        seen.setdefault(side.device.type, []).append(torch.are_deterministic_algorithms_enabled())
        return Reply({})

    here = small()
    for federated in (here, on(each_home.device, here)):
        answer(side_of(federated), settings, {}, Visit(0, 1.0), Key(0))
    assert seen["cpu"] == [False]
    assert seen[each_home.device.type] == [each_home.device.type == "cuda"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_step_is_timed_when_the_device_has_done_it(each_home):
    sides = [side_of(small()), side_of(on(each_home.device, small()))]
    for side, waits in zip(sides, (0, 8), strict=True):
        each_home.waits.clear()
        before = {name: value.cpu().clone() for name, value in side.weights.items()}
        assert engines.seconds_per_step(side, 8) > 0
        assert each_home.waits["synchronize"] == waits  # before and after each of four steps
        assert all(torch.equal(value.cpu(), before[name]) for name, value in side.weights.items())


def test_the_parent_of_a_pool_leaves_the_device_to_its_workers(home, started):
    federated = on(home.device, small("scaffold"))
    arrived = home.arrivals
    engines.open_engine("pool", engines.EngineSetup(federated.blueprint, federated.data, 1)).close()
    assert home.arrivals == arrived
    assert started == [(0, "mps")]
