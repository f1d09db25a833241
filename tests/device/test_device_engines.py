"""What engines do about devices: which worker has which, what is deterministic, when the clock is read."""

import pytest
import torch
from placed import on, side_of, small

from federation import total
from unskew import engines
from unskew.core.key import Key
from unskew.core.types import Local, Reply, Visit
from unskew.engines import pool as pool_engine
from unskew.engines.pool import Scheduler
from unskew.round.client import Train
from unskew.round.jobs import answer


class Silent:
    """In the place of a worker process: it is started, and says nothing."""

    def __init__(self, started, *descriptors):
        self.started = started

    def exit_reason(self):
        return "signal 9"

    def send(self, message):
        if message is not None:
            self.started.append((message.number, message.blueprint["device"]))

    def end(self, patience):
        return


@pytest.fixture
def started(monkeypatch):
    """(number, device) of every worker that a pool starts."""
    started = []
    monkeypatch.setattr(pool_engine, "start_worker", lambda *_: Silent(started))
    monkeypatch.setattr(pool_engine.selectors, "DefaultSelector", Unselective)
    return started


class Unselective:
    def register(self, *_):
        return

    unregister = close = register


def test_a_new_worker_takes_the_number_of_the_old_one(started):
    federated = small("scaffold")
    pool = federated.open("pool", 3)
    assert started == [(0, "cpu"), (1, "cpu"), (2, "cpu")]
    pool._replace(pool._workers[1], Scheduler(Train(), [], pool.roster, Local(), {}), None)
    assert started[3:] == [(1, "cpu")]
    pool.close()


def test_real_workers_train_on_the_device_that_they_are_told():
    federated = on("auto", small())
    pool = federated.open("pool", 2)
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
    federated.open("pool", 1).close()
    assert home.arrivals == arrived
    assert started == [(0, "mps")]
