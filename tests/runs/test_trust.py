"""A run directory from somebody else is data: plug-ins that it names do not run unless the user says so."""

import shutil
import sys
from contextlib import suppress

import pytest
import torch

import unskew
from analysis.finished import done
from unskew.calibration import is_bound
from unskew.console.main import main
from unskew.core.errors import UserError
from unskew.core.plugins import remember, unknown_plugins
from unskew.runs.config import OPTIONS, PLUGGABLE
from unskew.runs.seals import seal_folder

CODE = """
from pathlib import Path
Path("ran").write_text("code of the sender")
from torch import nn
from unskew.extend import Algorithm

def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

def method(algorithm: Algorithm):
    return algorithm
"""
OPTIONS_OF_RUN = {"clients": 3, "partition": "iid", "rounds": 1, "epochs": 1, "engine": "loop"}
REFUSED = (
    r"uses code that has never been used on this machine: model evil:net; if you trust its author, give --trust "
    r"\(from Python: trust=True\)"
)


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """A run that somebody changed, and sealed anew, and the module that they sent along."""
    folder = tmp_path_factory.mktemp("sent")
    (folder / "evil.py").write_text(CODE)
    unskew.run(out=folder / "plain", **OPTIONS_OF_RUN)
    for name in ("finished", "interrupted"):
        shutil.copytree(folder / "plain", folder / name)
        change(folder / name, "model", "evil:net")
    (folder / "interrupted" / "result.json").unlink()
    seal_folder(folder / "interrupted")
    return folder


@pytest.fixture
def here(sent, tmp_path, monkeypatch):
    """A copy of what was sent, on a machine that has never seen its code, in the folder that the user works in."""
    for each in sent.iterdir():
        (shutil.copytree if each.is_dir() else shutil.copy)(each, tmp_path / each.name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("evil", None)


def change(run, option, value):
    """As a sender would: the option's line, and a new manifest."""
    file = run / "config.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith(f"{option} = ")]
    file.write_text("\n".join([*lines, f'{option} = "{value}"', ""]))
    seal_folder(run)


CALLS = {
    "load": lambda **more: unskew.load("finished", **more),
    "predict": lambda **more: unskew.predict("finished", "picture.png", **more),
    "export": lambda **more: unskew.export("finished", "onnx", **more),
    "calibrate": lambda **more: unskew.calibrate_run("finished", "lda", **more),
    "analyse": lambda **more: unskew.analyse("finished", "norms", **more),
    "draw": lambda **more: unskew.draw_runs(["finished"], **more),
    "report": lambda **more: unskew.write_report("finished", only=["skew"], **more),
    "compare on a page": lambda **more: unskew.write_report("finished", "plain", out="page.html", **more),
    "resume": lambda **more: unskew.resume("interrupted", **more),
    "repeat": lambda **more: unskew.run("finished/config.toml", out="again", **more),
    "repeat with seeds": lambda **more: unskew.run_seeds("finished/config.toml", seeds=[1], out="seeds", **more),
    "sweep": lambda **more: unskew.sweep("finished/config.toml", over="lr=0.01", out="sweep", **more),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_sender_s_code_does_not_run(name, here):
    with pytest.raises(UserError, match=REFUSED):
        CALLS[name]()
    assert not (here / "ran").exists()


@pytest.mark.parametrize("name", ["calibrate", "resume"])
def test_with_trust_it_runs(name, here):
    """It gets as far as the sender's code: these weights are not those of its network."""
    words = {"calibrate": ["calibrate", "finished", "lda"], "resume": ["resume", "interrupted"]}[name]
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert not (here / "ran").exists()
    with pytest.raises((UserError, SystemExit)) as caught:
        main([*words, "--trust"])
    assert "trust" not in str(caught.value)
    assert (here / "ran").exists()


def test_what_only_reads_results_runs_nothing(here, capsys):
    """A calibration of somebody's own may be a bound for study; it is not asked."""
    file = here / "plain" / "result.json"
    file.write_text(file.read_text().replace('"calibrations": []', CALIBRATIONS))
    seal_folder(here / "plain")
    done(capsys, "compare", "plain", "finished")
    done(capsys, "report", "plain", "--only", "skew")
    assert not is_bound("evil:net")
    assert not (here / "ran").exists()


CALIBRATIONS = '"calibrations": [{"name": "evil:method", "accuracy": 0.5, "loss": 1.0, "bytes_up": 0, "seconds": 0.1}]'


def test_a_baseline_from_somebody_else_is_compared_and_does_not_run(here):
    change(here / "finished", "method", "evil:method")
    result = unskew.run(out="run", baseline="finished", **OPTIONS_OF_RUN)
    assert result.relative_accuracy is not None
    assert not (here / "ran").exists()


@pytest.mark.parametrize("option", [name for name, each in OPTIONS.items() if each.kind is str])
def test_every_option_that_runs_code_is_looked_at(option, here):
    """A new option that names plug-ins must be among those that are checked."""
    change(here / "interrupted", "model", "simple-cnn")
    change(here / "interrupted", option, "evil:net")
    with suppress(UserError):  # of other options this is no text that they take
        unskew.resume("interrupted")
    assert not (here / "ran").exists()
    if option in PLUGGABLE:
        with pytest.raises(UserError, match=f"{option} evil:net"):
            unskew.resume("interrupted")


def test_a_run_of_one_s_own_needs_no_trust(here):
    """Typed here, so used here: also after a change of the code, and in a copy of the folder."""
    unskew.run(out="mine", model="evil:net", **OPTIONS_OF_RUN)
    shutil.move("mine", "moved")
    assert isinstance(unskew.load("moved"), torch.nn.Module)
    with (here / "evil.py").open("a") as file:
        file.write("# edited\n")
    unskew.calibrate_run("moved", "lda")
    assert (here / "state" / "unskew" / "plugins.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_module_of_the_same_name_from_elsewhere_is_other_code(here, monkeypatch):
    """The sender knows what the user's plug-in is called, and sends a module of that name with the run."""
    (here / "mine").mkdir()
    shutil.move("evil.py", "mine/evil.py")
    monkeypatch.chdir("mine")
    unskew.run(out="run", model="evil:net", **OPTIONS_OF_RUN)
    sys.modules.pop("evil")
    sys.path.remove(str(here / "mine"))
    (here / "evil.py").write_text(CODE)
    monkeypatch.chdir(here)
    with pytest.raises(UserError, match=r"never been used on this machine: model evil:net"):
        unskew.load("mine/run")
    assert not (here / "ran").exists()


def test_knobs_count(here):
    remember(["fedavg + evil:method(0.1) + ccvr"])
    assert unknown_plugins("evil:method(0.1)") == []
    assert unknown_plugins("evil:method(0.2) + fedavg(x='evil:net')") == ["evil:method(0.2)", "fedavg(x=evil:net)"]
    assert unknown_plugins("evil:method((") == ["evil:method(("]


def test_a_list_of_plugins_in_the_senders_folder_does_not_count(here, monkeypatch):
    """A relative XDG_STATE_HOME, or a home that is not known, would look for it there."""
    (here / "unskew").mkdir()
    (here / "unskew" / "plugins.jsonl").write_text('["evil:net", ""]\n')
    for value in (".", ""):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        monkeypatch.setenv("HOME", ".")
        assert unknown_plugins("evil:net") == ["evil:net"]


def test_statistics_name_no_code(here):
    features = torch.arange(24.0).reshape(6, 4)
    statistics = unskew.ClassStatistics.of_features(features, [0, 1, 2] * 2, 3)
    statistics.save("statistics")
    content = (here / "statistics").read_bytes()
    (here / "statistics").write_bytes(content.replace(b'\\"full\\"', b'\\"a:bc\\"'))
    with pytest.raises(UserError, match="does not contain class statistics"):
        unskew.ClassStatistics.load("statistics")
