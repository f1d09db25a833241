"""The laws of a round: what must hold whatever the method, the engine, the number of workers."""

import copy
import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from federation import federation, image_set, largest_difference, same
from unskew import methods
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.batches import plan
from unskew.engines.blueprint import build
from unskew.models import NETWORKS
from unskew.round.client import _row

ACTIVE = ["fedavg(lr=0.7)", "fedprox(mu=0.3)", "fedavgm(beta=0.8)", "fedadam", "fedyogi", "fedadagrad"]


def plain_sgd(whole, rounds, fused, other=None):
    """Ordinary PyTorch on one client's data: nn.Module, torch.optim.SGD or another for each round, cross_entropy."""
    side = build(whole.blueprint, whole.data)
    side.load(whole.state().tensors, training=True)
    network, local = side.network.train(), side.algorithm.local
    for number in range(1, rounds + 1):
        key = whole.key.fold("round", number).fold("client", 0, 0)
        batches = plan(side.population.examples(0), None, local, key)
        optimizer = torch.optim.SGD(
            network.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay, fused=fused
        )
        if other is not None:
            optimizer = other(network.parameters(), number)
        for step, count in enumerate(batches.counts):
            images, labels = side.train.batch(*_row(batches, step, count))
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            if local.clip:
                torch.nn.utils.clip_grad_norm_(network.parameters(), local.clip)
            optimizer.step()
    return tensors.of_module(network)


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

    got, want = whole.run(3).tensors, plain_sgd(whole, 3, fused=True, other=made)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("model", NETWORKS)
def test_one_client_holding_all_is_plain_unfused_sgd_in_float64_for_every_network(model):
    images = image_set(100, side=20, channels=3)
    whole = federation(sizes=(100,), images=images, model=model, weight_decay=0.01, augment=True)
    assert largest_difference(whole.run(2).tensors, plain_sgd(whole, 2, fused=False)) < 1e-12


@pytest.mark.parametrize("nothing", ["fedprox(0)", "fedavgm(0)", "fedavg(lr=1)"])
def test_a_method_whose_knob_is_zero_is_fedavg(nothing):
    plain = federation(dtype="float32").run(2).tensors
    other = federation(nothing, dtype="float32").run(2).tensors
    assert tensors.sha256(plain) == tensors.sha256(other)


@pytest.mark.parametrize("method", ACTIVE[1:])
def test_a_method_with_its_knob_up_is_not_fedavg(method):
    assert largest_difference(federation().run(2).tensors, federation(method).run(2).tensors) > 1e-6


@pytest.mark.parametrize("pair", list(combinations(ACTIVE, 2)), ids=" + ".join)
def test_every_pair_commutes_or_is_refused_by_both_names(pair):
    first, second = pair
    if sum(name != "fedprox(mu=0.3)" for name in pair) == 2:  # two servers
        with pytest.raises(UserError, match=r"{}.*{}.*server slot".format(*(n.partition("(")[0] for n in pair))):
            methods.parse_method(f"{first} + {second}")
        return
    there = federation(f"{first} + {second}").run(2).tensors
    back = federation(f"{second} + {first}").run(2).tensors
    assert largest_difference(there, back) < 1e-12


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("method", ["fedprox(mu=0.3) + fedavgm(beta=0.8)"])
def test_loop_and_pool_agree_bit_for_bit(method, workers):
    images = image_set(100, side=10, channels=3)
    small = federation(method, images=images, dtype="float32", augment=True)
    assert same(small.run(2), small.run(2, "pool", workers))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = (federation(seed=seed).run(2) for seed in (3, 3, 4))
    assert same(first, again)
    assert not same(first, other)


def test_stopping_between_rounds_changes_nothing():
    small = federation("fedavgm(beta=0.8)")
    assert same(small.run(4), small.run(4, state=small.run(2)))


def test_a_round_leaves_its_arguments_alone():
    small = federation("fedprox(mu=0.3) + fedadam")
    state = small.state()
    before, data = copy.deepcopy(state), tensors.copy(small.data)
    small.run(1, state=state)
    assert same(state, before)
    assert all(torch.equal(small.data[name], data[name]) for name in data)


def test_global_generators_are_neither_read_nor_moved():
    before = torch.random.get_rng_state()
    first = federation(augment=True).run(1)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(7)
    assert same(first, federation(augment=True).run(1))


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
