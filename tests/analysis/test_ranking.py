"""A winner is named only where the seeds support it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from unskew.analysis.ranking import compare_pairs, group_by_settings, list_contenders, pick_best, rank_settings
from unskew.core.key import Key
from unskew.runs.result import Calibration, Result

PLAIN = Result(
    path=Path("runs/a"), method="fedavg", data="digits", partition="dirichlet(alpha=0.1)", clients=10, per_round=10,
    rounds=20, seed=0, engine="loop", accuracy=0.5, loss=0.3, emd=1.2, examples=1000, seconds=12.0,
    examples_per_second=81.0, bytes_up=1, bytes_down=3, weights_sha256="a" * 64, model="tiny-cnn",
    partition_hash="b" * 64, data_sha256="c" * 64,
)  # fmt: skip


def runs(method, accuracies, first=0, **calibrated):
    """A run for each seed; ``calibrated`` has the accuracies after each calibration."""

    def run(place, accuracy):
        new = {name: Calibration(name, each[place], 0.1, 1, 0.1) for name, each in calibrated.items()}
        return replace(PLAIN, method=method, seed=first + place, accuracy=accuracy, calibrations=new)

    return [run(place, accuracy) for place, accuracy in enumerate(accuracies)]


def test_the_interval_is_that_of_a_paired_t_test_over_the_seeds_that_both_have():
    one = {0: 0.5, 1: 0.6, 2: 0.58, 3: 0.61, 9: 0.99}
    other = {0: 0.45, 1: 0.58, 2: 0.59, 3: 0.55, 7: 0.01}
    found = compare_pairs(one, other)
    wanted = ttest_rel([0.5, 0.6, 0.58, 0.61], [0.45, 0.58, 0.59, 0.55]).confidence_interval(0.95)
    assert found.seeds == 4
    assert (found.low, found.high) == (pytest.approx(wanted.low), pytest.approx(wanted.high))
    assert compare_pairs(one, {0: 0.1, 1: 0.1, 7: 0.1}) is None


@pytest.mark.parametrize("seeds", [1, 2])
def test_with_fewer_than_three_seeds_there_are_figures_and_no_winner(seeds):
    (said,) = rank_settings([*runs("a", [0.9] * seeds), *runs("b", [0.1] * seeds)])
    assert said.startswith("Too few seeds to name a winner")
    assert "the clear winner" not in said
    assert said.index("a 90.00") < said.index("b 10.00")


def test_settings_that_share_no_seeds_are_not_ranked():
    (said,) = rank_settings([*runs("a", [0.9, 0.91, 0.92]), *runs("b", [0.1, 0.11, 0.12], first=5)])
    assert said.startswith("Too few seeds to name a winner (fewer than 3 seeds in common)")
    three = [*runs("a", [0.9, 0.91, 0.92]), *runs("b", [0.1, 0.11, 0.12]), *runs("c", [0.3, 0.3, 0.31], first=5)]
    first, second = rank_settings(three)
    assert first.startswith(
        "a is the clear winner: 91.00 ± 1.00% over 3 seeds, the best of 2 classifiers in 2 settings. The runner-up is b"
    )
    assert second == "Not ranked (fewer than 3 seeds in common with it): c."


def test_calibrated_accuracy_counts_and_a_bound_does_not():
    a = runs("a", [0.6, 0.61, 0.62])
    b = runs("b", [0.5, 0.51, 0.52], ccvr=[0.7, 0.712, 0.719], oracle=[0.99, 0.99, 0.99])
    said = rank_settings([*a, *b])
    assert said[0].startswith("b, after ccvr is the clear winner")
    assert "the best of 3 classifiers in 2 settings" in said[0]
    assert said[1] == "Not calibrated, unlike b: a."
    assert [each.classifier for each in list_contenders(group_by_settings(b))] == ["", "ccvr"]


def test_a_calibration_of_one_seed_does_not_speak_for_the_others():
    group = runs("a", [0.5, 0.51, 0.52])
    group[0] = replace(group[0], calibrations={"lda": Calibration("lda", 0.99, 0.1, 1, 0.1)})
    assert pick_best(list_contenders(group_by_settings(group))).classifier == ""


def test_of_settings_that_are_the_same_a_winner_is_named_at_most_one_time_in_twenty():
    """1,000 studies of four settings that differ by chance alone, five seeds each."""
    draw = Key(0).fold("studies").numpy()
    studies = draw.normal(0.5, 0.02, (1000, 4, 5))
    said = [rank_settings([run for m in range(4) for run in runs(f"m{m}", scores[m])])[0] for scores in studies]
    assert sum("is the clear winner" in first for first in said) <= 50


def test_a_difference_that_is_there_is_found():
    draw = Key(1).fold("studies").numpy()
    base = draw.normal(0.5, 0.05, (100, 5, 1))
    scores = base + np.array([0.0, 0.02]) + draw.normal(0, 0.002, (100, 5, 2))
    named = sum(
        rank_settings([*runs("a", each[:, 0]), *runs("b", each[:, 1])])[0].startswith("b is the clear winner")
        for each in scores
    )
    assert named > 95


def test_runs_on_other_data_are_not_ranked():
    other = [replace(run, data_sha256="d" * 64, method="b") for run in runs("b", [0.1, 0.2, 0.3])]
    assert rank_settings([*runs("a", [0.9, 0.9, 0.9]), *other]) == [
        "The runs use different data, so they are not ranked."
    ]


def test_an_accuracy_that_is_not_a_number_is_left_out():
    assert rank_settings([*runs("a", [0.5, 0.6, float("nan")]), *runs("b", [0.5, 0.6, 0.7])]) == []


def test_runs_that_differ_in_an_option_of_settings_are_two_settings():
    one, other = (replace(PLAIN, settings={"lr": lr, "seed": 0, "evaluate_every": 5}) for lr in (0.1, 0.01))
    assert list(group_by_settings([one, other])) == ["fedavg · lr 0.1", "fedavg · lr 0.01"]
    assert (
        len(group_by_settings([one, replace(one, settings={"lr": 0.1, "seed": 3, "evaluate_every": 1}, seed=3)])) == 1
    )
