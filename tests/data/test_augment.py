"""Crops and flips: one gather for a batch is what numpy's pad, slices and mirror are image by image."""

from itertools import product

import numpy as np
import pytest
import torch

from unskew.core.key import Key
from unskew.data.augment import PAD, crop_and_flip, draw

ALL = list(product(range(2 * PAD + 1), range(2 * PAD + 1), (False, True)))  # 162 of them


def plain(image, top, left, flip):
    """The definition, on one image [ch, H, W]."""
    padded = np.pad(image, ((0, 0), (PAD, PAD), (PAD, PAD)), mode="reflect")
    crop = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return crop[:, :, ::-1] if flip else crop


def pictures(count, channels, height, width):
    return Key(0).numpy().integers(0, 256, (count, channels, height, width), dtype=np.uint8)


def applied(images, draws):
    shift = torch.tensor([[top, left] for top, left, _ in draws], dtype=torch.uint8).view(-1, 2)
    return crop_and_flip(torch.from_numpy(images), shift, torch.tensor([flip for *_, flip in draws], dtype=torch.bool))


@pytest.mark.parametrize(
    ("channels", "height", "width"),
    [(3, 32, 32), (1, 8, 8), (1, 28, 28), (3, 5, 9), (2, 9, 5), (1, 1, 6), (1, 6, 1), (3, 1, 1), (1, 2, 3), (1, 3, 4)],
)
def test_every_crop_and_flip_is_numpys(channels, height, width):
    images = pictures(len(ALL), channels, height, width)
    found = applied(images, ALL)
    assert found.shape == images.shape
    assert found.dtype == torch.uint8
    for got, image, (top, left, flip) in zip(found.numpy(), images, ALL, strict=True):
        assert np.array_equal(got, plain(image, top, left, flip))


def test_draws_cover_all_crops_and_flips_evenly():
    """162 equally likely draws: the chi-square of 162,000 has mean 161 and deviation 18; 6 deviations are 269."""
    count = 162_000
    shift, flip = draw(Key(0).numpy(), count)
    codes = (shift[:, 0].astype(int) * 9 + shift[:, 1]) * 2 + flip
    seen = np.bincount(codes, minlength=162)
    assert len(seen) == 162
    assert ((seen - count / 162) ** 2 / (count / 162)).sum() < 269


@pytest.mark.parametrize("count", [0, 1, 7])
def test_draws_have_these_shapes_and_types_and_follow_the_key(count):
    shift, flip = draw(Key(3).numpy(), count)
    assert (shift.shape, shift.dtype) == ((count, 2), np.uint8)
    assert (flip.shape, flip.dtype) == ((count,), bool)
    again = draw(Key(3).numpy(), count)
    assert np.array_equal(again[0], shift)
    assert np.array_equal(again[1], flip)
