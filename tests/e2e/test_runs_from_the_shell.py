"""Runs as a user has them: started from a shell, killed, interrupted, resumed, repeated."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.finished import metrics, refused, result
from commands import UNSKEW, shell, started

FAST = ["--rounds", "12", "--epochs", "1", "--lr", "0.05", "--checkpoint-seconds", "0"]


def workers_in(folder):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"unskew.core.child" in words and os.readlink(f"/proc/{pid}/cwd") == str(folder):
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    shell("run", *FAST, "--method", "fedavgm(0.5)", "--out", "run", cwd=folder, check=True)
    return folder / "run"


def test_ctrl_c_ends_cleanly_with_a_checkpoint_without_workers_and_says_how_to_go_on(tmp_path, whole):
    run = tmp_path / "run"
    words = ["run", *FAST[:-1], "3600", "--engine", "pool", "--method", "fedavgm(0.5)", "--out", "run"]
    process = started(*words, cwd=tmp_path, run=run, rounds=2)
    assert workers_in(tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not workers_in(tmp_path)
    assert errors.strip() == "unskew: interrupted; resume it with: unskew resume run"
    assert (run / "checkpoint" / "state.safetensors").exists()
    done = shell("resume", "run", "--workers", "1", cwd=tmp_path, check=True)
    assert "resuming after round" in done.stdout
    assert not workers_in(tmp_path)
    assert result(run)["weights_sha256"] == result(whole)["weights_sha256"]
    assert metrics(run) == metrics(whole)


def test_the_run_folder_holds_what_the_interface_promises(whole):
    from safetensors.torch import load_file

    from unskew.core import tensors

    assert set(result(whole)) >= {
        "method", "data", "partition", "clients", "per_round", "rounds", "seed", "engine", "accuracy", "loss", "emd",
        "examples", "seconds", "examples_per_second", "bytes_up", "bytes_down", "weights_sha256", "calibrations",
    }  # fmt: skip
    assert set(metrics(whole)[0]) >= {
        "round", "clients", "examples", "train_loss", "batches_max", "bytes_up", "bytes_down", "accuracy", "loss",
    }  # fmt: skip
    assert tensors.sha256(load_file(whole / "model.safetensors")) == result(whole)["weights_sha256"]
    assert result(whole)["accuracy"] == metrics(whole)[-1]["accuracy"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run stopped in the middle, to be copied and tampered with."""
    folder = tmp_path_factory.mktemp("stopped")
    process = started("run", *FAST, "--rounds", "4000", "--out", "run", cwd=folder, run=folder / "run", rounds=3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return folder / "run"


TAMPERED = {
    "another rate": (lambda run: edit(run, "lr = 0.05", "lr = 0.06"), "config.toml"),
    "fewer rounds": (lambda run: edit(run, "rounds = 4000", "rounds = 2"), "config.toml"),
    "no partition, another seed": (
        lambda run: ((run / "partition.npz").unlink(), edit(run, "seed = 0", "seed = 1")),
        "run",  # of the configuration where it is sealed, of the partition otherwise
    ),
    "a broken partition": (lambda run: (run / "partition.npz").write_bytes(b"PK"), "partition.npz"),
    "a broken checkpoint": (lambda run: (run / "checkpoint" / "state.safetensors").write_bytes(b"x"), "is damaged"),
    "shorter metrics": (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl"),
}


def edit(run: Path, old: str, new: str):
    text = (run / "config.toml").read_text()
    assert old in text
    (run / "config.toml").write_text(text.replace(old, new))


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "of an earlier version"])
@pytest.mark.parametrize("how", TAMPERED)
def test_a_run_that_was_tampered_with_is_not_resumed(tmp_path, stopped, how, sealed, capsys):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    tamper, hint = TAMPERED[how]
    tamper(run)
    if not sealed:
        (run / "manifest.json").unlink()
    assert hint in refused(capsys, "resume", run)


def test_output_that_nobody_reads_does_not_end_a_run(tmp_path):
    command = " ".join([*UNSKEW, "run", *FAST, "--out", "run"])
    done = subprocess.run(f"{command} | head -2", shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    for _ in range(600):
        if (tmp_path / "run" / "result.json").exists():
            return
        time.sleep(0.05)
    raise AssertionError("the run did not go on to its end")


@pytest.mark.heavy
def test_a_full_disk_is_named_and_nothing_is_lost(tmp_path):
    limited = (
        f"ulimit -f 60; {' '.join(UNSKEW)} run --rounds 4000 --epochs 1 --engine loop --checkpoint-seconds 0 --out run"
    )
    done = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert "unskew resume run" in done.stderr
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.heavy
def test_a_file_of_the_users_beside_a_run_shadows_nothing(tmp_path):
    (tmp_path / "uuid.py").write_text("raise RuntimeError('not the real one')")
    (tmp_path / "numpy.py").write_text("raise RuntimeError('not the real one')")
    command = [str(Path(sys.executable).with_name("unskew")), "run", *FAST, "--engine", "pool", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.heavy
def test_a_run_in_use_is_not_resumed_a_second_time(tmp_path):
    run = tmp_path / "run"
    process = started("run", *FAST, "--rounds", "4000", "--out", "run", cwd=tmp_path, run=run, rounds=1)
    try:
        done = shell("resume", "run", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == "unskew: run is in use by another process; wait for it or stop it\n"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_an_interrupt_during_the_long_imports_is_one_line(tmp_path):
    command = [*UNSKEW, "run", *FAST, "--rounds", "4000", "--out", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(1)
    for _ in range(2):  # the second one has nothing to add
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.startswith("unskew: interrupted")
    assert errors.count("\n") == 1
