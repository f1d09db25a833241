"""What holds for every partition: it is one, it follows its seed, and its skew lies in [0, 2]."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.partition_files import from_arrays, to_arrays
from unskew.data.population import Partition, Population, emd

EQUAL_SIZES = ["iid", "shards(1)", "dirichlet-client(0)", "dirichlet-client(0.3)", "dirichlet-client(50)"]
FREE_SIZES = [f"dirichlet({knobs}, min_size=0)" for knobs in ("0.3", "1e-3")]
FREE_SIZES.append("dirichlet(0.3, min_size=0, cap=true)")
SCHEMES = [*EQUAL_SIZES, *FREE_SIZES]
CLASSES = 7

label_rows = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=80).map(np.array)
seeds = st.integers(0, 2**64)


@settings(max_examples=150, deadline=None)
@given(text=st.sampled_from(SCHEMES), labels=label_rows, seed=seeds, data=st.data())
def test_every_partition_is_a_partition(text, labels, seed, data):
    clients = data.draw(st.integers(1, len(labels)), "clients")
    found = partition_examples(text, labels, clients=clients, key=Key(seed), classes=CLASSES)
    population = Population.from_partition(found)
    together = np.concatenate([population.examples(k) for k in range(clients)])
    assert population.clients == found.clients == clients
    assert sorted(together.tolist()) == list(range(len(labels)))  # none lost, none twice
    if text in EQUAL_SIZES:
        assert population.sizes.max() - population.sizes.min() <= 1
    assert 0 <= emd(found.client, labels, CLASSES) < 2
    again = partition_examples(found.scheme, labels, clients=clients, key=Key(seed), classes=CLASSES)
    assert again.hash == found.hash
    assert from_arrays(to_arrays(found, labels, CLASSES), labels, CLASSES).hash == found.hash


@settings(max_examples=40, deadline=None)
@given(labels=label_rows, seed=seeds, minimum=st.integers(0, 4))
def test_dirichlet_gives_every_client_the_least_size(labels, seed, minimum):
    clients = max(1, len(labels) // max(1, 3 * minimum))
    text = f"dirichlet(alpha=50, min_size={minimum})"
    if clients * minimum <= len(labels):
        found = partition_examples(text, labels, clients=clients, key=Key(seed), classes=CLASSES)
        assert Population.from_partition(found).sizes.min() >= minimum


@pytest.mark.parametrize("text", SCHEMES)
def test_another_seed_gives_another_partition(text):
    labels = np.arange(400) % CLASSES
    hashes = {partition_examples(text, labels, clients=9, key=Key(s), classes=CLASSES).hash for s in range(20)}
    assert len(hashes) == 20


@pytest.mark.parametrize("text", [text for text in SCHEMES if text != "iid"])
def test_the_order_of_the_examples_does_not_change_who_gets_how_many_of_a_class(text):
    labels = np.arange(400) % CLASSES
    mixed = np.random.default_rng(0).permutation(labels)
    first, second = (
        to_arrays(partition_examples(text, row, clients=9, key=Key(1), classes=CLASSES), row, CLASSES)
        for row in (labels, mixed)
    )
    assert first["counts"].tolist() == second["counts"].tolist()


clients_rows = st.lists(st.tuples(st.integers(-1, 12), st.integers(0, CLASSES - 1)), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(rows=clients_rows)
def test_emd_is_its_definition_and_lies_between_0_and_2(rows):
    client, labels = (np.array(column) for column in zip(*rows, strict=True))
    held = client >= 0
    expected = 0.0
    p = np.bincount(labels[held], minlength=CLASSES) / max(1, held.sum())
    for k in set(client[held].tolist()):
        q = np.bincount(labels[client == k], minlength=CLASSES) / (client == k).sum()
        expected += (client == k).sum() / held.sum() * np.abs(q - p).sum()
    value = emd(client.astype(np.int32), labels, CLASSES)
    assert 0 <= value < 2
    assert value == pytest.approx(expected, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(rows=clients_rows, spare=st.integers(0, 3))
def test_a_population_holds_each_client_s_examples_and_no_other(rows, spare):
    client = np.array([row[0] for row in rows], np.int32)
    population = Population.from_partition(Partition(client, 13 + spare, "by hand", 0))
    for k in range(13 + spare):
        assert population.examples(k).tolist() == np.flatnonzero(client == k).tolist()
