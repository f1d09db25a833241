"""The small federation of unskew.checks, with local settings as plain keywords."""

import torch
import torch.nn.functional as F

from unskew.checks.laws import federation as _federation
from unskew.checks.laws import image_set, largest_difference, partition_of, same
from unskew.core.tensors import copy, of_module
from unskew.core.types import Local, Visit
from unskew.data.batches import plan
from unskew.engines.blueprint import build
from unskew.round.jobs import add


def federation(
    method="fedavg", *, sizes=(40, 30, 1, 20, 9), images=None, model="tiny-cnn", dtype="float64", seed=0, **local
):
    settings = Local(**{"epochs": 2, "batch": 16, "lr": 0.05, **local})
    return _federation(method, sizes, images, model, dtype, seed, settings)


def plain_sgd(whole, rounds, fused, make=None, client=0, share=None):
    """Ordinary PyTorch on one client's data: a fresh torch.optim.SGD, or another, in each round, and cross_entropy.

    ``share`` of the client's examples are used, drawn anew in each round; ``make(parameters, round)`` gives another.
    """
    side = build(whole.blueprint, whole.data)
    side.load(whole.state().tensors, training=True)
    network, local, held = side.network.train(), side.algorithm.local, side.population.examples(client)
    knobs = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay, "fused": fused}
    for number in range(1, rounds + 1):
        key = whole.key.fold("round", number).fold("client", client, 0)
        batches = plan(held, share and round(share * len(held)), local, key)
        optimizer = make(network.parameters(), number) if make else torch.optim.SGD(network.parameters(), **knobs)
        for step in range(len(batches.counts)):
            images, labels = side.train.batch(*batches.row(step))
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            if local.clip:
                torch.nn.utils.clip_grad_norm_(network.parameters(), local.clip)
            optimizer.step()
    return of_module(network)


def remembered(engine, state):
    """All that each client remembers, by client and name."""
    return {
        client: copy(engine.memory.recall(Visit(client, 1.0, ticket=ticket)))
        for client, ticket in state.clients.items()
    }


def total(engine, job, shared, visits, key):
    """What a job's replies add up to."""
    return add(engine.visit(job, shared, visits, key), visits)


__all__ = ["federation", "image_set", "largest_difference", "partition_of", "plain_sgd", "remembered", "same", "total"]
