"""What the engine torchrun promises: any number of ranks gives the loop's bits, and what goes wrong is said."""

import shlex
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.run import parse_args

import unskew
from federation import federation, image_set, same, total
from torchrun_ranks import free_port, ranks_started, variables
from unskew import engines
from unskew.console.main import main
from unskew.core.errors import ClientFailure, LostMemory, UserError
from unskew.core.key import Key
from unskew.core.types import Split, TestPart, Visit
from unskew.engines.results import ResultFile, SharedFile, offer, open_offered
from unskew.engines.torchrun import join, link
from unskew.engines.torchrun.engine import Signals
from unskew.round.client import Train
from unskew.round.evaluation import Evaluate, evaluate
from unskew.runs.config import OPTIONS

MEMORIES = "moon + scaffold + fedvc(16) + fedavgm"
ROUNDED = ("secure(updates=true)", "rounded")  # the same bits without masks


@pytest.fixture(scope="module")
def started():
    with ranks_started(2) as own:
        yield own


@pytest.fixture
def two(started, monkeypatch):
    """Another rank beside this process, the same one for all tests."""
    for name, value in started.items():
        monkeypatch.setenv(name, value)


def opened(small):
    return engines.open_engine("torchrun", engines.EngineSetup(small.blueprint, small.data))


# The same bits


def test_two_ranks_give_the_bits_of_the_loop_in_one_run_after_another(two):
    for method in ("fedavg", MEMORIES):
        assert same(federation(method).run(3, "torchrun"), federation(method).run(3)), method


def test_masks_are_the_same_whichever_rank_does_a_clients_next_exchange(two):
    for method in ("secure(updates=true) + scaffold", "secure(updates=true) + fedvc(16)"):
        assert same(federation(method).run(2, "torchrun"), federation(method.replace(*ROUNDED)).run(2)), method


def test_results_are_added_in_the_order_of_the_visits(two):
    """Float addition is not associative: another order would show in the last bits."""
    small = federation(dtype="float32", sizes=(60, 5, 33, 2, 17))
    visits = [Visit(client, weight) for client, weight in enumerate((1e9, 1e-9, 1.0, 1e5, 1e-3))]
    outcomes = []
    for engine in ("loop", "torchrun"):
        working = engines.open_engine(engine, engines.EngineSetup(small.blueprint, small.data))
        outcomes.append(total(working, Train(), small.state().tensors, visits, Key(0)).sums)
        working.close()
    assert list(outcomes[0]) == list(outcomes[1])
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def test_evaluation_is_spread_too(two):
    small, scores = federation(), []
    for engine in ("loop", "torchrun"):
        working = engines.open_engine(engine, engines.EngineSetup(small.blueprint, small.data))
        scores.append(evaluate(working, small.state().tensors, 33, Key(0)))
        working.close()
    assert scores[0] == scores[1]


def test_every_rank_does_some_of_the_work(two, monkeypatch):
    asked, send = [], link.Writer.send
    monkeypatch.setattr(
        link.Writer, "send", lambda self, message, *tensors: (asked.append(message), send(self, message, *tensors))
    )
    federation(sizes=(30,) * 12).run(2, "torchrun")
    elsewhere = sum(len(message.get("tasks", ())) for message in asked)
    assert 0 < elsewhere < 24


def test_short_visits_go_to_a_rank_in_groups(two, monkeypatch):
    asked, send = [], link.Writer.send
    monkeypatch.setattr(
        link.Writer, "send", lambda self, message, *tensors: (asked.append(message), send(self, message, *tensors))
    )
    here = federation(MEMORIES, sizes=(3,) * 64)
    assert same(here.run(2, "torchrun"), here.run(2))
    sizes = [len(message["tasks"]) for message in asked if "tasks" in message]
    assert max(sizes) > 1
    assert min(sizes) == 1  # the last go one by one


def test_what_is_larger_than_a_piece_arrives(two):
    count, images = 300_000, image_set(120)
    test = Split(Key(0).numpy().integers(0, 256, (count, 1, 8, 8), dtype=np.uint8), np.arange(count) % 4)
    assert test.images.nbytes > link.PIECE
    small, scores = federation(images=replace(images, test=test)), []
    parts = [TestPart(0, 500), TestPart(count // 2, count // 2 + 500), TestPart(count - 500, count)]
    for engine in ("loop", "torchrun"):
        working = engines.open_engine(engine, engines.EngineSetup(small.blueprint, small.data))
        scores.append(total(working, Evaluate(), small.state().tensors, parts, Key(0)).sums)
        working.close()
    assert all(torch.equal(scores[0][name], scores[1][name]) for name in scores[0])


# What goes wrong in a visit


@pytest.mark.parametrize(("method", "reason"), [("raises", "the camera fell into the sea"), ("nan", "NaN or infinity")])
def test_a_failing_client_stops_the_run_by_name_or_is_left_out(two, method, reason):
    with pytest.raises(ClientFailure, match=f"client 2, round 1, job train: .*{reason}.*seed 5 replays it"):
        federation(f"outside_methods:{method}(1)", seed=5).run(1, "torchrun")
    left_out = federation(f"outside_methods:{method}(1)").run(2, "torchrun", skip_failures=True)
    assert same(left_out, federation(f"outside_methods:{method}(1)").run(2, "loop", skip_failures=True))


def test_a_damaged_memory_is_named_wherever_its_client_is_visited(two, tmp_path):
    small = federation("moon")
    state = small.run(1, "torchrun", folder=tmp_path)
    file = tmp_path / "checkpoint" / "memories.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(LostMemory, match=r"client \d's saved state is damaged on disk"):
        small.run(2, "torchrun", state=state, folder=tmp_path)


def test_memories_of_one_engine_are_those_of_the_others(two, tmp_path):
    small = federation(MEMORIES)
    state = small.run(2, "torchrun", folder=tmp_path, rounds_planned=4)
    assert same(small.run(4, "loop", state=state, folder=tmp_path), small.run(4))


def test_what_a_rank_cannot_build_is_told_by_its_name(two, monkeypatch):
    """This process knows a method that the other one does not find."""
    module = type(sys)("only_here")
    module.method = lambda: lambda algorithm: algorithm
    monkeypatch.setitem(sys.modules, "only_here", module)
    small = federation().with_method("only_here:method")
    with pytest.raises(UserError, match=r"rank 1 on \S+ \(process \d+\): .*only_here"):
        opened(small)
    assert same(federation().run(1, "torchrun"), federation().run(1))  # the ranks go on


def test_the_ranks_work_for_one_run_at_a_time(two):
    working = opened(federation())
    with pytest.raises(UserError, match="still working on another run"):
        opened(federation())
    working.close()
    opened(federation()).close()


def test_an_open_engine_gives_its_threads_and_handlers_back(two):
    before = threading.active_count(), signal.getsignal(signal.SIGTERM)
    working = opened(federation())
    assert signal.getsignal(signal.SIGTERM) != before[1]
    working.close()
    working.close()
    assert (threading.active_count(), signal.getsignal(signal.SIGTERM)) == before


def test_to_another_rank_go_texts_numbers_and_raw_tensors(two, monkeypatch):
    """The wire, read message by message: the federation once, then jobs and visits; nothing that names an example."""
    told, send = [], link.Writer.send
    monkeypatch.setattr(
        link.Writer, "send", lambda self, message, *tensors: (told.append(message), send(self, message, *tensors))
    )
    federation("moon + fedvc(8)", dtype="float32", epochs=1).run(2, "torchrun")
    known = (
        {"open", "secret", "remembers", "shared"}, {"data"}, {"build"}, {"close"}, {"begin", "seed", "key", "layout"},
        {"number", "tasks", "slot"},
    )  # fmt: skip
    plain = [msgspec.to_builtins(message) for message in told]
    assert all(set(message) in known for message in plain)
    tasks = [task for message in plain for task in message.get("tasks", ())]
    assert all(set(task) == {"index", "visit", "record"} for task in tasks)
    visits = [task["visit"] for task in tasks]
    assert visits
    known = {"client", "weight", "take", "repeat", "ticket", "keep", "slot", "parcel"}
    assert all(set(visit) == known for visit in visits)


# Before the work begins


def test_without_torchrun_one_message_has_the_line_that_starts_it(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--engine", "torchrun", "--out", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert "RANK is not set" in said.err
    assert f"start it with: {join.LINE}" in said.err
    assert not (tmp_path / "run").exists()


def test_a_command_that_torchrun_started_twice_wants_the_engine(monkeypatch, capsys):
    for name, value in {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "h",
        "MASTER_PORT": 1,
        "TORCHELASTIC_RUN_ID": "x",
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        main(["run", "--rounds", "1"])
    assert ended.value.code == 2
    assert "torchrun has started this command 2 times; give --engine torchrun" in capsys.readouterr().err


def test_torchrun_understands_every_line_that_we_tell_people_to_type():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "torchrun.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("torchrun --")]
    flags = [word for option in OPTIONS.values() for word in (option.flag, "x")]
    assert len(lines) >= 4
    for line in (*lines, join.LINE):
        asked = parse_args([*shlex.split(line)[1:], *flags, "--log", "x"])
        assert (asked.module, asked.training_script) == (True, "unskew")
        assert {"--engine", "torchrun", "--start", "--log"} <= set(asked.training_script_args)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"RANK": "one"}, "RANK=one: torchrun sets it to a whole number"), ({"RANK": "2"}, "ranks are numbered from 0"),
     ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"), ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1")],
)  # fmt: skip
def test_odd_variables_are_named(monkeypatch, changed, message):
    for name, value in {**variables(0, 2, 29500), **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        join.launched()


@pytest.mark.parametrize("what", ["Unskew", "PyTorch", "NumPy", "Python", "processor"])
def test_a_rank_that_would_give_other_bits_is_refused_by_name(what):
    own = join.facts()
    other = own | {"machine": "lab2", "process": "7", what: "other"}
    join._check_same(own, {1: own}, processors=True)
    with pytest.raises(UserError, match=rf"rank 2 on lab2 \(process 7\) has {what} other, but rank 0 on "):
        join._check_same(own, {1: own, 2: other}, processors=True)
    if what == "processor":  # a GPU computes
        join._check_same(own, {1: own, 2: other}, processors=False)


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(join, "JOIN_SECONDS", 0.2)
    with pytest.raises(UserError, match="ranks 1, 2 have not joined within 0 s"):
        join.gather(join.Launched(0, 3, "127.0.0.1", free_port()), processors=True)


def test_measures_and_sweeps_say_that_they_are_for_one_machine(tmp_path):
    with pytest.raises(UserError, match="--engine torchrun: finished runs are measured on one machine"):
        unskew.analyse(tmp_path, "curves", engine="torchrun")
    with pytest.raises(UserError, match="--engine torchrun: a sweep spreads its runs over this machine's cores"):
        unskew.sweep(over="lr=0.1,0.2", engine="torchrun", out=tmp_path / "sweep")


def test_the_overview_counts_a_process_and_a_copy_of_the_data_for_each_rank(monkeypatch):
    for name, value in variables(0, 3, 29500).items():
        monkeypatch.setenv(name, value)
    assert engines.processes("torchrun", 8) == engines.Processes(3, 3, 3, "3 ranks")
    assert engines.processes("pool", 8) == engines.Processes(9, 8, 2, "8 workers")


def test_a_run_that_was_made_with_torchrun_is_used_without_it():
    assert engines.default_engine("torchrun") == "auto"
    assert engines.default_engine("pool") == "pool"


# Interrupts


def test_a_second_interrupt_does_not_break_what_the_first_one_began():
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_in_another_thread_interrupts_are_left_alone():
    before, seen = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: seen.append(Signals()))
    thread.start()
    thread.join()
    seen[0].restore()
    assert signal.getsignal(signal.SIGINT) == before


def test_ranks_of_one_machine_exchange_model_and_sums_in_shared_memory_and_others_send_them(two, monkeypatch):
    seen = []
    read, write = ResultFile.read, SharedFile.write
    monkeypatch.setattr(ResultFile, "read", lambda self, *where: seen.append(where) or read(self, *where))
    monkeypatch.setattr(SharedFile, "write", lambda self, model: seen.append("model") or write(self, model))
    shared = federation().run(2, "torchrun")
    assert seen.count("model") == 2
    assert len(seen) > 2
    seen.clear()  # from here on as on another machine
    monkeypatch.setattr("unskew.engines.torchrun.engine.open_offered", lambda *offered: None)
    monkeypatch.setattr("unskew.engines.torchrun.engine.offer", lambda file: (2**22 + 1, 0, 0))
    assert same(federation().run(2, "torchrun"), shared)
    assert not seen
    assert same(federation().run(2), shared)


def test_a_file_of_another_process_is_taken_only_with_its_token():
    file = ResultFile()
    process, descriptor, token = offer(file)
    assert open_offered(process, descriptor, token + 1) is None
    assert open_offered(2**22 + 1, descriptor, token) is None
    opened = ResultFile(open_offered(process, descriptor, token))
    where = file.write(torch.arange(9.0, dtype=torch.float64))
    assert torch.equal(opened.read(*where), torch.arange(9.0, dtype=torch.float64))
