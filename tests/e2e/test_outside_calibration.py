"""A stranger's calibration, in one file outside the package: in a run, after it, from Python, interrupted or wrong."""

import shutil
from pathlib import Path

import pytest

import unskew
from analysis.finished import done, refused, result

FAST = ["--rounds", "1", "--epochs", "1", "--lr", "0.05", "--engine", "loop"]
MINE = "mine_calibration:shrink"


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    """The file lies beside the user, as a stranger's would."""
    shutil.copy(Path(__file__).parent.parent / "outside_calibrations.py", tmp_path / "mine_calibration.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def names(run):
    return [row["name"] for row in result(run)["calibrations"]]


def test_it_works_in_a_run_after_a_run_and_from_python(tmp_path, capsys):
    run = tmp_path / "run"
    done(capsys, "run", *FAST, "--method", f"fedavg + {MINE}(0.1)", "--out", run)
    assert names(run) == [f"{MINE}(weight=0.1)"]
    done(capsys, "calibrate", run, f"{MINE}(0.2)", f"{MINE}(0.3) + secure", "mine_calibration:peek", "lda")
    import mine_calibration

    made = unskew.calibrate_run(run, mine_calibration.shrink(0.4), mine_calibration.shrink(0.1))
    assert list(made.calibrations) == [
        f"{MINE}(weight=0.1)", f"{MINE}(weight=0.2)", f"{MINE}(weight=0.3) + secure", "mine_calibration:peek", "lda",
        f"{MINE}(weight=0.4)",
    ]  # fmt: skip
    assert len(list(run.glob("calibration-*.safetensors"))) == 6
    assert unskew.load(run, f"{MINE}(0.2)") is not None
    assert unskew.load(run, f"{MINE}(weight=0.4)") is not None
    done(capsys, "compare", run)
    done(capsys, "report", run)


@pytest.mark.parametrize("method", ["mine_calibration:absent", "mine_calibration:nameless", "mine_calibration:number"])
def test_one_that_is_wrong_is_refused_before_a_folder_is_made(tmp_path, capsys, method):
    refused(capsys, "run", *FAST, "--method", f"fedavg + {method}", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_that_fails_leaves_the_trained_run_whole(tmp_path, capsys):
    run = tmp_path / "run"
    said = refused(capsys, "run", *FAST, "--method", "fedavg + mine_calibration:wrong", "--out", run)
    assert "mine_calibration:wrong failed: AttributeError" in said
    assert "the run finished without this calibration" in said
    assert names(run) == []
    done(capsys, "calibrate", run, MINE)
    assert names(run) == [MINE]
