"""Secure aggregation: the server learns the sum of the clients' class statistics and nothing of a single client's.

A client lays its statistics out for all classes, rounds them to fixed point and adds masks modulo 2⁶⁴:

    y_i = x_i + b_i + Σ_{j > i} m_ij − Σ_{j < i} m_ij    m_ij: of the secret that i and j share, b_i: of i's own seed

The m_ij cancel in Σ y_i, exactly, since these are integers. Each client then opens its seed, once, and the server takes
Σ b_i off. Keys and seeds come from the operating system, never from a Key: whoever knows the seed of a run must not
know the masks.

Why the seed: where a client does not answer, its m_ij stay in the sum. Were the others to publish the secrets that they
share with it, or were the sum repeated without it, its vector might still arrive late, and the server could take its
masks off, or subtract one sum from the other: either gives x_i in the clear. So nobody opens an attempt that is not
complete; it is repeated under a new session id, and what was sent before stays masked by b_i for good.

Departs from the paper: its clients hold shares of each other's seeds, so that a sum survives drop-outs; here it is
repeated, and lost if a client leaves between its answer and its opening.

Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, section 4.

Shapes: C classes, d features, W = C + the form's sums: the words of a vector.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.calibration.covariances import parse_form
from unskew.calibration.forms import Form
from unskew.calibration.statistics import ClassStatistics, checked
from unskew.core.errors import UserError
from unskew.core.plugins import require_extra

LEAST = 3  # of two clients each can take itself off the sum and has the other
MOST = 2**40  # examples of a class in a sum; more are a sign of masks that did not cancel
CHUNK = 2**20  # words of a mask made at a time

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Layout:
    """What everybody agrees on: classes, features, form, and the fixed point, in steps of 2^-``bits``.

    A vector holds the counts of all C classes, then the form's sums for all C, absent ones zero, so that its length
    says nothing about its client. Of n clients each may use ±(2⁶³ − 1)/n steps, ±5.5e9 for 100 clients and 24 bits;
    counts are whole and stay as they are.
    """

    classes: int
    width: int
    form: Form
    bits: int

    @staticmethod
    def of(classes: int, width: int, form: str | Form = "full", *, bits: int = 24) -> "Layout":
        """The layout of so many classes and features."""
        if classes < 1 or width < 1:
            raise UserError(f"a layout of {classes} classes of {width} features: give at least one of each")
        if not 0 <= bits <= 52:
            raise UserError(f"bits={bits}: give 0 to 52 binary places")
        return Layout(classes, width, parse_form(form), bits)

    @property
    def bytes(self) -> int:
        """What one client sends, whatever it holds: 8 bytes a word."""
        return 8 * (self.classes + sum(torch.Size(shape).numel() for shape in self._shapes.values()))

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.form.shapes(self.classes, self.width)

    def about(self) -> str:
        """What it is, in a few words."""
        return f"{self.form} over {self.classes} classes of {self.width} features in steps of 2^-{self.bits}"

    def quantised(self, statistics: ClassStatistics, clients: int, who: str) -> Tensor:
        """[W] int64, the statistics laid out; refused in who's name where a sum over so many clients could overflow."""
        statistics = checked(statistics.classes, statistics.form, statistics.tensors(), who)
        if (statistics.classes, statistics.width, statistics.form) != (self.classes, self.width, self.form):
            raise UserError(f"the statistics of {who} are refused: {statistics.about()}; wanted is {self.about()}")
        if bool((statistics.number > MOST // clients).any()):
            raise UserError(f"the statistics of {who} are refused: a class has more than {MOST // clients} examples")
        flat = [statistics.counts]
        for name, shape in self._shapes.items():
            value = statistics.sums[name]
            if name == "second":
                value = (value + value.mT) / 2  # products are symmetric but for rounding, which must not grow to a step
            if self._by_class(name):
                value = torch.zeros(shape, dtype=torch.float64).index_copy_(0, statistics.held, value)
            flat.append(self._steps(value.flatten(), name, clients, who))
        return torch.cat(flat)

    def statistics(self, vector: Tensor, who: str) -> ClassStatistics:
        """The statistics of a sum of vectors that carries no mask any more."""
        counts, *parts = torch.split_with_sizes(
            vector, [self.classes, *(torch.Size(shape).numel() for shape in self._shapes.values())]
        )
        if bool(((counts < 0) | (counts > MOST)).any()):
            raise UserError(
                f"the masks of {who} do not cancel: all must answer one session with the same clients and layout, "
                "and open it"
            )
        held = counts.nonzero()[:, 0]
        values = {"held": held, "number": counts[held]}
        for (name, shape), part in zip(self._shapes.items(), parts, strict=True):
            value = part.reshape(shape).double() * 2.0**-self.bits
            values[name] = value[held] if self._by_class(name) else value
        return checked(self.classes, self.form, values, who)

    def _by_class(self, name: str) -> bool:
        return name not in self.form.common

    def _steps(self, value: Tensor, name: str, clients: int, who: str) -> Tensor:
        limit = (2**63 - 1) // clients
        steps = (value * 2.0**self.bits).round()
        if bool((steps.abs() >= 2.0**63).any()) or bool((steps.long().abs() > limit).any()):
            raise UserError(
                f"the statistics of {who} are refused: {name} reach {float(value.abs().max()):.3g}, in a sum over "
                f"{clients} clients there is room for {limit * 2.0**-self.bits:.3g}; take fewer bits or clip features"
            )
        return steps.long()


class Masking:
    """A client's part in one sum: a key pair of its own, as many attempts as drop-outs make necessary, one opening."""

    def __init__(self, client: int, private: Any) -> None:
        if not 0 <= client < 2**63:
            raise UserError(f"client {client}: a client's number must lie between 0 and 2^63 - 1")
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
        least: int = LEAST,
    ) -> Tensor:  # fmt: skip
        """[W] int64, to be sent. ``peers`` are the public keys of all who take part; its own may be among them."""
        who = f"client {self.client}"
        everyone = {**peers, self.client: self.public}
        _enough(len(everyone), least)
        if peers.get(self.client, self.public) != self.public or len(set(everyone.values())) < len(everyone):
            raise UserError(f"{who} refuses to answer: a public key is not its owner's")
        if len(session) < 16:
            raise UserError(f"{who} refuses to answer: a session id has at least 16 random bytes, not {len(session)}")
        if session in self._sessions or self._opened:
            raise UserError(f"{who} refuses to answer: a session is answered once, and none after one was opened")
        vector = layout.quantised(statistics, len(everyone), who).numpy().view(np.uint64)
        self._sessions.add(session)
        self._seed = session, os.urandom(32)
        _add_stream(vector, self._seed[1], 1)
        for peer in sorted(everyone.keys() - {self.client}):
            _add_stream(vector, self._shared(peer, everyone, layout, session), 1 if self.client < peer else -1)
        return torch.from_numpy(vector.view(np.int64))

    def opened(self, session: bytes) -> bytes:
        """The seed of b_i, for the server that says that everybody has answered this session; no other is opened."""
        if self._seed is None or self._seed[0] != session:
            raise UserError(f"client {self.client} refuses to open: this is not the last session that it answered")
        self._opened = True
        return self._seed[1]

    def _shared(self, peer: int, everyone: Mapping[int, bytes], layout: Layout, session: bytes) -> bytes:
        """The key of m_ij: the same for both, another for each session, layout and set of clients."""
        x25519 = require_extra("cryptography.hazmat.primitives.asymmetric.x25519")
        try:
            secret = self._private.exchange(x25519.X25519PublicKey.from_public_bytes(everyone[peer]))
        except ValueError as error:  # not 32 bytes, or one of the few points that give the secret away
            raise UserError(f"client {self.client} refuses the public key of client {peer}: {error}") from error
        pair = b"".join(_entry(client, everyone[client]) for client in sorted((self.client, peer)))
        roster = b"".join(_entry(client, everyone[client]) for client in sorted(everyone))
        info = b"unskew secure sum 1 " + layout.about().encode() + pair + hashlib.sha256(roster).digest()
        sha256 = require_extra("cryptography.hazmat.primitives.hashes").SHA256()
        hkdf = require_extra("cryptography.hazmat.primitives.kdf.hkdf").HKDF(sha256, length=32, salt=session, info=info)
        key: bytes = hkdf.derive(secret)
        return key


def unmasked_sum(
    masked: Mapping[int, Tensor], opened: Mapping[int, bytes], layout: Layout, *, least: int = LEAST
) -> ClassStatistics:
    """The server's part: the sum over all clients that answered one session, from their vectors and opened seeds."""
    _enough(len(masked), least)
    if masked.keys() != opened.keys():
        odd = sorted(masked.keys() ^ opened.keys())[0]
        raise UserError(f"client {odd} has not both answered and opened; without it the sum stays masked: start anew")
    words = layout.bytes // 8
    total = np.zeros(words, dtype=np.uint64)
    for client, vector in masked.items():
        if vector.dtype != torch.int64 or tuple(vector.shape) != (words,):
            raise UserError(
                f"the vector of client {client} is refused: {vector.dtype} of the shape {tuple(vector.shape)}, "
                f"wanted is int64 of ({words},), {layout.about()}"
            )
        if len(opened[client]) != 32:
            raise UserError(
                f"the seed of client {client} is refused: it has {len(opened[client])} bytes, wanted are 32"
            )
        total += vector.numpy().view(np.uint64)
        _add_stream(total, opened[client], -1)
    return layout.statistics(torch.from_numpy(total.view(np.int64)), f"the sum over {len(masked)} clients")


def secure_sum(
    clients: Mapping[int, Callable[[], ClassStatistics]], layout: Layout, *, dropped: Collection[int] = (),
    least: int = LEAST,
) -> ClassStatistics:  # fmt: skip
    """The whole exchange in one process, for simulation: everybody tells a key, those in ``dropped`` never answer.

    What stands for the server handles public keys, masked vectors and opened seeds, nothing else. Every client that
    answers is measured once, however many attempts there are.
    """
    if strangers := sorted(set(dropped) - clients.keys()):
        raise UserError(f"dropped names client {strangers[0]}, who takes no part")
    maskings = {client: Masking.new(client) for client in clients}
    measured: dict[int, ClassStatistics] = {}

    def answer(client: int, peers: Mapping[int, bytes], session: bytes) -> Tensor:
        if client not in measured:
            measured[client] = clients[client]()
        return maskings[client].masked(measured[client], layout, peers, session, least=least)

    peers = {client: masking.public for client, masking in maskings.items()}
    while True:
        _enough(len(peers), least)
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


def _enough(clients: int, least: int) -> None:
    if least < 2:
        raise UserError(f"least={least}: the sum over one client is that client's statistics; give at least 2")
    if clients < least:
        raise UserError(f"a sum over {clients} clients would say too much of each; wanted are at least {least}")
