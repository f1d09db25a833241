"""Several runs in one figure: seeds joined, sizes as chosen, refusals before anything is drawn."""

from pathlib import Path

import pytest

import unskew
from analysis.finished import command, copied
from unskew.core.errors import UserError


@pytest.fixture
def runs(runs_of, tmp_path):
    """Copies: values that are taken are stored with the run."""
    made = [runs_of(seed=0), runs_of(seed=1), runs_of(method="fedavgm(0.5)")]
    return [copied(each, tmp_path, f"copy{place}") for place, each in enumerate(made)]


def test_runs_of_one_setting_are_one_line_with_a_band(runs, tmp_path):
    files = unskew.draw_runs(runs, "curves", out=tmp_path)
    assert [file.name for file in files] == [f"curves-{axis}.svg" for axis in ("round", "batches", "bytes", "seconds")]
    text = files[0].read_text()
    assert "fedavg (2 seeds)" in text
    assert "fedavgm(0.5)" in text
    assert text.count("fill-opacity=") == 1  # one band


def test_one_axis_size_title_and_format_are_chosen(runs, tmp_path, capsys):
    words = ["analyse", *runs, "--against", "bytes", "--width", "8cm", "--title", "Mine", "--out", tmp_path]
    code, said, _ = command(capsys, *words)
    assert (code, said.strip()) == (0, str(tmp_path / "curves-bytes.svg"))
    text = (tmp_path / "curves-bytes.svg").read_text()
    assert 'width="3.15in"' in text
    assert ">Mine<" in text
    assert command(capsys, *words, "--format", "pdf")[0] == 0
    assert (tmp_path / "curves-bytes.pdf").read_bytes().startswith(b"%PDF")


def test_the_lines_have_the_names_that_were_given(runs, tmp_path, capsys):
    words = ["analyse", *runs, "--out", tmp_path / "c", "--against", "round", "--serif"]
    code, _, error = command(capsys, *words, "--names", "Ours,Theirs,Mine")
    assert (code, "--names has 3 names, but the legend has 2: fedavg (2 seeds); fedavgm(0.5)" in error) == (2, True)
    assert command(capsys, *words, "--names", "Ours, Theirs")[0] == 0
    text = (tmp_path / "c/curves-round.svg").read_text()
    assert ">Ours<" in text
    assert ">Theirs<" in text


def test_figures_go_beside_the_runs(runs, tmp_path, capsys, monkeypatch):
    for place, run in enumerate(runs):
        (tmp_path / "all" / f"run{place}").parent.mkdir(exist_ok=True)
        (tmp_path / "all" / f"run{place}").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert command(capsys, "analyse", "all", "--against", "round")[1].strip().endswith("all/figures/curves-round.svg")
    said = command(capsys, "analyse", "all/run0", "all/run2", "curves", "--against", "round")[1]
    assert said.strip().endswith("all/figures/curves-round.svg")


def test_one_run_in_a_chosen_size(runs, tmp_path):
    (file,) = unskew.draw_runs([runs[0]], out=tmp_path, against="round", width="6cm", height="5cm")
    assert 'width="2.36in" height="1.97in"' in file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["projection"], "projection cannot compare runs; measures that can: skew"),
        (["--against", "time"], "--against time: "),
        (["--width", "8"], "--width 8: give a length from"),
        (["norms", "--against", "round"], "--against is only for curves, not for norms"),
        (["nowhere"], "no measure is called 'nowhere'"),
        (["runs/nowhere"], "runs/nowhere does not exist"),
        (["--format", "gif"], "--format gif"),
    ],
)
def test_a_mistake_is_one_message(runs, tmp_path, capsys, words, message):
    code, _, error = command(capsys, "analyse", *runs[:2], *words, "--out", tmp_path / "figures")
    assert code == 2
    assert message in error
    assert not Path(tmp_path / "figures").exists()


def test_no_run_at_all_is_refused():
    with pytest.raises(UserError, match="no runs; give the directories"):
        unskew.draw_runs([])
