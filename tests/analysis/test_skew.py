"""Who held what, against the population's own functions and against plain counting."""

from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.finished import NAMES, finished_run, undisturbed
from partitions import counts_table
from unskew.analysis import skew
from unskew.analysis.measure import name_clients
from unskew.charts import Picture
from unskew.charts.files import svg
from unskew.core.errors import UserError
from unskew.data.partition_files import Holdings, read_holdings, to_arrays
from unskew.data.population import Partition, Population, emd
from unskew.runs.folder import write_arrays


def holdings(client, labels, clients, classes, names=None):
    """What a run's partition.npz would say, without a file."""
    client = np.asarray(client, np.int32)
    arrays = to_arrays(Partition(client, clients, "test", 0), np.asarray(labels), classes)
    sizes = arrays["sizes"].astype(np.int64)
    return Holdings("test", names, sizes, arrays["counts"].astype(np.int64))


def measured(client, labels, population, classes, names=None, **knobs):
    held = holdings(client, labels, population, classes, names)
    return skew.take_skew(SimpleNamespace(notes=[], holdings=held, classes=[f"c{c}" for c in range(classes)]), **knobs)


def classes_for_most(counts):
    """How many of its largest classes make up 90% of what a client holds: counted one after another."""
    total, sum_, number = sum(counts), 0, 0
    for count in sorted(counts, reverse=True):
        if 10 * sum_ >= 9 * total:
            break
        sum_ += count
        number += 1
    return number


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 9), st.integers(1, 150))
def test_counts_sizes_and_distances_are_those_of_the_population(seed, clients, classes, examples):
    draw = np.random.default_rng(seed)
    client, labels = draw.integers(-1, clients, examples), draw.integers(0, classes, examples)
    client[0] = max(client[0], 0)  # somebody holds something
    found = measured(client, labels, clients, classes)
    table = counts_table(Population.from_partition(Partition(client.astype(np.int32), clients, "", 0)), labels, classes)
    assert found.counts == table.tolist()
    assert found.sizes == table.sum(1).tolist()
    assert found.total == table.sum(0).tolist()
    assert found.shown == list(range(clients))
    whole = table.sum(0) / table.sum()
    for row, distance in zip(table, found.distances, strict=True):
        share = row / max(row.sum(), 1)
        assert distance == pytest.approx(np.abs(share - whole).sum(), abs=1e-12)
    by_size = sum(d * n for d, n in zip(found.distances, found.sizes, strict=True)) / table.sum()
    assert found.emd == pytest.approx(by_size, abs=1e-12)
    assert found.emd == emd(client.astype(np.int32), labels, classes)
    assert found.few == median(classes_for_most(row) for row in found.counts if sum(row))


def test_one_client_holds_the_whole_and_is_at_no_distance():
    found = measured([0, 0, 0], [2, 1, 2], 1, 3)
    assert (found.sizes, found.counts, found.distances, found.emd) == ([3], [[0, 1, 2]], [0.0], 0.0)
    assert skew.SKEW.findings(found) == ["One client has all 3 examples, so nothing is skewed."]
    assert all(svg(chart).startswith("<svg") for chart in [*skew.SKEW.draw(found), *skew.draw_clients(found).values()])


def test_clients_that_are_users_have_their_names():
    found = measured([0, 1, 1], [0, 1, 1], 2, 2, names=("ann", "bob"))
    assert found.names == ["ann", "bob"]
    held = SimpleNamespace(holdings=holdings([0, 1, 1], [0, 1, 1], 2, 2, ("ann", "bob")))
    assert name_clients(held, [1, -1]) == ["bob", "-1"]
    assert list(skew.draw_clients(found)) == ["ann", "bob"]
    assert "bob" in skew.draw_clients(found)["bob"].title


def test_the_words_tell_the_sizes_the_classes_and_the_emd():
    """Three clients of 2, 4 and 4 examples, each with one class of its own but for the last: medians 1."""
    found = measured([0] * 2 + [1] * 4 + [2] * 4, [0, 0, 1, 1, 1, 1, 0, 0, 1, 1], 3, 2)
    # p = (0.4, 0.6): |1−0.4|·2 = 1.2; |0−0.4|·2 = 0.8; |0.5−0.4|·2 = 0.2 -> (2·1.2 + 4·0.8 + 4·0.2)/10 = 0.64
    assert found.emd == pytest.approx(0.64)
    assert found.distances == pytest.approx([1.2, 0.8, 0.2])
    assert skew.SKEW.findings(found) == [
        "3 clients hold 2 to 4 examples; for half of them, 1 or fewer of the 2 classes make up 90% of their examples. "
        "Label skew: EMD 0.64 on a scale from 0 to 2."
    ]


def test_a_client_beside_the_whole():
    found = measured([0] * 2 + [1] * 6, [0, 0, 1, 1, 1, 0, 0, 0], 2, 2)
    bars, line = skew.draw_clients(found)["1"].marks
    assert list(bars.height) == [0.5, 0.5]
    assert list(line.y) == [5 / 8, 3 / 8]


# Of a run


def test_a_run_s_skew_is_its_result_s(finished):
    with finished_run(finished) as opened, undisturbed():
        found = skew.take_skew(opened)
        images = opened.prepared
        table = counts_table(images.population, images.images.train.labels, 10)
    assert found.emd == opened.result.emd
    assert found.counts == table.tolist()
    assert found.classes == list(NAMES)


def spoiled(file, **changes):
    with np.load(file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    write_arrays(file, {name: value for name, value in (arrays | changes).items() if value is not None})


def read_clients(file):
    with np.load(file) as archive:
        return archive["client"]


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(file.read_bytes()[:300]),
        lambda file: file.write_bytes(b"no archive at all"),
        lambda file: spoiled(file, counts=None),
        lambda file: spoiled(file, client=np.zeros(240, np.int32)),
        lambda file: spoiled(file, counts=np.zeros((3, 2), np.int32)),
        lambda file: spoiled(file, clients=np.array([1, 2])),
        lambda file: spoiled(file, emd=np.array("much")),
        lambda file: spoiled(file, client=np.roll(read_clients(file), 1)),
    ],
)
def test_a_damaged_partition_is_one_message(run, change):
    change(run / "partition.npz")
    with pytest.raises(UserError, match=r"partition\.npz is damaged, or not an Unskew partition"):
        read_holdings(run / "partition.npz")


def test_a_partition_that_is_gone_is_named(tmp_path):
    with pytest.raises(UserError, match=r"partition\.npz is damaged"):
        read_holdings(tmp_path / "partition.npz")


def test_very_many_clients_are_told_by_quantiles():
    """20,000 clients: the file does not grow with them, the sentences and ends of the curves are of all of them."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 4, 20_000)
    sizes[5] = 900
    client = np.repeat(np.arange(20_000), sizes)
    labels = draw.integers(0, 120, len(client))
    found = measured(client, labels, 20_000, 120)
    assert found.clients == 20_000
    assert len(found.sizes) == 1001
    assert (min(found.sizes), max(found.sizes)) == (1, 900)
    assert found.shown == sorted(found.shown)
    shown = [sizes[k] for k in found.shown]  # evenly over the ranks: each size comes about 20 times, and the largest
    assert max(shown) == 900
    assert all(17 <= shown.count(size) <= 23 for size in (1, 2, 3))
    for k, row in zip(found.shown, found.counts, strict=True):
        assert row == np.bincount(labels[client == k], minlength=120).tolist()
    held = holdings(client, labels, 20_000, 120)
    assert found.ranked["distance"][-1] == pytest.approx(held.distances.max())
    assert found.ranked["classes"][-1] == len(set(labels[client == 5]))
    assert skew.SKEW.findings(found)[0].startswith("20,000 clients hold 1 to 900 examples")
    charts = {chart.name: chart for chart in skew.SKEW.draw(found)}
    assert charts["skew-sizes"].marks[0].y[-1] == 900
    assert all(len(svg(chart)) < 400_000 for chart in charts.values())
    alone = skew.draw_clients(found)
    assert all(len(chart.marks[0].x) <= 30 for chart in alone.values())
    assert sum(len(chart.marks[0].x) for chart in alone.values()) > 60


def test_the_largest_classes_of_a_client_are_shown_where_there_are_many():
    labels = np.repeat(np.arange(150), np.arange(150) + 1)
    found = measured(np.zeros(len(labels), np.int32), labels, 1, 150)
    (chart,) = skew.draw_clients(found).values()
    assert [word for _, word in chart.x.ticks] == [f"c{c}" for c in range(149, 119, -1)]
    assert chart.x.label == "class, the largest of 150"


def test_a_simulation_s_page_has_thumbnails_and_a_map_where_there_are_places(finished):
    with finished_run(finished) as opened:
        values = skew.take_skew(opened)
        *_, last = skew.SKEW.show(opened, values)
        assert (last.name, sum(isinstance(mark, Picture) for mark in last.marks)) == ("skew-images", 80)
        clients = opened.prepared.partition.client
        places = np.full((len(clients), 2), np.nan)
        assert skew.draw_map(places, clients, values) == []
        places[clients == 1] = (48.0, 11.5)
        (chart,) = skew.draw_map(places, clients, values)
        (dots,) = chart.marks
        assert (list(dots.x), list(dots.y)) == ([11.5], [48.0])
        assert dots.tips[0].startswith("client 1: ")
