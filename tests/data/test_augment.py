"""Crops and flips: one gather for a batch is what numpy's pad, slices and mirror are image by image."""

from itertools import product

import numpy as np
import pytest
import torch

from unskew.core.key import Key
from unskew.data.augment import PAD, crop_and_flip, draw, resize_images
from unskew.data.batches import Pixels

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


def test_enlarging_by_two_is_bilinear_between_the_centres_of_pixels():
    made = resize_images(torch.tensor([[[[0.0, 4.0]]]]), (1, 1, 4))
    assert made.flatten().tolist() == [0.0, 1.0, 3.0, 4.0]  # centres at −¼, ¼, ¾, 1¼; the ends are repeated


def test_shrinking_takes_every_pixel_into_account():
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, ::4, ::4] = 16.0  # without antialiasing only the two middle pixels in four would count
    assert float(resize_images(image, (1, 2, 2)).min()) > 0


@pytest.mark.parametrize("size", [(3, 4, 4), (1, 6, 6), (3, 2, 2)])
def test_batches_have_the_shape_and_are_normalised_after_scaling(size):
    images = torch.full((2, 1, 4, 4), 51, dtype=torch.uint8)
    channels = size[0]
    mean, std = torch.full((channels,), 0.1), torch.full((channels,), 0.5)
    pixels = Pixels.of(images, torch.tensor([0, 1]), mean, std, torch.float32, size)
    batch, labels = pixels.batch(torch.tensor([1, 0, 1]))
    assert batch.shape == (3, *size)
    assert pixels.shape == size
    torch.testing.assert_close(batch, torch.full_like(batch, (0.2 - 0.1) / 0.5))
    assert labels.tolist() == [1, 0, 1]


def test_stored_output_is_given_out_as_it_is_and_draws_choose_a_view():
    stored = torch.arange(12.0).view(6, 2, 1, 1)  # two examples: the plain one and two views of each
    one = torch.ones(1)
    pixels = Pixels.of(stored, torch.tensor([5, 6]), one, one, torch.float32, (3, 9, 9))
    assert pixels.stored
    assert pixels.shape == (2, 1, 1)
    plain, labels = pixels.batch(torch.tensor([1, 0]))
    assert plain.flatten(1).tolist() == [[6, 7], [0, 1]]
    assert labels.tolist() == [6, 5]
    shift, flip = torch.tensor([[0, 0], [0, 0]], dtype=torch.uint8), torch.tensor([False, True])
    views, _ = pixels.batch(torch.tensor([1, 0]), shift, flip)
    assert views.flatten(1).tolist() == [[8, 9], [4, 5]]
