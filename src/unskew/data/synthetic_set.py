"""The drawn population as an image set in memory: ``--data "unskew.data.synthetic_set:population(users=300)"``."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from unskew.core.errors import UserError
from unskew.core.images import ImageSet, Split
from unskew.data.synthetic import NOISE, Shape, draw_rows, pictures


def population(
    users: int = Shape.users, classes: int = Shape.classes, examples: int = Shape.examples, test: int = Shape.test,
    size: int = 32, seed: int = 0, noise: float = NOISE,
) -> ImageSet:  # fmt: skip
    """Photographers with users and places, as ``unskew data generate`` draws them, without a file."""
    if not 4 <= size <= 512:
        raise UserError(f"population(size={size}): a side of a picture has 4 to 512 pixels")
    if not 0 <= noise <= 1000:
        raise UserError(f"population(noise={noise}): the noise of a picture's colours is 0 to 1000")
    rows = draw_rows(Shape(users, classes, examples, test), Path(), seed=seed)
    images = np.stack([_pixels(content) for content in pictures(rows, size=size, seed=seed, noise=noise)])
    train = np.flatnonzero(~rows.test)
    moments = images[train].reshape(len(train), 3, -1) / 255
    return ImageSet(
        "population", rows.classes, Split(images[train], rows.labels[train]),
        Split(images[rows.test], rows.labels[rows.test]), tuple(moments.mean((0, 2)).tolist()),
        tuple(moments.std((0, 2)).tolist()), users=None if rows.users is None else rows.users[train], notes=rows.notes,
        places=None if rows.places is None else rows.places[train],
        test_users=None if rows.users is None else rows.users[rows.test],
    )  # fmt: skip


def _pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).transpose(2, 0, 1)
