"""What a run had reached by when: Acc@round, Acc@batch, rounds to an accuracy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unskew.runs.journal import accuracy_at_batch, accuracy_at_round, batches, rounds_to

# evaluated every second round; batches counted by the end of each: 10, 30, 35, 45
ROWS = [
    {"round": 1, "batches_max": 10},
    {"round": 2, "batches_max": 20, "accuracy": 0.3},
    {"round": 3, "batches_max": 5},
    {"round": 4, "batches_max": 10, "accuracy": 0.6},
]

runs = st.lists(st.tuples(st.integers(1, 50), st.none() | st.floats(0, 1)), max_size=12).map(
    lambda found: [
        {"round": number, "batches_max": steps} | ({} if accuracy is None else {"accuracy": accuracy})
        for number, (steps, accuracy) in enumerate(found, 1)
    ]
)


@pytest.mark.parametrize(("number", "accuracy"), [(1, None), (3, 0.3), (1000, 0.6)])
def test_accuracy_at_a_round_is_that_of_the_last_evaluated_round_up_to_it(number, accuracy):
    assert accuracy_at_round(ROWS, number) == accuracy


@pytest.mark.parametrize(("count", "accuracy"), [(9, None), (29, None), (30, 0.3), (44, 0.3), (45, 0.6), (1000, 0.6)])
def test_accuracy_at_a_batch_count_is_that_of_the_last_evaluated_round_within_it(count, accuracy):
    assert accuracy_at_batch(ROWS, count) == accuracy


def test_batches_are_those_of_the_largest_clients_summed_over_rounds():
    assert batches(ROWS) == 10 + 20 + 5 + 10


@pytest.mark.parametrize(("accuracy", "number"), [(0.0, 2), (0.3, 2), (0.31, 4), (0.6, 4), (0.61, None)])
def test_rounds_to_an_accuracy_end_with_the_first_evaluated_round_that_has_it(accuracy, number):
    assert rounds_to(ROWS, accuracy) == number


def test_a_share_that_is_rounded_up_is_still_reached():
    assert 0.9 * 0.1 > 0.09
    assert rounds_to([{"round": 1, "batches_max": 1, "accuracy": 0.09}], 0.9 * 0.1) == 1


@given(runs)
def test_a_count_by_the_end_of_a_round_says_what_the_round_says(rows):
    for row in rows:
        count = batches(rows[: row["round"]])
        assert accuracy_at_batch(rows, count) == accuracy_at_round(rows, row["round"])


@given(runs, st.floats(0, 1), st.floats(0, 1))
def test_more_accuracy_never_takes_fewer_rounds(rows, one, other):
    fewer, more = (rounds_to(rows, accuracy) or len(rows) + 1 for accuracy in sorted((one, other)))
    assert fewer <= more
