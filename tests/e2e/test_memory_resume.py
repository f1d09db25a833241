"""Runs whose clients remember, killed and interrupted at any moment: resumed, they equal those that never stopped."""

import itertools
import json
import os
import resource
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis.finished import EVERYTHING
from commands import flags, shell, started
from federation import federation
from unskew import engines
from unskew.console.main import main
from unskew.core.types import Memory, Visit
from unskew.round import driver
from unskew.round.client_memory import ClientMemory
from unskew.round.driver import Metrics
from unskew.runs import execute, train
from unskew.runs.checkpoint import MAX_MEMORY_BYTES_KEPT, MEMORIES, load_checkpoint, open_memories
from unskew.runs.prepare import Overview

BOTH, FEDDYN = "moon(mu=1) + scaffold", "feddyn(alpha=0.1)"
SLOWLY = " + outside_methods:sleeps(0.05)"  # a step changes nothing by it, and no round ends before it is noticed
ROUNDS = 8
OPTIONS = {"data": "digits", "clients": 8, "per_round": 3, "rounds": ROUNDS, "epochs": 1, "lr": 0.05,
           "during": EVERYTHING}  # fmt: skip


def hoards(kilobytes: int = 512):
    """Every client remembers this much, and its number."""
    size = 256 * kilobytes

    def keep(visited):
        assert not visited.memory or bool((visited.memory["hoard/x"] == visited.visit.client).all())
        return {"x": torch.full((size,), float(visited.visit.client))}

    hoard = Memory("hoard", blank=lambda model: {"x": torch.zeros(size)}, keep=keep)
    return lambda algorithm: replace(algorithm, remember=(*algorithm.remember, hoard))


def outcome(run: Path):
    """All that must be the same in a run that was never stopped: weights, records, states, rounds but for seconds."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    result = json.loads((run / "result.json").read_text())
    assert result["bytes_up"] == sum(row["bytes_up"] for row in rows)
    assert result["bytes_down"] == sum(row["bytes_down"] for row in rows)
    kept = sorted(file.name for file in (run / "states").iterdir())
    return result["weights_sha256"], rows, (run / "during.jsonl").read_bytes(), kept


def resumed(run: Path, *options):
    """``unskew resume`` in this process: its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["resume", str(run), *options])
    return ended.value.code


def images_of(run: Path, folder: Path, monkeypatch, **options):
    """The run's folder as ``kill -9`` would leave it: after every round, and after every fifth memory written.

    The clock counts how often it is asked, so that checkpoints come after the same rounds on every machine.
    """
    taken, write, written = [], ClientMemory.write, itertools.count(1)

    def take(name):
        taken.append(folder / name)
        shutil.copytree(run, taken[-1])

    def after_round(event: Overview | Metrics):
        if isinstance(event, Metrics):
            take(f"after round {event.round}")

    def write_and_take(self, slot, values):
        ticket = write(self, slot, values)
        if (number := next(written)) % 5 == 0:
            take(f"after visit {number}")
        return ticket

    with monkeypatch.context() as patched:
        patched.setattr(ClientMemory, "write", write_and_take)
        patched.setattr(execute.time, "monotonic", itertools.count(0.0).__next__)
        train.run(out=run, observe=after_round, engine="loop", **OPTIONS, **options)
    return taken


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that were never stopped, by method."""
    found = {}
    for method in (BOTH, FEDDYN):
        run = tmp_path_factory.mktemp("whole") / "run"
        train.run(out=run, engine="loop", method=method, **OPTIONS)
        assert (run / MEMORIES).stat().st_size <= MAX_MEMORY_BYTES_KEPT
        found[method] = outcome(run)
    return found


# From the shell


@pytest.mark.heavy
def test_a_pool_killed_in_the_middle_and_resumed_equals_a_run_that_never_stopped(tmp_path, whole):
    """It goes on in one process: how the work is done is the user's to change."""
    run = tmp_path / "run"
    options = {**OPTIONS, "method": BOTH + SLOWLY, "checkpoint_seconds": 0, "out": run}
    process = started("run", *flags(**options, engine="pool", workers=2), run=run, rounds=2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (run / MEMORIES).stat().st_size > 0
    done = shell("resume", "run", "--engine", "loop", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "resuming after round" in done.stdout
    assert outcome(run) == whole[BOTH]
    assert (run / MEMORIES).stat().st_size <= MAX_MEMORY_BYTES_KEPT


# As kill -9 leaves it, at many moments


@pytest.mark.parametrize(("method", "seconds"), [(BOTH, 0), (BOTH, 3), (BOTH, 1000), (FEDDYN, 3)])
def test_whenever_it_is_killed_a_resumed_run_equals_one_that_never_stopped(
    tmp_path, monkeypatch, whole, method, seconds, capsys
):
    """A checkpoint after every round; after some; after none, so that the run begins anew beside an old file."""
    taken = images_of(tmp_path / "run", tmp_path, monkeypatch, method=method, checkpoint_seconds=seconds)
    assert outcome(tmp_path / "run") == whole[method]
    behind = [
        json.loads((each / "metrics.jsonl").read_text().splitlines()[-1])["round"] - at for each, at in stood(taken)
    ]
    assert max(behind) == {0: 1, 3: 3, 1000: 8}[seconds]  # rounds that the last checkpoint does not know of
    for run in taken[:: {0: 4, 3: 2, 1000: 5}[seconds]]:
        assert resumed(run) == 0, (run.name, capsys.readouterr().err)
        assert outcome(run) == whole[method], run.name
        assert (run / MEMORIES).stat().st_size <= MAX_MEMORY_BYTES_KEPT


def stood(taken):
    """Where the checkpoint of each stood, for those with a round to their name."""
    for run in taken:
        if (run / "metrics.jsonl").read_text():
            found = load_checkpoint(run)
            yield run, found[0].round if found else 0


def test_a_run_killed_again_and_again_gets_to_the_same_end(tmp_path, monkeypatch, whole):
    """Checkpoints come every second round of three visits; the process gets to its tenth visit, then to its fifth, …"""
    run, write, lives = tmp_path / "run", ClientMemory.write, 0
    while not (run / "result.json").exists():
        lives += 1
        visits = itertools.count(1)

        def write_or_die(self, slot, values, visits=visits, last=10 if lives % 2 else 5):
            ticket = write(self, slot, values)
            if next(visits) == last:
                shutil.copytree(run, tmp_path / "image")
                raise KeyboardInterrupt  # whatever is still written after this goes to the folder that is thrown away
            return ticket

        monkeypatch.setattr(ClientMemory, "write", write_or_die)
        monkeypatch.setattr(execute.time, "monotonic", itertools.count(0.0).__next__)
        try:
            if lives == 1:
                train.run(out=run, engine="loop", method=BOTH, checkpoint_seconds=3, **OPTIONS)
            else:
                train.resume(run)
        except KeyboardInterrupt:
            shutil.rmtree(run)
            (tmp_path / "image").rename(run)
        assert lives < 10
    assert lives == 7  # two rounds further in every second life: 2, 2, 4, 4, 6, 6, 8
    assert outcome(run) == whole[BOTH]


def test_client_memory_are_durable_before_a_checkpoint_refers_to_them_and_free_only_after(tmp_path, monkeypatch):
    """Power may fail at any moment: written, synced, referred to, and only then are older ones given up."""
    said = []
    fsync, replaced, write, pin = os.fsync, os.replace, ClientMemory.write, ClientMemory.pin
    monkeypatch.setattr(os, "fsync", lambda fd: (said.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (said.append(f"replace {Path(b).name}"), replaced(a, b)))
    monkeypatch.setattr(ClientMemory, "write", lambda *given: (said.append("keep"), write(*given))[1])
    monkeypatch.setattr(ClientMemory, "pin", lambda *given: (said.append("pin"), pin(*given)))
    train.run(out=tmp_path / "run", engine="loop", method=BOTH, checkpoint_seconds=0, **{**OPTIONS, "rounds": 2})
    mattered = [word for word in said if word in ("keep", "memories.bin", "replace state.safetensors", "pin")]
    each = ["keep", "keep", "keep", "memories.bin", "replace state.safetensors", "pin"]
    assert mattered == ["pin", *each, *each]


# What may happen to the file meanwhile


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that stood still after its sixth round, when all that come next remember something."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        taken = images_of(folder / "run", folder, patched, method=BOTH, checkpoint_seconds=0)
    run = next(each for each in taken if each.name == "after round 7")
    state, _ = load_checkpoint(run)
    assert state.round == 6
    assert len(state.clients) == 8
    return run


@pytest.mark.parametrize("words", [["--engine", "pool", "--workers", "1"], []], ids=["in a pool", "in the loop"])
def test_a_run_stopped_in_the_loop_goes_on_whatever_grew_beyond_its_checkpoint(tmp_path, stopped, whole, words):
    """A crash may leave slots that no checkpoint knows of, half of them written."""
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    with open(run / MEMORIES, "ab") as file:
        file.write(b"\xff" * 123_457)
    assert resumed(run, *words) == 0
    assert outcome(run) == whole[BOTH]


LOST = {
    "deleted": lambda file: file.unlink(),
    "cut short": lambda file: os.truncate(file, 1000),
    "of another run": lambda file: file.write_bytes(bytes(range(256)) * (file.stat().st_size // 256)),
}


@pytest.mark.parametrize("how", LOST)
def test_client_memory_lost_meanwhile_are_one_clear_message(tmp_path, stopped, capsys, how):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    LOST[how](run / MEMORIES)
    for _ in range(2):  # trying again makes nothing worse
        assert resumed(run, "--on-failure", "skip") == 2
        errors = capsys.readouterr().err
        assert errors.startswith(f"unskew: {run / MEMORIES}: ")
        assert "saved state" in errors
        assert "unskew resume" not in errors
        assert "start a new run" in errors
        assert errors.count("\n") == 1
    assert not (run / "result.json").exists()
    assert load_checkpoint(run)[0].round == 6


def test_a_full_disk_stops_the_run_by_name_and_it_goes_on_when_there_is_room(tmp_path, whole, capsys):
    """A file may hold four memories of 109,6xx bytes and no more: the second round has no place for its second."""
    run = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 110_000, hard))
    try:
        with pytest.raises(SystemExit) as ended:
            main(["run", *flags(**OPTIONS, method=BOTH, engine="loop", checkpoint_seconds=0, out=run)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert "the clients' state cannot be saved: File too large" in errors
    assert errors.endswith(f"resume it with: unskew resume {run}\n")
    assert errors.count("\n") == 1
    assert resumed(run) == 0
    assert outcome(run) == whole[BOTH]


# What it costs


def resident(process: int) -> int:
    """Bytes of RAM that belong to the process alone."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["loop", pytest.param("pool", marks=pytest.mark.heavy)])
def test_ram_does_not_grow_with_the_clients_seen(tmp_path, name):
    """Half a megabyte each: 40 clients come first, to warm up, then 200 others. Kept in RAM those were 100 MB."""
    small = federation(
        "test_memory_resume:hoards(kilobytes=512)", sizes=(1,) * 240, model="outside_models:linear", epochs=1
    )
    engine = engines.open_engine(name, engines.EngineSetup(small.blueprint, small.data, 1, open_memories(tmp_path)))
    processes = [os.getpid(), *(worker.child.pid for worker in getattr(engine, "_workers", []))]
    state, seen = small.state(), []
    algorithm = replace(small.algorithm, sampler=in_turn(first := [0]))
    for _ in range(12):
        state, _ = driver.run_round(algorithm, engine, state, small.key, per_round=20)
        first[0] += 20
        seen.append(sum(map(resident, processes)))
    engine.close()
    assert len(state.clients) == 240
    assert (tmp_path / MEMORIES).stat().st_size >= 240 * 512 * 1024
    assert seen[-1] - seen[1] < 40 * 2**20


def in_turn(first):
    """Clients in the order of their numbers, from wherever the list says."""
    return lambda key, population, per_round: [Visit(first[0] + at, 1.0) for at in range(per_round)]
