"""What is seen of a visit: by hand, in the client's own row."""

import pytest
import torch

from federation import federation
from unskew.core.tensors import copy
from unskew.core.types import Visit
from unskew.engines.blueprint import build
from unskew.round.client import train
from unskew.round.watch import Watch, class_norms, distances, lengths, watched


def bench_of(method="fedavg", **knobs):
    small = federation(method, sizes=(9, 4), **knobs)
    return small, build(small.blueprint, small.data)


def test_a_watch_survives_its_text():
    watch = Watch(("norms", "drift"), (3, 0, 12))
    assert Watch.from_text(watch.to_text()) == watch


def test_lengths_and_distances_by_hand():
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
    assert lengths(model).tolist() == [5.0, 0.0]
    assert distances(model, other).tolist() == [0.5, 3.0]
    assert distances(model, model).tolist() == [0.0, 0.0]
    assert lengths(model).dtype == torch.float64


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


def test_each_client_has_a_row_and_the_others_zeros():
    small, side = bench_of()
    shared = small.state().tensors
    side.load({name: value + 1 for name, value in shared.items()}, training=False)
    found = watched(side, shared, Visit(4, 1.0), Watch(("norms", "drift", "model"), (7, 4, 9)))
    assert found["visits"].tolist() == [0, 1, 0]
    assert all(value.dtype == torch.float64 for value in found.values())
    assert torch.equal(found["norms"][1], class_norms(side))
    assert found["drift"][1].tolist() == pytest.approx(
        [sum(shared[name].numel() for name in shared if f"{layer}." in name) ** 0.5
         for layer in ("conv1", "conv2", "fc1", "classifier")]
    )  # fmt: skip
    for name, value in shared.items():
        assert torch.equal(found[f"model/{name}"][1], value.double() + 1)
    for value in found.values():
        assert not value[0].any()
        assert not value[2].any()


def test_somebody_who_is_not_watched_leaves_zeros():
    small, side = bench_of()
    found = watched(side, small.state().tensors, Visit(5, 1.0), Watch(("norms",), (7, 4)))
    assert list(found) == ["visits", "norms"]
    assert not any(value.any() for value in found.values())


@pytest.mark.parametrize("method", ["fedavg", "prototypes", "clsnorm"])
def test_a_job_that_is_watched_gives_the_same_sums_and_the_watch_beside(method):
    small, side = bench_of(method)
    shared, key = copy(small.state().tensors), small.key.fold("round", 1, "client", 0, 0)
    plain = train(side, shared, Visit(0, 9.0), key, "").sums
    watch = Watch(("norms", "drift", "model"), (0, 1))
    seen = train(side, shared, Visit(0, 9.0), key, watch.to_text()).sums
    assert [name for name in seen if not name.startswith("watch/")] == list(plain)
    assert all(torch.equal(seen[name], value) for name, value in plain.items())
    for name in shared:
        old_less_new = shared[name].double() - seen[f"watch/model/{name}"][0]
        torch.testing.assert_close(9 * old_less_new, plain[f"delta/{name}"], rtol=1e-9, atol=1e-12)


def test_buffers_are_seen_in_the_model_and_not_in_the_distances():
    small, side = bench_of(model="outside_models:batch_norm")
    shared, key = copy(small.state().tensors), small.key.fold("round", 1, "client", 0, 0)
    watch = Watch(("drift", "model"), (0,))
    seen = train(side, shared, Visit(0, 9.0), key, watch.to_text()).sums
    steps = seen["watch/model/buffers/encoder.1.num_batches_tracked"]
    assert steps.item() == 2  # 9 examples in batches of 16, twice
    assert len(seen["watch/drift"][0]) == 3  # convolution, norm, classifier
