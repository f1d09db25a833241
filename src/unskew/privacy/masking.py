"""The protocol of secure sums: what the members of a session agree on, a member's part in it, and unmasking.

    y_i = x_i + b_i + Σ_{j > i} m_ij − Σ_{j < i} m_ij mod 2⁶⁴    m_ij: of a key that i and j share, b_i: of i's own seed

The m_ij cancel exactly in Σ y_i. Every member sends every other a sealed share of its own seed and of its key for the
m_ij. Afterwards t of n others open shares of the seed of each member that answered, and of the key of each that dropped
out, never both: with both, its vector could be unmasked. All secrets of a member follow from one seed.

Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, section 4
and figure 4. The signatures against a dishonest server are in ``signing``.

``Masking`` and ``unmasked_sum`` are the sides of a sum of class statistics in your own federation, ``secure_sum`` is
all of it in one process. Keys and seeds come from the operating system, never from a Key: the seed of a run must not
reveal the masks. Shapes: W = C + the form's sums: the words of a vector.
"""

import hashlib
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.types import THRESHOLD
from unskew.privacy.ciphers import (
    SECRET_BYTES,
    SHARE_BYTES,
    Words,
    add_stream,
    derived_key,
    exchanged,
    private_key,
    public_bytes,
    sealed,
    secret_of,
    shares_of,
    unsealed,
)
from unskew.privacy.sessions import Record

if TYPE_CHECKING:  # calibration imports privacy, not the other way round
    from unskew.calibration.protection import Layout
    from unskew.calibration.statistics import ClassStatistics

MIN_CLIENTS = 3  # with two, each could subtract its own part from the sum to get the other's
MIN_SESSION = 16  # bytes
KEY_BYTES = 32
PUBLIC_BYTES = 2 * KEY_BYTES  # of a member: for masks, then for shares
BOX_BYTES = 2 * SHARE_BYTES + 16  # a share of both secrets, sealed
MOST_CLIENTS = 2**40  # clients' numbers are below; the higher bits of a member's number are the visit


@dataclass(frozen=True)
class Agreement:
    """What all members know before they answer: the session, t, all public keys by member, what is summed."""

    session: bytes
    threshold: int
    publics: Mapping[int, bytes]
    about: str

    @cached_property
    def members(self) -> list[int]:
        """All members in ascending order; the first has the share at point 1."""
        return sorted(self.publics)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all of it: members with different agreements share no masks."""
        numbers = b"".join(map(_number, (self.threshold, len(self.publics), len(self.session))))
        entries = b"".join(_number(member) + self.publics[member] for member in self.members)
        content = numbers + self.session + entries + self.about.encode()
        return hashlib.sha256(b"unskew agreement 1 " + content).digest()

    def mask_key(self, private: Any, member: int, other: int) -> bytes:
        """The key of m_ij, from the private key of either."""
        low, high = sorted((member, other))
        return self._pair_key(private, member, other, slice(KEY_BYTES), b"unskew mask 2 ", low, high)

    def box_key(self, private: Any, member: int, other: int, *, sends: bool) -> bytes:
        """The key that seals messages between the two, different in each direction."""
        pair = (member, other) if sends else (other, member)
        return self._pair_key(private, member, other, slice(KEY_BYTES, None), b"unskew share 1 ", *pair)

    def _pair_key(self, private: Any, member: int, other: int, half: slice, purpose: bytes, *pair: int) -> bytes:
        secret = exchanged(
            private, self.publics[other][half], f"{named(member)} refuses the public key of {named(other)}"
        )
        return derived_key(secret, purpose + b"".join(map(_number, pair)) + self.digest, self.session)


@dataclass(frozen=True)
class Member:
    """One member's part: everything follows from its number, the session and a seed that only it knows."""

    number: int
    session: bytes
    seed: bytes

    @cached_property
    def public(self) -> bytes:
        """Its public keys."""
        return public_bytes(mask_private(self._mask_secret, self.session)) + public_bytes(self._box_private)

    def check(self, agreement: Agreement) -> None:
        """Refuse an agreement that is not valid."""
        publics, count = agreement.publics, len(agreement.publics)
        halves = [public[at : at + KEY_BYTES] for public in publics.values() for at in (0, KEY_BYTES)]
        sizes = {len(public) for public in publics.values()}
        if publics.get(self.number) != self.public or sizes != {PUBLIC_BYTES} or len(set(halves)) < len(halves):
            raise UserError(f"{named(self.number)} refuses: a public key does not belong to its member")
        if len(agreement.session) < MIN_SESSION or not count < 2 * agreement.threshold <= 2 * count:
            shares = f"{agreement.threshold} of {count} shares is the wrong threshold for removing a mask"
            rule = "it must be more than half and at most all"
            raise UserError(f"{named(self.number)} refuses: the session id is too short, or {shares}; {rule}")

    def require_present(self, agreement: Agreement, *groups: Collection[int]) -> None:
        """Refuse groups of members that are not one inside the other, or too small, or without this one."""
        inside: set[int] = set(agreement.members)
        for group in map(set, groups):
            if not {self.number} <= group <= inside or len(group) < agreement.threshold:
                listed = f"the server lists {len(group)} of {len(inside)} members"
                least = f"at least {agreement.threshold} must take part, including this client"
                raise UserError(f"{named(self.number)} refuses: {listed}; {least}")
            inside = group

    def boxes(self, agreement: Agreement) -> dict[int, bytes]:
        """For each other member, its sealed shares of this member's own seed and of its key for masks."""
        boxes = {}
        shares = zip(self._own_shares(agreement), self._key_shares(agreement), strict=True)
        for other, (own_share, key_share) in zip(agreement.members, shares, strict=True):
            if other != self.number:
                key = agreement.box_key(self._box_private, self.number, other, sends=True)
                boxes[other] = sealed(key, own_share + key_share, agreement.digest)
        return boxes

    def mask(self, vector: Words, agreement: Agreement, sharing: Collection[int]) -> None:
        """Add this member's masks in place: its own, and one for each other that has distributed its shares."""
        self.require_present(agreement, sharing)
        add_stream(vector, own_mask_key(self._own_secret(agreement), self.session), 1)
        private = mask_private(self._mask_secret, self.session)
        for other in sorted(set(sharing) - {self.number}):
            add_stream(vector, agreement.mask_key(private, self.number, other), 1 if self.number < other else -1)

    def opened(
        self, agreement: Agreement, boxes: Mapping[int, bytes], sharing: Collection[int], answered: Collection[int]
    ) -> dict[int, bytes]:
        """A share for each member that shared: of its own seed if it answered, of its key if it dropped out.

        ``boxes`` are those that the other members sealed for this one; there is no share for a box that does not open.
        """
        self.require_present(agreement, sharing, answered)
        index = agreement.members.index(self.number)
        shares, refused = dict[int, bytes](), list[UserError]()
        for other in sorted(sharing):
            if other == self.number:
                shares[other] = self._own_shares(agreement)[index]
                continue
            key = agreement.box_key(self._box_private, self.number, other, sends=False)
            try:
                both = unsealed(key, boxes[other], agreement.digest, f"the shares of {named(other)}'s secrets")
            except UserError as error:  # one invalid box must not prevent opening the others
                refused.append(error)
                continue
            shares[other] = both[:SHARE_BYTES] if other in answered else both[SHARE_BYTES:]
        if len(shares) < agreement.threshold:  # with so few left, the server must have modified them
            raise refused[0]
        return shares

    def derive(self, purpose: bytes, agreement: Agreement | None = None, length: int = 32) -> bytes:
        """One of its secrets: for the session, or for one agreement."""
        info = purpose + _number(self.number) + (b"" if agreement is None else agreement.digest)
        return derived_key(self.seed, info, self.session, length)

    @cached_property
    def _mask_secret(self) -> bytes:
        return self.derive(b"unskew mask secret 1 ", length=SECRET_BYTES)

    @cached_property
    def _box_private(self) -> Any:
        return private_key(self.derive(b"unskew box key 1 "))

    def _own_secret(self, agreement: Agreement) -> bytes:
        return self.derive(b"unskew own secret 1 ", agreement, SECRET_BYTES)

    def _own_shares(self, agreement: Agreement) -> list[bytes]:
        key = self.derive(b"unskew own shares 1 ", agreement)
        return shares_of(self._own_secret(agreement), agreement.threshold, len(agreement.members), key)

    def _key_shares(self, agreement: Agreement) -> list[bytes]:
        key = self.derive(b"unskew key shares 1 ", agreement)
        return shares_of(self._mask_secret, agreement.threshold, len(agreement.members), key)


def shares_needed(share: float, members: int) -> int:
    """t, the number of members that must stay to the end, from their share."""
    return min(members, max(members // 2 + 1, math.ceil(share * members - 1e-9)))


def member_number(client: int, visit: int = 0) -> int:
    """The member number of a client's visit; a client with two visits is two members."""
    return visit * MOST_CLIENTS + client


def named(member: int) -> str:
    """A member's name in messages."""
    visit, client = divmod(member, MOST_CLIENTS)
    return f"client {client}, visit {visit + 1}" if visit else f"client {client}"


def mask_private(secret: bytes, session: bytes) -> Any:
    """The private key for masks, from its secret of 16 bytes."""
    return private_key(derived_key(secret, b"unskew mask key 1", session))


def own_mask_key(secret: bytes, session: bytes) -> bytes:
    """The key of b_i, from i's own 16 bytes."""
    return derived_key(secret, b"unskew own mask 2", session)


def require_enough(count: int, least: int = MIN_CLIENTS, of: str = "clients") -> None:
    """Refuse a sum over so few that it would reveal too much about each."""
    if count < max(least, 2):
        raise UserError(f"a sum over {count} {of} would reveal too much about each; at least {least} are needed")


def _number(member: int) -> bytes:
    return member.to_bytes(8, "big")


class NoShares(UserError):
    """A member sealed invalid shares for the others, so its masks cannot be removed."""

    def __init__(self, member: int) -> None:
        super().__init__(f"the shares that {named(member)} sealed for the others are invalid; the sum stays masked")
        self.member = member


def unmask(
    total: Words, agreement: Agreement, sharing: Collection[int], answered: Collection[int],
    opened: Mapping[int, Mapping[int, bytes]],
) -> None:  # fmt: skip
    """Remove all masks from the sum of the answers, in place.

    ``opened`` has, by the member that sent them, the shares of every member that shared its secrets.
    """
    if len(opened) < agreement.threshold:
        raise UserError(f"{len(opened)} clients opened their shares, but {agreement.threshold} must")
    points = {giver: agreement.members.index(giver) + 1 for giver in sorted(opened)}
    for member in sorted(sharing):
        shares = {point: opened[giver].get(member, b"") for giver, point in points.items()}
        if any(len(share) != SHARE_BYTES for share in shares.values()):
            raise UserError(f"a share of {named(member)} is refused: it must be {SHARE_BYTES} bytes long")
        chosen = [point for point, share in shares.items() if any(share)][: agreement.threshold]  # zeros: no share
        if len(chosen) < agreement.threshold:
            raise NoShares(member)
        secret = secret_of({point: shares[point] for point in chosen})
        if member in answered:
            add_stream(total, own_mask_key(secret, agreement.session), -1)
            continue
        private = mask_private(secret, agreement.session)
        if public_bytes(private) != agreement.publics[member][:KEY_BYTES]:
            raise UserError(f"the shares of {named(member)}, which dropped out, do not yield its key: one is wrong")
        for other in sorted(answered):  # the others added +m before it and −m after it
            add_stream(total, agreement.mask_key(private, member, other), 1 if other > member else -1)


def survivors(sharing: Collection[int], answered: Collection[int]) -> bytes:
    """The digest of the members that share masks, and of those that answered."""
    content = b"|".join(b"".join(map(_number, sorted(members))) for members in (sharing, answered))
    return hashlib.sha256(b"unskew opening 2 " + _number(len(sharing)) + content).digest()


class Masking:
    """A client's part in one sum: its keys, its shares for the others, one answer, and opening shares once."""

    def __init__(self, client: int, session: bytes, seed: bytes) -> None:
        self.client = client
        self._member = Member(member_number(client), session, seed)
        self._record = Record()  # what it has done, so that it answers and opens once
        self._agreement: Agreement | None = None
        self._sharing: frozenset[int] = frozenset()

    @staticmethod
    def new(client: int, session: bytes) -> "Masking":
        """A part with fresh secrets from the operating system, for the server's session."""
        return Masking(client, session, os.urandom(32))

    @property
    def public(self) -> bytes:
        """Its public keys, 64 bytes, which the server distributes."""
        return self._member.public

    def boxes(self, agreement: Agreement, *, least: int = MIN_CLIENTS) -> dict[int, bytes]:
        """For each other client, its sealed shares of this client's secrets, which the server forwards."""
        require_enough(len(agreement.publics), least)
        self._member.check(agreement)
        self._record = self._record.agreed(agreement.session, agreement.digest)
        self._agreement = agreement
        return self._member.boxes(agreement)

    def masked(self, statistics: "ClassStatistics", layout: "Layout", sharing: Collection[int]) -> Tensor:
        """[W] int64, to be sent once. ``sharing`` are the clients that have distributed their shares."""
        agreement = self._agreed()
        if layout.about() != agreement.about:
            raise UserError(f"client {self.client} refuses to answer: the agreed layout was {agreement.about}")
        vector = layout.quantise(statistics, len(agreement.publics), f"client {self.client}").numpy().view(np.uint64)
        record = self._record.with_answer(agreement.session, agreement.digest, survivors(sharing, ()), 0)
        self._member.mask(vector, agreement, sharing)
        self._record, self._sharing = record, frozenset(sharing)
        return torch.from_numpy(vector.view(np.int64))

    def opened(self, boxes: Mapping[int, bytes], answered: Collection[int]) -> dict[int, bytes]:
        """Shares for the server: of the seed of each client that answered, of the key of each that dropped out.

        ``boxes`` are those that the others sealed for this client. Afterwards another set of answers is refused: with
        both, a client's vector could be unmasked.
        """
        agreement, sharing = self._agreed(), self._sharing
        digests = agreement.digest, survivors(sharing, ()), survivors(sharing, answered)
        record = self._record.with_opening(agreement.session, *digests, visit=0)
        shares = self._member.opened(agreement, boxes, sharing, answered)
        self._record = record
        return shares

    def _agreed(self) -> Agreement:
        if self._agreement is None:
            raise UserError(f"client {self.client} refuses: it has not distributed its shares (boxes)")
        return self._agreement


def unmasked_sum(
    masked: Mapping[int, Tensor], agreement: Agreement, sharing: Collection[int],
    opened: Mapping[int, Mapping[int, bytes]], layout: "Layout", *, least: int = MIN_CLIENTS,
) -> "ClassStatistics":  # fmt: skip
    """The server's part: the sum over all clients that answered, from their vectors and opened shares."""
    require_enough(len(masked), least)
    words = layout.bytes // 8
    total = np.zeros(words, dtype=np.uint64)
    for client, vector in masked.items():
        if vector.dtype != torch.int64 or tuple(vector.shape) != (words,):
            raise UserError(f"the vector of client {client} is not int64 of shape ({words},), {layout.about()}")
        total += vector.numpy().view(np.uint64)
    unmask(total, agreement, sharing, masked.keys(), opened)
    return layout.statistics(torch.from_numpy(total.view(np.int64)), f"the sum over {len(masked)} clients")


def secure_sum(
    clients: Mapping[int, "Callable[[], ClassStatistics]"], layout: "Layout", *, dropped: Collection[int] = (),
    threshold: float = THRESHOLD, least: int = MIN_CLIENTS,
) -> "ClassStatistics":  # fmt: skip
    """The complete exchange in one process, for simulation: all clients distribute shares, then ``dropped`` leave.

    The simulated server handles only public keys, sealed shares, masked vectors and opened shares. ``threshold`` is the
    share of the clients that must stay.
    """
    staying = [client for client in clients if client not in dropped]
    require_enough(len(staying), least)
    session = os.urandom(32)
    maskings = {client: Masking.new(client, session) for client in clients}
    publics = {client: masking.public for client, masking in maskings.items()}
    agreement = Agreement(session, shares_needed(threshold, len(clients)), publics, layout.about())
    boxes = {client: masking.boxes(agreement, least=least) for client, masking in maskings.items()}
    answers = {client: maskings[client].masked(clients[client](), layout, clients.keys()) for client in staying}
    opened = {
        client: maskings[client].opened({other: boxes[other][client] for other in clients if other != client}, answers)
        for client in answers
    }
    return unmasked_sum(answers, agreement, clients.keys(), opened, layout, least=least)
