import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.data import published

HERE = Path("some/file")
IMAGES = Path("some/images")


def idx_bytes(shape=(2, 3, 4), magic=0x803, body=None):
    count = int(np.prod(shape))
    body = bytes(i % 256 for i in range(count)) if body is None else body
    return struct.pack(f">I{len(shape)}I", magic, *shape) + body


@settings(max_examples=25)
@given(st.integers(1, 4), st.sampled_from([(1, 10), (2, 100)]), st.randoms(use_true_random=False))
def test_cifar_records_come_back_as_written(count, kind, chance):
    label_bytes, classes = kind
    raw = bytearray(chance.randbytes(count * (label_bytes + 3072)))
    wanted = [chance.randrange(classes) for _ in range(count)]
    for i, label in enumerate(wanted):
        raw[i * (label_bytes + 3072) + label_bytes - 1] = label
    images, labels = published.cifar(bytes(raw), HERE, label_bytes=label_bytes, classes=classes)
    assert labels.tolist() == wanted
    assert images.shape == (count, 3, 32, 32)
    for i in range(count):
        start = i * (label_bytes + 3072) + label_bytes
        assert images[i].tobytes() == raw[start : start + 3072]


@given(st.integers(0, 3 * 3073))
def test_a_truncated_cifar_file_is_named(size):
    if size % 3073 or size == 0:
        with pytest.raises(UserError, match=r"some/file is truncated: .* records of 3,073"):
            published.cifar(bytes(size), HERE, label_bytes=1, classes=10)
    else:
        assert len(published.cifar(bytes(size), HERE, label_bytes=1, classes=10)[1]) == size // 3073


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_reads_the_same_gzipped_or_not(pack):
    images = published.idx(pack(idx_bytes()), IMAGES)
    np.testing.assert_array_equal(images, np.arange(24).reshape(2, 3, 4))
    labels = published.idx(pack(idx_bytes((5,), 0x801)), Path("labels"))
    assert labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (idx_bytes((5,), 0x801), "requires a buffer"),
        (idx_bytes(magic=0x801), "not begin like an idx file of images"),
        (idx_bytes(body=bytes(25)), "more than the declared 24 bytes"),
        (idx_bytes((0, 28, 28)), "not begin like an idx file of images"),
    ],
)
def test_an_idx_file_of_something_else_or_of_another_length_is_refused(raw, complaint):
    with pytest.raises(UserError, match=f"some/images is damaged.*{complaint}"):
        published.idx(raw, IMAGES)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_truncated_at_any_byte_is_named(pack):
    raw = pack(idx_bytes())
    for size in range(len(raw)):
        with pytest.raises(UserError, match="some/images"):
            published.idx(raw[:size], IMAGES)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_count_of_terabytes_is_refused_without_asking_for_memory(pack):
    with pytest.raises(UserError, match="it is truncated"):
        published.idx(pack(struct.pack(">IIII", 0x803, *[2**32 - 1] * 3)), IMAGES)


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (None, [1]),
        (np.zeros((1, 3072), np.uint8), None),
        (np.zeros((1, 3071), np.uint8), [1]),
        (np.zeros((1, 3072), np.int64), [1]),
        (np.zeros((0, 3072), np.uint8), []),
        (np.zeros((1, 3072), np.uint8), ["1"]),
        (np.zeros((1, 3072), np.uint8), [1, 2]),
        (np.zeros((1, 3072), np.uint8), [10]),
        (np.zeros((1, 3072), np.uint8), [-1]),
    ],
)
def test_a_python_batch_that_is_none_is_named(data, labels):
    raw = pickle.dumps({"data": data, "labels": labels})
    with pytest.raises(UserError, match="some/file is not a batch in CIFAR's Python layout"):
        published.cifar_python(raw, HERE, key="labels", classes=10)
