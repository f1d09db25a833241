import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.data import binary

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
    images, labels = binary.cifar(bytes(raw), HERE, label_bytes=label_bytes, classes=classes)
    assert labels.tolist() == wanted
    assert images.shape == (count, 3, 32, 32)
    for i in range(count):
        start = i * (label_bytes + 3072) + label_bytes
        assert images[i].tobytes() == raw[start : start + 3072]


@given(st.integers(0, 3 * 3073))
def test_a_truncated_cifar_file_is_named(size):
    if size % 3073 or size == 0:
        with pytest.raises(UserError, match=r"some/file is truncated: .* record size of 3,073"):
            binary.cifar(bytes(size), HERE, label_bytes=1, classes=10)
    else:
        assert len(binary.cifar(bytes(size), HERE, label_bytes=1, classes=10)[1]) == size // 3073


def test_a_cifar_label_out_of_range_is_named_with_its_record():
    raw = bytes(3073) + b"\x0a" + bytes(3072)
    with pytest.raises(UserError, match="some/file: the label of record 1 is 10, but labels range from 0 to 9"):
        binary.cifar(raw, HERE, label_bytes=1, classes=10)


def test_an_empty_file_and_a_missing_file_are_named(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="empty is empty"):
        binary.read_file(tmp_path / "empty")
    with pytest.raises(UserError, match="absent cannot be read: No such file"):
        binary.read_file(tmp_path / "absent")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_reads_the_same_gzipped_or_not(pack):
    images = binary.idx(pack(idx_bytes()), IMAGES)
    np.testing.assert_array_equal(images, np.arange(24).reshape(2, 3, 4))
    labels = binary.idx(pack(idx_bytes((5,), 0x801)), Path("labels"))
    assert labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (idx_bytes((5,), 0x801), "some/images starts with 00000801, but an idx file of images starts with 00000803"),
        (idx_bytes(body=bytes(23)), "is truncated: 2×3×4 images take 24 bytes, but it has 23"),
        (idx_bytes(body=bytes(25)), "is longer than it declares"),
        (idx_bytes((0, 28, 28)), "it contains no images"),
    ],
)
def test_an_idx_file_of_something_else_or_of_another_length_is_refused(raw, says):
    with pytest.raises(UserError, match=says):
        binary.idx(raw, IMAGES)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_truncated_at_any_byte_is_named(pack):
    raw = pack(idx_bytes())
    for size in range(len(raw)):
        with pytest.raises(UserError, match="some/images"):
            binary.idx(raw[:size], IMAGES)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_count_of_terabytes_is_refused_without_asking_for_memory(pack):
    with pytest.raises(UserError, match="is truncated"):
        binary.idx(pack(struct.pack(">IIII", 0x803, *[2**32 - 1] * 3)), IMAGES)


def test_a_flipped_bit_fails_the_gzip_checksum():
    raw = bytearray(gzip.compress(idx_bytes()))
    raw[-8] ^= 1  # the CRC is the last but one word
    with pytest.raises(UserError, match=r"some/images is damaged inside its gzip compression .*CRC"):
        binary.idx(bytes(raw), IMAGES)


def test_joining_counts_letters_from_zero():
    pixels, labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([1, 26], np.uint8)
    images, numbers = binary.join(pixels, labels, (HERE, HERE), classes=26, first=1)
    assert numbers.tolist() == [0, 25]
    assert images.shape == (2, 1, 3, 4)
    with pytest.raises(UserError, match="is 0, but labels range from 1 to 26"):
        binary.join(pixels, labels - labels[0], (HERE, HERE), classes=26, first=1)


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ({"labels": [1]}, "has no 'data', only 'labels'"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "has no 'labels'"),
        ({"data": np.zeros((1, 3071), np.uint8), "labels": [1]}, "not an array of bytes"),
        ({"data": np.zeros((1, 3072), np.int64), "labels": [1]}, "not an array of bytes"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "not an array of bytes"),
        ({"data": "text", "labels": [1]}, "not an array of bytes"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["1"]}, "not a list of whole numbers"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [2**70]}, "not a list of whole numbers"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [1, 2]}, "1 images and 2 labels"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "record 0 is 10"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [-1]}, "record 0 is -1"),
    ],
)
def test_a_python_batch_that_is_none_is_named(batch, complaint):
    with pytest.raises(UserError, match=f"some/file.*{complaint}"):
        binary.check_cifar_python(batch, HERE, key="labels", classes=10)
