"""Several runs as one page: grouped over seeds, and honest about what is not known of some."""

from contextlib import ExitStack
from dataclasses import replace
from statistics import mean, stdev

import pytest

from analysis.finished import SMALL, copied, finished, result, run, runs_of, section
from unskew.analysis.measure import Table
from unskew.core.errors import UserError
from unskew.report.page import to_html
from unskew.report.write import comparison_page
from unskew.runs import train
from unskew.runs.finished import FinishedRun

__all__ = ["finished", "run", "runs_of"]


def compared(*paths, only=(), again=False):
    with ExitStack() as stack:
        return comparison_page([stack.enter_context(FinishedRun(path)) for path in paths], only, again)


@pytest.fixture
def pair(runs_of, tmp_path):
    """fedavg and moon, nothing measured yet."""
    return copied(runs_of(), tmp_path, "fedavg"), copied(runs_of(method="moon"), tmp_path, "moon")


@pytest.fixture
def seeds(runs_of, tmp_path):
    return [copied(runs_of(seed=seed), tmp_path, f"seed{seed}") for seed in (0, 1, 2)]


def tables(made):
    return {part.title: part for part in section(made, "runs").elements if isinstance(part, Table)}


def test_results_stand_side_by_side_and_with_one_seed_there_is_no_winner(pair):
    made = compared(*pair)
    table = tables(made)["Results"]
    assert [row[0] for row in table.rows] == ["fedavg", "moon"]
    place = [column.name for column in table.columns].index("accuracy")
    accuracies = [result(path)["accuracy"] for path in pair]
    assert [row[place] for row in table.rows] == accuracies
    assert "Over seeds" not in tables(made)
    assert made.facts[0] == ("runs", "2")
    assert made.findings[0].startswith("Too few seeds to name a winner (one seed each)")
    assert all(f"{accuracy:.2%}" in made.findings[0] for accuracy in accuracies)
    assert to_html(made)


def test_three_findings_are_open_and_the_others_folded(pair):
    page = replace(compared(*pair), findings=["one", "two", "three", "four", "five"])
    before, _, after = to_html(page).partition("<summary>2 more</summary>")
    assert "three" in before
    assert "four" in after
    assert "<summary>" not in to_html(replace(page, findings=["one", "two", "three"]))


def test_seeds_are_grouped_with_mean_and_deviation_in_the_table_and_the_charts(seeds, pair):
    made = compared(*seeds, pair[1])
    accuracies = [result(path)["accuracy"] for path in seeds]
    first, second = tables(made)["Over seeds"].rows
    assert first[1:3] == [3, f"{100 * mean(accuracies):.2f} ± {100 * stdev(accuracies):.2f}"]
    assert second[1] == 1
    assert "±" not in second[2]
    bars, whisker = section(made, "runs").elements[0].marks
    assert list(bars.height) == pytest.approx([mean(accuracies), result(pair[1])["accuracy"]])
    assert whisker.x[1] - whisker.x[0] == pytest.approx(2 * stdev(accuracies))
    marks = section(made, "curves").elements[0].marks
    assert sorted(type(mark).__name__ for mark in marks) == ["Band", "Line", "Line"]
    assert to_html(made)


def test_the_best_calibration_over_seeds_has_a_mean_and_a_deviation_of_its_own(runs_of, tmp_path):
    paths = [copied(runs_of(seed=seed, calibrations=("lda",)), tmp_path, f"seed{seed}") for seed in (0, 2)]
    before = [result(path)["accuracy"] for path in paths]
    after = [result(path)["calibrations"][0]["accuracy"] for path in paths]
    assert stdev(before) != pytest.approx(stdev(after))
    (row,) = tables(compared(*paths))["Over seeds"].rows
    own, calibrated = (f"{100 * mean(part):.2f} ± {100 * stdev(part):.2f}" for part in (before, after))
    assert row[1:] == [2, own, "lda", calibrated]


def test_the_table_has_the_settings_that_differ_and_a_note_with_the_others(runs_of, tmp_path):
    paths = [copied(runs_of(lr=lr), tmp_path, f"lr{lr}") for lr in (0.05, 0.01)]
    table = tables(compared(*paths))["Results"]
    names = [column.name for column in table.columns]
    assert names[:4] == ["run", "lr", "EMD", "accuracy"]
    assert [row[1] for row in table.rows] == [0.05, 0.01]
    assert "method fedavg" in table.note
    assert "batch" in table.note


def test_what_calibration_changes_is_said_in_points(runs_of, tmp_path):
    path = copied(runs_of(calibrations=("lda",)), tmp_path, "calibrated")
    other = copied(runs_of(lr=0.01), tmp_path, "other")
    gain = 100 * (result(path)["calibrations"][0]["accuracy"] - result(path)["accuracy"])
    assert f"Calibration changes accuracy by {gain:+.2f} points (1 run)." in compared(path, other).findings


def test_a_run_named_twice_is_refused(pair, tmp_path):
    for twice in ((pair[0], pair[0]), (pair[0], tmp_path / "moon" / ".." / "fedavg")):
        with pytest.raises(UserError, match="each only once"):
            compared(*twice)


def test_runs_of_one_name_are_told_apart_by_their_folders(runs_of, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [copied(runs_of(seed=seed), tmp_path / name) for seed, name in enumerate("ab")]
    assert [row[0] for row in tables(compared(*paths))["Results"].rows] == ["a/run", "b/run"]


def test_what_was_not_measured_is_said_and_what_was_is_shown(pair):
    made = compared(*pair)
    (said,) = section(made, "cka").missing
    assert all(part in said for part in ("fedavg", "moon", "--only cka"))
    assert section(made, "cka").elements == []
    assert section(made, "skew").elements
    assert not (pair[0] / "figures" / "cka.json").exists()
    made = compared(*pair, only=("cka",))
    assert not section(made, "cka").missing
    (chart,) = section(made, "cka").elements
    assert [line.name for line in chart.marks] == ["fedavg", "moon"]
    assert section(compared(*pair), "cka").elements, "what was stored is shown without being asked for"
    assert to_html(made)


@pytest.mark.parametrize("name", ["cka", "norms"])
def test_again_takes_anew_what_was_taken_before(pair, name):
    """--again must not make vanish what is stored."""
    compared(*pair, only=(name,))
    made = compared(*pair, again=True)
    assert section(made, name).elements
    assert not section(made, name).missing


def test_why_a_measure_that_was_asked_for_cannot_be_taken_is_said(pair, tmp_path):
    (tmp_path / "digits.npz").unlink()
    made = compared(*pair, only=("confusion",))
    said = " ".join(section(made, "confusion").missing)
    assert "digits.npz does not exist" in said
    assert "add --only confusion" not in said


def test_runs_on_other_data_stand_on_one_page_and_classes_that_are_left_out_are_named(runs_of, tmp_path):
    """Four classes beside ten: a run that is not in the picture must not just be missing."""
    one = copied(runs_of(), tmp_path, "arrays")
    other = tmp_path / "digits"
    train.run(out=other, **{**SMALL, "data": "digits", "rounds": 1, "batch": 64})
    made = compared(one, other, only=("confusion", "cka", "norms"))
    assert len(dict(made.facts)["data"].split(", ")) == 2
    shown = {mark.name for part in section(made, "confusion").elements for mark in part.marks}
    said = " ".join(section(made, "confusion").missing)
    assert all(name in shown or name in said for name in ("arrays", "digits"))
    assert to_html(made)
