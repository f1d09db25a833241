"""How training went: sums by hand, seeds together, runs that were evaluated at other rounds."""

import json
from dataclasses import replace
from statistics import mean, stdev

import pytest

from analysis.finished import drawn, finished_run, unsealed
from unskew.analysis import curves
from unskew.analysis.curves import Curves
from unskew.analysis.ranking import name_settings
from unskew.charts import Band, Line
from unskew.core.errors import UserError


def written(run, *rows):
    """metrics.jsonl with just these rounds."""
    lines = [
        json.dumps({"round": n, "examples": 1, "train_loss": 9.0 - n, "batches_max": 4, "bytes_up": 10, "bytes_down": 1,
                    "seconds": 0.5, "clients": 2} | row)
        for n, row in enumerate(rows, 1)
    ]  # fmt: skip
    (unsealed(run) / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_what_was_spent_is_summed_up_to_each_evaluation(run):
    """Rounds 1 and 3 were evaluated; round 2's batches, bytes and seconds belong to round 3."""
    written(
        run,
        {"accuracy": 0.25, "loss": 2.0},
        {"batches_max": 7, "bytes_up": 100, "bytes_down": 30, "seconds": 2.0},
        {"accuracy": 0.75, "loss": 1.0},
    )
    with finished_run(run) as opened:
        found = curves.take_curves(opened)
    assert found.round == [1, 3]
    assert found.batches == [4, 15]
    assert found.bytes == [11, 152]
    assert found.seconds == [0.5, 3.0]
    assert (found.accuracy, found.loss) == ([0.25, 0.75], [2.0, 1.0])
    assert found.train_loss == [8.0, 7.0, 6.0]


def test_a_run_without_metrics_says_so(run):
    (unsealed(run) / "metrics.jsonl").unlink()
    with finished_run(run) as opened:
        found = curves.take_curves(opened)
    assert curves.CURVES.findings(found) == ["The run was never evaluated."]
    assert drawn(curves.CURVES.draw(found))


SETTINGS = {"method": "fedavg", "data": "digits", "partition": "iid", "per_round": "5", "lr": "0.01"}


def made(accuracy, rounds=None, seed=0, unit=1, **settings):
    at = rounds or list(range(1, len(accuracy) + 1))
    each = {"round": at, "batches": [10 * unit * n for n in at], "bytes": [1000 * n for n in at]}
    each |= {"seconds": [float(unit * n) for n in at], "accuracy": accuracy, "loss": [1.0] * len(at)}
    return Curves(
        run=f"r{seed}", settings=SETTINGS | settings, seed=seed, train_loss=[1.0] * max(at), calibrated={}, **each
    )


def lines(chart):
    return [mark for mark in chart.marks if isinstance(mark, Line)]


def bands(chart):
    return [mark for mark in chart.marks if isinstance(mark, Band)]


def test_seeds_become_one_line_their_mean_with_a_band_of_one_deviation():
    values = [[0.1, 0.5], [0.3, 0.6], [0.2, 0.9]]
    group = [made(each, seed=seed, unit=1 + seed) for seed, each in enumerate(values)]
    by_round, by_batch, by_byte, by_second = curves.draw_together(group)
    (line,), (band,) = lines(by_round), bands(by_round)
    means, spreads = (list(map(of, zip(*values, strict=True))) for of in (mean, stdev))
    assert list(line.x) == [1, 2]
    assert list(line.y) == pytest.approx(means)
    assert list(band.low) == pytest.approx([m - s for m, s in zip(means, spreads, strict=True)])
    assert list(band.high) == pytest.approx([m + s for m, s in zip(means, spreads, strict=True)])
    assert list(lines(by_batch)[0].x) == pytest.approx([20, 40])  # the mean of 10, 20, 30 and of 20, 40, 60
    assert list(lines(by_byte)[0].x) == pytest.approx([1000, 2000])
    assert list(lines(by_second)[0].x) == pytest.approx([2, 4])


def test_a_line_ends_with_a_step_to_the_accuracy_after_calibration_but_not_to_an_upper_bound():
    one = replace(made([0.1, 0.5]), calibrated={"lda": 0.7, "oracle": 0.9})
    first, step = lines(curves.draw_together([one])[0])
    assert (first.name, step.name, list(step.x), list(step.y)) == (
        "before calibration", "after lda", [2, 2], [0.5, 0.7],
    )  # fmt: skip
    two = [replace(made([0.1, 0.5], seed=seed), calibrated={"lda": 0.6 + seed / 10, "ccvr": 0.6}) for seed in (0, 1)]
    *_, step = lines(curves.draw_together([*two, made([0.3], method="other")])[0])[:2]
    assert step.name.endswith("(2 seeds), after lda")
    assert step.y[1] == pytest.approx(0.65)


def test_seeds_evaluated_at_other_rounds_meet_where_both_were():
    one, other = made([0.1, 0.2, 0.3], [1, 2, 4]), made([0.3, 0.5], [2, 4], seed=1)
    chart = curves.draw_together([one, other])[0]
    assert list(lines(chart)[0].x) == [2, 4]
    assert list(lines(chart)[0].y) == pytest.approx([0.25, 0.4])


def test_the_words_tell_where_it_ended_and_its_best():
    (said,) = curves.CURVES.findings(made([0.2, 0.6, 0.5]))
    assert "After 3 rounds" in said
    assert "50.00%" in said
    assert "60.00% in round 2" in said
    assert "its best" in curves.CURVES.findings(made([0.2, 0.6]))[0]
    assert "in round" not in curves.CURVES.findings(made([0.2, 0.6]))[0]


def test_a_run_that_kept_its_best_round_tells_of_that_round():
    (said,) = curves.CURVES.findings(replace(made([0.2, 0.6, 0.5]), kept=2))
    assert "The model of round 2, the best of 3 rounds, reaches 60.00% on the test images, for" in said
    assert "50.00%" not in said


def test_a_line_that_ends_before_some_of_its_seeds_do_is_said():
    runs = {"a": made([0.1, 0.2]), "b": made([0.1, 0.2, 0.3], seed=1), "c": made([0.5, 0.6], method="moon")}
    (said,) = curves.CURVES.compare.left_out(runs)
    assert said == "fedavg after round 2: not all of its seeds continue (up to 3)"
    assert curves.CURVES.compare.left_out({"a": made([0.1]), "b": made([0.2], seed=1)}) == []


def test_an_option_that_some_settings_were_not_given_is_named_so():
    names = ["fedavg · patience 2", "fedavg · without patience"]
    assert name_settings([SETTINGS | {"patience": "2"}, SETTINGS]) == names


def test_pictures_of_one_run():
    charts = curves.CURVES.draw(made([0.1, 0.4]))
    assert drawn(charts) == [
        "curves-round", "curves-batches", "curves-bytes", "curves-seconds", "curves-loss",
    ]  # fmt: skip
    assert "40.00%" in charts[0].alt


def test_settings_that_matter_are_part_of_the_label(runs_of):
    """Runs that differ in the rate, the epochs or the network do not differ in nothing but the seed."""
    found = []
    for options in ({}, {"lr": 0.1}, {"epochs": 2}, {"model": "outside_models:linear"}, {"batch": 16}):
        with finished_run(runs_of(rounds=1, **options)) as opened:
            found.append(curves.take_curves(opened))
    assert len(set(name_settings([each.settings for each in found]))) == 5
    with finished_run(runs_of(rounds=1, seed=1)) as opened:
        assert curves.take_curves(opened).settings == found[0].settings


def test_a_nan_in_the_metrics_is_no_traceback(run):
    text = (unsealed(run) / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"train_loss": ', '"train_loss": NaN, "was": '))
    with pytest.raises(UserError, match=r"metrics\.jsonl"), finished_run(run) as opened:
        curves.take_curves(opened)
