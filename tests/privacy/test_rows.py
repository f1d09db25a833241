"""Bytes, words and rounded sums come through an engine's float64 addition exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.privacy import rows
from unskew.privacy.fixed_point import as_steps, from_steps


@settings(max_examples=30)
@given(contents=st.lists(st.binary(min_size=17, max_size=17), min_size=1, max_size=5))
def test_bytes_of_many_clients_add_up_row_by_row(contents):
    total = sum(
        rows.in_row(place, len(contents), rows.packed(np.frombuffer(each, np.uint8)))
        for place, each in enumerate(contents)
    )
    assert total.shape == (len(contents), 3)
    assert [row.tobytes() for row in rows.unpacked(total, 17)] == contents


@settings(max_examples=30)
@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_words_add_up_modulo_two_to_the_64(words):
    sums = {}
    for word in words:
        halves = rows.halves({"x": torch.tensor([[word]]), "y": torch.tensor(word)})
        sums = {name: sums.get(name, 0) + value for name, value in halves.items()}
    expected = (sum(words) + 2**63) % 2**64 - 2**63
    assert {name: value.tolist() for name, value in rows.joined(sums).items()} == {"x": [[expected]], "y": expected}


@settings(max_examples=30)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_sums_are_rounded_to_the_nearest_step_and_read_back(values):
    words = as_steps({"a": torch.tensor(values, dtype=torch.float64)}, 3, "test")["a"]
    assert words.tolist() == [round(value * 2**32) for value in values]
    assert from_steps({"a": words})["a"].tolist() == [round(value * 2**32) / 2**32 for value in values]


@pytest.mark.parametrize(("value", "words"), [
    (float("nan"), "client 4: its result holds NaN"), (float("inf"), "client 4: its result holds NaN"),
    (2.0**31 / 2 + 1, r"client 4: x reaches 1.07e\+09, and in a sum over 2 visits there is room for 1.07e\+09 each"),
    (1e300, r"client 4: x reaches 1e\+300"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(value, words):
    with pytest.raises(UserError, match=words):
        as_steps({"x": torch.tensor([0.0, value], dtype=torch.float64)}, 2, "client 4")
