"""One run of several: what it has is kept, what is missing is added, what fails does not stop the rest."""

import os
import signal
from dataclasses import replace

import pytest

from unskew.core.child import start_worker
from unskew.core.errors import UserError
from unskew.runs.config import Config
from unskew.runs.result import read_result
from unskew.sweeps import tasks
from unskew.sweeps.tasks import Task, run_task, run_tasks

SMALL = Config(rounds=1, epochs=1, clients=3, partition="iid", engine="loop")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    task = Task(SMALL, tmp_path_factory.mktemp("work") / "run", ("lda",), ("skew",))
    assert run_task(task) is None
    return task


def test_a_trained_run_gets_its_calibrations_and_measures(trained):
    assert list(read_result(trained.path).calibrations) == ["lda"]
    assert (trained.path / "figures" / "skew.json").exists()


def test_only_what_is_missing_is_made(trained, monkeypatch):
    asked = []
    monkeypatch.setattr(tasks, "calibrate_run", lambda path, *names, **_: asked.append(names))
    monkeypatch.setattr(tasks.train, "run", lambda *_, **__: pytest.fail("it is trained already"))
    assert run_task(Task(SMALL, trained.path, ("lda",), ("skew",))) is None
    assert asked == []
    run_task(Task(SMALL, trained.path, ("lda", "ridge")))
    assert asked == [("ridge",)]


def test_a_calibration_or_measure_that_fails_does_not_stop_the_others(trained):
    failure = run_task(Task(SMALL, trained.path, ("ccvr(layers=9)", "ridge"), ("separability(x=1)", "curves")))
    assert "layers" in failure.reason
    assert "separability" in failure.reason
    assert not failure.diverged
    assert "ridge" in read_result(trained.path).calibrations
    assert (trained.path / "figures" / "curves.json").exists()


@pytest.fixture
def workers(monkeypatch):
    """The worker processes, in the order of their start."""
    started = []

    def start(module):
        started.append(start_worker(module))
        return started[-1]

    monkeypatch.setattr(tasks, "start_worker", start)
    return started


@pytest.mark.heavy
def test_the_run_of_a_killed_worker_is_resumed_by_another(trained, workers, tmp_path):
    ended, killed = {}, []

    def progress(done, total):
        if not killed:
            killed.append(done)
            os.kill(workers[0].pid, signal.SIGKILL)

    several = [Task(replace(SMALL, rounds=3), tmp_path / str(place)) for place in range(3)]
    run_tasks(several, 2, ended.__setitem__, progress)
    assert ended == {0: None, 1: None, 2: None}
    assert len({read_result(task.path).weights_sha256 for task in several}) == 1
    assert len(workers) == 3


def test_workers_that_never_start_are_one_message(workers, tmp_path, monkeypatch):
    start, ended = tasks.start_worker, {}

    def start_and_kill(module):
        child = start(module)
        os.kill(child.pid, signal.SIGKILL)
        return child

    monkeypatch.setattr(tasks, "start_worker", start_and_kill)
    with pytest.raises(UserError, match=r"a worker process could not start: it ended with signal 9"):
        run_tasks([Task(SMALL, tmp_path / str(place)) for place in range(2)], 2, ended.__setitem__, lambda *_: None)
    assert ended == {}


def test_a_run_that_cannot_be_trained_is_a_failure(tmp_path):
    failure = run_task(Task(Config(data="nothing"), tmp_path / "run", ("lda",)))
    assert "nothing" in failure.reason
    with pytest.raises(UserError, match="run"):
        read_result(tmp_path / "run")
