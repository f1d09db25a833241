"""Very many clients: what each costs, and that a round costs the same however many there are."""

import statistics
import time

import numpy as np
import pytest

import unskew
from unskew import engines, models
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import ImageSet, Local, Split
from unskew.data.partition_files import Holdings, from_arrays, to_arrays
from unskew.data.population import Partition, Population, cells, emd
from unskew.engines.blueprint import Blueprint, build, dataset
from unskew.round import driver
from unskew.runs import folder
from unskew.runs.checkpoint import MEMORIES, load_checkpoint
from unskew.runs.folder import arrays_bytes, write_arrays


def crowd(clients, most, seed=0):
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(clients, dtype=np.int32), draw.integers(1, most + 1, clients))
    parts = [Split(draw.integers(0, 256, (n, 1, 4, 4), dtype=np.uint8), draw.integers(0, 5, n))
             for n in (len(owner), 20)]  # fmt: skip
    return ImageSet("crowd", tuple("abcde"), *parts, (0.5,), (0.25,)), owner


def test_a_client_costs_less_than_100_bytes_beyond_its_examples():
    images, owner = crowd(200_000, 3)
    partition = Partition(owner, 200_000, "crowd", 0)
    population = Population.from_partition(partition)
    roster = population.roster
    held = (population.offsets, roster.sizes, roster.inhabited, roster.ends)
    assert sum(each.nbytes for each in held) / 200_000 < 40
    assert population.order.dtype == np.int32
    packed = arrays_bytes(to_arrays(partition, images.train.labels, 5))
    assert len(packed) / 200_000 < 30


def test_clients_that_are_not_in_a_row_are_ordered_as_by_a_stable_sort():
    """Many examples and clients, some examples held by none."""
    client = np.random.default_rng(1).integers(-1, 150_000, 2**20 + 5).astype(np.int32)
    population = Population.from_partition(Partition(client, 150_001, "test", 0))
    expected = np.argsort(client, kind="stable")[np.count_nonzero(client < 0) :]
    np.testing.assert_array_equal(population.order, expected)
    np.testing.assert_array_equal(population.sizes, np.bincount(client[client >= 0], minlength=150_001))


@pytest.mark.parametrize("classes", [1, 7, 5000])
def test_cells_that_are_counted_are_those_that_are_sorted(classes):
    """With few classes the whole table is counted, with 5,000 the examples are sorted."""
    draw = np.random.default_rng(2)
    client, labels = draw.integers(-1, 40, 3000).astype(np.int32), draw.integers(0, classes, 3000)
    held = client >= 0
    codes, counts = np.unique(client[held].astype(np.int64) * classes + labels[held], return_counts=True)
    for found, wanted in zip(cells(client, labels, classes), (codes // classes, codes % classes, counts), strict=True):
        np.testing.assert_array_equal(found, wanted)
    table = np.zeros((40, classes))
    np.add.at(table, (client[held], labels[held]), 1)
    share, whole = table / table.sum(1, keepdims=True), table.sum(0) / table.sum()
    distances = np.abs(share - whole).sum(1)
    assert emd(client, labels, classes) == pytest.approx((table.sum(1) / table.sum()) @ distances, abs=1e-12)
    arrays = to_arrays(Partition(client, 40, "test", 0), labels, classes)
    told = Holdings("test", None, arrays["sizes"], arrays["counts"].astype(np.int64))
    np.testing.assert_allclose(told.distances, distances, atol=1e-12)


def test_large_arrays_are_packed_quickly_and_read_back_alike(monkeypatch, tmp_path):
    draw = np.random.default_rng(3)
    labels, client = draw.integers(0, 3, 500), draw.integers(0, 9, 500).astype(np.int32)
    arrays = to_arrays(Partition(client, 9, "test", 0), labels, 3)
    small = arrays_bytes(arrays)
    monkeypatch.setattr(folder, "LARGE_BYTES", 100)
    assert arrays_bytes(arrays) != small
    assert arrays_bytes(arrays) == arrays_bytes(arrays)
    write_arrays(tmp_path / "p.npz", arrays)
    with np.load(tmp_path / "p.npz") as read:
        found = from_arrays(dict(read), labels, 3)
    np.testing.assert_array_equal(found.client, client)


def test_saved_states_are_kept_for_visited_clients_alone(tmp_path):
    images, owner = crowd(5000, 2)
    unskew.run(
        data=images, partition=owner, clients=5000, per_round=3, rounds=2, epochs=1, method="scaffold",
        model="tiny-cnn", engine="loop", out=tmp_path / "run",
    )  # fmt: skip
    state, _ = load_checkpoint(tmp_path / "run")
    assert 3 <= len(state.clients) <= 6
    model = tensors.count_bytes(state.tensors)
    assert (tmp_path / "run" / MEMORIES).stat().st_size <= 10 * model


class Crowd:
    """A loop engine over a population, and the state of its server."""

    def __init__(self, clients, method):
        images, owner = crowd(clients, 8)
        population = Population.from_partition(Partition(owner, clients, "crowd", 0))
        blueprint = Blueprint(method, "tiny-cnn", images.shape, 5, Local(epochs=1, batch=16, augment=False))
        data = dataset(images, population)
        side = build(blueprint, data)
        models.initialise(side.network, Key(0))
        self.algorithm = side.algorithm
        self.state = driver.start(side.algorithm, tensors.of_module(side.network))
        self.engine = engines.open_engine("loop", engines.EngineSetup(blueprint, data, 1))

    def round(self):
        """Processor time of a round, for each example of it."""
        began = time.process_time()
        self.state, metrics = driver.run_round(
            self.algorithm, self.engine, self.state, Key(0), per_round=20, rounds=1000
        )
        return (time.process_time() - began) / metrics.examples


@pytest.mark.parametrize("method", ["fedavg", "fedvc(8)"])
def test_a_round_of_200_000_clients_costs_what_one_of_1_000_costs(method):
    """In turns, so that a busy moment hits both; the bound for a million is in benchmarks/million.py."""
    populations = {clients: Crowd(clients, method) for clients in (1_000, 200_000)}
    seconds = {clients: [] for clients in populations}
    for turn in range(13):
        for clients, each in populations.items():
            cost = each.round()
            if turn:
                seconds[clients].append(cost)
    assert statistics.median(seconds[200_000]) <= 1.5 * statistics.median(seconds[1_000])
