"""``--device`` from the shell: it reaches the run, and what is not there is refused before anything is written."""

import shutil
import tomllib

import pytest
import torch

from analysis.finished import SMALL, command, done, finished, images, refused, result, runs_of
from commands import flags
from observers import stop_after
from unskew.runs import train
from unskew.runs.seals import seal_folder
from unskew.runs.train import StopRun

__all__ = ["finished", "runs_of"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """These tests are about a machine without one, wherever they run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def options(tmp_path):
    """The small run, as flags."""
    return flags(**{"data": f"arrays:{images(tmp_path)}", **SMALL, "rounds": 1})


def test_the_device_reaches_the_run(capsys, options, tmp_path):
    hashes = []
    for device in ("cpu", "auto"):
        run = tmp_path / device
        done(capsys, "run", *options, "--device", device, "--out", run)
        assert tomllib.loads((run / "config.toml").read_text())["device"] == device
        hashes.append(result(run)["weights_sha256"])
    assert hashes[0] == hashes[1]


def of_a_machine_with_a_gpu(run):
    """The run's folder as if it had been made with --device cuda."""
    text = (run / "config.toml").read_text()
    assert 'device = "auto"' in text
    (run / "config.toml").write_text(text.replace('device = "auto"', 'device = "cuda"'))
    seal_folder(run)


def test_a_finished_run_of_a_gpu_is_calibrated_analysed_and_reported_on_the_cpu(capsys, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    of_a_machine_with_a_gpu(run)
    before = (run / "result.json").read_bytes()
    for words in (("calibrate", run, "lda"), ("analyse", run, "confusion")):
        assert "no CUDA device; use auto or cpu" in refused(capsys, *words)
    assert (run / "result.json").read_bytes() == before
    done(capsys, "calibrate", run, "lda(ridge=0.1)", "--device", "cpu")
    assert "lda(ridge=0.1)" in [each["name"] for each in result(run)["calibrations"]]
    assert "confusion" in done(capsys, "analyse", run, "confusion", "--device", "auto")
    assert "no CUDA device" in done(capsys, "report", run, "--only", "cka")  # the rest is shown
    assert "no CUDA device" not in done(capsys, "report", run, "--only", "cka", "--device", "cpu")


def test_an_interrupted_run_of_a_gpu_is_resumed_on_the_cpu(capsys, tmp_path):
    data, run = f"arrays:{images(tmp_path)}", tmp_path / "run"
    with pytest.raises(StopRun):
        train.run(out=run, data=data, **SMALL, observe=stop_after(1))
    of_a_machine_with_a_gpu(run)
    assert "no CUDA device; use auto or cpu" in refused(capsys, "resume", run)
    assert command(capsys, "resume", run, "--device", "cpu")[0] == 0
    whole = train.run(out=tmp_path / "whole", data=data, **SMALL)
    assert result(run)["weights_sha256"] == whole.weights_sha256
