"""What the engine torchrun promises: any number of ranks gives the loop's bits, and what goes wrong is said."""

import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

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
from unskew.core.types import Split, TestPart
from unskew.engines import torchrun
from unskew.engines.pool import VisitGroup
from unskew.round.evaluation import Evaluate
from unskew.runs.config import OPTIONS

MEMORIES = "moon + scaffold + fedvc(16) + fedavgm"
ROUNDED = ("secure(updates=true)", "rounded")  # the same bits without masks


@pytest.fixture(scope="module")
def started():
    with ranks_started(2) as own:
        yield own


def set_variables(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def two(started, monkeypatch):
    """Another rank beside this process, the same one for all tests."""
    set_variables(monkeypatch, started)


# The same bits


@pytest.mark.parametrize("place", ["near", "far"])
def test_two_ranks_give_the_bits_of_the_loop_in_one_run_after_another(two, place, request):
    if place == "far":
        request.getfixturevalue("far")
    for method in (MEMORIES, "secure(updates=true) + scaffold + fedvc(16)"):
        assert same(federation(method).run(2, "torchrun"), federation(method.replace(*ROUNDED)).run(2)), method


@pytest.fixture
def asked(two, monkeypatch):
    """What the other rank is sent."""
    asked, send = [], torchrun.Rank.send
    monkeypatch.setattr(torchrun.Rank, "send", lambda self, message: (asked.append(message), send(self, message)))
    return asked


def test_short_visits_go_to_a_rank_in_groups(asked):
    here = federation(MEMORIES, sizes=(3,) * 64)
    assert same(here.run(2, "torchrun"), here.run(2))
    sizes = [len(message.visits) for message in asked if isinstance(message, VisitGroup)]
    assert max(sizes) > 1


@pytest.fixture
def far(two, monkeypatch):
    """The other rank, as if it were on another machine."""
    for rank in torchrun.gather(torchrun.launched(), processors=True):
        monkeypatch.setattr(rank, "near", False)


def test_what_is_larger_than_a_piece_arrives(far):
    count, images = 300_000, image_set(120)
    test = Split(Key(0).numpy().integers(0, 256, (count, 1, 8, 8), dtype=np.uint8), np.arange(count) % 4)
    assert test.images.nbytes > torchrun.PIECE
    small, scores = federation(images=replace(images, test=test)), []
    parts = [TestPart(0, 500), TestPart(count // 2, count // 2 + 500), TestPart(count - 500, count)]
    for engine in ("loop", "torchrun"):
        working = small.open(engine)
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
    with pytest.raises(UserError, match=r"rank 1 on \S+ \(process \d+\) cannot start: .*only_here"):
        small.run(1, "torchrun")
    assert same(federation().run(1, "torchrun"), federation().run(1))  # the ranks go on


def test_the_ranks_work_for_one_run_at_a_time(two):
    working = federation().open("torchrun")
    with pytest.raises(UserError, match="still working on another run"):
        federation().open("torchrun")
    working.close()
    federation().open("torchrun").close()


def test_an_open_engine_gives_its_handlers_back_and_hears_the_first_interrupt_only(two):
    before = signal.getsignal(signal.SIGTERM)
    working = federation().open("torchrun")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    working.close()
    working.close()
    assert signal.getsignal(signal.SIGTERM) == before


# Before the work begins


def test_without_torchrun_one_message_has_the_line_that_starts_it(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--engine", "torchrun", "--out", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert "RANK is not set" in said.err
    assert f"start it with: {torchrun.LINE}" in said.err
    assert not (tmp_path / "run").exists()


def test_a_command_that_torchrun_started_twice_wants_the_engine(monkeypatch, capsys):
    set_variables(monkeypatch, variables(1, 2, 29500) | {"TORCHELASTIC_RUN_ID": "x"})
    with pytest.raises(SystemExit) as ended:
        main(["run", "--rounds", "1"])
    assert ended.value.code == 2
    assert "torchrun has started this command 2 times; give --engine torchrun" in capsys.readouterr().err


def test_torchrun_understands_every_line_that_we_tell_people_to_type():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "torchrun.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("torchrun --")]
    flags = [word for option in OPTIONS.values() for word in (option.flag, "x")]
    assert len(lines) >= 4
    for line in (*lines, torchrun.LINE):
        asked = parse_args([*shlex.split(line)[1:], *flags, "--log", "x"])
        assert (asked.module, asked.training_script) == (True, "unskew")
        assert {"--engine", "torchrun", "--start", "--log"} <= set(asked.training_script_args)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"RANK": "one"}, "RANK=one: torchrun sets it to a whole number"), ({"RANK": "2"}, "ranks are numbered from 0"),
     ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"), ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1")],
)  # fmt: skip
def test_odd_variables_are_named(monkeypatch, changed, message):
    set_variables(monkeypatch, variables(0, 2, 29500) | changed)
    with pytest.raises(UserError, match=message):
        torchrun.launched()


@pytest.mark.parametrize("what", ["Unskew", "PyTorch", "NumPy", "Python", "processor"])
def test_a_rank_that_would_give_other_bits_is_refused_by_name(two, monkeypatch, what):
    monkeypatch.setattr(torchrun, "versions", lambda versions=torchrun.versions: versions() | {what: "other"})
    with pytest.raises(UserError, match=rf"rank 1 on \S+ \(process \d+\) has {what} .* has other"):
        torchrun.gather(torchrun.launched(), processors=True)
    if what == "processor":  # a GPU computes
        torchrun.gather(torchrun.launched(), processors=False)


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(torchrun, "JOIN_SECONDS", 0.2)
    launched = torchrun.Launched(0, 3, "127.0.0.1", free_port())
    with torchrun.listen(launched)[0], pytest.raises(UserError, match="after 0 s, still waiting for rank 1, 2"):
        torchrun.gather(launched, processors=True)


def test_a_sweep_says_that_it_is_for_one_machine(tmp_path):
    with pytest.raises(UserError, match="--engine torchrun: a sweep spreads its runs over this machine's cores"):
        unskew.sweep(over="lr=0.1,0.2", engine="torchrun", out=tmp_path / "sweep")


def test_the_overview_counts_a_process_and_a_copy_of_the_data_for_each_rank(monkeypatch):
    set_variables(monkeypatch, variables(0, 3, 29500))
    assert engines.processes("torchrun", 8) == engines.Processes(4, 3, 4, "3 ranks")
    assert engines.processes("pool", 8) == engines.Processes(9, 8, 2, "8 workers")


def test_a_run_that_was_made_with_torchrun_is_used_without_it():
    assert engines.default_engine("torchrun") == "auto"
    assert engines.default_engine("pool") == "pool"
