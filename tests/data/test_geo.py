"""The partition geo: its cells are S2's own, none has too many examples, none that is kept has too few."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.population import Population

s2 = pytest.importorskip("s2geometry")

DRAW = np.random.default_rng(0)
TOWNS = DRAW.uniform((-60, -180), (70, 180), (200, 2)).repeat(30, axis=0) + DRAW.normal(0, 2, (6000, 2)).clip(-5, 5)
TOWNS[:, 1] = (TOWNS[:, 1] + 180) % 360 - 180


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


def test_min_0_keeps_every_example_and_a_higher_min_drops_whole_cells():
    every, some = deal(TOWNS, "geo(max=100, min=0)"), deal(TOWNS, "geo(max=100, min=50)")
    assert (every.client >= 0).all()
    assert every.notes == ()
    large = {name: rows for name, rows in as_groups(every).items() if len(rows) >= 50}
    assert as_groups(some) == large
    assert len(large) < every.clients
    assert f"{(some.client < 0).sum():,} training examples" in some.notes[0]


def test_neither_the_seed_nor_the_order_of_the_rows_matters():
    first = deal(TOWNS, "geo(max=100)")
    assert deal(TOWNS, "geo(max=100)", seed=5).hash == first.hash
    mixed = np.random.default_rng(0).permutation(len(TOWNS))
    again = deal(TOWNS[mixed], "geo(max=100)")
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
