"""Whole runs that torchrun starts: the loop's bits with any number of ranks, and what happens when one of them dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from photo_tables import write_table
from torchrun_ranks import PATHS, free_port

pytestmark = pytest.mark.heavy

HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
UNSKEW = ["-m", "unskew"]
RANKS = ["-m", "--", "unskew"]  # without the dashes torchrun takes some of the options for its own
SHORT = ["--rounds", "4", "--epochs", "1", "--clients", "6", "--lr", "0.05"]
SLEEPS = "moon + scaffold + outside_methods:sleeps(0.05)"
SLOW = ["--method", SLEEPS, "--rounds", "12", "--epochs", "1", "--clients", "6"]
KINDS = {
    "memories": ["--method", "moon(mu=1) + scaffold", "--per-round", "4", "--during", "norms + drift"],
    "secure": ["--method", "fedavgm(0.9) + fedvc(64) + fedir + ccvr(per_class=50) + lda + secure"],
    "prototypes": ["--method", "fedeccr", "--during", "silhouette(every=2)", "--start", "lda"],
    "frozen": ["--train", "last(2)", "--validation", "0.2", "--patience", "2"],
}


def torchrun(ranks, *words, **machines):
    """The command that starts so many ranks of ``unskew`` on this machine."""
    place = [f"--{name.replace('_', '-')}={value}" for name, value in machines.items()] or ["--standalone"]
    return [sys.executable, "-m", "torch.distributed.run", *place, f"--nproc-per-node={ranks}", *map(str, words)]


def done(command, cwd):
    return subprocess.run(command, cwd=cwd, env=HERE, capture_output=True, text=True, timeout=300)


def outcome(run: Path):
    """All that must be the same, whatever did the work: every file but for seconds, and the engine's name."""
    result = json.loads((run / "result.json").read_text())
    for name in ("seconds", "examples_per_second", "engine", "settings", "manifest"):
        result.pop(name, None)
    for each in [*result["calibrations"], result.get("start") or {}]:
        each.pop("seconds", None)
    rows = [
        {name: value for name, value in json.loads(line).items() if name != "seconds"}
        for file in ("metrics.jsonl", "during.jsonl")
        if (run / file).exists()
        for line in (run / file).read_text().splitlines()
    ]
    weights = {file.name: file.read_bytes() for file in run.glob("*.safetensors")}
    return result, rows, weights


@pytest.fixture(scope="module")
def by_the_loop(tmp_path_factory):
    """What the loop makes of some options, once."""
    known = {}

    def outcome_of(*words):
        if words not in known:
            folder = tmp_path_factory.mktemp("loop")
            found = done([sys.executable, *UNSKEW, "run", *words, "--engine", "loop", "--out", "run"], folder)
            assert found.returncode == 0, found.stderr
            known[words] = outcome(folder / "run")
        return known[words]

    return outcome_of


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_gives_the_bits_of_the_loop(kind, ranks, tmp_path, by_the_loop):
    words = [*SHORT, *KINDS[kind]]
    found = done(torchrun(ranks, *RANKS, "run", *words, "--engine", "torchrun", "--out", "run"), tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("sha256") == 1  # one of them speaks
    assert outcome(tmp_path / "run") == by_the_loop(*words)


def test_photographs_are_read_by_every_rank(tmp_path, by_the_loop):
    write_table(tmp_path, 60)
    words = ["--data", f"table:{tmp_path / 'photos.csv'}(size=16)", "--partition", "users", "--rounds", "2"]
    found = done(torchrun(2, *RANKS, "run", *words, "--engine", "torchrun", "--out", "run"), tmp_path)
    assert found.returncode == 0, found.stderr
    assert outcome(tmp_path / "run") == by_the_loop(*words)


def test_a_script_runs_twice_and_calibrates_with_the_same_ranks(tmp_path):
    (tmp_path / "script.py").write_text(
        "import unskew\n"
        "for name in ('a', 'b'):\n"
        "    result = unskew.run(rounds=2, epochs=1, clients=4, engine='torchrun', out=name)\n"
        "    print(result.weights_sha256)\n"
        "print(unskew.calibrate_run('b', 'lda', engine='torchrun').calibrations['lda'].accuracy)\n"
    )
    found = done(torchrun(2, "script.py"), tmp_path)
    assert found.returncode == 0, found.stderr
    first, second, accuracy = found.stdout.split()
    assert first == second
    assert 0 <= float(accuracy) <= 1


def test_what_is_refused_ends_all_ranks_and_leaves_no_folder(tmp_path):
    found = done(torchrun(2, *RANKS, "run", "--method", "nowhere", "--engine", "torchrun", "--out", "run"), tmp_path)
    assert found.returncode == 1  # torchrun's own, whatever the ranks say
    assert found.stderr.count("unskew: ") == 1
    assert not (tmp_path / "run").exists()


# Ranks that die


class Started:
    """A slow run that torchrun has started, with some rounds done."""

    def __init__(self, ranks, folder, *, rounds=3):
        self.run = folder / "run"
        words = [*SLOW, "--engine", "torchrun", "--checkpoint-seconds", "0", "--out", "run"]
        self.said = folder / "said.txt"
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                torchrun(ranks, *RANKS, "run", *words), cwd=folder, env=HERE, stdout=said, stderr=said
            )
        wait_for_rounds(self.run, rounds, self.process, self.said)

    def rank(self, number):
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if f"\0RANK={number}\0" in Path(f"/proc/{child}/environ").read_text():
                return int(child)
        raise AssertionError(f"there is no rank {number}")

    def message(self):
        """What unskew said when all had ended, without torchrun's own words."""
        self.process.wait(timeout=60)
        return [line for line in self.said.read_text().splitlines() if line.startswith("unskew: ")]


def wait_for_rounds(run, rounds, process, said):
    file = run / "metrics.jsonl"
    for _ in range(1200):
        if file.exists() and file.read_bytes().count(b"\n") >= rounds:
            return
        assert process.poll() is None, said.read_text()
        time.sleep(0.1)
    raise AssertionError("it never got so far")


def resumed(run, ranks, tmp_path):
    """A copy of the run, resumed with so many ranks; without torchrun where there are none."""
    copy = tmp_path / f"resumed-{ranks}"
    shutil.copytree(run, copy)
    if ranks:
        found = done(torchrun(ranks, *RANKS, "resume", copy, "--engine", "torchrun"), tmp_path)
    else:
        found = done([sys.executable, *UNSKEW, "resume", str(copy)], tmp_path)
    assert found.returncode == 0, found.stderr
    assert "resuming after round" in found.stdout
    return outcome(copy)


def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_with_any_number_of_ranks(tmp_path, by_the_loop):
    started = Started(3, tmp_path)
    victim = started.rank(1)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    (message,) = started.message()
    assert time.monotonic() - began < 15
    assert f"(process {victim}) is lost: its connection closed" in message
    assert message.startswith("unskew: rank 1 on ")
    assert message.endswith("resume it with: unskew resume run")
    assert (started.run / "checkpoint" / "state.safetensors").exists()
    for ranks in (2, 0):
        assert resumed(started.run, ranks, tmp_path) == by_the_loop(*SLOW)


def test_when_rank_0_is_killed_another_says_so_and_the_run_goes_on(tmp_path, by_the_loop):
    started = Started(3, tmp_path)
    os.kill(started.rank(0), signal.SIGKILL)
    (message,) = started.message()
    assert message == "unskew: rank 0 is lost: its connection closed; resume its run with: unskew resume RUN"
    assert resumed(started.run, 1, tmp_path) == by_the_loop(*SLOW)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_ranks_with_a_checkpoint_and_one_message(number, tmp_path, by_the_loop):
    started = Started(2, tmp_path)
    zero = started.rank(0)
    started.process.send_signal(number)
    assert started.message() == ["unskew: interrupted; resume it with: unskew resume run"]
    assert f"{zero}" not in os.listdir("/proc")
    assert resumed(started.run, 3, tmp_path) == by_the_loop(*SLOW)


def test_a_rank_that_says_nothing_is_lost_after_fifteen_seconds(tmp_path):
    started = Started(2, tmp_path)
    silent = started.rank(1)
    os.kill(silent, signal.SIGSTOP)
    began = time.monotonic()
    while "is lost" not in started.said.read_text():
        assert time.monotonic() - began < 40
        time.sleep(0.2)
    os.kill(silent, signal.SIGCONT)
    assert f"(process {silent}) is lost: nothing was received from it for 15.0 s" in started.message()[0]


# Two machines


@contextmanager
def two_machines():
    """Two network namespaces with a cable between them; skipped where this machine does not allow it."""
    names = [f"unskew-{os.getpid()}-{each}" for each in "ab"]
    ends = [f"u{os.getpid()}{each}" for each in "ab"]

    def ip(*words, check=True):
        found = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if check and found.returncode:
            pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {found.stderr.strip()}")

    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: iproute2 is not installed")
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name, check=False)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        yield names, lambda: ip("-n", names[0], "link", "set", ends[0], "down")


@contextmanager
def on_both(names, words, tmp_path):
    """The same command on both machines, as two people type it; the processes, and what each says."""
    place = {"nnodes": 2, "master_addr": "10.77.0.1", "master_port": free_port()}
    processes, said = [], []
    for number, name in enumerate(names):
        folder = tmp_path / f"machine-{number}"
        folder.mkdir()
        command = ["ip", "netns", "exec", name, *torchrun(1, *RANKS, "run", *words, node_rank=number, **place)]
        said.append(folder / "said.txt")
        with said[-1].open("w") as file:
            processes.append(subprocess.Popen(command, cwd=folder, env=HERE, stdout=file, stderr=file))
    try:
        yield processes, said
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_two_machines_give_the_bits_of_the_loop(tmp_path, by_the_loop):
    words = [*SHORT, *KINDS["memories"]]
    with (
        two_machines() as (names, _),
        on_both(names, [*words, "--engine", "torchrun", "--out", "run"], tmp_path) as (processes, said),
    ):
        assert [process.wait(timeout=200) for process in processes] == [0, 0], [each.read_text() for each in said]
    assert outcome(tmp_path / "machine-0" / "run") == by_the_loop(*words)
    assert os.listdir(tmp_path / "machine-1") == ["said.txt"]  # the run is on one of them


def test_a_machine_that_is_cut_off_is_lost_and_the_run_goes_on_without_it(tmp_path, by_the_loop):
    words = [*SLOW, "--engine", "torchrun", "--checkpoint-seconds", "0", "--out", "run"]
    with two_machines() as (names, cut), on_both(names, words, tmp_path) as (processes, said):
        run = tmp_path / "machine-0" / "run"
        wait_for_rounds(run, 3, processes[0], said[0])
        cut()
        processes[0].wait(timeout=60)
        (message,) = (line for line in said[0].read_text().splitlines() if line.startswith("unskew: "))
    assert "is lost: nothing was received from it for 15.0 s" in message
    assert resumed(run, 0, tmp_path) == by_the_loop(*SLOW)
