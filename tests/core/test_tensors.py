"""Arithmetic over dicts of tensors: each fast form against the plain one that defines it."""

import hashlib
import math

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.tensors import PackedSums
from unskew.runs.folder import model_bytes

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4)


def random_tensors(shapes, seed=0, dtype=torch.float64):
    draw = Key(seed).torch()
    return {f"params/{place}": torch.randn(shape, generator=draw, dtype=dtype) for place, shape in enumerate(shapes)}


def batch_norm():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with torch.no_grad():
        for place, value in enumerate(module.state_dict().values()):
            value.fill_(place + 1)
    return module


@settings(deadline=None)
@given(shapes, st.sampled_from([torch.float32, torch.float64]))
def test_flat_is_every_value_in_order(shapes, dtype):
    values = random_tensors(shapes, dtype=dtype)
    vector = tensors.flat(values)
    assert vector.dtype == torch.float64
    assert vector.tolist() == [number for value in values.values() for number in value.flatten().tolist()]


def test_flat_keeps_whole_numbers_beside_float32_exactly():
    """float32 ends at 2^24; a count of batches may go beyond it."""
    assert tensors.flat({"weight": torch.ones(1), "batches": torch.tensor(2**24 + 1)}).tolist() == [1.0, 2**24 + 1]


@settings(deadline=None)
@given(shapes)
def test_sums_are_added_name_by_name_and_the_tensors_they_were_packed_from_stay(shapes):
    left, right = random_tensors(shapes, 1), random_tensors(shapes, 2)
    before = tensors.copy(left), tensors.copy(right)
    total = PackedSums.of(left)
    total.add(PackedSums.of(right))
    assert list(total) == list(left)
    assert all(torch.equal(total[name], left[name] + right[name]) for name in left)
    assert all(torch.equal(left[name], before[0][name]) and torch.equal(right[name], before[1][name]) for name in left)


@pytest.mark.parametrize(
    ("left", "right", "odd"),
    [(("a", "b"), ("a",), "b"), (("a",), ("c", "d"), "a, c, d"), ((), ("a",), "a"), (("a", "b"), ("b", "a"), "order")],
)
def test_sums_with_other_entries_are_not_added(left, right, odd):
    one = torch.zeros((), dtype=torch.float64)
    with pytest.raises(ValueError, match=odd):
        PackedSums.of(dict.fromkeys(left, one)).add(PackedSums.of(dict.fromkeys(right, one)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", [0, 999])
def test_one_value_that_is_not_finite_is_found(bad, dtype, where):
    values = {"a": torch.zeros(3, dtype=dtype), "b": torch.ones(1000, dtype=dtype)}
    assert tensors.finite(values)
    values["b"][where] = bad
    assert not tensors.finite(values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"a": torch.zeros(0)},
        {"a": torch.full((4,), 1e308, dtype=torch.float64)},
        {"a": torch.tensor([1e308, 1e308, -1e308], dtype=torch.float64), "b": torch.ones(2)},
        {"a": torch.full((5,), 3e38, dtype=torch.float32)},
        {"a": torch.tensor(3), "b": torch.tensor(2.0)},
        {"a": torch.tensor([True, False])},
    ],
)
def test_finite_values_are_finite_even_if_their_sum_is_not(values):
    assert tensors.finite(values)


def test_the_hash_is_over_names_and_raw_bytes_in_the_order_of_the_names(tmp_path):
    """As the interface says it, recomputed from what another program finds in the model file."""
    state = tensors.of_module(batch_norm())
    (tmp_path / "model.safetensors").write_bytes(model_bytes(state))
    digest = hashlib.sha256()
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode() + file.get_tensor(name).tobytes())
    assert tensors.sha256(state) == digest.hexdigest()


def plain_half_squared_distance(values, reference):
    return 0.5 * sum(((value - fixed) ** 2).sum() for value, fixed in zip(values, reference, strict=True))


@settings(deadline=None, max_examples=50)
@given(shapes, st.sampled_from([torch.float32, torch.float64]))
def test_half_squared_distance_is_the_plain_formula_in_value_and_gradient(shapes, dtype):
    values = [value.requires_grad_() for value in random_tensors(shapes, 1, dtype).values()]
    reference = list(random_tensors(shapes, 2, dtype).values())
    fast, plain = (f(values, reference) for f in (tensors.half_squared_distance, plain_half_squared_distance))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)
    pairs = zip(torch.autograd.grad(3 * fast, values), torch.autograd.grad(3 * plain, values), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_modules_tensors_are_its_own_under_two_namespaces():
    module = batch_norm()
    found = tensors.of_module(module)
    names = ["params/0.weight", "params/0.bias", "params/1.weight", "params/1.bias"]
    assert list(found) == [*names, *(f"buffers/1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked"))]
    found["params/0.bias"].fill_(9)
    found["buffers/1.running_var"].fill_(8)
    assert module[0].bias.tolist() == [9, 9]
    assert module[1].running_var.tolist() == [8, 8]
    assert not any(value.requires_grad for value in found.values())
