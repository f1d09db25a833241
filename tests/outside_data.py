"""Data sets and partitions that live outside the package, named ``outside_data:function`` in tests."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

from unskew.core.errors import UserError


def stripes(examples: int = 60, classes: int = 3):
    """Images whose bright row is the class, as arrays with test part and users."""
    draw = np.random.default_rng(0)
    labels = np.arange(examples) % classes
    images = draw.integers(0, 60, (examples, 8, 8), dtype=np.uint8)
    images[np.arange(examples), labels * 2] = 250
    return {
        "x_train": images, "y_train": labels, "x_test": images[:15], "y_test": labels[:15],
        "users": labels // 2, "classes": [f"row {c}" for c in range(classes)],
    }  # fmt: skip


def dataset(data_dir=None):
    """A torch Dataset; a text file in the data folder may change its brightness."""
    held = stripes()
    level = 1.0 if data_dir is None else float((data_dir / "level.txt").read_text())
    images = torch.from_numpy(held["x_train"])[:, None].float() / 255 * level
    return TensorDataset(images, torch.from_numpy(held["y_train"]))


def wrong():
    return 3


def fails():
    raise OSError("disk on fire")


def complains():
    raise UserError("mine: give another folder")


def by_class(labels, clients, key, offset: int = 0):
    """Client k has the classes k, k + K, …"""
    return (labels + offset) % clients


def drawn(labels, clients, key):
    return key.numpy().integers(0, clients, len(labels))


def answer(labels, clients, key, what: str = "float"):
    """Every wrong answer."""
    count = len(labels)
    answers = {
        "float": np.zeros(count), "short": np.zeros(3, int), "negative": np.full(count, -2),
        "large": np.full(count, clients),
        "none": None, "nobody": np.full(count, -1), "table": np.zeros((count, 2), int), "text": ["a"] * count,
        "ragged": [[1], [1, 2]], "nan": np.full(count, np.nan),
    }  # fmt: skip
    if what == "raises":
        raise RuntimeError("no luck")
    return answers[what]
