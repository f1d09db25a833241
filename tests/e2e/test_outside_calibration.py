"""A stranger's calibration, in one file outside the package: in a run, after it, from Python, interrupted or wrong."""

import json
import shutil
from pathlib import Path

import pytest

import unskew
from unskew.console.main import main

FAST = ["--rounds", "1", "--epochs", "1", "--lr", "0.05", "--engine", "loop"]
MINE = "mine_calibration:shrink"


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    """The file lies beside the user, as a stranger's would."""
    shutil.copy(Path(__file__).parent.parent / "outside_calibrations.py", tmp_path / "mine_calibration.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def names(run):
    return [row["name"] for row in json.loads((run / "result.json").read_text())["calibrations"]]


def test_it_works_in_a_run_after_a_run_and_from_python(tmp_path, capsys):
    run = tmp_path / "run"
    assert command("run", *FAST, "--method", f"fedavg + {MINE}(0.1)", "--out", run) == 0
    assert names(run) == [f"{MINE}(weight=0.1)"]
    assert command("calibrate", run, f"{MINE}(0.2)", f"{MINE}(0.3) + secure", "mine_calibration:peek", "lda") == 0
    import mine_calibration

    result = unskew.calibrate_run(run, mine_calibration.shrink(0.4), mine_calibration.shrink(0.1))
    assert list(result.calibrations) == [
        f"{MINE}(weight=0.1)", f"{MINE}(weight=0.2)", f"{MINE}(weight=0.3) + secure", "mine_calibration:peek", "lda",
        f"{MINE}(weight=0.4)",
    ]  # fmt: skip
    assert len(list(run.glob("calibration-*.safetensors"))) == 6
    assert unskew.load(run, f"{MINE}(0.2)") is not None
    assert unskew.load(run, f"{MINE}(weight=0.4)") is not None
    assert command("compare", run) == 0
    assert command("report", run) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("method", ["mine_calibration:absent", "mine_calibration:nameless", "mine_calibration:number"])
def test_one_that_is_wrong_is_refused_before_a_folder_is_made(tmp_path, capsys, method):
    assert command("run", *FAST, "--method", f"fedavg + {method}", "--out", tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()
    assert "Traceback" not in capsys.readouterr().err


def test_one_that_fails_leaves_the_trained_run_whole(tmp_path, capsys):
    run = tmp_path / "run"
    assert command("run", *FAST, "--method", "fedavg + mine_calibration:wrong", "--out", run) == 2
    said = capsys.readouterr().err
    assert "mine_calibration:wrong failed: AttributeError" in said
    assert "the run is finished without this calibration" in said
    assert names(run) == []
    assert command("calibrate", run, MINE) == 0
    assert names(run) == [MINE]
