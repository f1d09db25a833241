"""Files are read by one reader: nothing but strict JSON of a sane size passes; a crash may cut a last line short."""

import os
from pathlib import Path

import pytest

from unskew.core.errors import UserError
from unskew.core.files import MAX_DEPTH, json_lines, parse_json, read_content, read_json


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b"", []),
        (b'{"a": 1}\n', [{"a": 1}]),
        (b'{"a": 1}\n{"b": [2, null]}\n', [{"a": 1}, {"b": [2, None]}]),
        (b'{"a": 1}\n{"b": ', [{"a": 1}]),
        (b'{"a": 1}\n{"b": 2}', [{"a": 1}]),  # without its newline the line may lack digits
        (b'{"a"', []),
    ],
)
def test_whole_lines_are_read_and_a_last_one_that_was_cut_short_is_not(content, rows):
    assert json_lines(content, Path("rows.jsonl")) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\nnot JSON\n', "line 2 is not JSON"),
        (b'{"a": 1}\n\n', "line 2 is not JSON"),
        (b"\xff\xfe\n", "line 1 is not JSON"),
        (b"[1, 2]\n", "line 1 is not a JSON object"),
        (b"3\n", "line 1 is not a JSON object"),
        (b"[" * 100_000 + b"\n", "line 1 is not JSON"),
    ],
)
def test_what_is_damaged_is_refused_with_the_line(content, message):
    with pytest.raises(UserError, match=f"rows.jsonl is damaged: {message}"):
        json_lines(content, Path("rows.jsonl"))


def test_what_cannot_be_opened_is_one_message(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_content(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"NaN", "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b'{"a": 1e999}', "1e999 is too large for a number"),
        (b"-1e400", "too large"),
        (b"9" * 5000, "too large for a whole number"),
        (str(2**64 + 1).encode(), "too large for a whole number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested too deeply"),
        (b'{"a": "\xff"}', "decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
        (b"{'a': 1}", "Expecting property name"),
    ],
)
def test_json_that_is_not_strict_is_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        parse_json(content)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json cannot be read"):
        read_json(tmp_path / "a.json")


def test_strict_json_comes_through_as_it_is():
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(b'{"a": [1, -2.5e-300, null, true, "\\u00e9"], "b": 18446744073709551616}')["b"] == 2**64
    assert isinstance(parse_json(deep), list)
    assert parse_json("0.1") == 0.1


def test_pipes_devices_and_large_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a plain file"):
        read_content(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="it has 100 bytes, 99 are the most"):
        read_content(tmp_path / "large", most=99)
    assert read_content(tmp_path / "large", most=100) == b"x" * 100
    assert read_content(tmp_path / "nothing") is None
    with pytest.raises(UserError, match="cannot be read"):
        read_content(tmp_path / "a\0b")
