"""What secure sums take from the ``cryptography`` package: shared keys, streams of masks, sealed messages.

X25519 for keys that two clients share, HKDF-SHA256 to derive one key from another, ChaCha20 as the stream of a mask,
ChaCha20-Poly1305 to seal what the server passes on from one client to another. Every key serves one purpose, so nonces
may be zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.plugins import require_extra

CHUNK = 2**16  # words of a mask made at a time: they stay in the processor's cache

Words = npt.NDArray[np.uint64]


def derived_key(secret: bytes, info: bytes, salt: bytes, length: int = 32) -> bytes:
    """Bytes that follow from a secret (HKDF with SHA-256): others for every purpose that ``info`` names."""
    sha256 = require_extra("cryptography.hazmat.primitives.hashes").SHA256()
    hkdf = require_extra("cryptography.hazmat.primitives.kdf.hkdf").HKDF(sha256, length=length, salt=salt, info=info)
    key: bytes = hkdf.derive(secret)
    return key


def private_key(content: bytes) -> Any:
    """The X25519 key of these 32 bytes."""
    return require_extra("cryptography.hazmat.primitives.asymmetric.x25519").X25519PrivateKey.from_private_bytes(
        content
    )


def public_bytes(private: Any) -> bytes:
    """The 32 bytes that others may know of a key."""
    content: bytes = private.public_key().public_bytes_raw()
    return content


def exchanged(private: Any, public: bytes, who: str) -> bytes:
    """What the owners of both keys know and nobody else; refused, naming ``who``, where the public key is none."""
    x25519 = require_extra("cryptography.hazmat.primitives.asymmetric.x25519")
    try:
        secret: bytes = private.exchange(x25519.X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # not 32 bytes, or one of the few points that give the secret away
        raise UserError(f"{who}: {error}") from error
    return secret


def add_stream(vector: Words, key: bytes, sign: int) -> None:
    """Add or subtract ChaCha20's keystream in place, modulo 2⁶⁴. A key serves one vector, so its nonce may be zero."""
    ciphers = require_extra("cryptography.hazmat.primitives.ciphers")
    stream = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    add = np.add if sign > 0 else np.subtract
    zeros, drawn = memoryview(bytes(8 * CHUNK)), bytearray(8 * CHUNK)
    for start in range(0, len(vector), CHUNK):
        part = vector[start : start + CHUNK]
        stream.update_into(zeros[: part.nbytes], drawn)
        add(part, np.frombuffer(drawn, dtype="<u8", count=len(part)), out=part)


def key_stream(key: bytes, length: int) -> bytes:
    """Random bytes that follow from a key."""
    ciphers = require_extra("cryptography.hazmat.primitives.ciphers")
    stream = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    drawn: bytes = stream.update(bytes(length))
    return drawn


def sealed(key: bytes, content: bytes, about: bytes) -> bytes:
    """The content for the owner of the key, with 16 bytes that show whether it, or what it is about, was changed."""
    aead = require_extra("cryptography.hazmat.primitives.ciphers.aead")
    box: bytes = aead.ChaCha20Poly1305(key).encrypt(bytes(12), content, about)
    return box


def unsealed(key: bytes, box: bytes, about: bytes, who: str) -> bytes:
    """What was sealed; refused, naming ``who``, where it was changed or is meant for others."""
    aead = require_extra("cryptography.hazmat.primitives.ciphers.aead")
    invalid = require_extra("cryptography.exceptions").InvalidTag
    try:
        content: bytes = aead.ChaCha20Poly1305(key).decrypt(bytes(12), box, about)
    except invalid as error:
        raise UserError(f"{who}: it was changed on its way, or is of another session") from error
    return content


PRIME = 2**128 + 51
SECRET_BYTES = 16
SHARE_BYTES = 17
DRAWN_BYTES = 32  # for each coefficient: reduced modulo the prime they are uniform to 2^-128


def shares_of(secret: bytes, threshold: int, count: int, key: bytes) -> list[bytes]:
    """The shares for the points 1 to ``count``; the polynomial's other coefficients follow from the key."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, this one {len(secret)}")
    if not 1 <= threshold <= count:
        raise ValueError(f"{threshold} of {count} shares: give a threshold from 1 to the number of shares")
    drawn = key_stream(key, DRAWN_BYTES * (threshold - 1))
    parts = (drawn[at : at + DRAWN_BYTES] for at in range(0, len(drawn), DRAWN_BYTES))
    coefficients = [int.from_bytes(secret, "big"), *(int.from_bytes(part, "big") % PRIME for part in parts)]
    return [_value(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in range(1, count + 1)]


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange's weights: with them the values at these points add up to the value at 0."""
    weights = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def secret_of(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes:
    """The secret, from at least t shares by point and the weights of these points."""
    total = sum(weight * int.from_bytes(shares[point], "big") for point, weight in weights.items()) % PRIME
    if total >> (8 * SECRET_BYTES):
        raise UserError("the shares do not belong together: they give no secret")
    return total.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value
