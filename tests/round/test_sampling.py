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


def test_every_pair_comes_together_equally_often():
    """2 of 5 over 3,000 rounds: ten pairs, each about 300 times; 9 degrees of freedom, 99.99 % lie below 34."""
    seen = np.zeros((5, 5))
    for number in range(3_000):
        first, second = (visit.client for visit in uniform(Key(1).fold(number), population([2] * 5), 2))
        seen[first, second] += 1
    pairs = seen[np.triu_indices(5, 1)]
    assert pairs.sum() == 3_000
    assert ((pairs - 300) ** 2 / 300).sum() < 40


def test_clients_that_hold_nothing_never_come():
    held = population([0, 5, 0, 2, 0])
    for number in range(50):
        assert {visit.client for visit in uniform(Key(number), held, 1)} <= {1, 3}
    for per_round in (2, 3, 5, 99):
        assert [visit.client for visit in uniform(Key(0), held, per_round)] == [1, 3]


def test_all_come_when_as_many_are_asked_for_as_there_are():
    held = population([4, 1, 2])
    for per_round in (3, 4, 10**9):
        assert uniform(Key(0), held, per_round) == [Visit(0, 4.0), Visit(1, 1.0), Visit(2, 2.0)]


def test_a_partition_that_holds_nothing_is_refused():
    nobody = Population.from_partition(partition_of([0, 0], examples=3)).roster
    with pytest.raises(UserError, match="no client in the partition has any examples"):
        uniform(Key(0), nobody, 1)
