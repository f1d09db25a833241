"""Secure aggregation: the server learns the sum of the clients' class statistics and nothing of a single client's.

A client lays its statistics out for all classes, rounds them to fixed point and adds masks modulo 2⁶⁴:

    y_i = x_i + b_i + Σ_{j > i} m_ij − Σ_{j < i} m_ij    m_ij: of the secret that i and j share, b_i: of i's own seed

The m_ij cancel in Σ y_i, exactly, since these are integers. Each client then opens its seed, once, and the server takes
Σ b_i off. Keys and seeds come from the operating system, never from a Key: the seed of a run must not
give the masks away.

Why the seed: where a client does not answer, its m_ij stay in the sum. Were the others to publish the secrets that they
share with it, or were the sum repeated without it, its vector might still arrive late, and the server could take its
masks off, or subtract one sum from the other: either gives x_i in the clear. So no client opens its seed
for an incomplete attempt. The attempt is repeated under a new session id, and what was sent before stays masked by b_i.

Departs from the paper: its clients hold shares of each other's seeds, so that a sum survives drop-outs; here it is
repeated, and lost if a client leaves between its answer and its opening.

Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, section 4.

Shapes: C classes, d features, W = C + the form's sums: the words of a vector.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.plugins import require_extra
from unskew.privacy.fixed_point import Layout

MIN_CLIENTS = 3  # of two, each can subtract its own part from the sum and has the other's
CHUNK = 2**20  # words of a mask made at a time

Words = npt.NDArray[np.uint64]


class Masking:
    """A client's part in one sum: its key pair, one attempt or more if clients drop out, one opening."""

    def __init__(self, client: int, private: Any) -> None:
        if not 0 <= client < 2**63:
            raise UserError(f"client {client}: a client's number must be between 0 and 2^63 - 1")
        self.client = client
        self._private = private  # an X25519PrivateKey
        self.public: bytes = private.public_key().public_bytes_raw()
        self._sessions: set[bytes] = set()
        self._seed: tuple[bytes, bytes] | None = None  # of the last session alone: older ones can never be opened
        self._opened = False

    @staticmethod
    def new(client: int) -> "Masking":
        """With a fresh key from the operating system."""
        return Masking(
            client, require_extra("cryptography.hazmat.primitives.asymmetric.x25519").X25519PrivateKey.generate()
        )

    def masked(
        self, statistics: ClassStatistics, layout: Layout, peers: Mapping[int, bytes], session: bytes, *,
        least: int = MIN_CLIENTS,
    ) -> Tensor:  # fmt: skip
        """[W] int64, to be sent. ``peers`` are the public keys of all that take part; its own may be among them."""
        if session in self._sessions or self._opened:
            who = f"client {self.client} refuses to answer"
            raise UserError(f"{who}: a session is answered once, and none after one was opened")
        seed = os.urandom(32)
        public_keys = {**peers, self.client: peers.get(self.client, self.public)}
        vector = masked_vector(
            statistics, layout, public_keys, session, client=self.client, private=self._private, seed=seed, least=least
        )
        self._sessions.add(session)
        self._seed = session, seed
        return vector

    def opened(self, session: bytes) -> bytes:
        """The seed of b_i, for when the server says that every client has answered this session; no other is opened."""
        if self._seed is None or self._seed[0] != session:
            raise UserError(f"client {self.client} refuses to open: this is not the last session that it answered")
        self._opened = True
        return self._seed[1]


def masked_vector(
    statistics: ClassStatistics, layout: Layout, public_keys: Mapping[int, bytes], session: bytes, *, client: int,
    private: Any, seed: bytes, least: int = MIN_CLIENTS,
) -> Tensor:  # fmt: skip
    """[W] int64, what a client sends: its statistics under its own mask and those that it shares with each other.

    ``public_keys`` are those of all clients that take part, its own included; ``private`` is its X25519 key, ``seed``
    that of its own mask.
    """
    who = f"client {client}"
    _require_enough(len(public_keys), least)
    public = private.public_key().public_bytes_raw()
    if public_keys.get(client) != public or len(set(public_keys.values())) < len(public_keys):
        raise UserError(f"{who} refuses to answer: a public key is not its owner's")
    if len(session) < 16:
        raise UserError(f"{who} refuses to answer: a session id has at least 16 random bytes, not {len(session)}")
    vector = layout.quantised(statistics, len(public_keys), who).numpy().view(np.uint64)
    _add_stream(vector, seed, 1)
    taking_part = roster_hash(public_keys)
    for peer in sorted(public_keys.keys() - {client}):
        shared = _shared_key(client, private, peer, public_keys, layout, session, taking_part)
        _add_stream(vector, shared, 1 if client < peer else -1)
    return torch.from_numpy(vector.view(np.int64))


def _shared_key(
    client: int,
    private: Any,
    peer: int,
    public_keys: Mapping[int, bytes],
    layout: Layout,
    session: bytes,
    roster: bytes,
) -> bytes:
    """The key of m_ij: the same for both clients, another for each session, layout and set of clients."""
    x25519 = require_extra("cryptography.hazmat.primitives.asymmetric.x25519")
    try:
        secret = private.exchange(x25519.X25519PublicKey.from_public_bytes(public_keys[peer]))
    except ValueError as error:  # not 32 bytes, or one of the few points that give the secret away
        raise UserError(f"client {client} refuses the public key of client {peer}: {error}") from error
    pair = b"".join(_entry(each, public_keys[each]) for each in sorted((client, peer)))
    return derived_key(secret, b"unskew secure sum 1 " + layout.about().encode() + pair + roster, session)


def roster_hash(public_keys: Mapping[int, bytes]) -> bytes:
    """SHA-256 over all clients that take part and their public keys."""
    return hashlib.sha256(b"".join(_entry(client, public_keys[client]) for client in sorted(public_keys))).digest()


def derived_key(secret: bytes, info: bytes, salt: bytes) -> bytes:
    """32 bytes from a secret (HKDF with SHA-256)."""
    sha256 = require_extra("cryptography.hazmat.primitives.hashes").SHA256()
    hkdf = require_extra("cryptography.hazmat.primitives.kdf.hkdf").HKDF(sha256, length=32, salt=salt, info=info)
    key: bytes = hkdf.derive(secret)
    return key


def unmasked_sum(
    masked: Mapping[int, Tensor], opened: Mapping[int, bytes], layout: Layout, *, least: int = MIN_CLIENTS
) -> ClassStatistics:
    """The server's part: the sum over all clients that answered one session, from their vectors and opened seeds."""
    _require_enough(len(masked), least)
    if masked.keys() != opened.keys():
        odd = sorted(masked.keys() ^ opened.keys())[0]
        raise UserError(
            f"client {odd} has not both answered and opened; without it the sum stays masked; start a new secure sum"
        )
    words = layout.bytes // 8
    total = np.zeros(words, dtype=np.uint64)
    for client, vector in masked.items():
        if vector.dtype != torch.int64 or tuple(vector.shape) != (words,):
            raise UserError(
                f"the vector of client {client} is refused: {vector.dtype} of the shape {tuple(vector.shape)}, "
                f"expected int64 of ({words},), {layout.about()}"
            )
        if len(opened[client]) != 32:
            raise UserError(f"the seed of client {client} is refused: it has {len(opened[client])} bytes, expected 32")
        total += vector.numpy().view(np.uint64)
    return unmasked(total, opened.values(), layout)


def unmasked(total: Words, seeds: Collection[bytes], layout: Layout) -> ClassStatistics:
    """The statistics of a sum of masked vectors, its clients' own masks taken off; theirs with each other cancel."""
    for seed in seeds:
        _add_stream(total, seed, -1)
    return layout.statistics(torch.from_numpy(total.view(np.int64)), f"the sum over {len(seeds)} clients")


def secure_sum(
    clients: Mapping[int, Callable[[], ClassStatistics]], layout: Layout, *, dropped: Collection[int] = (),
    least: int = MIN_CLIENTS,
) -> ClassStatistics:  # fmt: skip
    """The whole exchange in one process, for simulation: every client gives a key, those in ``dropped`` never answer.

    The part that plays the server handles public keys, masked vectors and opened seeds, nothing else. Every client that
    answers is measured once, however many attempts there are.
    """
    if strangers := sorted(set(dropped) - clients.keys()):
        raise UserError(f"dropped names client {strangers[0]}, which does not take part; name only clients of the sum")
    maskings = {client: Masking.new(client) for client in clients}
    measured: dict[int, ClassStatistics] = {}

    def answer(client: int, peers: Mapping[int, bytes], session: bytes) -> Tensor:
        if client not in measured:
            measured[client] = clients[client]()
        return maskings[client].masked(measured[client], layout, peers, session, least=least)

    peers = {client: masking.public for client, masking in maskings.items()}
    while True:
        _require_enough(len(peers), least)
        session = os.urandom(32)
        answers = {client: answer(client, peers, session) for client in peers if client not in dropped}
        if answers.keys() == peers.keys():
            break
        peers = {client: peers[client] for client in answers}
    return unmasked_sum(answers, {client: maskings[client].opened(session) for client in answers}, layout, least=least)


def _add_stream(vector: Words, key: bytes, sign: int) -> None:
    """Add or subtract ChaCha20's keystream in place, modulo 2⁶⁴. A key serves one vector, so its nonce may be zero."""
    ciphers = require_extra("cryptography.hazmat.primitives.ciphers")
    stream = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    for part in np.split(vector, range(CHUNK, len(vector), CHUNK)):
        words = np.frombuffer(stream.update(bytes(part.nbytes)), dtype="<u8")
        (np.add if sign > 0 else np.subtract)(part, words, out=part)


def _entry(client: int, public: bytes) -> bytes:
    return client.to_bytes(8, "big") + public


def _require_enough(clients: int, least: int) -> None:
    if least < 2:
        raise UserError(f"least={least}: the sum over one client is that client's statistics; give at least 2")
    if clients < least:
        raise UserError(f"a sum over {clients} clients would reveal too much of each; at least {least} are needed")
