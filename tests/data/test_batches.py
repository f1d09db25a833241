"""A visit's plan: every epoch sees each example once, in an order that follows from the key alone."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Local
from unskew.data import batches
from unskew.data.augment import crop_and_flip
from unskew.data.batches import Pixels, examples_for, plan, steps_for

held = st.lists(st.integers(0, 1000), max_size=40, unique=True).map(lambda ids: np.array(sorted(ids), dtype=np.int32))


def epochs_of(found, epochs):
    """The example ids of each epoch, in order, without the filling."""
    rows = [row[:count].tolist() for row, count in zip(found.index, found.counts, strict=True)]
    per_epoch = len(rows) // epochs
    return [list(chain(*rows[e * per_epoch : (e + 1) * per_epoch])) for e in range(epochs)]


@settings(deadline=None, max_examples=200)
@given(held, st.integers(1, 4), st.integers(1, 12), st.booleans(), st.integers(0, 2**32))
def test_every_epoch_is_a_permutation_of_the_clients_examples(examples, epochs, batch, augment, seed):
    local = Local(epochs=epochs, batch=batch, augment=augment)
    found = plan(examples, None, local, Key(seed))
    assert found.index.shape == (steps_for(len(examples), local), max(1, min(batch, len(examples))))
    assert found.index.dtype == torch.int64
    assert len(found.counts) == len(found.index)
    for epoch in epochs_of(found, epochs):
        assert sorted(epoch) == examples.tolist()
    for row, count in zip(found.index, found.counts, strict=True):
        assert 1 <= count <= batch
        assert bool((row[:count] >= 0).all())
        assert bool((row[count:] == -1).all())
    short = [step for step, count in enumerate(found.counts) if count < batch]
    per_epoch = len(found.counts) // epochs
    assert all(step % per_epoch == per_epoch - 1 for step in short)  # only an epoch's last batch is short
    if augment and len(examples):
        assert found.shift.shape == (*found.index.shape, 2)
        assert found.flip.shape == found.index.shape
    else:
        assert found.shift is found.flip is None


@settings(deadline=None)
@given(held.filter(len), st.integers(0, 80), st.integers(1, 3), st.integers(1, 12))
def test_a_client_that_draws_does_so_with_replacement_only_if_it_must(examples, take, epochs, batch):
    local = Local(epochs=epochs, batch=batch)
    found = plan(examples, take, local, Key(0))
    assert sum(found.counts) == take * epochs
    assert len(found.counts) == steps_for(take, local)
    first, *others = [sorted(epoch) for epoch in epochs_of(found, epochs)]
    assert all(other == first for other in others)  # one draw for the visit, permuted each epoch
    assert set(first) <= set(examples.tolist())
    if take <= len(examples):
        assert len(set(first)) == take


def test_augmentation_does_not_change_the_order():
    examples = np.arange(30, dtype=np.int32)
    with_crops, without = (plan(examples, None, Local(augment=on), Key(0)) for on in (True, False))
    assert torch.equal(with_crops.index, without.index)


# Pixels


def pixels(dtype, channels=3):
    images = torch.from_numpy(Key(0).numpy().integers(0, 256, (10, channels, 6, 5), dtype=np.uint8))
    images[0], images[1] = 0, 255
    mean, std = torch.tensor([0.491, 0.482, 0.447])[:channels], torch.tensor([0.247, 0.243, 0.262])[:channels]
    return Pixels.of(images, torch.arange(10) % 4, mean, std, dtype), images, mean, std


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_normalisation_is_the_plain_formula(dtype, tolerance, channels):
    held, images, mean, std = pixels(dtype, channels)
    found, labels = held.batch(torch.arange(10))
    wanted = (images.double() / 255 - mean.double().view(1, -1, 1, 1)) / std.double().view(1, -1, 1, 1)
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() < tolerance
    assert labels.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_batch_holds_the_examples_asked_for_in_their_order():
    held, *_ = pixels(torch.float64)
    whole, _ = held.batch(torch.arange(10))
    found, labels = held.batch(torch.tensor([7, 2, 2]))
    assert torch.equal(found, whole[[7, 2, 2]])
    assert labels.tolist() == [3, 2, 2]
    assert held.batch(torch.tensor([], dtype=torch.int64))[0].shape == (0, 3, 6, 5)


def test_crops_come_before_normalisation_and_the_images_stay_as_they_were():
    held, images, *_ = pixels(torch.float64)
    before, index = images.clone(), torch.tensor([3, 4])
    shift, flip = torch.tensor([[0, 8], [4, 1]], dtype=torch.uint8), torch.tensor([True, False])
    found, _ = held.batch(index, shift, flip)
    whole, _ = held.batch(index)
    assert torch.equal(found, crop_and_flip(whole, shift, flip))
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    ("examples", "local"), [(10**9, Local(1, 64)), (100, Local(10**9, 64)), (10**8, Local(1, 10**8))]
)
def test_a_visit_whose_plan_or_batch_does_not_fit_in_memory_is_refused(monkeypatch, examples, local):
    monkeypatch.setattr(batches, "physical_memory", lambda: 16e9)
    batches.check_visit(60_000, Local(20, 64), (3, 32, 32))
    with pytest.raises(UserError, match=r"of memory before training, more than the limit of 8\.0 GB"):
        batches.check_visit(examples, local, (3, 32, 32))


@settings(deadline=None)
@given(held, st.integers(1, 30), st.integers(1, 12), st.booleans())
def test_with_steps_a_visit_has_that_many_batches_and_begins_as_with_epochs(examples, steps, batch, augment):
    local = Local(steps=steps, batch=batch, augment=augment)
    found = plan(examples, None, local, Key(3))
    assert len(found.counts) == len(found.index) == steps_for(len(examples), local) == (steps if len(examples) else 0)
    assert sum(found.counts) == examples_for(len(examples), local)
    longer = plan(examples, None, Local(epochs=30, batch=batch), Key(3))
    assert torch.equal(found.index, longer.index[: len(found.index)])
    assert found.counts == longer.counts[: len(found.counts)]
