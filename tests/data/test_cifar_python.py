import os
import pickle
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.data import published

HERE = Path("some/batch")
DATA = np.arange(12, dtype=np.uint8).reshape(3, 4) + 120
DTYPE_STATE = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


PIXELS = DATA.tobytes()
HUGE = b"\x8a\x06" + (2**39).to_bytes(6, "little")  # LONG1


def python2(data=PIXELS, shape=b"K\x03K\x04\x86", code=b"u1"):
    """What Python 2's cPickle wrote at protocol 2: byte strings throughout, numpy.core."""
    return (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01" + shape + b"cnumpy\ndtype\nq\x06U\x02" + code + b"K\x00K\x01\x87Rq\x07"
        + DTYPE_STATE + b"\x89T" + struct.pack("<I", len(data)) + data + b"tbU\x06labelsq\x08]q\t(K\x01K\x02K\x09e"
        b"U\tfilenames]q\n(U\x05a.pngU\x05b.pngeu."
    )  # fmt: skip


def refused(raw):
    with pytest.raises(UserError, match="some/batch") as caught:
        published.read_pickle(raw, HERE)
    return str(caught.value)


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("as_key", [str, str.encode])
def test_batches_of_every_protocol_and_kind_of_key_read_alike(protocol, as_key):
    batch = {"data": DATA, "labels": [0, 1, 300], "batch_label": b"testing 1", "none": None, "empty": b"", "é": "ü€"}
    raw = pickle.dumps({k if k == "é" else as_key(k): v for k, v in batch.items()}, protocol=protocol)
    read = published.read_pickle(raw, HERE)
    np.testing.assert_array_equal(read.pop("data"), DATA)
    assert read == {k: v for k, v in batch.items() if k != "data"}


def test_a_batch_written_by_python_2_reads():
    read = published.read_pickle(python2(), HERE)
    np.testing.assert_array_equal(read["data"], DATA)
    assert read["labels"] == [1, 2, 9]
    assert read["filenames"] == [b"a.png", b"b.png"]


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(
            st.integers(-(2**40), 2**40), st.text(), st.binary(), st.none(), st.booleans(),
            st.lists(st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=3), st.binary(max_size=3))),
        ),
    ),
    st.integers(2, 5),
)  # fmt: skip
def test_any_flat_dict_comes_back(held, protocol):
    assert published.read_pickle(pickle.dumps(held, protocol), HERE) == held


@pytest.mark.parametrize(
    "raw", [python2(), *(pickle.dumps({"data": DATA, b"labels": [1, 70000, "x"]}, p) for p in range(2, 6))]
)
def test_a_batch_truncated_at_any_byte_is_named(raw):
    published.read_pickle(raw, HERE)
    for size in range(len(raw)):
        refused(raw[:size])


class Malice:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_would_run_a_command_is_refused_by_name_and_not_run(protocol, tmp_path):
    mark = tmp_path / "ran"
    message = refused(pickle.dumps({"data": Malice(os.system, f"touch {mark}")}, protocol))
    assert "system" in message
    assert not mark.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"Pname\n.",  # PERSID
        b"\x80\x02N.",  # no dict
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93.",  # STACK_GLOBAL
        b"\x80\x04K\x01K\x02\x93.",
        b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.",  # objects
        b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR}b.",
        b"cnumpy\nndarray\n(I9\ntR.",  # permitted as a word, not as a call
        b"}(]I1\nu.",  # a list as a key
        b"}}s.",
        b"}a.",
        b"}s.",
        b"(.",
        b"((d.",
        b"0.",
        b"\xff.",
        b"",
        b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",  # BINBYTES8: from here on, sizes that are not true
        b"\x80\x05\x96" + struct.pack("<Q", 2**63) + b"x.",  # BYTEARRAY8
        b"\x80\x02T\xff\xff\xff\xff.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # LONG4
        python2(shape=HUGE + HUGE + b"\x86"),
        python2(shape=b"K\x03K\x05\x86"),
        python2(shape=b"(" + b"K\x01" * 70 + b"K\x0ct"),
        python2(code=b"i8"),
    ],
)
def test_what_no_batch_needs_and_a_size_that_the_bytes_do_not_bear_out_are_refused(raw):
    refused(raw)


def test_a_string_encoded_again_and_again_does_not_fill_the_memory():
    text = b"X" + struct.pack("<I", 10_000) + b"a" * 10_000
    again = b"h\x00(h\x01h\x02tR"
    raw = b"\x80\x02c_codecs\nencode\nq\x00" + text + b"q\x01X\x06\x00\x00\x00latin1q\x02](" + again * 100 + b"e."
    assert "would unpack to more bytes than it contains" in refused(raw)


@pytest.mark.parametrize("nest", [b"]" * 50_000 + b"a" * 49_999, b")" + b"\x85" * 50_000])
def test_deep_nesting_is_refused_without_recursion(nest):
    refused(nest + b".")
    refused(b"}K\x01" + nest + b"s.")
    refused(b"}" + nest + b"K\x01s.")


@settings(max_examples=300)
@given(st.sampled_from([python2(), pickle.dumps({"d": DATA, "l": [1, 2]}, 5)]), st.data())
def test_a_damaged_byte_never_raises_anything_but_a_user_error(raw, data):
    at = data.draw(st.integers(0, len(raw) - 1))
    damaged = raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    with suppress(UserError):
        assert isinstance(published.read_pickle(damaged, HERE), dict)
