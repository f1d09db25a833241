"""What is added up one after another is the sum of the parts, holds none of them."""

import weakref
from dataclasses import replace
from functools import reduce
from operator import add

import pytest
import torch

from calibration.heads import same_statistics as same
from unskew.calibration.statistics import ClassStatistics, KnownNoise
from unskew.core.key import Key

C, D = 6, 3
FORMS = ("full", "diagonal", "shared", "low-rank(2)")
HELD = ((4, 1), (0,), (), (1, 5, 4), (0, 1, 2, 4, 5))  # what each client holds; class 3 is nobody's


def part(client, form="full"):
    labels = torch.tensor([label for label in HELD[client] for _ in range(client + label + 1)], dtype=torch.int64)
    features = torch.randn(len(labels), D, generator=Key(client).torch(), dtype=torch.float64)
    return ClassStatistics.of_features(features, labels, C, form)


def parts(form="full"):
    return [part(client, form) for client in range(len(HELD))]


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_is_the_sum_of_the_parts_added_in_their_order_to_the_last_bit(form):
    """Label by label in plain Python, and by +."""
    given = parts(form)
    found = ClassStatistics.merged(given)
    assert found.held.tolist() == [0, 1, 2, 4, 5]
    for label in range(C):
        own = [(one, one.held.tolist().index(label)) for one in given if label in one.held]
        assert int(found.counts[label]) == sum(int(one.number[place]) for one, place in own)
        for name in [] if label == 3 else [name for name in found.sums if name not in found.form.common]:
            total = torch.zeros_like(given[0].sums[name][0])
            for one, place in own:
                total = total + one.sums[name][place]
            assert torch.equal(found.sums[name][found.held.tolist().index(label)], total)
    for name in found.form.common:
        assert torch.equal(found.sums[name], reduce(add, (one.sums[name] for one in given)))
    same(reduce(add, given), found)


@pytest.mark.parametrize("form", FORMS)
def test_the_parts_stay_as_they_were_and_share_no_memory_with_the_sum(form):
    given = parts(form)
    found = ClassStatistics.merged(given)
    alone = ClassStatistics.merged(given[:1])
    for value in (*found.tensors().values(), *alone.tensors().values()):
        value.fill_(7)
    for one, wanted in zip(given, parts(form), strict=True):
        same(one, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_of_an_iterator_one_part_is_held_while_the_next_is_made_and_none_for_longer(form):
    alive = []

    def one_by_one():
        for client in (0, 3, 4, 1, 0, 3):
            made = part(client, form)
            alive.append(weakref.ref(made))
            assert sum(each() is not None for each in alive) <= 2  # this one, and the one that was added last
            yield made
            del made

    total = ClassStatistics.merged(one_by_one())
    assert not any(each() is not None for each in alive)
    same(total, ClassStatistics.merged([part(client, form) for client in (0, 3, 4, 1, 0, 3)]))


def test_known_noise_adds_up_in_squares_and_is_not_lost():
    first, second, third = parts()[:3]
    noisy = [replace(first, noise=KnownNoise(3.0, 5.0)), second, replace(third, noise=KnownNoise(4.0, 12.0))]
    assert ClassStatistics.merged(noisy).noise == KnownNoise(5.0, 13.0)
    assert reduce(add, noisy).noise == KnownNoise(5.0, 13.0)
    assert ClassStatistics.merged(parts()).noise is None
