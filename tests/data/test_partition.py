"""Schemes at their edges, against their definitions, and pinned for every machine."""

import time
from collections import Counter
from itertools import product

import numpy as np
import pytest

from partitions import counts_table
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.partition import partition_examples, polya
from unskew.data.population import Population

LABELS = np.arange(5000) * 7919 % 5000 // 500  # ten classes of 500, well mixed


def deal(text, clients=10, labels=LABELS, seed=0, users=None, classes=10):
    return partition_examples(text, labels, clients=clients, key=Key(seed), users=users, classes=classes)


def sizes_of(found):
    return Population.from_partition(found).sizes


def table_of(found, labels=LABELS, classes=10):
    return counts_table(Population.from_partition(found), labels, classes)


GOLDEN = {
    "iid": "e89cb5b331884418",
    "shards": "56ff38649ba3cae9",
    "dirichlet": "29aad5cd8b0b7755",
    "dirichlet(0.1, cap=true)": "41835b540a309411",
    "dirichlet(0.001, min_size=0)": "7f94596b3922b9d6",
    "dirichlet-client(0)": "bf54c3171b62bc72",
    "dirichlet-client(0.5)": "6c623352516afdc3",
}


@pytest.mark.parametrize(("text", "start"), GOLDEN.items())
def test_a_seed_gives_the_same_partition_on_any_machine(text, start):
    # Derivation: deal(text).hash as first drawn. Whoever changes one breaks every published seed.
    assert deal(text).hash[:16] == start


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("iid", "iid"),
        ("dirichlet", "dirichlet(alpha=0.1)"),
        (" dirichlet( 1 ) ", "dirichlet(alpha=1.0)"),
        ("dirichlet(min_size=5, alpha=0.5)", "dirichlet(alpha=0.5, min_size=5)"),
        ("dirichlet(0.5, cap=true, min_size=10)", "dirichlet(alpha=0.5, cap=true)"),
        ("dirichlet-client(0)", "dirichlet-client(alpha=0.0)"),
        ("shards", "shards(per_client=2)"),
    ],
)
def test_the_scheme_is_written_in_one_way_and_means_the_same_again(text, canonical):
    found = deal(text)
    assert found.scheme == canonical
    assert deal(canonical).hash == found.hash


# What is refused, and what the message says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "partition is empty"),
        ("iid + shards", "give one partition; several cannot be added"),
        ("dirichlet-clients(1)", "did you mean 'dirichlet-client'"),
        ("diriclet(1)", "did you mean 'dirichlet'"),
        ("random", "choose from: iid, dirichlet, dirichlet-client, shards, users, geo, file:FILE"),
        ("geo(max=1000)", "has no places"),
        ("geo(max=0)", "give a number above 0"),
        ("geo(max=100, min=101)", "min must be between 0 and max"),
        ("geo(min=-1)", "min must be between 0 and max"),
        ("iid(3)", "takes no values"),
        ("users(3)", "takes no values"),
        ("users", "has no users"),
        ("dirichlet(0)", "give a number above 0"),
        ("dirichlet(-1)", "give a number above 0"),
        ("dirichlet(1e999)", "this number is too large"),
        ("dirichlet(nan)", "alpha must be a number"),
        ("dirichlet(0.1, min_size=-1)", "0 or more"),
        ("dirichlet(0.1, min_size=2.5)", "whole number"),
        ("dirichlet(0.1, 10, cap=1)", "true or false"),
        ("dirichlet(beta=1)", "no knob 'beta'"),
        ("dirichlet-client", "needs alpha"),
        ("dirichlet-client(-0.1)", "must be 0 or more"),
        ("dirichlet-client(inf)", "alpha must be a number"),
        ("shards(0)", "give a number above 0"),
        ("shards(1000)", "10000 shards need as many examples"),
        ("file:", "it is a folder"),
    ],
)
def test_a_wrong_text_is_refused_with_what_to_do(text, says):
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        deal(text)


@pytest.mark.parametrize(
    ("text", "clients", "examples"),
    [("iid", 11, 10), ("dirichlet(min_size=0)", 11, 10), ("dirichlet-client(1)", 11, 10), ("shards(1)", 11, 10),
     ("iid", 0, 10), ("iid", -3, 10), ("iid", 1, 0)],
)  # fmt: skip
def test_there_are_from_one_client_to_as_many_as_examples(text, clients, examples):
    with pytest.raises(UserError, match=f"{clients} clients for {examples} training examples: give 1 to {examples}"):
        deal(text, clients, np.zeros(examples, np.int64))


# iid and shards


def test_shards_are_two_a_client_so_a_client_has_few_classes():
    table = table_of(deal("shards", 10))
    assert set(table.sum(axis=1)) == {500}
    assert ((table > 0).sum(axis=1) <= 2).all()  # 250 a shard: no shard spans two classes


# dirichlet


def plain_dirichlet(labels, clients, alpha, rng, cap):
    """One draw as the papers' codes write it, class by class; [K, C] counts."""
    held = [[] for _ in range(clients)]
    for c in np.unique(labels):
        p = rng.dirichlet([alpha] * clients)
        if cap:
            p = np.array([q * (len(own) < len(labels) / clients) for q, own in zip(p, held, strict=True)])
            p = p / p.sum()
        cuts = (np.cumsum(p) * (labels == c).sum()).astype(int)[:-1]
        for own, part in zip(held, np.split(np.flatnonzero(labels == c), cuts), strict=True):
            own.extend(part)
    return np.array([np.bincount(labels[own], minlength=10) for own in held])


@pytest.mark.parametrize("cap", [False, True])
def test_dirichlet_agrees_with_its_plain_twin_in_distribution(cap):
    rng = np.random.default_rng(0)
    text = f"dirichlet(0.5, min_size=0, cap={str(cap).lower()})"
    ours = [np.sort(sizes_of(deal(text, 5, seed=seed))) for seed in range(400)]
    twin = [np.sort(plain_dirichlet(LABELS, 5, 0.5, rng, cap).sum(axis=1)) for _ in range(400)]
    error = np.sqrt((np.var(ours, axis=0) + np.var(twin, axis=0)) / 400)
    assert (np.abs(np.mean(ours, axis=0) - np.mean(twin, axis=0)) < 4 * error).all()


def test_dirichlet_favours_neither_the_first_client_nor_the_last():
    # 300 classes of 4 for 8 clients: plain floors would take 150 examples from the first and give them to the last.
    labels = np.repeat(np.arange(300), 4)
    sizes = sizes_of(deal("dirichlet(1)", 8, labels, classes=300))
    assert (np.abs(sizes - 150) < 45).all()


def test_cap_stops_a_client_that_has_its_share():
    labels = np.repeat(np.arange(10), 500)
    found = deal("dirichlet(0.05, min_size=0, cap=true)", 10, labels)
    table = table_of(found, labels)
    before = np.cumsum(table, axis=1) - table  # what a client held before each class
    assert (table[before >= 500] == 0).all()
    assert (table.sum(axis=1) < 1000).all()
    free = table_of(deal("dirichlet(0.05, min_size=0)", 10, labels), labels)
    assert (free.sum(axis=1) >= 1000).any()


def test_dirichlet_draws_again_until_every_client_has_enough():
    found = deal("dirichlet(0.1, min_size=100)")
    assert sizes_of(found).min() >= 100
    assert found.redraws > 0


def test_dirichlet_gives_up_after_a_counted_number_of_draws_and_says_what_to_change():
    start = time.process_time()
    with pytest.raises(UserError, match=r"dirichlet: none of .* draws gave all 100 clients") as error:
        deal("dirichlet(0.001)", 100)
    assert time.process_time() - start < 10  # 0.1 s on a quiet machine
    message = str(error.value)
    remedies = ("fewer clients", "larger alpha", "smaller min_size", "dirichlet-client")
    for part in ("1000 draws", *remedies):
        assert part in message


@pytest.mark.parametrize("alpha", ["1e-3", "1e-9", "1e-320"])
def test_a_tiny_alpha_gives_each_class_to_one_client_and_no_nan(alpha):
    table = table_of(deal(f"dirichlet({alpha}, min_size=0)"))
    assert table.sum() == 5000
    assert (table.max(axis=0) >= 495).sum() >= 9


# dirichlet-client


def plain_dirichlet_client(frequency, sequence, alpha, rng):
    """The chance that a client draws this sequence of classes, by Hsu's words: with q ~ Dir(alpha·p) the next is
    of class y with chance q(y) / q(those that remain); the mean over many q.
    """
    q = rng.dirichlet(alpha * frequency / frequency.sum(), 40_000)
    left, chance = frequency.copy(), np.ones(len(q))
    for label in sequence:
        if left[label] == 0:
            return 0.0
        chance *= q[:, label] / q[:, left > 0].sum(axis=1)
        left[label] -= 1
    return chance.mean()


@pytest.mark.parametrize("alpha", [0.7, 4.0])
def test_polyas_urn_is_hsus_procedure_in_distribution(alpha):
    # Every sequence of five draws from classes of 3, 2 and 2: all but the first few meet an exhausted class.
    frequency, draws = np.array([3, 2, 2]), 12_000
    sequences = list(product(range(3), repeat=5))
    expected = draws * np.array(
        [plain_dirichlet_client(frequency, s, alpha, np.random.default_rng(0)) for s in sequences]
    )
    drawn = Counter(tuple(polya(frequency, np.array([5]), alpha, Key(s)).tolist()) for s in range(draws))
    assert expected.sum() == pytest.approx(draws)
    assert sum(drawn[s] for s, e in zip(sequences, expected, strict=True) if e == 0) == 0
    common = expected > 5
    freedom = common.sum() - 1
    observed = np.array([drawn[s] for s in sequences])
    chi_square = ((observed - expected) ** 2 / np.where(common, expected, 1))[common].sum()
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


# Edges that every scheme meets


# users


def test_users_are_clients_with_names():
    users = np.array(["zoe", "abe", "zoe", "mia"])
    found = deal("users", None, np.array([0, 1, 1, 0]), users=users)
    assert found.names == ("abe", "mia", "zoe")
    assert found.client.tolist() == [2, 0, 2, 1]
    assert (found.clients, found.scheme) == (3, "users")
