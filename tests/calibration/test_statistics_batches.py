"""Batches as users have them give the same sums, and images go where the encoder is."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from calibration.heads import same_statistics as same
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key

C = 3
IMAGES = torch.randn(9, 4, generator=Key(0).torch())
LABELS = torch.arange(9) % C
ENCODER = nn.Linear(4, 5)


def measured(*batches, encoder=ENCODER):
    return ClassStatistics.measure(encoder, batches, C)


PAIRS = {
    "list": [IMAGES, LABELS],
    "arrays": (IMAGES.numpy(), LABELS.numpy()),
    "lists": (IMAGES.tolist(), LABELS.tolist()),
    "doubles": (IMAGES.double().numpy(), LABELS.numpy().astype(np.int32)),
    "tensors in a list": (list(IMAGES), list(LABELS)),
    "a tuple of labels": (IMAGES, tuple(LABELS.tolist())),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_tensors_arrays_and_lists_give_the_same_sums(kind):
    same(measured(PAIRS[kind]), measured((IMAGES, LABELS)))


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("pixel_values", "labels"), ("x", "y")])
def test_dict_batches_give_the_same_sums(image, label):
    same(measured({image: IMAGES.numpy(), label: LABELS, "id": 7}), measured((IMAGES, LABELS)))


PAIR, NUMBERS = (
    "batches must be pairs of (images, labels) or dicts with both",
    "tensors, numpy arrays or lists of numbers",
)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"picture": IMAGES, "label": LABELS}, PAIR),
        ({"image": IMAGES, "class": LABELS}, PAIR),
        (IMAGES, PAIR),
        ((IMAGES, LABELS, 3), PAIR),
        ((IMAGES, None), NUMBERS),
        ((IMAGES, [*LABELS.tolist()[:-1], [1]]), NUMBERS),
        (([[1.0, 2.0], [3.0]], [0, 1]), NUMBERS),
    ],
)
def test_any_other_batch_is_refused(batch, words):
    with pytest.raises(UserError, match=re.escape(words)):
        measured(batch)


class Elsewhere(nn.Module):
    """Its parameters are on another device, and it takes images from there alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, device="meta"))

    def forward(self, images):
        assert images.device == self.scale.device
        return IMAGES[: len(images)]


@pytest.mark.parametrize("batch", [(IMAGES, LABELS), (IMAGES.numpy(), LABELS), {"image": IMAGES, "label": LABELS}])
def test_images_are_moved_to_the_encoders_device_and_sums_stay_on_the_cpu(batch):
    same(measured(batch, encoder=Elsewhere()), ClassStatistics.of_features(IMAGES, LABELS, C))


def test_images_that_are_no_numbers_are_the_encoders_own_affair():
    class Words(nn.Module):
        def forward(self, images):
            return IMAGES[: images.count]

    class Batch:
        count = 9

    same(measured((Batch(), LABELS), encoder=Words()), ClassStatistics.of_features(IMAGES, LABELS, C))
