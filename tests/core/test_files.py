"""JSON lines are read by one reader: a crash may cut the last line short, and nothing else may be wrong."""

import pytest

from unskew.core.errors import UserError
from unskew.core.files import read_json_lines


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
def test_whole_lines_are_read_and_a_last_one_that_was_cut_short_is_not(tmp_path, content, rows):
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert read_json_lines(tmp_path / "rows.jsonl") == rows


def test_no_file_is_no_rows(tmp_path):
    assert read_json_lines(tmp_path / "rows.jsonl") == []


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
def test_what_is_damaged_is_refused_with_the_line(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=f"rows.jsonl is damaged: {message}"):
        read_json_lines(tmp_path / "rows.jsonl")


def test_what_cannot_be_opened_is_one_message(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_json_lines(tmp_path / "rows.jsonl")
