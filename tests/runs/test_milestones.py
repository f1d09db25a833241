"""What a run had reached by when: Acc@round, Acc@batch, rounds to an accuracy."""

import pytest

from unskew.runs.journal import accuracy_at_batch, accuracy_at_round, batches, rounds_to

# evaluated every second round; batches counted by the end of each: 10, 30, 35, 45
ROWS = [
    {"round": 1, "batches_max": 10},
    {"round": 2, "batches_max": 20, "accuracy": 0.3},
    {"round": 3, "batches_max": 5},
    {"round": 4, "batches_max": 10, "accuracy": 0.6},
]


@pytest.mark.parametrize(
    ("measure", "found"),
    [
        (accuracy_at_round, {1: None, 3: 0.3, 1000: 0.6}),
        (accuracy_at_batch, {9: None, 29: None, 30: 0.3, 44: 0.3, 45: 0.6, 1000: 0.6}),
        (rounds_to, {0.0: 2, 0.3: 2, 0.31: 4, 0.6: 4, 0.61: None}),
    ],
)
def test_a_milestone_counts_evaluated_rounds_alone(measure, found):
    assert {at: measure(ROWS, at) for at in found} == found


def test_batches_are_those_of_the_largest_clients_summed_over_rounds():
    assert batches(ROWS) == 10 + 20 + 5 + 10


def test_a_share_that_is_rounded_up_is_still_reached():
    assert 0.9 * 0.1 > 0.09
    assert rounds_to([{"round": 1, "batches_max": 1, "accuracy": 0.09}], 0.9 * 0.1) == 1
