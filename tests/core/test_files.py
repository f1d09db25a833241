"""Files are read by one reader: nothing but strict JSON of a sane size passes; a crash may cut a last line short."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from unskew.core.errors import UserError
from unskew.core.files import (
    FORGOTTEN_SECONDS,
    MAX_DEPTH,
    clear_parts,
    json_lines,
    parse_json,
    part_beside,
    read_content,
    read_json,
    record_from,
)


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
        (b'{"a": 1}\nnot JSON\n', "line 2 cannot be read: it is damaged, or not JSON"),
        (b'{"a": 1}\n\n', "line 2 cannot be read: it is damaged, or not JSON"),
        (b"\xff\xfe\n", "line 1 cannot be read: it is damaged, or not JSON"),
        (b"[1, 2]\n", "line 1 cannot be read: it is damaged, or not JSON: it is not an object"),
        (b"3\n", "line 1 cannot be read: it is damaged, or not JSON: it is not an object"),
        (b"[" * 100_000 + b"\n", "line 1 cannot be read: it is damaged, or not JSON"),
    ],
)
def test_what_is_damaged_is_refused_with_the_line(content, message):
    with pytest.raises(UserError, match=f"rows.jsonl {message}"):
        json_lines(content, Path("rows.jsonl"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"NaN", "invalid character"),
        (b"[-Infinity]", "invalid character"),
        (b'{"a": 1e999}', "Number out of range"),
        (b"9" * 5000, "out of range"),
        (str(2**64 + 1).encode(), r"larger than 2\^64"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested too deeply"),
        (b'{"a": "\xff"}', "decode"),
        (b"\xef\xbb\xbf{}", "invalid character"),
        (b"", "truncated"),
        (b"{} {}", "trailing characters"),
        (b"{'a': 1}", "object keys must be strings"),
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
    with pytest.raises(UserError, match="not a regular file"):
        read_content(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="it has 100 bytes; the limit is 99"):
        read_content(tmp_path / "large", most=99)
    assert read_content(tmp_path / "large", most=100) == b"x" * 100
    assert read_content(tmp_path / "nothing") is None
    with pytest.raises(UserError, match="cannot be read"):
        read_content(tmp_path / "a\0b")


@pytest.fixture
def ended():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def part_of(folder, process, machine=None):
    own = part_beside(folder / "result.json").name
    name = own.replace(f".{os.getpid()}.part", f".{process}.part")
    file = folder / (name if machine is None else f"result.json.{machine}.{process}.part")
    file.write_bytes(b"half")
    return file


def test_a_part_of_a_process_that_has_ended_goes_and_one_of_a_live_process_stays(tmp_path, ended):
    dead, own, parent = part_of(tmp_path, ended), part_of(tmp_path, os.getpid()), part_of(tmp_path, os.getppid())
    clear_parts(tmp_path, tmp_path / "nowhere")
    assert not dead.exists()
    assert own.exists()
    assert parent.exists()


def test_another_machine_s_part_stays_for_a_day(tmp_path, ended):
    file = part_of(tmp_path, ended, machine="elsewhere-7")
    clear_parts(tmp_path)
    assert file.exists()
    os.utime(file, (time.time() - FORGOTTEN_SECONDS - 60,) * 2)
    clear_parts(tmp_path)
    assert not file.exists()


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
        ({"count": 1, "share": 1.0, "cuont": 2}, "unknown key 'cuont'"),
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
