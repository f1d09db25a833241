"""analyse and report as a user has them: what is printed, what is written, what is refused and how."""

import re
from pathlib import Path

import pytest

from analysis.finished import content, copied, done, finished, refused, run, runs_of, unsealed

__all__ = ["finished", "run", "runs_of"]

FAST = ["--without", "projection", "--without", "inversion", "--without", "separability"]


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


def test_without_names_all_are_taken_and_what_is_missing_is_said(run, capsys):
    (run.parent / "digits.npz").unlink()
    said = done(capsys, "analyse", run)
    for name in ("skew", "curves", "norms", "drift", "separability"):
        assert re.search(rf"^{name}: (?!not shown)", said, re.M), name
    for name in ("cka", "projection", "confusion", "inversion"):
        assert re.search(rf"^{name}: not shown: .*digits\.npz does not exist", said, re.M), name
    assert re.search(r"^norms: note: norms of local classifiers are shown only as recorded", said, re.M)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["ckaa"], "did you mean 'cka'?"),
        (["cka(client=2)"], "did you mean 'clients'?"),
        (["cka(round=9)"], "the run has rounds 1 to 3"),
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
    assert "each only once" in refused(capsys, "report", run, run, "--out", target)


# Folders that are not what they should be


def spoil(file, length=None):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 if length is None else length])


SPOILT = {
    "no folder": (lambda run: run.rename(run.parent / "gone"), "does not exist"),
    "not finished": (lambda run: (run / "result.json").unlink(), "finish it with: unskew resume"),
    "result": (lambda run: spoil(run / "result.json"), "result.json"),
    "config": (lambda run: (run / "config.toml").write_text("rounds = ["), "config.toml"),
    "model": (lambda run: spoil(run / "model.safetensors"), "model.safetensors"),
    "partition": (lambda run: spoil(run / "partition.npz"), "partition.npz"),
    "metrics": (lambda run: (run / "metrics.jsonl").write_text("{\n{\n"), "metrics.jsonl line 1 cannot be read"),
    "records": (lambda run: (run / "during.jsonl").write_text("nonsense\n"), "during.jsonl line 1 cannot be read"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_folder_that_is_spoilt_is_one_message(run, capsys, how):
    spoil_it, message = SPOILT[how]
    spoil_it(unsealed(run))
    assert message in refused(capsys, "analyse", run, "skew", "curves", "norms", "confusion")
