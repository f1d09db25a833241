"""Records from parsed JSON: whatever does not fit its field is named."""

from dataclasses import dataclass, field

import pytest

from unskew.core.files import check_fields, record_from


@dataclass(frozen=True)
class Row:
    count: int
    share: float
    name: str = "x"
    best: float | None = None
    more: dict[str, int] = field(default_factory=dict)


def test_a_record_comes_from_its_fields():
    assert record_from(Row, {"count": 1, "share": 2}) == Row(1, 2)
    assert record_from(Row, {"count": 1, "share": 0.5, "best": None, "name": "y"}) == Row(1, 0.5, "y")
    assert record_from(Row, {"share": 0.5}, count=3, more={"a": 1}) == Row(3, 0.5, more={"a": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "an object with fields was expected, not list"),
        (None, "an object with fields was expected, not None"),
        ({"share": 1.0}, "it has no count"),
        ({"count": 1, "share": 1.0, "cuont": 2}, "a field 'cuont' that this version does not know"),
        ({"count": 1.0, "share": 1.0}, "count must be a whole number, not 1.0"),
        ({"count": True, "share": 1.0}, "count must be a whole number, not True"),
        ({"count": 1, "share": "1"}, "share must be a number, not '1'"),
        ({"count": 1, "share": float("nan")}, "share must be a number, not nan"),
        ({"count": 1, "share": float("inf")}, "share must be a number, not inf"),
        ({"count": 1, "share": None}, "share must be a number, not None"),
        ({"count": 1, "share": 1.0, "name": {"a": 1}}, "name must be a text, not dict"),
        ({"count": 1, "share": 1.0, "best": "x"}, "best must be a number or null, not 'x'"),
        ({"count": 1, "share": 1.0, "name": 5 * ["long"]}, "name must be a text, not list"),
    ],
)
def test_what_does_not_fit_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        record_from(Row, values)


def test_fields_alone_may_be_fewer_and_more():
    check_fields(Row, {"share": 1, "unknown": object()})
    with pytest.raises(ValueError, match="count"):
        check_fields(Row, {"count": "one"})
