"""Records from parsed JSON: whatever does not fit its field is named."""

import re
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
    assert record_from(Row, {"count": 3, "share": 0.5, "more": {"a": 1}}) == Row(3, 0.5, more={"a": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "expected object, got array"),
        (None, "expected object, got null"),
        ({"share": 1.0}, "object missing required field count"),
        ({"count": 1, "share": 1.0, "cuont": 2}, "unknown field 'cuont'"),
        ({"count": 1.0, "share": 1.0}, "count: expected int, got float"),
        ({"count": True, "share": 1.0}, "count: expected int, got bool"),
        ({"count": 1, "share": "1"}, "share: expected float, got str"),
        ({"count": 1, "share": 1.0, "best": "x"}, "best: expected float | null, got str"),
        ({"count": 1, "share": 1.0, "more": {"a": "x"}}, "more[...]: expected int, got str"),
    ],
)
def test_what_does_not_fit_is_named(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        record_from(Row, values)


def test_fields_alone_may_be_fewer_and_more():
    check_fields(Row, {"share": 1, "unknown": object()})
    with pytest.raises(ValueError, match="count: expected int, got str"):
        check_fields(Row, {"count": "one"})
