"""Who comes to a round."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation import partition_of
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.data.population import Population
from unskew.round.sampling import uniform


def population(sizes):
    return Population.from_partition(partition_of(sizes)).roster


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), st.integers(1, 20), st.integers(0, 2**32))
def test_clients_come_once_in_ascending_order_weighted_by_their_examples(sizes, per_round, seed):
    visits = uniform(Key(seed), population(sizes), per_round)
    who = [visit.client for visit in visits]
    assert who == sorted(set(who))
    assert len(who) == min(per_round, sum(size > 0 for size in sizes))
    assert visits == [Visit(client, float(sizes[client])) for client in who]
    assert all(sizes[client] > 0 for client in who)
    assert all(type(client) is int for client in who)


def test_the_same_key_draws_the_same_clients_and_others_draw_others():
    held = population([3] * 30)
    draws = [[visit.client for visit in uniform(Key(0).fold("round", r), held, 5)] for r in (1, 1, 2, 3)]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) == 3


def test_every_client_is_drawn_as_often_as_any_other_whatever_its_size():
    """3 of 10 over 3,000 rounds: the chi-square of the counts has about 9·(1 − 0.3) = 6; 30 never happens by chance."""
    held, rounds = population([1, 100, 1, 50, 7, 7, 7, 1, 2, 3]), 3_000
    seen = np.zeros(10)
    for number in range(rounds):
        for visit in uniform(Key(0).fold(number), held, 3):
            seen[visit.client] += 1
    expected = rounds * 0.3
    assert seen.sum() == 3 * rounds
    assert ((seen - expected) ** 2 / expected).sum() < 30


def test_a_partition_that_holds_nothing_is_refused():
    nobody = Population.from_partition(partition_of([0, 0], examples=3)).roster
    with pytest.raises(UserError, match="no client in the partition has any examples"):
        uniform(Key(0), nobody, 1)
