"""Generated files with the layout and the number of rows of sets that cannot be downloaded here; pictures are tiny."""

import gzip
import struct

import numpy as np
import pytest

from unskew.data import sources

pytestmark = pytest.mark.heavy


def test_emnist_balanced_has_its_published_size(tmp_path):
    draw = np.random.default_rng(0)
    for part, count in (("train", 112_800), ("test", 18_800)):
        images = draw.integers(0, 256, (100, 28, 28), dtype=np.uint8)[np.arange(count) % 100]
        labels = (np.arange(count) % 47).astype(np.uint8)
        for kind, head, body in (
            ("images-idx3", struct.pack(">IIII", 0x803, count, 28, 28), images),
            ("labels-idx1", struct.pack(">II", 0x801, count), labels),
        ):
            path = tmp_path / "emnist" / f"emnist-balanced-{part}-{kind}-ubyte.gz"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(head + body.tobytes(), 1))
    images = sources.load("emnist", tmp_path)
    assert (len(images.train), len(images.test), len(images.classes)) == (112_800, 18_800, 47)
    assert not any("the published set has" in note for note in images.notes)
