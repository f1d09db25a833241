"""The laws of a round: what must hold whatever the method, the engine, the number of workers."""

import math

import pytest
import torch

from federation import federation, image_set, largest_difference, plain_sgd, same
from unskew.core.key import Key
from unskew.engines.blueprint import build
from unskew.models import NETWORKS


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_holding_all_is_plain_sgd_to_the_last_bit(momentum):
    whole = federation(sizes=(100,), dtype="float32", momentum=momentum, weight_decay=0.01)
    got, want = whole.run(3).tensors, plain_sgd(whole, 3, fused=True)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(("text", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_one_client_holding_all_is_plain_adam_to_the_last_bit(text, kind):
    """Clipped, on a cosine, its state new in each round."""
    settings = {"lr": 0.01, "weight_decay": 0.01, "clip": 0.3, "schedule": "cosine", "optimizer": text}
    whole = federation(sizes=(100,), dtype="float32", **settings)

    def made(parameters, number):
        rate = 0.01 * (1 + math.cos(math.pi * (number - 1) / 3)) / 2
        return kind(parameters, lr=rate, weight_decay=0.01, fused=True)

    got, want = whole.run(3).tensors, plain_sgd(whole, 3, fused=True, make=made)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("model", NETWORKS)
def test_one_client_holding_all_is_plain_unfused_sgd_in_float64_for_every_network(model):
    images = image_set(100, side=20, channels=3)
    whole = federation(sizes=(100,), images=images, model=model, weight_decay=0.01, augment=True)
    assert largest_difference(whole.run(2).tensors, plain_sgd(whole, 2, fused=False)) < 1e-12


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("method", ["fedprox(mu=0.3) + fedavgm(beta=0.8)"])
def test_loop_and_pool_agree_bit_for_bit(method, workers):
    images = image_set(100, side=10, channels=3)
    small = federation(method, images=images, dtype="float32", augment=True)
    assert same(small.run(2), small.run(2, "pool", workers))


def test_clients_that_are_not_drawn_do_not_matter():
    """Their data may change without a bit of the result changing."""
    small = federation()
    visits = small.algorithm.sampler(
        Key(0).fold("round", 1).fold("sample"), build(small.blueprint, small.data).population.roster, 2
    )
    side = build(small.blueprint, small.data)
    drawn = {int(i) for visit in visits for i in side.population.examples(visit.client)}
    before = small.run(1, per_round=2)
    others = [i for i in range(100) if i not in drawn]
    small.data["train/images"][others] = 0
    assert same(before, small.run(1, per_round=2))
