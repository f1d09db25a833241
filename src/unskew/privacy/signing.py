"""Signatures in secure sums: they prove who a member is, and that all members were sent the same.

With its registered key, a node signs each member's keys for a session, among them one with which the member signs.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_content
from unskew.core.plugins import require_extra
from unskew.core.types import Job
from unskew.privacy.agreement import Agreement, Member

POINT_BYTES = 49  # a P-384 key
NUMBER_BYTES = 48
SIGNATURE_BYTES = 64  # Ed25519, with a session's key
STATED_BYTES = 32 + POINT_BYTES + 32 + 8  # the run's agreed settings, the node's key, the session's key, examples
STATEMENT_BYTES = STATED_BYTES + 2 * NUMBER_BYTES
ROSTER = "roster.txt"
MAX_ROSTER = 2**22  # bytes of a roster file

CONSENT, SURVIVORS = b"unskew consent 1 ", b"unskew survivors 1 "


@dataclass(frozen=True)
class Statement:
    """A node's statement about one member; ``content`` is with or without the node's signature."""

    content: bytes

    @property
    def context(self) -> bytes:
        """The digest of the settings that the run's server and this node agreed on."""
        return self.content[:32]

    @property
    def node(self) -> bytes:
        """The node's registered key."""
        return self.content[32 : 32 + POINT_BYTES]

    @property
    def key(self) -> bytes:
        """The member's signing key in the session."""
        return self.content[32 + POINT_BYTES : STATED_BYTES - 8]

    @property
    def examples(self) -> int:
        """The client's number of examples."""
        return int.from_bytes(self.content[STATED_BYTES - 8 : STATED_BYTES], "big")

    @property
    def stated(self) -> bytes:
        """The statement without the signature."""
        return self.content[:STATED_BYTES]

    def holds(self, member: int, session: bytes, keys: bytes) -> bool:
        """Whether its node has signed it, for these keys of this member in this session."""
        asymmetric = require_extra("cryptography.hazmat.primitives.asymmetric.utils")
        numbers = self.content[STATED_BYTES:]
        if len(self.content) != STATEMENT_BYTES:
            return False
        r, s = (int.from_bytes(numbers[at : at + NUMBER_BYTES], "big") for at in (0, NUMBER_BYTES))
        try:
            signature = asymmetric.encode_dss_signature(r, s)
            _load_point(self.node).verify(signature, _message(member, session, keys, self.stated), ecdsa())
        except (ValueError, require_extra("cryptography.exceptions").InvalidSignature):
            return False
        return True


@dataclass(frozen=True)
class NodeRoster:
    """The nodes with which this node takes part in sums: their names by registered key."""

    names: Mapping[bytes, str]

    @staticmethod
    def read(path: Path) -> "NodeRoster":
        """Read a file with a name and a public key in OpenSSH format on each line."""
        content = read_content(path, MAX_ROSTER)
        if content is None:
            raise UserError(
                f"{path}, the list of the federation's nodes, is missing; copy it from the server's machine"
            )
        names = {}
        for line in content.decode("utf-8", "replace").splitlines():
            name, _, key = line.partition(" ")
            if not line.strip() or line.startswith("#"):
                continue
            if (point := _point_in(key.encode())) is None:
                raise UserError(f"{path}: every line needs a name and a key, such as: ward ecdsa-sha2-nistp384 AAAA…")
            names[point] = name
        return NodeRoster(names)


@dataclass(frozen=True)
class Registered:
    """A node's registered key, and its roster file, which its owner may change at any time."""

    private: Any
    roster: Path

    @staticmethod
    def read(key: Path, roster: Path) -> "Registered":
        """Read both files; refused if one of them is missing or invalid."""
        NodeRoster.read(roster)
        return Registered(load_private(key), roster)


@dataclass(frozen=True)
class Signer:
    """A node's part in signed sums: its key, its roster, and the sums it has taken part in.

    ``context`` is the digest of the run's agreed settings. ``subject`` names a sum's subject, from its job and the
    digests of the tensors sent with it and of its key: two sums on one subject must have the same members, which
    ``pin`` checks. ``say`` receives messages that must not leave the node.
    """

    registered: Registered
    context: bytes
    subject: Callable[[Job, bytes, bytes], str]
    pin: Callable[[str, Mapping[int, tuple[float, int | None]]], None]
    say: Callable[[str], None] = lambda line: None

    def state(self, member: Member, examples: int) -> bytes:
        """This node's signed statement about one of its members."""
        asymmetric = require_extra("cryptography.hazmat.primitives.asymmetric.utils")
        point = point_of(self.registered.private.public_key())
        stated = self.context + point + signing_public(member) + examples.to_bytes(8, "big")
        signature = self.registered.private.sign(
            _message(member.number, member.session, member.public, stated), ecdsa()
        )
        numbers = (number.to_bytes(NUMBER_BYTES, "big") for number in asymmetric.decode_dss_signature(signature))
        return stated + b"".join(numbers)

    def check(self, roster: NodeRoster, who: str, statement: Statement, *about: Any) -> None:
        """Refuse a member that no node in the roster vouches for, or whose run has other settings."""
        if statement.node not in roster.names or not statement.holds(*about):
            raise UserError(f"the keys of {who} are not signed by a node in {self.registered.roster.name}")
        if statement.context != self.context:
            raise UserError(f"{who} was sent a different run: another method, rate or network")


def load_private(path: Path) -> Any:
    """Read a node's private P-384 key, written by OpenSSH or ``unskew federation init``."""
    ec = require_extra("cryptography.hazmat.primitives.asymmetric.ec")
    try:
        content = read_content(path, 2**20) or b""
        key = require_extra("cryptography.hazmat.primitives.serialization").load_ssh_private_key(content, None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise UserError(f"{path} is no P-384 key; create one with: ssh-keygen -t ecdsa -b 384 -N '' -f node.key")
    return key


def sign(member: Member, purpose: bytes, agreement: Agreement, content: bytes = b"") -> bytes:
    """Sign, with a member's session key, what all members must have received alike."""
    return bytes(_signing_private(member).sign(purpose + agreement.digest + content))


def signed(key: bytes, signature: bytes, purpose: bytes, agreement: Agreement, content: bytes = b"") -> bool:
    """Whether the owner of this session key signed it."""
    ed25519 = require_extra("cryptography.hazmat.primitives.asymmetric.ed25519")
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, purpose + agreement.digest + content)
    except (ValueError, require_extra("cryptography.exceptions").InvalidSignature):
        return False
    return True


def signing_public(member: Member) -> bytes:
    """The public key for a member's signatures in this session."""
    return bytes(_signing_private(member).public_key().public_bytes_raw())


def survivors(sharing: Collection[int], answered: Collection[int]) -> bytes:
    """The digest of the members that share masks, and of those that answered."""
    content = b"|".join(
        b"".join(number.to_bytes(8, "big") for number in sorted(members)) for members in (sharing, answered)
    )
    return hashlib.sha256(b"unskew opening 2 " + len(sharing).to_bytes(8, "big") + content).digest()


def _message(member: int, session: bytes, keys: bytes, stated: bytes) -> bytes:
    return b"unskew member 1 " + member.to_bytes(8, "big") + session + keys + stated


def _signing_private(member: Member) -> Any:
    ed25519 = require_extra("cryptography.hazmat.primitives.asymmetric.ed25519")
    return ed25519.Ed25519PrivateKey.from_private_bytes(member.signing_seed)


def ecdsa() -> Any:
    """The scheme of signatures with a node's registered key."""
    ec = require_extra("cryptography.hazmat.primitives.asymmetric.ec")
    return ec.ECDSA(require_extra("cryptography.hazmat.primitives.hashes").SHA384())


@lru_cache(4096)
def _load_point(point: bytes) -> Any:
    ec = require_extra("cryptography.hazmat.primitives.asymmetric.ec")
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), point)


def point_of(public: Any) -> bytes:
    """A P-384 key in the format of statements and rosters."""
    s = require_extra("cryptography.hazmat.primitives.serialization")
    return bytes(public.public_bytes(s.Encoding.X962, s.PublicFormat.CompressedPoint))


@lru_cache(4096)
def _point_in(line: bytes) -> bytes | None:
    """The P-384 key in a line in OpenSSH format; None if there is none."""
    ec = require_extra("cryptography.hazmat.primitives.asymmetric.ec")
    try:
        key = require_extra("cryptography.hazmat.primitives.serialization").load_ssh_public_key(line)
    except (ValueError, require_extra("cryptography.exceptions").UnsupportedAlgorithm):
        return None
    p384 = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)
    return point_of(key) if p384 else None
