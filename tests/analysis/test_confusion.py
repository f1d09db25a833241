"""What is taken for what: tables that add up to what the run's result says."""

from dataclasses import replace

import pytest

from analysis.finished import CALIBRATIONS, NAMES, finished_run, result, undisturbed
from unskew.analysis import confusion
from unskew.analysis.confusion import Confusion
from unskew.charts.files import svg
from unskew.core.errors import UserError


def right(table):
    return sum(table[c][c] for c in range(len(table)))


def test_rows_add_up_to_the_images_of_each_class_and_diagonals_to_the_result(finished):
    """For the run's own classifier and each calibration: ccvr, lda, lda(layers=2)."""
    with finished_run(finished) as opened, undisturbed():
        found = confusion.take_confusion(opened)
        labels = opened.images.test.labels.tolist()
    assert found.classes == list(NAMES)
    assert found.total == [labels.count(c) for c in range(10)]
    assert list(found.tables) == ["before", *CALIBRATIONS]
    said = {"before": result(finished)["accuracy"]}
    said |= {row["name"]: row["accuracy"] for row in result(finished)["calibrations"]}
    assert len(set(said.values())) > 2
    for name, table in found.tables.items():
        assert [sum(row) for row in table] == found.total
        assert right(table) / 120 == pytest.approx(said[name], abs=1e-12), name
        assert found.overall(name) == pytest.approx(said[name], abs=1e-12)


@pytest.mark.parametrize("method", ["clsnorm", "fedavg + clsnorm + ccvr(per_class=30, epochs=2)"])
def test_a_classifier_that_is_transformed_counts_as_it_is_used(runs_of, method):
    run = runs_of(method=method)
    with finished_run(run) as opened:
        found = confusion.take_confusion(opened)
    assert right(found.tables["before"]) / 120 == pytest.approx(result(run)["accuracy"], abs=1e-12)
    for row in result(run)["calibrations"]:
        assert right(found.tables[row["name"]]) / 120 == pytest.approx(row["accuracy"], abs=1e-12)


def test_the_best_calibrations_are_shown_where_not_all_are(finished):
    ranked = sorted(result(finished)["calibrations"], key=lambda row: -row["accuracy"])
    with finished_run(finished) as opened:
        found = confusion.take_confusion(opened, calibrations=1)
        assert list(found.tables) == ["before", ranked[0]["name"]]
        assert opened.notes == ["showing the 1 most accurate of 3 calibrations"]
        assert list(confusion.take_confusion(opened, calibrations=0).tables) == ["before"]
        with pytest.raises(UserError, match="0 or more"):
            confusion.take_confusion(opened, calibrations=-1)


def made():
    """Class b has no image; a is got right once of 4, c twice of 2; after, a three times."""
    before = [[1, 1, 2], [0, 0, 0], [0, 0, 2]]
    after = [[3, 0, 1], [0, 0, 0], [1, 0, 1]]
    return Confusion(["a", "b", "c"], [4, 0, 2], {"before": before, "lda": after})


def test_accuracy_of_each_class_and_of_all():
    assert made().accuracy("before") == [0.25, None, 1.0]
    assert made().accuracy("lda") == [0.75, None, 0.5]
    assert made().overall("before") == 0.5
    assert made().overall("lda") == pytest.approx(4 / 6)


def test_the_words_name_the_worst_class_and_what_calibration_made_of_it():
    first, second = confusion.CONFUSION.findings(made())
    assert "lda raises accuracy" in first
    assert "50.00% to 66.67%" in first
    assert "1 of 2 classes gain and 1 lose" in first
    assert "c" in first.rpartition("worst")[2]
    assert "50%" in first.rpartition("worst")[2]
    assert "25% (a)" in second
    assert "100% (c)" in second
    only = replace(made(), tables={"before": made().tables["before"]})
    assert confusion.CONFUSION.findings(only) == [second]


def test_the_best_of_as_many_as_were_tried_also_where_fewer_are_shown():
    first = confusion.CONFUSION.findings(replace(made(), tried=8))[0]
    assert "Calibration by lda, the best of 8 on the test images, raises" in first
    assert "the best of" not in confusion.CONFUSION.findings(made())[0]


def test_a_loss_is_called_one():
    before, after = made().tables.values()
    turned = replace(made(), tables={"before": after, "lda": before})
    assert "lda lowers accuracy" in confusion.CONFUSION.findings(turned)[0]
    same = replace(made(), tables={"before": before, "lda": before})
    assert "lda hardly changes accuracy" in confusion.CONFUSION.findings(same)[0]


def test_pictures_of_the_tables():
    charts = confusion.CONFUSION.draw(made())
    assert [chart.name for chart in charts] == ["confusion-classes", "confusion-before", "confusion-lda"]
    assert "50.00% correct" in charts[1].title
    cells = charts[1].marks[0]
    assert cells.values == [[0.25, 0.25, 0.5], [None] * 3, [None, None, 1.0]]
    each = confusion._draw_classes(made())
    assert list(each) == ["a", "b", "c"]
    assert [list(bars.height) for bars in each["a"].marks] == [[0.25, 0.25, 0.5], [0.75, 0.0, 0.25]]
    assert all(svg(chart).startswith("<svg") for chart in [*charts, *each.values()])


def test_more_classes_than_can_be_read_have_no_table():
    many = 101
    found = Confusion([str(c) for c in range(many)], [1] * many, {}, right={"before": [1] * many})
    assert [chart.name for chart in confusion.CONFUSION.draw(found)] == ["confusion-classes"]
    assert svg(confusion.CONFUSION.draw(found)[0]).startswith("<svg")
