"""The weighted mean of what the clients report."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.tensors import PackedSums
from unskew.round.server import weighted_mean

weights = st.floats(1e-3, 1e6)
values = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)


def report(weight, delta):
    """What a client sends: its weight, its difference times the weight."""
    scaled = weight * torch.tensor(delta, dtype=torch.float64)
    return {
        "weight": torch.tensor(weight, dtype=torch.float64),
        "delta/params/w": scaled,
        "metric/loss": torch.ones((), dtype=torch.float64),
    }


def added(*reports):
    total = PackedSums.of(reports[0])
    for other in reports[1:]:
        total.add(PackedSums.of(other))
    return total


@settings(deadline=None)
@given(st.lists(st.tuples(weights, values), min_size=1, max_size=6))
def test_the_mean_of_the_reports_is_numpys_weighted_average(clients):
    found = weighted_mean(added(*(report(weight, delta) for weight, delta in clients)))
    wanted = np.average([delta for _, delta in clients], axis=0, weights=[weight for weight, _ in clients])
    assert list(found) == ["params/w"]
    np.testing.assert_allclose(found["params/w"].numpy(), wanted, rtol=1e-12, atol=1e-9)


def test_parameters_and_buffers_are_averaged_alike_and_nothing_else_is():
    sums = {
        "weight": torch.tensor(4.0).double(),
        "delta/params/w": torch.tensor([[8.0]]).double(),
        "delta/buffers/mean": torch.tensor([2.0]).double(),
        "metric/loss": torch.tensor(9.0).double(),
    }
    found = weighted_mean(sums)
    assert {name: value.tolist() for name, value in found.items()} == {"params/w": [[2.0]], "buffers/mean": [0.5]}
    assert all(value.dtype == torch.float64 for value in found.values())
    assert sums["delta/params/w"].item() == 8.0


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_extreme_weights_neither_overflow_nor_vanish(scale):
    total = added(report(scale, [1.0, 2.0, 3.0]), report(scale, [3.0, 2.0, 1.0]))
    assert weighted_mean(total)["params/w"].tolist() == [2.0, 2.0, 2.0]
