"""A key is a path: the same path gives the same draws everywhere, any other path others."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.key import Key

parts = st.text(max_size=4) | st.integers(-(2**70), 2**70)
paths = st.lists(parts, max_size=4).map(tuple)
seeds = st.integers(0, 2**64)

PATH = Key(7).fold("round", 3).fold("client", 12, 0)
GOLDEN_NUMPY = [407, 256, 336, 112, 514]
GOLDEN_TORCH = [821, 389, 614, 15, 274]


@settings(deadline=None)
@given(seeds, seeds, paths, paths)
def test_two_keys_give_the_same_number_only_if_seed_and_path_are_the_same(seed, other_seed, path, other_path):
    left, right = Key(seed, path), Key(other_seed, other_path)
    assert (left.number() == right.number()) == (left == right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("a", "b"), ("ab",)),
        (("a", "b"), ("b", "a")),
        (("a, b",), ("a", "b")),
        (("a', 'b",), ("a", "b")),
        ((1,), ("1",)),
        ((12,), (1, 2)),
        ((), ("",)),
        ((0,), ()),
        ((-1,), (1,)),
    ],
)
def test_paths_that_look_alike_differ(left, right):
    assert Key(0, left).number() != Key(0, right).number()


def test_the_numbers_are_pinned_and_follow_from_their_text():
    """SHA-256 of the path as Python writes the tuple, its first 16 bytes, lowest first."""
    for path, seed, number in [
        ((), 0, 339624658933061617697532958265078699665),
        (("round", 3, "client", 12, 0), 7, 216646316807301270272633657466371734744),
    ]:
        text = repr((seed, *path))
        assert int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little") == number
        assert Key(seed, path).number() == number


def test_the_draws_are_pinned():
    assert PATH.numpy().integers(0, 1000, 5).tolist() == GOLDEN_NUMPY
    assert torch.randint(0, 1000, (5,), generator=PATH.torch()).tolist() == GOLDEN_TORCH


def test_generators_neither_read_nor_move_global_state():
    torch_before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = PATH.torch(), PATH.numpy()
    drawn = torch.rand(3, generator=first[0]), first[1].random(3)
    assert torch.equal(torch.random.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002
    torch.rand(5)
    np.random.random(5)  # noqa: NPY002
    assert torch.equal(torch.rand(3, generator=PATH.torch()), drawn[0])
    assert np.array_equal(PATH.numpy().random(3), drawn[1])


def test_the_type_of_a_number_in_the_path_does_not_matter():
    assert Key(np.int64(7), (np.int32(3),)).number() == Key(7, (3,)).number()
