"""analyse and report as a user has them: what is printed, what is written, what is refused and how."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.finished import (
    EVERYTHING,
    SMALL,
    changed,
    command,
    content,
    copied,
    done,
    finished,
    images,
    recorded,
    refused,
    result,
    run,
    runs_of,
    unsealed,
)  # fmt: skip
from unskew.analysis import MEASURES
from unskew.console.main import main

__all__ = ["finished", "run", "runs_of"]

UNSKEW = [sys.executable, "-m", "unskew"]
FAST = ["--without", "projection", "--without", "inversion", "--without", "separability"]


def away(run):
    """Move the images where the run does not look; the folder they are in then."""
    other = run.parent / "elsewhere"
    other.mkdir()
    (run.parent / "digits.npz").rename(other / "digits.npz")
    return other


# analyse


def test_analyse_says_what_it_found_and_where_the_pictures_are(run, capsys):
    before = content(run)
    said = done(capsys, "analyse", run, "skew", "cka(clients=2)")
    assert re.search(r"^skew: 5 clients hold ", said, re.M)
    assert re.search(r"^cka\(clients=2\): The .* layer ", said, re.M)
    files = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    assert files
    assert all((run / "figures") in Path(file).parents for file in files)
    assert all(Path(file).read_text().startswith("<svg") for file in files)
    assert sorted(path.name for path in (run / "figures").glob("*.json")) == ["cka-clients-2.json", "skew.json"]
    assert content(run) == before


def test_piped_output_is_plain_lines(run):
    """No colour, no cursor, no line broken at a terminal's width."""
    words = [*UNSKEW, "analyse", str(run), "skew", "confusion"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\x1b" not in ended.stdout
    assert "\r" not in ended.stdout
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) > 100
    assert all(re.match(r"skew: |confusion: |  /|[a-z][^:]* …$", line) for line in lines), lines


def test_without_names_all_are_taken_and_what_is_missing_is_said(run, capsys):
    away(run)
    said = done(capsys, "analyse", run)
    for name in ("skew", "curves", "norms", "drift", "separability"):
        assert re.search(rf"^{name}: (?!not shown)", said, re.M), name
    for name in ("cka", "projection", "confusion", "inversion"):
        assert re.search(rf"^{name}: not shown: .*digits\.npz does not exist", said, re.M), name
    assert re.search(r"^norms: note: norms of local classifiers are shown only as recorded", said, re.M)


def test_a_measure_named_that_cannot_be_taken_is_one_message(run, capsys):
    away(run)
    error = refused(capsys, "analyse", run, "cka")
    assert "cka" in error
    assert "digits.npz does not exist" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("form", "begins"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_pictures_come_in_the_form_that_is_asked_for(run, capsys, form, begins):
    done(capsys, "analyse", run, "drift", "--format", form)
    files = list((run / "figures").glob(f"*.{form}"))
    assert len(files) >= 2
    assert all(file.read_bytes().startswith(begins) for file in files)


def test_another_form_is_refused(run, capsys):
    error = refused(capsys, "analyse", run, "drift", "--format", "gif")
    assert "--format gif" in error
    assert not (run / "figures").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["ckaa"], "did you mean 'cka'?"),
        (["confuson"], "did you mean 'confusion'?"),
        (["cka(client=2)"], "did you mean 'clients'?"),
        (["cka(round=9)"], "the run has rounds 1 to 3"),
        (["cka(clients=1)"], "two clients"),
        (["norms(clients=0)"], ""),
        (["drift(clients=-1)"], ""),
        (["inversion(lr=-1)"], ""),
        (["skew(clients=0)"], "at least one client"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(run, capsys, words, hint):
    assert hint in refused(capsys, "analyse", run, *words)


# report


def test_a_report_is_one_file_that_says_what_it_found(run, capsys):
    said = done(capsys, "report", run, *FAST)
    page = (run / "report.html").read_text()
    assert said.splitlines()[-1] == f"written to {run / 'report.html'}"
    assert "5 clients hold" in said
    assert "5 clients hold" in page
    assert page.lower().startswith("<!doctype html>")
    assert "<svg" in page
    for outside in re.findall(r'(?:src|href)\s*=\s*["\']([^"\'#][^"\']*)', page):
        assert outside.startswith("data:"), outside
    assert re.search(r"projection.*left out|left out.*projection", said)


def test_a_report_without_its_data_set_is_made_with_what_can_be_shown(run, capsys):
    other = away(run)
    said = done(capsys, "report", run)
    page = (run / "report.html").read_text()
    for text in (said, page):
        assert "digits.npz does not exist" in text
    assert "Who has what" in page
    said = done(capsys, "report", run, "--data-dir", other, "--only", "cka", "--only", "confusion")
    assert "does not exist" not in said


def test_a_report_with_its_data_set_again_lacks_nothing(run, capsys):
    """The page made without it has stored what it could; the next one must not be content with that."""
    other = away(run)
    done(capsys, "report", run, *FAST)
    said = done(capsys, "report", run, *FAST, "--data-dir", other)
    assert "does not exist" not in said
    assert "does not exist" not in (run / "report.html").read_text()


def test_values_taken_by_analyse_are_used_by_the_report_and_again_takes_them_anew(run, capsys):
    done(capsys, "analyse", run, "skew", "cka")
    file = run / "figures" / "cka.json"
    changed(file, lambda values: values["values"].update(means=[0.123, 0.456, 0.789, 0.012]))
    said = done(capsys, "report", run, "--only", "cka")
    assert "the most similar is fc1 (0.79)" in said
    said = done(capsys, "report", run, "--only", "cka", "--again")
    assert "0.79" not in said
    assert "0.789" not in file.read_text()


def test_what_is_stored_and_damaged_is_made_anew(run, capsys):
    done(capsys, "analyse", run, "skew")
    (run / "figures" / "skew.json").write_text('{"unskew": 1')
    assert "delete it so that it is recreated" in refused(capsys, "report", run, "--only", "skew")
    unsealed(run)
    assert "5 clients hold" in done(capsys, "report", run, "--only", "skew")


def test_a_report_goes_where_it_is_told_and_makes_the_folder(run, capsys, tmp_path):
    target = tmp_path / "new" / "folder" / "page.html"
    done(capsys, "report", run, "--only", "skew", "--out", target)
    assert target.exists()
    assert not (run / "report.html").exists()
    for wrong in ("page.pdf", "page", "page.txt"):
        assert "the file must end in .html" in refused(capsys, "report", run, "--out", tmp_path / wrong)
        assert not (tmp_path / wrong).exists()
    (tmp_path / "taken.html").mkdir()
    assert "cannot be written" in refused(capsys, "report", run, "--only", "skew", "--out", tmp_path / "taken.html")


@pytest.mark.parametrize("options", [{"method": "centralised"}, {"clients": 1, "partition": "iid"}])
def test_runs_of_one_client_are_reported(runs_of, tmp_path, capsys, options):
    path = copied(runs_of(**options), tmp_path)
    said = done(capsys, "report", path, *FAST)
    assert "this run has only one per round" in said
    assert (path / "report.html").exists()


def test_two_runs_make_a_comparison(run, runs_of, capsys, tmp_path):
    other = copied(runs_of(method="moon"), tmp_path, "other")
    assert "--out FILE.html" in refused(capsys, "report", run, other)
    target = tmp_path / "both.html"
    said = done(capsys, "report", run, other, "--out", target)
    assert said.splitlines()[-1] == f"written to {target}"
    page = target.read_text()
    assert "moon" in page
    assert "Too few seeds to name a winner (one seed each)" in said
    assert not (run / "report.html").exists()
    assert "a run is given twice" in refused(capsys, "report", run, run, "--out", target)


def test_an_unknown_measure_is_refused_by_report_too(run, capsys):
    for option in ("--only", "--without"):
        assert "did you mean 'cka'?" in refused(capsys, "report", run, option, "ckaa")
    assert not (run / "report.html").exists()


# Folders that are not what they should be


def spoil(file, length=None):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 if length is None else length])


SPOILT = {
    "no folder": (lambda run: run.rename(run.parent / "gone"), "does not exist"),
    "no run": (lambda run: [file.unlink() for file in run.iterdir() if file.is_file()], "it is not a run directory"),
    "not finished": (lambda run: (run / "result.json").unlink(), "finish it with: unskew resume"),
    "result": (lambda run: spoil(run / "result.json"), "result.json"),
    "config": (lambda run: (run / "config.toml").write_text("rounds = ["), "config.toml"),
    "no config": (lambda run: (run / "config.toml").unlink(), "config.toml"),
    "model": (lambda run: spoil(run / "model.safetensors"), "model.safetensors"),
    "no model": (lambda run: (run / "model.safetensors").unlink(), "model.safetensors"),
    "partition": (lambda run: spoil(run / "partition.npz"), "partition.npz"),
    "no partition": (lambda run: (run / "partition.npz").unlink(), "partition.npz"),
    "metrics": (lambda run: (run / "metrics.jsonl").write_text("{\n{\n"), "metrics.jsonl is damaged"),
    "metrics of words": (
        lambda run: (run / "metrics.jsonl").write_text(
            (run / "metrics.jsonl").read_text().replace('"accuracy": 0', '"accuracy": "much", "was": 0')
        ),
        "metrics.jsonl",
    ),
    "records": (lambda run: (run / "during.jsonl").write_text("nonsense\n"), "during.jsonl is damaged"),
}


@pytest.mark.parametrize("words", [["analyse"], ["report", *FAST]], ids=["analyse", "report"])
@pytest.mark.parametrize("how", SPOILT)
def test_a_folder_that_is_spoilt_is_one_message(run, capsys, how, words):
    spoil_it, message = SPOILT[how]
    spoil_it(unsealed(run))
    measures = ["skew", "curves", "norms", "confusion"] if words == ["analyse"] else []
    assert message in refused(capsys, words[0], run, *words[1:], *measures)


@pytest.mark.parametrize("how", [spoil, Path.unlink], ids=["damaged", "gone"])
def test_a_calibration_that_cannot_be_read_is_left_out_with_a_note(run, capsys, how):
    how(unsealed(run) / "calibration-lda.safetensors")
    with pytest.raises(SystemExit) as ended:
        main(["analyse", str(run), "confusion", "norms"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "the calibration lda is left out" in said
    assert "calibration-lda.safetensors" in said
    assert "lda" not in json.loads((run / "figures" / "norms.json").read_text())["values"]["calibrated"]


# While training


def test_during_is_an_option_of_run(tmp_path, capsys):
    file = images(tmp_path)
    words = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    words += ["--data", f"arrays:{file}", "--out", str(tmp_path / "run")]
    done(capsys, "run", *words, "--during", EVERYTHING)
    assert [row["round"] for row in recorded(tmp_path / "run")] == [1, 2, 3]
    assert f'during = "{EVERYTHING}"' in (tmp_path / "run" / "config.toml").read_text()
    error = refused(capsys, "run", *words[:-1], str(tmp_path / "other"), "--during", "norm(every=2)")
    assert "did you mean 'norms'?" in error
    assert error.splitlines()[-1].strip() == "^"
    assert not (tmp_path / "other").exists()
    assert "--during is empty" in refused(capsys, "run", *words[:-1], str(tmp_path / "other"), "--during", "")


@pytest.mark.heavy
def test_everything_of_a_run_by_the_shell(run, capsys):
    said = done(capsys, "analyse", run)
    for name in MEASURES:
        assert re.search(rf"^{name}: (?!not shown)", said, re.M), name
    said = done(capsys, "report", run)
    assert "not shown" not in said
    code, _, _ = command(capsys, "report", run)
    assert code == 0
    assert f"{result(run)['accuracy']:.2%}" in (run / "report.html").read_text()
