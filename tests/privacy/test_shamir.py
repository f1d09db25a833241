"""Any t of n shares give the secret back, t − 1 say nothing, and the field is a field."""

import os
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import nextprime

from unskew.core.errors import UserError
from unskew.privacy import ciphers
from unskew.privacy.ciphers import PRIME, secret_of, shares_of


def put_together(shares, places):
    return secret_of({place: shares[place - 1] for place in places})


@settings(max_examples=30)
@given(secret=st.binary(min_size=16, max_size=16), count=st.integers(1, 12), data=st.data())
def test_any_t_shares_give_the_secret_back(secret, count, data):
    threshold = data.draw(st.integers(1, count))
    places = data.draw(st.permutations(range(1, count + 1)))[:threshold]
    assert put_together(shares_of(secret, threshold, count, os.urandom(32)), places) == secret


def test_every_subset_of_t_gives_it_and_one_share_less_does_not():
    secret, shares = bytes(range(16)), shares_of(bytes(range(16)), 3, 5, bytes(32))
    assert all(put_together(shares, places) == secret for places in combinations(range(1, 6), 3))
    assert all(put_together(shares, places) != secret for places in combinations(range(1, 6), 2))


def test_shares_that_give_no_secret_are_refused():
    """The prime is a little above all secrets: 2¹²⁸ itself is a number of the field and not a secret."""
    with pytest.raises(UserError, match="the shares do not belong together"):
        secret_of({1: (2**128).to_bytes(17, "big")})


def test_fewer_shares_than_t_fit_every_secret_equally_well():
    """Of t − 1 shares any value at 0 has one polynomial through them: here is the one for another secret."""
    shares = shares_of(bytes(16), 3, 3, bytes(32))
    known = {place: int.from_bytes(shares[place - 1], "big") for place in (1, 2)}
    for other in (1, 2**128 - 1, 2**127):
        through = {0: other, **known}
        value = 0
        for x, y in through.items():  # Lagrange at 3
            weight = 1
            for z in through:
                if z != x:
                    weight = weight * (3 - z) * pow(x - z, -1, PRIME) % PRIME
            value = (value + y * weight) % PRIME
        both = {place: number.to_bytes(17, "big") for place, number in {**known, 3: value}.items()}
        assert int.from_bytes(secret_of(both), "big") == other


def test_shares_are_the_values_of_a_polynomial_over_the_field(monkeypatch):
    """By hand: 5 + 3x + 7x² at 1, 2 and 3 is 15, 39 and 77."""
    numbers = b"".join(number.to_bytes(32, "big") for number in (3, 7))
    monkeypatch.setattr(ciphers, "key_stream", lambda key, length: numbers)
    shares = shares_of((5).to_bytes(16, "big"), 3, 3, b"")
    assert [int.from_bytes(share, "big") for share in shares] == [15, 39, 77]
    assert int.from_bytes(put_together(shares, [1, 2, 3]), "big") == 5


def test_the_prime_is_the_first_above_all_secrets():
    assert nextprime(2**128) == PRIME
