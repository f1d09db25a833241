"""Numbers find their places and their words: round ticks, ends that hold everything, texts that fit."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unskew.charts import Axis
from unskew.charts.scales import Scale, ends, fit, format_numbers, text_width, ticks, wrap
from unskew.core.errors import UserError

ODD = (None, math.nan, math.inf, -math.inf, 1e305)
finite = st.floats(-1e200, 1e200)


def said(low, high, most=6, kind="number", log=False):
    return [word for _, word in ticks(low, high, most=most, kind=kind, log=log)]


def test_numbers_have_their_places_and_what_is_not_a_number_has_none():
    assert np.isnan(Scale(0, 10, 100, 200).place(ODD)).all()
    assert Scale(0, 10, 100, 200).place([0, 2.5, 10]).tolist() == [100, 125, 200]
    assert Scale(0, 10, 200, 100).at(2.5) == 175
    assert abs(Scale(0, 1, 0, 100).at(1e290)) <= 2000
    logarithmic = Scale(1, 1000, 0, 300, log=True).place([1, 10, 100, 1000, 0, -5])
    assert logarithmic == pytest.approx([0, 100, 200, 300, math.nan, math.nan], nan_ok=True)


@given(st.lists(finite, min_size=1), st.booleans(), st.sampled_from(("number", "percent", "count", "bytes", "seconds")))
def test_the_ends_of_an_axis_hold_every_value_and_are_apart(values, zero, kind):
    low, high = ends(values, Axis(kind=kind), room=0.05, zero=zero)
    assert low < high
    assert low <= min(values)
    assert max(values) <= high
    if zero:
        assert low <= 0 <= high


@given(st.lists(st.floats(1e-200, 1e200), min_size=1), st.booleans())
def test_the_ends_of_a_logarithmic_axis_hold_every_positive_value(values, zero):
    low, high = ends([*values, 0, -3], Axis(log=True), room=0.05, zero=zero)
    assert 0 < low < high
    assert low <= min(values) * (1 + 1e-9)
    assert max(values) <= high * (1 + 1e-9)


def test_ends_that_are_given_stay():
    assert ends([5, 500], Axis(low=0, high=1)) == (0, 1)
    assert ends([0.1, 0.3], Axis(low=0.5)) == pytest.approx((0.5, 0.55))
    assert ends([0.1, 0.3], Axis(high=0.05), room=0.05)[1] == 0.05
    assert ends([], Axis(low=2, high=2)) == pytest.approx((2, 2.2))
    assert ends([], Axis(high=0)) == (-0.5, 0)
    assert ends([], Axis(low=1, kind="percent")) == pytest.approx((1, 1.1))


def test_ends_without_values_near_zero_and_with_free_room():
    assert ends(ODD, Axis()) == (0, 1)
    low, high = ends([0, -1], Axis(log=True))
    assert 0 < low < high
    assert ends([1, 100], Axis()) == (0, 100)
    assert ends([60, 100], Axis()) == (60, 100)
    assert ends([1, 100], Axis(ticks=((1, "one"),))) == (1, 100)
    assert ends([0.01, 0.99], Axis(kind="percent"), room=0.05) == (0, 1)
    assert ends([0.01, 0.99], Axis(), room=0.05)[1] > 1
    assert ends([-1, 1], Axis(), room=0.05) == pytest.approx((-1.1, 1.1))
    assert ends([0, 0], Axis(kind="count"), zero=True) == (0, 1)
    assert ends([-4, -2], Axis(), room=0.1, zero=True) == pytest.approx((-4.4, 0))


def test_an_unknown_kind_of_axis_is_refused():
    with pytest.raises(UserError, match="unknown kind of axis 'metres'"):
        ends([1], Axis(kind="metres"))


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9), st.integers(2, 12))
def test_ticks_are_round_in_order_evenly_spaced_and_not_too_many(low, span, most):
    found = [value for value, _ in ticks(low, low + span, most=most)]
    assert len(found) <= most + 1
    assert all(low - 1e-9 * span - 1e-9 <= value <= low + span + 1e-9 * span + 1e-9 for value in found)
    steps = {float(f"{later - earlier:.3g}") for earlier, later in pairwise(found)}
    assert len(steps) <= 1
    for step in steps:
        assert f"{step:e}"[0] in "125"
    assert len(found) >= 1 or most < 4


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        ((0, 1, 5, "percent"), "0% 20% 40% 60% 80% 100%"),
        ((0.9, 0.92, 4, "percent"), "90.0% 90.5% 91.0% 91.5% 92.0%"),
        ((0, 20_000, 4, "count"), "0 5,000 10,000 15,000 20,000"),
        ((0, 3, 12, "count"), "0 1 2 3"),
        ((0, 60, 6, "seconds"), "0s 10s 20s 30s 40s 50s 60s"),
        ((0, 3600, 4, "seconds"), "0min 15min 30min 45min 60min"),
        ((0, 36_000, 5, "seconds"), "0h 2h 4h 6h 8h 10h"),
        ((0, 1, 2, "seconds"), "0.0s 0.5s 1.0s"),
        ((0, 864_000, 5, "seconds"), "0h 48h 96h 144h 192h 240h"),
        ((1, 10_000, 5, "number", True), "1 10 100 1,000 10,000"),
        ((1, 1e12, 5, "number", True), "1 1,000 1,000,000 1,000,000,000 1e12"),
        ((1, 10, 6, "number", True), "1 2 5 10"),
        ((0.001, 100, 6, "number", True), "0.001 0.01 0.1 1 10 100"),
        ((1, 1000, 4, "seconds", True), "1s 10s 100s 1,000s"),
        ((41, 62, 6, "number", True), "45 50 55 60"),
    ],
)
def test_ticks_are_round_in_the_unit_of_their_axis(axis, labels):
    assert [label.replace(" ", "") for label in said(*axis)] == labels.split()


def test_numbers_have_units_the_same_decimals_and_no_negative_zero():
    assert format_numbers([0, 500, 1000, 2.5e6, 1e9], "bytes") == ["0 B", "500 B", "1 kB", "2.5 MB", "1 GB"]
    assert format_numbers([-0.0, 0.5, 1]) == ["0.0", "0.5", "1.0"]
    assert format_numbers([1e-6, 2e-6]) == ["1e-6", "2e-6"]
    assert format_numbers([2e12]) == ["2e12"]
    assert format_numbers([]) == []


@given(st.text(), st.floats(1, 500))
def test_a_text_that_is_cut_fits_and_begins_alike(text, room):
    cut = fit(text, room)
    assert text_width(cut) <= max(room, text_width("…"))
    assert " ".join(text.split()).startswith(cut.removesuffix("…"))


@given(st.text("abc dÄ🎉界", max_size=200), st.floats(40, 300), st.integers(1, 4))
def test_wrapped_lines_fit_and_lose_nothing_without_an_ellipsis(text, room, most):
    lines = wrap(text, room, most=most)
    assert len(lines) <= most
    assert all(text_width(line) <= room for line in lines)
    if not any("…" in line for line in lines):
        assert "".join(lines).replace(" ", "") == "".join(text.split())
