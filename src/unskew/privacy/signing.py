"""Signatures in secure sums: they prove who a member is, and that all members were sent the same.

With its registered key, a node signs each member's keys for a session, among them one with which the member signs.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from unskew.core.errors import UserError
from unskew.core.files import read_content
from unskew.core.plugins import require_extra
from unskew.core.types import Job
from unskew.privacy.ciphers import primitives
from unskew.privacy.masking import Agreement, Member

POINT_BYTES = 49  # a P-384 key
NUMBER_BYTES = 48
SIGNATURE_BYTES = 64  # Ed25519, with a session's key
STATED = struct.Struct(f">32s{POINT_BYTES}s32sQ")  # the first four fields of a Statement
STATED_BYTES = STATED.size
STATEMENT_BYTES = STATED_BYTES + 2 * NUMBER_BYTES
ROSTER = "roster.txt"
MAX_ROSTER = 2**22  # bytes of a roster file

CONSENT, SURVIVORS = b"unskew consent 1 ", b"unskew survivors 1 "


class Statement(NamedTuple):
    """A node's statement about one member."""

    context: bytes  # the digest of the settings that the run's server and this node agreed on
    node: bytes  # its registered key
    key: bytes  # the member's signing key in the session
    examples: int  # of the client
    numbers: bytes  # the node's signature, if it is included

    @staticmethod
    def read(content: bytes) -> "Statement":
        """A statement with or without the node's signature; one that is too short is empty."""
        if len(content) < STATED_BYTES:
            return Statement(b"", b"", b"", 0, b"")
        context, node, key, examples = STATED.unpack_from(content)
        return Statement(context, node, key, examples, content[STATED_BYTES:])

    def holds(self, member: int, session: bytes, keys: bytes) -> bool:
        """Whether its node has signed it, for these keys of this member in this session."""
        if len(self.numbers) != 2 * NUMBER_BYTES:
            return False
        r, s = (int.from_bytes(self.numbers[at : at + NUMBER_BYTES], "big") for at in (0, NUMBER_BYTES))
        message = _message(member, session, keys, STATED.pack(*self[:4]))
        try:
            signature = primitives("asymmetric.utils").encode_dss_signature(r, s)
            _load_point(self.node).verify(signature, message, ecdsa())
        except (ValueError, require_extra("cryptography.exceptions").InvalidSignature):
            return False
        return True


def read_roster(path: Path) -> dict[bytes, str]:
    """The nodes with which this node takes part in sums, their names by registered key.

    Each line of the file has a name and a public key in OpenSSH format.
    """
    content = read_content(path, MAX_ROSTER)
    if content is None:
        raise UserError(f"{path}, the list of the federation's nodes, is missing; copy it from the server's machine")
    names = {}
    for line in content.decode("utf-8", "replace").splitlines():
        name, _, key = line.partition(" ")
        if not line.strip() or line.startswith("#"):
            continue
        if (point := _point_in(key.encode())) is None:
            raise UserError(f"{path}: every line needs a name and a key, such as: ward ecdsa-sha2-nistp384 AAAA…")
        names[point] = name
    return names


@dataclass(frozen=True)
class Registered:
    """A node's registered key, and its roster file, which its owner may change at any time."""

    private: Any
    roster: Path

    @staticmethod
    def read(key: Path, roster: Path) -> "Registered":
        """Read both files; refused if one of them is missing or invalid."""
        read_roster(roster)
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
        point = point_of(self.registered.private.public_key())
        signing = _signing_private(member).public_key().public_bytes_raw()
        stated = STATED.pack(self.context, point, signing, examples)
        signature = self.registered.private.sign(
            _message(member.number, member.session, member.public, stated), ecdsa()
        )
        numbers = primitives("asymmetric.utils").decode_dss_signature(signature)
        return stated + b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in numbers)


def load_private(path: Path) -> Any:
    """Read a node's private P-384 key, written by OpenSSH or ``unskew federation init``."""
    try:
        key = primitives("serialization").load_ssh_private_key(read_content(path, 2**20) or b"", None)
    except (ValueError, TypeError):
        key = None
    if not _is_p384(key, "PrivateKey"):
        raise UserError(f"{path} is not a P-384 key; create one with: ssh-keygen -t ecdsa -b 384 -N '' -f node.key")
    return key


def sign(member: Member, purpose: bytes, agreement: Agreement, content: bytes = b"") -> bytes:
    """Sign, with a member's session key, what all members must have received alike."""
    return bytes(_signing_private(member).sign(purpose + agreement.digest + content))


def signed(key: bytes, signature: bytes, purpose: bytes, agreement: Agreement, content: bytes = b"") -> bool:
    """Whether the owner of this session key signed it."""
    try:
        public = primitives("asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(key)
        public.verify(signature, purpose + agreement.digest + content)
    except (ValueError, require_extra("cryptography.exceptions").InvalidSignature):
        return False
    return True


def _message(member: int, session: bytes, keys: bytes, stated: bytes) -> bytes:
    return b"unskew member 1 " + member.to_bytes(8, "big") + session + keys + stated


def _signing_private(member: Member) -> Any:
    seed = member.derive(b"unskew signing key 1 ")
    return primitives("asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(seed)


def ecdsa() -> Any:
    """The scheme of signatures with a node's registered key."""
    return primitives("asymmetric.ec").ECDSA(primitives("hashes").SHA384())


def _is_p384(key: Any, kind: str) -> bool:
    ec = primitives("asymmetric.ec")
    return isinstance(key, getattr(ec, f"EllipticCurve{kind}")) and isinstance(key.curve, ec.SECP384R1)


@lru_cache(4096)
def _load_point(point: bytes) -> Any:
    ec = primitives("asymmetric.ec")
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), point)


def point_of(public: Any) -> bytes:
    """A P-384 key in the format of statements and rosters."""
    s = primitives("serialization")
    return bytes(public.public_bytes(s.Encoding.X962, s.PublicFormat.CompressedPoint))


@lru_cache(4096)
def _point_in(line: bytes) -> bytes | None:
    """The P-384 key in a line in OpenSSH format; None if there is none."""
    try:
        key = primitives("serialization").load_ssh_public_key(line)
    except (ValueError, require_extra("cryptography.exceptions").UnsupportedAlgorithm):
        return None
    return point_of(key) if _is_p384(key, "PublicKey") else None
