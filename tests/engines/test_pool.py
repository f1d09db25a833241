"""What the pool promises beyond the loop: workers die, parents die, clients fail, and the sum is still the sum."""

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import unskew
from commands import alive
from federation import federation, same, total
from unskew import engines
from unskew.core.errors import ClientFailure, UserError
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.engines.pool import Pool
from unskew.engines.results import SharedFile
from unskew.round.client import Train

HERE = Path(__file__).parent.parent


@pytest.mark.parametrize("engine", ["loop", "pool"])
@pytest.mark.parametrize(("method", "reason"), [("raises", "the camera fell into the sea"), ("nan", "NaN or infinity")])
def test_a_failing_client_stops_the_run_by_name_with_its_seed(engine, method, reason):
    with pytest.raises(ClientFailure, match=f"client 2, round 1, job train: .*{reason}.*seed 5 replays it"):
        federation(f"outside_methods:{method}(1)", seed=5).run(1, engine)


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_a_failing_client_can_be_left_out_as_if_it_had_stayed_away(engine):
    skipped = federation("outside_methods:raises(1)").run(2, engine, skip_failures=True)
    assert same(skipped, federation("outside_methods:stays_away(2)").run(2))


def test_when_every_client_fails_there_is_nothing_to_go_on_with():
    with pytest.raises(ClientFailure, match="client 0"):
        federation("outside_methods:raises(4)", sizes=(4, 4)).run(1, skip_failures=True)


def test_a_worker_that_dies_is_replaced_and_its_visits_are_done_again(tmp_path):
    mark = tmp_path / "died"
    dying = federation(f'outside_methods:dies(1, once="{mark}")')
    got = dying.run(2, "pool", 2)
    assert mark.exists()
    assert same(got, federation().run(2))


def test_a_client_that_kills_every_worker_is_a_failed_client():
    with pytest.raises(ClientFailure, match=r"client 2.*died 3 times \(signal 9"):
        federation("outside_methods:dies(1)").run(1, "pool", 2)


def test_workers_end_when_their_parent_is_killed_in_the_middle_of_a_visit():
    code = (
        "from federation import federation\n"
        "from unskew import engines\n"
        "from unskew.core.key import Key\n"
        "from unskew.core.types import Visit\n"
        "f = federation('outside_methods:sleeps(60)')\n"
        "pool = engines.open_engine('pool', engines.EngineSetup(f.blueprint, f.data, 2))\n"
        "from unskew.round.client import Train\n"
        "print(*(w.child.pid for w in pool._workers), flush=True)\n"
        "list(pool.visit(Train(), f.state().tensors, [Visit(0, 1.0), Visit(1, 1.0)], Key(0)))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(4)  # long enough to be asleep inside the visit
    assert all(map(alive, workers))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(50):
        if not any(map(alive, workers)):
            return
        time.sleep(0.1)
    raise AssertionError(f"workers {workers} outlive their parent")


def test_results_are_added_in_the_order_of_the_visits():
    """Float addition is not associative: another order would show in the last bits."""
    small = federation(dtype="float32", sizes=(60, 5, 33, 2, 17))
    visits = [Visit(client, weight) for client, weight in enumerate((1e9, 1e-9, 1.0, 1e5, 1e-3))]
    outcomes = []
    for engine, workers in (("loop", 1), ("pool", 3)):
        opened = small.open(engine, workers)
        outcomes.append(total(opened, Train(), small.state().tensors, visits, Key(0)).sums)
        opened.close()
    assert list(outcomes[0]) == list(outcomes[1])
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


@pytest.mark.heavy
def test_a_pool_gives_back_all_it_took():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        small = federation()
        pool = small.open("pool", 2)
        children = [worker.child for worker in pool._workers]
        total(pool, Train(), small.state().tensors, [Visit(0, 1.0)], Key(0))
        pool.close()
        assert all(child.code is not None for child in children)
        del pool, children
        gc.collect()  # a mapping keeps a descriptor for as long as a tensor lies in it
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.heavy
def test_a_worker_that_cannot_start_says_why():
    broken = federation()
    broken.blueprint.local.__dict__["batch"] = "many"
    data = SharedFile()
    side = engines.EngineSetup(broken.blueprint, broken.data).client_side()
    pool = Pool(broken.with_method("nowhere:method").blueprint, data, data.write(broken.data), 1, side)
    with pytest.raises(UserError, match=r"a worker process cannot start: .*nowhere"):
        total(pool, Train(), {}, [Visit(0, 1.0)], Key(0))
    pool.close()


def test_auto_takes_the_loop_when_processes_would_cost_more_than_they_save():
    assert engines.choose("auto", workers=2, work=1.0, visits=10) == "loop"
    assert engines.choose("auto", workers=2, work=100.0, visits=10) == "pool"
    assert engines.choose("auto", workers=1, work=100.0, visits=10) == "loop"
    assert engines.choose("auto", workers=8, work=100.0, visits=1) == "loop"


def test_a_pool_with_too_few_open_files_says_so_before_a_worker_starts():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, hard))
    try:
        with pytest.raises(UserError, match=r"a pool of 4 workers needs to open 48 .* only \d+; .* fewer --workers"):
            federation().run(1, "pool", 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_engine_of_processes_written_from_the_documentation_has_the_bits_of_the_loop(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    options = {"rounds": 2, "epochs": 1, "clients": 4, "workers": 2, "method": "moon + ccvr(per_class=50) + secure"}
    one, other = (
        unskew.run(**options, engine=engine, out=tmp_path / engine[:4])
        for engine in ("outside_processes:processes", "loop")
    )
    assert (one.weights_sha256, one.calibrations.keys()) == (other.weights_sha256, other.calibrations.keys())
    assert [row.accuracy for row in one.calibrations.values()] == [row.accuracy for row in other.calibrations.values()]


def test_an_engine_without_memory_is_refused_before_the_run_directory_exists(tmp_path):
    with pytest.raises(UserError, match="forgets has no memory, which the method needs"):
        unskew.run(method="moon", engine="outside_engines:forgets", rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    unskew.run(engine="outside_engines:forgets", rounds=1, epochs=1, out=tmp_path / "run")
