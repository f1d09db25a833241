"""The command line: what works, and one clear line for what does not."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.finished import command as unskew
from analysis.finished import done, refused
from unskew.console.main import COMMANDS
from unskew.methods import METHODS
from unskew.runs import train

pytestmark = pytest.mark.usefixtures("in_a_new_folder")
FAST = ["--rounds", "2", "--epochs", "1", "--engine", "loop"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "a"
    train.run(rounds=2, epochs=1, engine="loop", out=out)
    return out


@pytest.fixture
def run(trained, tmp_path):
    """A finished run of one's own, the folder a."""
    return Path(shutil.copytree(trained, tmp_path / "a"))


WRONG = {
    "an unknown command": (["rum"], "run"),
    "an unknown option": (["run", "--roundz", "3"], "--rounds"),
    "a word for a number": (["run", "--rounds", "many"], "--rounds"),
    "negative rounds": (["run", "--rounds", "-1"], "--rounds -1: give 0 or more"),
    "more clients a round than there are": (["run", "--clients", "5", "--per-round", "6"], "only 5 clients"),
    "more clients than examples": (["run", "--clients", "100000", "--partition", "iid"], "1438"),
    "an unknown data set": (["run", "--data", "digit"], "digits"),
    "a built data set that is not there": (["run", "--data", "landmarks", "--data-dir", "nowhere"], "nowhere"),
    "a data set that is not there": (["run", "--data", "cifar10"], "--data-dir"),
    "a data folder that is not there": (["run", "--data", "cifar10", "--data-dir", "nowhere"], "nowhere"),
    "a folder without pictures": (["run", "--data", "folder:."], "folder"),
    "arrays that are not there": (["run", "--data", "arrays:none.npz"], "none.npz"),
    "an unknown model": (["run", "--model", "simple-cn"], "did you mean 'simple-cnn'?"),
    "a model too large for the images": (["run", "--model", "simple-cnn"], "8x8"),
    "an unknown engine": (["run", "--engine", "pol"], "did you mean 'pool'?"),
    "an unknown method": (["run", "--method", "fedprx"], "did you mean 'fedprox'?"),
    "an open bracket": (["run", "--method", "fedprox(0.1"], "^"),
    "two servers": (["run", "--method", "fedavgm + fedadam"], "fedavgm and fedadam both claim the server slot"),
    "a method twice": (["run", "--method", "fedprox + fedprox"], "twice"),
    "an empty method": (["run", "--method", " "], "method is empty"),
    "an unknown partition": (["run", "--partition", "dirichle(0.1)"], "dirichlet"),
    "a partition that cannot be": (["run", "--partition", "dirichlet(-1)"], "alpha"),
    "a partition by users without users": (["run", "--partition", "users"], "users"),
    "a partition file that is not there": (["run", "--partition", "file:none.npz"], "none.npz"),
    "a class that is no method": (["run", "--method", "builtins:dict"], "its signature is unknown"),
    "a function that is no model": (["run", "--model", "os:getcwd"], "os:getcwd"),
    "a calibration that this network cannot have": (["run", "--method", "fedavg + lda(layers=9)"], "layers=9"),
    "a recording that is none": (["run", "--during", "drfit"], "did you mean 'drift'?"),
    "a device that is not there": (["run", "--device", "cuda:999"], "--device cuda:999: "),
    "an unknown logger": (
        ["run", "--log", "tensorbord"],
        "did you mean 'tensorboard'?; or give package.module:function",
    ),
    "a function that is no logger": (["run", "--log", "outside_loggers:nothing"], "start, write and close"),
    "a method that no one knows": (["methods", "fedprx"], "did you mean 'fedprox'?"),
    "a function that is no method, to show": (["methods", "os:getcwd"], "not a method"),
    "more rounds than can be": (["run", "--rounds", "1" + 300 * "0"], "the limit is 1,000,000,000"),
    "a recipe that is not there": (["run", "none.toml"], "the recipe none.toml does not exist"),
    "a run that is not there": (["resume", "none"], "none is not a run directory"),
    "a comparison with nothing": (["compare", "none"], "none does not exist"),
    "a format that is none": (["compare", "none", "--format", "tabel"], "did you mean 'table'?"),
    "a partition without a file": (["partition"], "--out"),
    "a partition in a strange format": (["partition", "--out", "p.xlsx"], ".npz or .csv"),
    "a picture in a strange format": (["partition", "--out", "p.npz", "--plot", "p.docx"], ".png or .svg or .pdf"),
    "a fetch to nowhere": (["data", "fetch", "cifar10"], "--data-dir"),
    "a fetch of what is here": (["data", "fetch", "digits", "--data-dir", "."], "digits"),
    "a check of what is not there": (["data", "check", "mnist", "--data-dir", "."], "mnist"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_gets_one_clear_message_and_exit_code_2(capsys, tmp_path, mistake):
    words, hint = WRONG[mistake]
    code, said, error = unskew(capsys, *words)
    assert code == 2, error
    assert hint in error
    assert error.startswith("unskew: ")
    assert error.count("unskew: ") == 1
    assert "Traceback" not in error
    most = 5 if "  File " in error else 3  # the message, the place in a plug-in, and for a text the text with a caret
    assert len(error.strip().splitlines()) <= most
    assert said == ""
    assert os.listdir(tmp_path) == []  # and nothing is left behind


def test_flags_go_over_the_recipe(capsys, tmp_path):
    (tmp_path / "r.toml").write_text('rounds = 1\nepochs = 1\nper-round = 2\nmethod = "fedprox(0.1)"\n')
    done(capsys, "run", "r.toml", "--method", "fedavg", "--out", "a", "--engine", "loop")
    found = json.loads((tmp_path / "a" / "result.json").read_text())
    assert (found["method"], found["rounds"], found["per_round"]) == ("fedavg", 1, 2)


def test_a_run_that_exists_is_not_written_over(capsys, run):
    before = (run / "result.json").read_bytes()
    said = refused(capsys, "run", *FAST, "--out", "a")
    assert "a exists and is not an empty folder; choose another --out" in said
    assert (run / "result.json").read_bytes() == before
    assert "a is finished" in refused(capsys, "resume", "a")


def test_default_run_folders_do_not_collide(capsys, tmp_path):
    for _ in range(2):
        assert unskew(capsys, "run", *FAST)[0] == 0
    assert sorted(os.listdir(tmp_path / "runs")) == ["digits-fedavg-seed0", "digits-fedavg-seed0-2"]


def test_a_rate_that_blows_up_stops_the_run_by_name_and_loses_nothing(capsys, tmp_path):
    error = refused(capsys, "run", *FAST, "--lr", "1e20", "--out", "a")
    assert re.match(r"client \d, round 1, job train: .*NaN or infinity.*seed 0 replays it", error)
    assert (tmp_path / "a" / "config.toml").exists()


def test_a_partition_written_and_read_again_gives_the_same_run(capsys, run):
    for file in ("p.npz", "p.csv"):
        assert "EMD 1.169" in done(capsys, "partition", "--out", file, "--plot", "p.png")
        done(capsys, "run", *FAST, "--partition", f"file:{file}", "--out", file + "-run")
        drawn, read = (json.loads(Path(folder, "result.json").read_text()) for folder in (run, file + "-run"))
        assert drawn["partition_hash"] == read["partition_hash"]
        assert drawn["weights_sha256"] == read["weights_sha256"]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    assert done(capsys, name, "--help").startswith(f"Usage: unskew {name} ")


@pytest.mark.parametrize("words", [["-c", "import unskew"], ["-m", "unskew", "--help"], ["-m", "unskew", "--version"]])
def test_what_needs_no_pytorch_does_not_import_it(words):
    told = subprocess.run([sys.executable, "-X", "importtime", *words], capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "unskew" in loaded
    assert not loaded & {"torch", "numpy", "rich", "scipy", "sklearn", "flwr", "unskew.runs"}


def test_brackets_in_names_are_names_and_commas_in_users_stay(capsys, tmp_path):
    images = np.zeros((40, 6, 6), np.uint8)
    users = np.array(["Doe, Jane", 'a "b"', "[/x]", "ü"] * 10)
    labels = np.arange(40) % 2
    np.savez(tmp_path / "a[bold].npz", x_train=images, y_train=labels, x_test=images, y_test=labels, users=users)
    own = ["--data", "arrays:a[bold].npz"]
    said = done(capsys, "partition", *own, "--partition", "users", "--out", "p[red].csv")
    assert "written to p[red].csv" in said
    assert "[bold]r" in done(capsys, "run", *FAST, *own, "--partition", "file:p[red].csv", "--out", "[bold]r")
    with np.load(tmp_path / "[bold]r" / "partition.npz") as kept:
        assert sorted(kept["names"].tolist()) == sorted(set(users.tolist()))


def test_a_large_batch_takes_no_memory_for_examples_that_are_not_there(capsys):
    assert unskew(capsys, "run", *FAST, "--batch", "1000000000", "--out", "a")[0] == 0


@pytest.mark.parametrize("words", [["methods"], ["methods", "fedprox"], ["methods", "ccvr"]], ids=" ".join)
def test_methods_fit_80_columns(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(len(line.rstrip()) for line in done(capsys, *words).splitlines()) <= 80


def test_one_method_is_shown_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, said, _ = unskew(capsys, "methods", "fedprox")
    words = ("Adds a proximal term", "‖w − w_global‖²", "mu: float = 0.01", "terms", "Li et al.")
    assert all(part in said for part in ("fedprox(mu=0.01, on=all)", *words))
    _, said, _ = unskew(capsys, "methods", "outside_methods:raises")
    for part in ("outside_methods:raises(on=1)", "on: int = 1", "raises."):
        assert part in said
    _, said, _ = unskew(capsys, "methods", "outside_methods:as_it_is")
    assert "A method itself" in said


def test_every_method_is_in_the_list_once(capsys):
    _, said, _ = unskew(capsys, "methods")
    names = [line.split()[0] for line in said.splitlines() if re.match(r"  \w", line)]
    assert sorted(names) == sorted(METHODS)
