"""Numbers find their places and their words: round ticks, ends that hold everything, texts that fit."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unskew.charts import Axis
from unskew.charts.scales import Scale, ends, fit, format_numbers, locate, text_width, ticks, to_number, wrap
from unskew.core.errors import UserError

ODD = (None, math.nan, math.inf, -math.inf, 1e305, 10**400)
finite = st.floats(-1e200, 1e200)


def said(low, high, most=6, kind="number", log=False):
    return [word for _, word in ticks(low, high, most=most, kind=kind, log=log)]


def test_what_is_not_a_number_has_no_place():
    scale = Scale(0, 10, 100, 200)
    assert [to_number(value) for value in ODD] == [None] * 6
    assert [locate(scale, value) for value in ODD] == [None] * 6
    assert [locate(scale, value) for value in (0, 2.5, 10)] == [100, 125, 200]


def test_a_scale_may_run_backwards_and_places_far_off_stay_small():
    assert locate(Scale(0, 10, 200, 100), 2.5) == 175
    assert abs(locate(Scale(0, 1, 0, 100), 1e290)) <= 2000


def test_on_a_logarithmic_scale_factors_are_distances_and_zero_has_no_place():
    scale = Scale(1, 1000, 0, 300, log=True)
    assert [locate(scale, value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 100, 200, 300])
    assert [locate(scale, value) for value in (0, -5)] == [None, None]


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


def test_without_values_there_is_an_axis_all_the_same():
    assert ends(ODD, Axis()) == (0, 1)
    low, high = ends([0, -1], Axis(log=True))
    assert 0 < low < high


def test_zero_belongs_to_the_axis_when_it_is_near():
    assert ends([1, 100], Axis()) == (0, 100)
    assert ends([60, 100], Axis()) == (60, 100)
    assert ends([1, 100], Axis(ticks=((1, "one"),))) == (1, 100)


def test_free_room_crosses_neither_zero_nor_a_hundred_per_cent():
    assert ends([0.01, 0.99], Axis(kind="percent"), room=0.05) == (0, 1)
    assert ends([0.01, 0.99], Axis(), room=0.05)[1] > 1
    assert ends([-1, 1], Axis(), room=0.05) == pytest.approx((-1.1, 1.1))


def test_bars_that_are_all_zero_stand_on_an_axis_from_zero():
    assert ends([0, 0], Axis(kind="count"), zero=True) == (0, 1)
    assert ends([-4, -2], Axis(), room=0.1, zero=True) == pytest.approx((-4.4, 0))


@pytest.mark.parametrize("axis", [Axis(kind="metres"), Axis(low=2, high=1)])
def test_an_axis_that_cannot_be_is_refused(axis):
    with pytest.raises(UserError, match="axis"):
        ends([1], axis)


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


def test_percent_reads_as_percent():
    assert said(0, 1, 5, "percent") == ["0%", "20%", "40%", "60%", "80%", "100%"]
    assert said(0.9, 0.92, 4, "percent") == ["90.0%", "90.5%", "91.0%", "91.5%", "92.0%"]
    assert format_numbers([0.5], "percent") == ["50%"]


def test_counts_have_separators_and_whole_ticks_only():
    assert said(0, 20_000, 4, "count") == ["0", "5,000", "10,000", "15,000", "20,000"]
    assert said(0, 3, 12, "count") == ["0", "1", "2", "3"]
    assert said(0.2, 30, 6, "count", log=True)[0] == "1"


def test_bytes_have_units_of_thousands():
    assert format_numbers([0, 500, 1000, 2.5e6, 1e9], "bytes") == ["0 B", "500 B", "1 kB", "2.5 MB", "1 GB"]


def test_seconds_become_minutes_and_hours_at_steps_of_the_clock():
    assert said(0, 60, 6, "seconds") == ["0 s", "10 s", "20 s", "30 s", "40 s", "50 s", "60 s"]
    assert said(0, 3600, 4, "seconds") == ["0 min", "15 min", "30 min", "45 min", "60 min"]
    assert said(0, 36_000, 5, "seconds") == ["0 h", "2 h", "4 h", "6 h", "8 h", "10 h"]
    assert said(0, 1, 2, "seconds") == ["0.0 s", "0.5 s", "1.0 s"]
    assert said(0, 864_000, 5, "seconds") == ["0 h", "48 h", "96 h", "144 h", "192 h", "240 h"]


def test_a_logarithmic_axis_has_powers_of_ten_fewer_when_there_are_many_and_more_when_there_are_few():
    assert said(1, 10_000, 5, log=True) == ["1", "10", "100", "1,000", "10,000"]
    assert said(1, 1e12, 5, log=True) == ["1", "1,000", "1,000,000", "1,000,000,000", "1e12"]
    assert said(1, 10, 6, log=True) == ["1", "2", "5", "10"]
    assert said(0.001, 100, 6, log=True) == ["0.001", "0.01", "0.1", "1", "10", "100"]
    assert said(1, 1000, 4, "seconds", log=True) == ["1 s", "10 s", "100 s", "1,000 s"]
    assert said(41, 62, 6, log=True) == ["45", "50", "55", "60"]


def test_numbers_beside_each_other_have_the_same_decimals_and_no_zero_is_negative():
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
        assert " ".join(lines) == " ".join(text.split())


def test_wide_letters_are_wider_than_narrow_ones_and_accents_take_no_room():
    assert text_width("W") > text_width("a") > text_width("i")
    assert text_width("界") > text_width("W")
    assert text_width("e\u0301") == text_width("e")
