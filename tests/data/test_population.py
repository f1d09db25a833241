"""Clients as flat arrays, and how unlike they are."""

import hashlib

import numpy as np
import pytest

from unskew.data.population import Partition, Population, emd


def made(client, clients=None) -> Partition:
    client = np.array(client, np.int32)
    return Partition(client, clients or int(client.max()) + 1, "by hand", 0)


def plain_emd(client, labels, classes) -> float:
    """The definition, client by client."""
    held = client >= 0
    p = np.bincount(labels[held], minlength=classes) / held.sum()
    total = 0.0
    for k in np.unique(client[held]):
        own = labels[client == k]
        q = np.bincount(own, minlength=classes) / len(own)
        total += len(own) / held.sum() * np.abs(q - p).sum()
    return total


def test_a_population_groups_examples_by_client_in_ascending_order():
    population = Population.from_partition(made([1, 0, 1, -1, 0, 1]))
    assert population.clients == 2
    assert population.examples(0).tolist() == [1, 4]
    assert population.examples(1).tolist() == [0, 2, 5]
    assert population.sizes.tolist() == [2, 3]
    assert [population.roster.size(0), population.roster.size(1)] == [2, 3]
    assert population.order.dtype == np.int32
    assert population.offsets.dtype == np.int64


def test_emd_equals_its_definition():
    rng = np.random.default_rng(0)
    for classes, clients in [(2, 3), (7, 5), (40, 900)]:
        client = rng.integers(-1, clients, 500).astype(np.int32)
        labels = rng.integers(0, classes, 500)
        assert emd(client, labels, classes) == pytest.approx(plain_emd(client, labels, classes), abs=1e-12)


def test_the_hash_covers_the_clients_and_their_number():
    written = bytes.fromhex("00000000 01000000 ffffffff 0200000000000000")
    assert made([0, 1, -1]).hash == hashlib.sha256(written).hexdigest()
    assert made([0, 1, -1]).hash != made([0, 1, 0]).hash
    assert made([0, 1, -1]).hash != made([0, 1, -1], clients=3).hash
