"""What the tests of the readers share: small files of their own, and the real data where somebody has it."""

import gzip
import struct

import numpy as np
import pytest

from unskew.data.store import Cache


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", 10**9, 10**8)


@pytest.fixture
def draw():
    return np.random.default_rng(0)


@pytest.fixture
def write_cifar10(draw):
    """Writes the six binary files with three images each and gives all images and labels in their order."""

    def write(folder, count=3):
        folder.mkdir(parents=True, exist_ok=True)
        images = draw.integers(0, 256, (6 * count, 3, 32, 32), dtype=np.uint8)
        labels = draw.integers(0, 10, 6 * count)
        records = np.concatenate([labels.astype(np.uint8)[:, None], images.reshape(len(images), -1)], axis=1)
        for i, name in enumerate([*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]):
            (folder / name).write_bytes(records[count * i : count * (i + 1)].tobytes())
        return images, labels

    return write


@pytest.fixture
def write_idx(draw):
    """Writes the four idx files of a set of the MNIST family: 7 training and 3 test images."""

    def write(folder, prefix="", test="t10k", packed=True, first=0):
        folder.mkdir(parents=True, exist_ok=True)
        written = {}
        for part, count in (("train", 7), (test, 3)):
            images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = (draw.integers(0, 10, count) + first).astype(np.uint8)
            for name, raw in (
                ("images-idx3-ubyte", struct.pack(">IIII", 0x803, *images.shape) + images.tobytes()),
                ("labels-idx1-ubyte", struct.pack(">II", 0x801, count) + labels.tobytes()),
            ):
                path = folder / f"{prefix}{part}-{name}{'.gz' if packed else ''}"
                path.write_bytes(gzip.compress(raw, mtime=0) if packed else raw)
            written[part] = (images, labels)
        return written["train"], written[test]

    return write
