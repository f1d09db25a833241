"""The run folder: a crash at any moment leaves whole files, and what is read back is what was written."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.files import part_beside, write_whole
from unskew.core.key import Key
from unskew.core.types import Failure, ServerState
from unskew.round.driver import Metrics
from unskew.runs.checkpoint import CHECKPOINT, CheckpointRecord, load_checkpoint, save_checkpoint
from unskew.runs.folder import create_run_folder, locked_folder, model_bytes, write_arrays
from unskew.runs.journal import LineFile, Mark, metrics_row, read_metrics

PROGRESS = CheckpointRecord(123, 4.5, data_sha256="d" * 64, partition_hash="p" * 64, config_sha256="c" * 64)


ROW = Metrics(1, clients=2, examples=30, train_loss=1.5, batches_max=4, bytes_up=10, bytes_down=20, seconds=0.25)


def metrics(number=1, **changes):
    return metrics_row(replace(ROW, round=number, **changes))


def state():
    draw = Key(0).torch()
    model = {
        "params/weight": torch.randn(3, 4, generator=draw),
        "params/wide": torch.randn(2, 2, generator=draw, dtype=torch.float64).t(),
        "buffers/count": torch.tensor(2**40 + 1),
        "buffers/empty": torch.zeros(0, 3),
        "params/odd": torch.tensor([float("nan"), -0.0, 1e-45]),
    }
    memory = {"velocity/params/weight": torch.randn(3, 4, generator=draw, dtype=torch.float64)}
    return ServerState(17, model, memory)


class Crash(Exception):
    pass


def crash(*_, **__):
    raise Crash


# Replacing a file


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file_whole(tmp_path, monkeypatch, moment):
    file = tmp_path / "result.json"
    write_whole(file, b"old")
    monkeypatch.setattr(os, moment, crash)
    with pytest.raises(Crash):
        write_whole(file, b"new, and much longer")
    assert file.read_bytes() == b"old"
    monkeypatch.undo()
    write_whole(file, b"newer")
    assert file.read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_file_is_synced_before_it_takes_its_place_and_its_folder_after(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(f"sync {os.readlink(f'/proc/self/fd/{fd}')}"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    write_whole(tmp_path / "a", b"content")
    assert order == [f"sync {part_beside(tmp_path / 'a')}", "replace", f"sync {tmp_path}"]


# Folders and locks


def test_a_folder_that_holds_something_is_refused_with_the_way_on(tmp_path):
    create_run_folder(tmp_path / "new" / "run")
    create_run_folder(tmp_path / "new" / "run")  # still empty
    (tmp_path / "new" / "run" / "x").touch()
    for path in (tmp_path / "new" / "run", tmp_path / "new" / "run" / "x"):
        with pytest.raises(UserError, match="is not an empty folder; choose another --out, or continue a run with"):
            create_run_folder(path)
    with pytest.raises(UserError, match="cannot be created"):
        create_run_folder(tmp_path / "new" / "run" / "x" / "below a file")


def test_a_killed_process_releases_its_lock(tmp_path):
    code = (
        "import time\nfrom unskew.runs.folder import locked_folder\nfrom pathlib import Path\n"
        f"with locked_folder(Path({str(tmp_path)!r})):\n    print('held', flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="in use by another process"), locked_folder(tmp_path):
            pass
        holder.kill()
    with locked_folder(tmp_path):
        pass


# Metrics


def test_metrics_come_back_without_what_was_not_measured(tmp_path):
    file = LineFile(tmp_path / "metrics.jsonl", Mark())
    file.append(metrics(1))
    file.append(metrics(2, accuracy=0.0, loss=0.5, failures=(Failure(3, "NaN"),)))
    file.close()
    first, second = read_metrics(tmp_path)
    assert "accuracy" not in first
    assert "failures" not in first
    assert first["examples"] == 30
    assert (second["accuracy"], second["failures"]) == (0.0, [{"client": 3, "reason": "NaN", "repeat": 0}])


def test_what_a_crash_left_behind_the_checkpoint_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path, Mark())
    keep = file.append(metrics(1))
    assert keep.bytes == path.stat().st_size
    assert file.append(metrics(2)).bytes == path.stat().st_size > keep.bytes
    file.close()
    path.write_bytes(path.read_bytes() + b'{"round": 3, "cli')
    file = LineFile(path, keep)
    assert file.append(metrics(2, train_loss=9.0)).bytes == path.stat().st_size
    file.close()
    assert [(row["round"], row["train_loss"]) for row in read_metrics(tmp_path)] == [(1, 1.5), (2, 9.0)]


def test_a_last_line_is_ignored_wherever_it_was_cut(tmp_path):
    line = json.dumps(metrics()).encode() + b"\n"
    for length in range(2 * len(line) + 1):
        (tmp_path / "metrics.jsonl").write_bytes((2 * line)[:length])
        assert len(read_metrics(tmp_path)) == length // len(line)


# Checkpoints


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    save_checkpoint(tmp_path, state(), PROGRESS)
    found, progress = load_checkpoint(tmp_path)
    assert progress == PROGRESS
    assert found.round == 17
    for got, want in ((found.tensors, state().tensors), (found.memory, state().memory)):
        assert got.keys() == want.keys()
        for name in want:
            assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        assert tensors.sha256(got) == tensors.sha256(want)


def test_what_was_loaded_does_not_change_with_the_next_checkpoint(tmp_path):
    """Loaded tensors may lie in the file itself, so a new one must never be written into the old one's place."""
    save_checkpoint(tmp_path, state(), PROGRESS)
    found, _ = load_checkpoint(tmp_path)
    zeros = {name: torch.zeros_like(value) for name, value in state().tensors.items()}
    save_checkpoint(tmp_path, ServerState(18, zeros, state().memory), PROGRESS)
    assert tensors.sha256(found.tensors) == tensors.sha256(state().tensors)


def test_a_checkpoint_cut_anywhere_is_the_users_to_delete(tmp_path):
    save_checkpoint(tmp_path, state(), PROGRESS)
    file = tmp_path / CHECKPOINT
    whole = file.read_bytes()
    for length in [*range(12), *range(12, len(whole), 7), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"state\.safetensors is damaged .* delete it"):
            load_checkpoint(tmp_path)
    file.write_bytes(whole + b"\x00")
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(tmp_path)


# Models and arrays


def test_a_model_is_readable_by_others_under_the_networks_names(tmp_path):
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    write_whole(tmp_path / "model.safetensors", model_bytes(tensors.of_module(network)))
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == network.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in network.state_dict().items())


def test_the_same_arrays_give_the_same_bytes_at_any_time(tmp_path):
    arrays = {"client": np.arange(5, dtype=np.int32), "scheme": np.array("iid"), "empty": np.zeros((0, 2))}
    write_arrays(tmp_path / "a.npz", arrays)
    write_arrays(tmp_path / "b.npz", arrays)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as file:
        assert {entry.date_time for entry in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
        assert found["client"].dtype == np.int32
