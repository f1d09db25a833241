"""The cryptography of secure sums: shared keys, mask streams and sealed messages (``cryptography``), secret sharing.

X25519 for keys that two clients share, HKDF-SHA256 to derive one key from another, ChaCha20 as the stream of a mask,
ChaCha20-Poly1305 to seal what the server forwards from one client to another, Shamir's shares of secrets. Every key
serves one purpose, so nonces may be zero.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.plugins import require_extra

CHUNK = 2**16  # words of a mask generated at a time, so that they stay in the CPU's cache

Words = npt.NDArray[np.uint64]


def primitives(name: str) -> Any:
    """A module of ``cryptography.hazmat.primitives``."""
    return require_extra(f"cryptography.hazmat.primitives.{name}")


def derived_key(secret: bytes, info: bytes, salt: bytes, length: int = 32) -> bytes:
    """Derive bytes from a secret (HKDF with SHA-256), different ones for every purpose ``info``."""
    hkdf = primitives("kdf.hkdf").HKDF(primitives("hashes").SHA256(), length=length, salt=salt, info=info)
    return bytes(hkdf.derive(secret))


def private_key(content: bytes) -> Any:
    """The X25519 private key of these 32 bytes."""
    return primitives("asymmetric.x25519").X25519PrivateKey.from_private_bytes(content)


def public_bytes(private: Any) -> bytes:
    """The 32 bytes of the public key."""
    return bytes(private.public_key().public_bytes_raw())


def exchanged(private: Any, public: bytes, who: str) -> bytes:
    """The shared secret of the two keys' owners; refused, naming ``who``, if the public key is invalid."""
    try:
        return bytes(private.exchange(primitives("asymmetric.x25519").X25519PublicKey.from_public_bytes(public)))
    except ValueError as error:  # not 32 bytes, or one of the few points that reveal the secret
        raise UserError(f"{who}: {error}") from error


def add_stream(vector: Words, key: bytes, sign: int) -> None:
    """Add or subtract ChaCha20's keystream in place, modulo 2⁶⁴. A key serves one vector, so its nonce may be zero."""
    stream, add = _stream(key), np.add if sign > 0 else np.subtract
    zeros, drawn = memoryview(bytes(8 * CHUNK)), bytearray(8 * CHUNK)
    for start in range(0, len(vector), CHUNK):
        part = vector[start : start + CHUNK]
        stream.update_into(zeros[: part.nbytes], drawn)
        add(part, np.frombuffer(drawn, dtype="<u8", count=len(part)), out=part)


def _stream(key: bytes) -> Any:
    ciphers = primitives("ciphers")
    return ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()


def key_stream(key: bytes, length: int) -> bytes:
    """Pseudorandom bytes from a key."""
    return bytes(_stream(key).update(bytes(length)))


def sealed(key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypt the content for the owner of the key, with a tag of 16 bytes that protects it and the context."""
    return bytes(primitives("ciphers.aead").ChaCha20Poly1305(key).encrypt(bytes(12), content, context))


def unsealed(key: bytes, box: bytes, context: bytes, who: str) -> bytes:
    """Decrypt a box; refused, naming ``who``, if it was modified or is meant for others."""
    try:
        return bytes(primitives("ciphers.aead").ChaCha20Poly1305(key).decrypt(bytes(12), box, context))
    except require_extra("cryptography.exceptions").InvalidTag as error:
        raise UserError(f"{who}: the message was modified, or belongs to another session") from error


PRIME = 2**128 + 51
SECRET_BYTES = 16
SHARE_BYTES = 17
DRAWN_BYTES = 32  # per coefficient: modulo the prime they are uniform up to 2^-128


def shares_of(secret: bytes, threshold: int, count: int, key: bytes) -> list[bytes]:
    """Shamir's shares for the points 1 to ``count``; the polynomial's other coefficients follow from the key."""
    drawn = key_stream(key, DRAWN_BYTES * (threshold - 1))
    parts = (drawn[at : at + DRAWN_BYTES] for at in range(0, len(drawn), DRAWN_BYTES))
    coefficients = [int.from_bytes(secret, "big"), *(int.from_bytes(part, "big") % PRIME for part in parts)]
    shares = []
    for point in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def secret_of(shares: Mapping[int, bytes]) -> bytes:
    """Reconstruct the secret from t shares by point: Lagrange's polynomial at 0."""
    total = 0
    for point, share in shares.items():
        above, below = 1, 1
        for other in shares.keys() - {point}:
            above = above * other % PRIME
            below = below * (other - point) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    if (secret := total % PRIME) >> (8 * SECRET_BYTES):
        raise UserError("the shares do not belong together: they do not yield a secret")
    return secret.to_bytes(SECRET_BYTES, "big")
