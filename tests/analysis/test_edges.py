"""Runs that went wrong, folders that may only be read, populations larger than what is recorded."""

from dataclasses import replace

import pytest

from analysis.finished import finished_run, measured
from unskew.analysis import MEASURES, analyse
from unskew.core.errors import Missing, UserError
from unskew.report.write import make_report, run_page, take_all, write_report


def test_a_measure_that_is_no_number_is_missing_and_the_page_is_made_without_it(run, monkeypatch):
    taken = MEASURES["curves"].take
    broken = replace(MEASURES["curves"], take=lambda opened: replace(taken(opened), loss=[float("nan")]))
    monkeypatch.setitem(MEASURES, "curves", broken)
    with finished_run(run) as opened:
        with pytest.raises(Missing, match="diverged"):
            measured(opened, "curves")
        found = take_all(opened, only=["skew", "curves"])
        page = run_page(opened, found)
    assert "diverged" in str(found[1][1])
    assert not (run / "figures" / "curves.json").exists()
    assert [section.name for section in page.sections if section.missing] == ["curves"]


def test_a_folder_that_may_only_be_read_can_still_be_looked_at(run, tmp_path, monkeypatch):
    def refused(path, contents):
        raise UserError(f"{path} cannot be written: Read-only file system")

    monkeypatch.setattr("unskew.analysis.measure.write_sealed", refused)
    _, made = make_report(run, out=tmp_path / "page.html", only=["skew", "curves"])
    assert (tmp_path / "page.html").stat().st_size > 1000
    notes = [note for section in made.sections for note in section.notes]
    assert len(notes) == 2
    assert all("Read-only" in note for note in notes)


def test_a_comparison_refuses_what_it_would_not_heed(run, runs_of, tmp_path):
    with pytest.raises(UserError, match="--without is only for the report of one run"):
        write_report(run, runs_of(), out=tmp_path / "both.html", without=["skew"])
    with pytest.raises(UserError, match="--only drift: this measure cannot compare runs; these can: skew, curves"):
        write_report(run, runs_of(), out=tmp_path / "both.html", only=["drift"])
    assert not (tmp_path / "both.html").exists()


def test_what_is_not_shown_is_said(run):
    found = analyse(run, "skew(clients=2)", "cka(clients=3)")
    assert found["skew(clients=2)"].notes == ("2 of 5 clients are shown, evenly spaced by size",)
    assert found["cka(clients=3)"].notes == ("only the models of 3 of 5 clients are compared",)
