"""Shamir's secret sharing: of n shares any t give the secret back, and t − 1 say nothing about it.

The secret is the value at 0 of a polynomial of degree t − 1 over a prime field, the shares are its values at 1, 2, … n.
Secrets have 16 bytes; the prime is the first above 2¹²⁸, so that every secret is a number below it.

Reference: Shamir, "How to Share a Secret", Communications of the ACM 1979.
"""

from collections.abc import Mapping, Sequence

from unskew.core.errors import UserError
from unskew.privacy.ciphers import key_stream

PRIME = 2**128 + 51
SECRET_BYTES = 16
SHARE_BYTES = 17
DRAWN_BYTES = 32  # for each coefficient: reduced modulo the prime they are uniform to 2^-128


def shares_of(secret: bytes, threshold: int, count: int, key: bytes) -> list[bytes]:
    """The shares for the places 1 to ``count``; the polynomial's other coefficients follow from the key."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, this one {len(secret)}")
    if not 1 <= threshold <= count:
        raise ValueError(f"{threshold} of {count} shares: give a threshold from 1 to the number of shares")
    drawn = key_stream(key, DRAWN_BYTES * (threshold - 1))
    parts = (drawn[at : at + DRAWN_BYTES] for at in range(0, len(drawn), DRAWN_BYTES))
    coefficients = [int.from_bytes(secret, "big"), *(int.from_bytes(part, "big") % PRIME for part in parts)]
    return [_value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in range(1, count + 1)]


def weights_at_zero(places: Sequence[int]) -> list[int]:
    """Lagrange's weights: with them the values at these places add up to the value at 0."""
    weights = []
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def secret_of(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes:
    """The secret, from at least t shares by place and the weights of these places."""
    total = sum(weight * int.from_bytes(shares[place], "big") for place, weight in weights.items()) % PRIME
    if total >> (8 * SECRET_BYTES):
        raise UserError("the shares do not belong together: they give no secret")
    return total.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value
