"""Images in the shape that a network takes."""

import pytest
import torch

from unskew.data.augment import resize_images
from unskew.data.batches import Pixels


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
