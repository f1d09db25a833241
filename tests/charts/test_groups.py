"""Bars side by side."""

from itertools import pairwise

from unskew.charts import grouped


def test_groups_stand_around_whole_numbers_without_touching():
    marks = grouped({"a": [1, 2], "b": [3, None], "c": [5, 6]})
    places = sorted((x, mark.width) for mark in marks for x in mark.x)
    for (left, width), (right, _) in pairwise(places):
        assert left + width / 2 < right - width / 2
    assert [round(sum(mark.x[at] for mark in marks) / 3, 12) for at in (0, 1)] == [0, 1]
    assert [mark.name for mark in marks] == ["a", "b", "c"]
    assert [mark.colour for mark in marks] == [0, 1, 2]
    assert list(marks[1].height) == [3, None]
