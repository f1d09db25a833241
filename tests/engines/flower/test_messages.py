"""A message is what was sent, or refused: every type and shape, and everything that can be wrong with the bytes."""

import json
from dataclasses import replace

import pytest
import torch

from unskew.core.errors import UserError
from unskew.engines.flower.messages import (
    MAX_HEADER,
    REMEMBERED,
    STARTS,
    BadMessage,
    Body,
    Envelope,
    Header,
    Seen,
    by_name,
    read,
    seal,
    unseal,
)

TENSORS = [
    ("float64", torch.tensor([[0.1, -0.0], [float("inf"), 1e-320]], dtype=torch.float64)),
    ("float32", torch.tensor(3.5)),
    ("float16", torch.arange(3, dtype=torch.float16)),
    ("bfloat16", torch.arange(5, dtype=torch.bfloat16)),
    ("int64", torch.tensor([2**62, -1])),
    ("int32", torch.tensor([[7]], dtype=torch.int32)),
    ("uint8", torch.tensor([255], dtype=torch.uint8)),
    ("bool", torch.tensor([True, False])),
    ("empty", torch.zeros(0, 3)),
    ("turned", torch.arange(6.0).view(2, 3).t()),
]


def changed(envelope, **fields):
    header = {**json.loads(envelope.header), **fields}
    return Envelope(json.dumps(header).encode(), envelope.body)


def test_every_tensor_arrives_as_it_was_bit_for_bit():
    header, came = unseal(seal({"kind": "job", "größe": 1}, TENSORS))
    assert header == {"kind": "job", "größe": 1}
    assert [name for name, _ in came] == [name for name, _ in TENSORS]
    for (_, sent), (_, got) in zip(TENSORS, came, strict=True):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert Body.of([("", got)]) == Body.of([("", sent)])


def test_a_tensor_has_memory_of_its_own_and_begins_where_pytorch_would_begin_it():
    _, came = unseal(seal({}, [("odd", torch.ones(3, dtype=torch.uint8)), ("next", torch.ones(4))]))
    assert came[1][1].data_ptr() % 64 == 0
    came[1][1].add_(1)


def test_the_bytes_are_those_of_the_tensors_and_a_short_header():
    envelope = seal({"kind": "job"}, [("weight", torch.zeros(1000))])
    assert len(envelope.body) == 4000
    assert len(envelope.header) < 150


@pytest.mark.parametrize(("fields", "wrong"), [
    ({"protocol": 1}, "uses protocol 1, but this side uses 4"), ({"protocol": None}, "uses protocol unknown"),
    ({"tensors": None}, "not described"), ({"tensors": [["x", "float32"]]}, "not described"),
    ({"tensors": [["x", "float32", [2]]]}, "should take 8 bytes, but 16 arrived"),
    ({"tensors": [["x", "float32", [-4]]]}, "not described"),
    ({"tensors": [["x", "float32", [True, 4]]]}, "not described"),
    ({"tensors": [["x", "complex64", [2]]]}, "not described"),
    ({"tensors": [["x" * 301, "float32", [4]]]}, "not described"),
    ({"tensors": [["x", "float32", [2**40, 2**40]]]}, "not described"),
    ({"tensors": [["x", "float32", [2**33, 2**33]]]}, "should take"),
    ({"tensors": [["x", "float32", [1] * 17]]}, "not described"),
])  # fmt: skip
def test_a_header_that_does_not_fit_is_refused(fields, wrong):
    with pytest.raises(BadMessage, match=wrong):
        unseal(changed(seal({}, [("x", torch.zeros(4))]), **fields))


@pytest.mark.parametrize("header", [b"", b"[]", b"{", b"\xff", b'{"protocol": NaN}', b"[" * 100_000, b'{"a": 1e999}'])
def test_what_is_no_header_is_refused(header):
    with pytest.raises(BadMessage):
        unseal(Envelope(header))


def test_an_oversized_message_is_refused_before_it_is_read():
    with pytest.raises(BadMessage, match="oversized: its tensors take 16 bytes; the limit is 15"):
        unseal(seal({}, [("x", torch.zeros(4))]), max_bytes=15)
    with pytest.raises(BadMessage, match="oversized: its header"):
        unseal(Envelope(b" " * (MAX_HEADER + 1)))


def test_a_tensor_that_comes_twice_is_refused_and_one_of_a_type_that_no_message_has_is_not_sent():
    with pytest.raises(BadMessage, match="twice"):
        by_name([("x", torch.zeros(1)), ("x", torch.ones(1))])
    with pytest.raises(UserError, match="complex64 cannot be sent"):
        seal({}, [("x", torch.zeros(1, dtype=torch.complex64))])


def test_a_field_must_have_exactly_its_type():
    fields = {"kind": "job", "run": "ab" * 16, "number": 1}
    assert read(fields, Header) == Header(**fields)
    for value in (True, 1.5, "1", None, [1]):
        with pytest.raises(BadMessage, match=r"Expected `int`, got .* at `\$\.number`"):
            read({**fields, "number": value}, Header)
    for run in ("ab" * 16 + "\n", "../x", "AB" * 16):
        with pytest.raises(BadMessage, match="matching regex"):
            read({**fields, "run": run}, Header)


def test_a_flipped_bit_anywhere_is_noticed():
    envelope = seal({"kind": "job", "seed": 1}, [("weight", torch.arange(4.0))])
    for part in ("header", "body"):
        content = getattr(envelope, part)
        for place in range(8 * len(content)):
            changed = bytearray(content)
            changed[place // 8] ^= 1 << place % 8
            with pytest.raises(BadMessage, match=r"\w"):
                unseal(replace(envelope, **{part: bytes(changed)}))
    assert unseal(envelope)[0] == {"kind": "job", "seed": 1}


# Message numbers


def test_a_number_is_taken_once_in_whatever_order(tmp_path):
    seen = Seen(tmp_path / "seen.json")
    for number in (5, 3, 4):
        seen.take(number)
    for number in (3, 4, 5):
        with pytest.raises(BadMessage, match=f"replayed: message {number}"):
            seen.take(number)
    seen.take(6)


def test_a_restart_forgets_nothing_and_what_is_too_old_to_be_remembered_is_refused(tmp_path):
    seen = Seen(tmp_path / "seen.json")
    for number in range(1, REMEMBERED + 2):
        seen.take(number)
    for number in (0, 1, REMEMBERED + 1):
        with pytest.raises(BadMessage, match="replayed"):
            Seen(tmp_path / "seen.json").take(number)


def test_after_the_server_was_started_again_its_earlier_messages_are_refused(tmp_path):
    seen = Seen(tmp_path / "seen.json")
    seen.take(9)
    seen.take(STARTS)
    with pytest.raises(BadMessage, match="replayed: message 10"):
        seen.take(10)
    seen.take(STARTS + 1)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'[0, ["a"]]', b"[0, [1"])
def test_a_damaged_file_is_a_message_with_a_way_out(tmp_path, content):
    (tmp_path / "seen.json").write_bytes(content)
    with pytest.raises(UserError, match="is damaged; delete the folder"):
        Seen(tmp_path / "seen.json")
