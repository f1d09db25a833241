"""Traces of availability: both forms, their edges, and files that are none."""

import numpy as np
import pytest

from unskew.core.errors import UserError
from unskew.methods.attendance import read_trace


def trace(tmp_path, content):
    (tmp_path / "t.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    return read_trace(tmp_path / "t.csv")


WEEK = [[0], [0, 3], [], [3], [0], [0, 3], []]  # four rounds, and from the start again


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("round,client\n1,0\n2,0\n2,3\n4,3\n", WEEK),
        ("client,from,to\n0,1,2\n3,2,2\n3,4,4\n", WEEK),
        ("\ufeffTo , note,FROM,client\r\n2,x,1,1\r\n\r\n3,,3,0\r\n", [[1], [1], [0]]),  # columns in any order
        ("client,from,to\n2,1,3\n2,2,5\n", [[2]] * 5),  # stays may overlap
        ("round,client\n1,2\n", [[2]] * 3),
    ],
)
def test_both_forms_are_read_and_start_again_after_their_last_round(tmp_path, content, expected):
    made = trace(tmp_path, content)
    assert [np.flatnonzero(made(number, 4)).tolist() for number in range(1, len(expected) + 1)] == expected


@pytest.mark.parametrize(
    "content",
    [
        "",
        "who,when\n1,2\n",
        "round,client\n",
        "round,client\n0,1\n",
        "round,client\n1,-1\n",
        "round,client\n1,1\n1\n",
        "round,client\n1,1.5\n",
        "client,from,to\n1,5,4\n",
        "round,client\n1,99999999999\n",
        b"round,client\n1,\xff\n",
        'round,client\n1,"2\n',
    ],
)
def test_what_is_no_trace_is_refused_with_its_name(tmp_path, content):
    with pytest.raises(UserError, match=r"t\.csv is not a trace \(.*\); give rows of round,client or client,from,to"):
        trace(tmp_path, content)


def test_a_folder_or_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="the trace"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"folder|plain file"):
        read_trace(tmp_path)
