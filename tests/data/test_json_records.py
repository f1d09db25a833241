"""Records are read one by one, wherever a block ends, and broken files are refused with the place."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.data import inaturalist
from unskew.data.inaturalist import read_records

FIELDS = {"images": ("id", "name"), "annotations": ("id",)}
GOOD = {"info": {"year": 2017}, "images": [{"id": 1, "name": "ä"}, {"id": 22, "name": "b", "x": 0}], "annotations": []}


def read(content, wanted=FIELDS):
    raw = content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode()
    return read_records(io.BytesIO(raw), "file.json", wanted)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_it_does_not_matter_where_a_block_ends(block, indent, monkeypatch):
    monkeypatch.setattr(inaturalist, "BLOCK", block)
    raw = json.dumps(GOOD, indent=indent, ensure_ascii=False).encode()
    assert read(raw) == {"images": [[1, 22], ["ä", "b"]], "annotations": [[]]}
    assert read(b"\xef\xbb\xbf" + raw) == read(raw)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(records=st.lists(values, max_size=6), block=st.integers(1, 40))
def test_any_list_of_records_reads_as_json_does(records, block):
    records = [{"id": record} for record in records]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inaturalist, "BLOCK", block)
        assert read(records, {"": ("id",)}) == {"": [[record["id"] for record in records]]}


def test_a_field_with_a_question_mark_may_be_missing():
    assert read([{"id": 1}, {"id": 2, "lat": None}, {"id": 3, "lat": 0.5}], {"": ("id", "lat?")}) == {
        "": [[1, 2, 3], [None, None, 0.5]]
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "expected '{'"),
        (b"[]", "expected '{'"),
        (b"{}", "no list 'images'"),
        ({"images": []}, "no list 'annotations'"),
        ({"images": {}, "annotations": []}, "images is not a list"),
        (b'{"images": [], "images": [], "annotations": []}', "second list 'images'"),
        ({"images": [{"id": 1}], "annotations": []}, "images, record 0 has no 'name'"),
        ({"images": [3], "annotations": []}, "images, record 0 is not an object with id, name"),
        (json.dumps(GOOD).encode()[:-1], "expected ','"),
        (json.dumps(GOOD).encode()[:60], "damaged, or not JSON, at character"),
        (json.dumps(GOOD).encode() + b"x", "more follows after its end"),
        (b'{"images": [{"id": NaN, "name": ""}]}', "NaN is not a number"),
        (b'{"images": [{"id": 1, "name": "\xff"}]}', "not UTF-8"),
        (b'{"images": ' + b"[" * 100_000, "nested too deeply"),
        (b"{1: []}", "expected"),
    ],
)
def test_what_is_not_the_published_form_is_refused(content, says):
    with pytest.raises(UserError, match=says) as caught:
        read(content)
    assert "file.json" in str(caught.value)


def test_a_record_without_end_is_not_read_to_the_end_of_a_large_file(monkeypatch):
    monkeypatch.setattr(inaturalist, "BLOCK", 16)
    monkeypatch.setattr(inaturalist, "MAX_RECORD", 100)
    stream = io.BytesIO(b'{"images": [{"id": "' + b"x" * 10_000)
    with pytest.raises(UserError, match="a value has more than 100 characters"):
        read_records(stream, "file.json", FIELDS)
    assert stream.tell() < 1000
