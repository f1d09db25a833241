"""From a text and a run folder to values, charts and files: what is stored is used again while it fits."""

import importlib
import json
import re
from dataclasses import fields

import pytest

from analysis.finished import changed, finished_run, known, measured, undisturbed, unsealed
from unskew import analysis
from unskew.analysis import MEASURES, parse_measure, skew
from unskew.analysis.measure import Measured, slug
from unskew.core.errors import Missing, UserError
from unskew.runs import finished

LIGHT = ("skew", "curves", "norms", "confusion", "drift", "cka")


# The text


def test_a_measure_is_named_in_its_plainest_spelling():
    request = parse_measure(" cka( clients = 3,round=0 )")
    assert (request.name, request.text) == ("cka", "cka(clients=3, round=0)")
    assert request.take.keywords == {"clients": 3, "round": 0}
    assert request.measure is MEASURES["cka"]
    assert parse_measure("norms").text == "norms"
    assert parse_measure("norms(local=FALSE)").take.keywords == {"local": False}


@pytest.mark.parametrize(
    ("source", "message", "column"),
    [
        ("ckaa", "no measure is called 'ckaa'; did you mean 'cka'?", 0),
        (" drif", "no measure is called 'drif'; did you mean 'drift'?", 1),
        ("cka + norms", "give measures separately, not joined with +", 6),
        ("cka(client=3)", "measure cka has no knob 'client'; did you mean 'clients'?", 0),
        ("cka(run=3)", "measure cka has no knob 'run'; ", 0),
        ("cka(clients=many)", "measure cka: clients must be a whole number, not many", 0),
        ("curves(3)", "measure curves takes no values, but 1 were given", 0),
        ("cka(", "measure: expected a value, found 'the end'", 4),
    ],
)
def test_what_cannot_be_read_is_pointed_at(source, message, column):
    with pytest.raises(UserError, match=re.escape(message)) as said:
        parse_measure(source)
    first, shown, caret = str(said.value).split("\n")
    assert first.startswith(message)
    assert (shown, caret) == (f"  {source}", f"  {' ' * column}^")


def test_every_measure_is_one_file_with_one_record():
    for name, measure in MEASURES.items():
        module = importlib.import_module(f"unskew.analysis.{name}")
        assert getattr(module, name.upper()) is measure
        assert measure.take.__name__ == f"take_{name}"
        for function in (measure.take, measure.draw, measure.findings):
            assert function.__module__ == module.__name__
        assert measure.take.__doc__
        assert fields(measure.values)
        assert measure.title
        assert measure.text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cka(round=-1)", "cka(round=1)"),
        ("cka(clients=2, round=1)", "cka(clients=21)"),
        ("inversion(smooth=1e-05)", "inversion(smooth=100000.0)"),
    ],
)
def test_measures_with_other_knobs_have_other_files(one, other):
    assert slug(parse_measure(one).text) != slug(parse_measure(other).text)


# The store


def stored(run, name):
    return run / "figures" / f"{name}.json"


def marked(run, name):
    """Leave a mark in what is stored, which tells whether it is used again."""
    changed(stored(run, name), lambda values: values.update(notes=["seen before"]))


def test_values_are_stored_with_what_they_stand_on(run):
    with finished_run(run) as opened:
        found = measured(opened, "confusion(calibrations=2)")
        said = json.loads(stored(run, "confusion-calibrations-2").read_text())
        assert said["measure"] == "confusion(calibrations=2)"
        assert said["weights_sha256"] == opened.result.weights_sha256
        assert said["values"]["tables"] == found.values.tables
        assert said["notes"] == ["showing the 2 most accurate of 3 calibrations"] == list(found.notes)
    assert sorted(path.name for path in (run / "figures").iterdir()) == ["confusion-calibrations-2.json"]


@pytest.mark.parametrize("name", LIGHT)
def test_what_was_stored_is_used_again_and_says_the_same(run, name):
    with finished_run(run) as opened:
        first = measured(opened, name)
    marked(run, name)
    with finished_run(run) as opened:
        again = measured(opened, name, again=False)
        assert again.notes == ("seen before",)
        assert known(opened, name) == again
        assert again.findings == first.findings
        assert [chart.name for chart in again.charts] == [chart.name for chart in first.charts]
        assert measured(opened, name).notes != ("seen before",)
        assert measured(opened, name, again=False).notes != ("seen before",)


@pytest.mark.parametrize("name", ["skew", "cka"])
def test_other_weights_make_it_anew(run, name):
    with finished_run(run) as opened:
        measured(opened, name)
    marked(run, name)
    changed(stored(run, name), lambda values: values.update(weights_sha256="0" * 64))
    with finished_run(run) as opened:
        assert known(opened, name) is None
        assert measured(opened, name, again=False).notes != ("seen before",)


def test_a_calibration_more_makes_those_anew_that_show_it(run):
    with finished_run(run) as opened:
        for name in ("confusion", "norms", "curves", "skew", "cka"):
            measured(opened, name)
    for name in ("confusion", "norms", "curves", "skew", "cka"):
        marked(run, name)
    finished.calibrate_run(run, "lda(ridge=0.5)")
    with finished_run(run) as opened:
        again = {name: measured(opened, name, again=False) for name in ("confusion", "norms", "curves", "skew", "cka")}
    assert [name for name, each in again.items() if each.notes == ("seen before",)] == ["skew", "cka"]
    assert "lda(ridge=0.5)" in again["confusion"].values.tables
    assert "lda(ridge=0.5)" in again["norms"].values.calibrated


DAMAGE = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:200]),
    "no values": lambda file: changed(file, lambda v: v.pop("values")),
    "values of another kind": lambda file: changed(file, lambda v: v.update(values=[1, 2])),
    "another version": lambda file: changed(file, lambda v: v.update(unskew=v["unskew"] + 1)),
    "rows of other lengths": lambda file: changed(file, lambda v: v["values"]["classes"].pop()),
    "words for numbers": lambda file: changed(file, lambda v: v["values"].update(emd="much", few="some")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_what_is_damaged_is_made_anew(run, how):
    with finished_run(run) as opened:
        first = measured(opened, "skew")
    DAMAGE[how](stored(unsealed(run), "skew"))
    with finished_run(run) as opened:
        assert known(opened, "skew") is None
        again = measured(opened, "skew", again=False)
        assert again.findings == first.findings
        assert known(opened, "skew").values == first.values


@pytest.mark.parametrize("name", ["norms", "drift", "separability", "skew"])
def test_what_was_taken_without_the_data_set_is_taken_anew_when_it_is_there_again(run, name):
    """What a machine without the images could not show must not be missing for ever."""
    file = run.parent / "digits.npz"
    file.rename(run.parent / "away.npz")
    with finished_run(run) as opened:
        measured(opened, name)
    (run.parent / "away.npz").rename(file)
    with finished_run(run) as opened:
        again = measured(opened, name, again=False)
        assert again.notes == ()
        fresh = measured(opened, name)
    assert again.findings == fresh.findings
    assert again.values == fresh.values


def test_recorded_lines_that_came_later_are_seen(run):
    """A run that was recorded says more than one that was not."""
    with finished_run(run) as opened:
        measured(opened, "drift")
    (unsealed(run) / "during.jsonl").unlink()
    with finished_run(run) as opened:
        assert [row["round"] for row in measured(opened, "drift", again=False).values.rounds] == [4]


# Pictures


def test_another_form_is_refused_before_anything_is_measured(run):
    for words in (lambda: analysis.draw_runs([run], form="gif"), lambda: analysis.analyse(run, "skew", form="gif")):
        with pytest.raises(UserError, match="--format gif"):
            words()
    assert not (run / "figures").exists()


# Several at once


def test_analyse_takes_what_is_named_and_tells_of_each(run):
    told = []
    with undisturbed():
        found = analysis.analyse(run, "skew", " norms( local=false )", observe=lambda *seen: told.append(seen))
    assert list(found) == ["skew", "norms(local=false)"]
    assert [(source, type(each)) for source, each, _ in told] == [("skew", Measured), ("norms(local=false)", Measured)]
    assert all(file.exists() for _, _, files in told for file in files)
    assert isinstance(found["skew"].values, skew.Skew)


def test_a_named_measure_that_cannot_be_taken_is_an_error_after_the_others(run):
    (run.parent / "digits.npz").unlink()
    told = []
    with pytest.raises(Missing, match=r"cka: .*digits\.npz does not exist"):
        analysis.analyse(run, "cka", "skew", observe=lambda source, *_: told.append(source))
    assert told == ["cka", "skew"]
    assert stored(run, "skew").exists()
