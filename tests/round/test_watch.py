"""What is recorded of a visit, by hand."""

import pytest
import torch

from federation import federation
from unskew.core.tensors import copy
from unskew.core.types import Visit
from unskew.engines.blueprint import build
from unskew.round.client import Train, class_norms, distances, layer_norms, record


def bench_of(method="fedavg", **knobs):
    small = federation(method, sizes=(9, 4), **knobs)
    return small, build(small.blueprint, small.data)


def test_norms_and_distances_by_hand():
    """conv: weight (3, 0), bias (4): 5. fc: all 0 against 1, 2, 2: 3."""
    model = {
        "params/encoder.conv.weight": torch.tensor([[3.0, 0.0]]),
        "params/encoder.conv.bias": torch.tensor([4.0]),
        "buffers/encoder.conv.mean": torch.tensor([100.0]),
        "params/classifier.weight": torch.tensor([[0.0, 0.0]]),
        "params/classifier.bias": torch.tensor([0.0]),
    }
    other = {
        "params/classifier.bias": torch.tensor([1.0]),
        "params/classifier.weight": torch.tensor([[2.0, 2.0]]),
        "params/encoder.conv.bias": torch.tensor([4.0]),
        "params/encoder.conv.weight": torch.tensor([[3.0, 0.5]]),
        "buffers/encoder.conv.mean": torch.tensor([0.0]),
    }
    assert layer_norms(model).tolist() == [5.0, 0.0]
    assert distances(model, other).tolist() == [0.5, 3.0]
    assert distances(model, model).tolist() == [0.0, 0.0]
    assert layer_norms(model).dtype == torch.float64


def test_distances_of_float32_are_taken_in_float64():
    """1 + 2⁻²³ against 1: a difference that float32 carries, and its square beside that of a thousand others."""
    model = {"params/fc.weight": torch.full((1000,), 1 + 2.0**-23)}
    other = {"params/fc.weight": torch.ones(1000)}
    assert distances(model, other).item() == pytest.approx(2.0**-23 * 1000**0.5, rel=1e-12)


def test_class_norms_are_those_of_the_classifier_as_it_is_used():
    _, side = bench_of()
    with torch.no_grad():
        side.network.classifier.weight.zero_()
        side.network.classifier.weight[1, :2] = torch.tensor([3.0, 4.0])
    assert class_norms(side).tolist() == [0.0, 5.0, 0.0, 0.0]
    assert not class_norms(side).requires_grad
    _, normalised = bench_of("clsnorm")
    with torch.no_grad():
        normalised.network.classifier.weight.mul_(7)
    assert class_norms(normalised).tolist() == pytest.approx([1] * 4)


def test_what_is_recorded_of_a_visit_by_hand():
    small, side = bench_of()
    shared = small.state().tensors
    side.load({name: value + 1 for name, value in shared.items()}, training=False)
    found = record(side, shared, ("norms", "drift", "model"))
    assert torch.equal(found["norms"], class_norms(side))
    assert found["drift"].tolist() == pytest.approx(
        [sum(shared[name].numel() for name in shared if f"{layer}." in name) ** 0.5
         for layer in ("conv1", "conv2", "fc1", "classifier")]
    )  # fmt: skip
    assert all(torch.equal(found[f"model/{name}"], value + 1) for name, value in shared.items())
    assert record(side, shared, ()) == {}


@pytest.mark.parametrize("method", ["fedavg", "prototypes", "clsnorm"])
def test_a_job_that_is_watched_gives_the_same_sums_and_what_was_recorded_as_extra(method):
    small, side = bench_of(method)
    shared, key = copy(small.state().tensors), small.key.fold("round", 1, "client", 0, 0)
    plain = dict(Train()(side, shared, Visit(0, 9.0), key).sums)
    plain = {name: value.clone() for name, value in plain.items()}
    seen = Train(1, ("norms", "drift", "model"))(side, shared, Visit(0, 9.0), key)
    assert list(seen.sums) == list(plain)
    assert all(torch.equal(seen.sums[name], value) for name, value in plain.items())
    for name in shared:
        old_less_new = shared[name].double() - seen.extra[f"model/{name}"].double()
        torch.testing.assert_close(9 * old_less_new, plain[f"delta/{name}"], rtol=1e-9, atol=1e-12)


def test_buffers_are_recorded_in_the_model_and_not_in_the_distances():
    small, side = bench_of(model="outside_models:batch_norm")
    shared, key = copy(small.state().tensors), small.key.fold("round", 1, "client", 0, 0)
    seen = Train(1, ("drift", "model"))(side, shared, Visit(0, 9.0), key).extra
    assert seen["model/buffers/encoder.1.num_batches_tracked"].item() == 2  # 9 examples in batches of 16, twice
    assert len(seen["drift"]) == 3  # convolution, norm, classifier
