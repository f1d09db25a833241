"""A client's record of secure sums: per session it takes part in one agreement, answers once and opens shares once.

Without it a server could ask twice under the same masks and subtract, or have both secrets of one member opened.
Session numbers increase, so only the last session needs a record.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_content, write_whole
from unskew.round.client_memory import anonymous_file, storage_failures

SESSION_BYTES = 32
NUMBER_BYTES = 8  # at the beginning of a session id, increasing from session to session
DIGEST_BYTES = 32
MOST_VISITS = 256  # of one client in one session: one bit each
SLOT = 256  # bytes: a disk writes them atomically
NOTHING = bytes(DIGEST_BYTES)


def new_session() -> bytes:
    """A new session id, for the server: the time in nanoseconds, then random bytes."""
    return time.time_ns().to_bytes(NUMBER_BYTES, "big") + os.urandom(SESSION_BYTES - NUMBER_BYTES)


@dataclass(frozen=True)
class Record:
    """What a client has done in its last session."""

    session: bytes = bytes(SESSION_BYTES)
    agreement: bytes = NOTHING  # the digest of the agreement in which it takes part
    answered: int = 0  # one bit per visit
    opened: bytes = NOTHING  # the digest of the request for which it opened its shares
    sharing: bytes = NOTHING  # the digest of the members with which it shares masks

    def agreed(self, session: bytes, agreement: bytes) -> "Record":
        """Take part in this agreement; refused after another one in this session, or after a later session."""
        if len(session) != SESSION_BYTES:
            raise UserError(f"a session id must be {SESSION_BYTES} bytes long, not {len(session)}")
        if session == self.session:
            if self.agreement != agreement:
                raise UserError("it takes part in another agreement of this session, with other members")
            return self
        if session[:NUMBER_BYTES] <= self.session[:NUMBER_BYTES]:
            raise UserError("it has already taken part in a later session (was the server's clock set back?)")
        return Record(session, agreement)

    def with_answer(self, session: bytes, agreement: bytes, sharing: bytes, visit: int) -> "Record":
        """Record an answer to this visit, under masks shared with these members."""
        now = self.agreed(session, agreement)
        if now is not self or now.answered >> visit & 1 or now.opened != NOTHING:
            raise UserError(
                "it has not distributed its shares in this session, has already answered this visit, or has already "
                "opened its shares"
            )
        return replace(now, answered=now.answered | 1 << visit, sharing=_either(now.sharing, sharing))

    def with_opening(self, session: bytes, agreement: bytes, sharing: bytes, question: bytes, visit: int) -> "Record":
        """Record that shares were opened for this request; it may be repeated, another one is refused."""
        now = self.agreed(session, agreement)
        if not now.answered >> visit & 1 or now.sharing != sharing:
            raise UserError("it has not answered in this session under masks with these members")
        return replace(now, opened=_either(now.opened, question))

    def joined(self, other: "Record") -> "Record":
        """Merge the records of two processes that did visits of one client at the same time."""
        later, earlier = (self, other) if self.session[:NUMBER_BYTES] >= other.session[:NUMBER_BYTES] else (other, self)
        if earlier.session != later.session:
            return later
        return replace(
            later.agreed(earlier.session, earlier.agreement),
            answered=later.answered | earlier.answered,
            opened=_either(later.opened, earlier.opened),
            sharing=_either(later.sharing, earlier.sharing),
        )

    def to_bytes(self) -> bytes:
        """The content of a slot, with a hash."""
        answered = self.answered.to_bytes(MOST_VISITS // 8, "big")
        content = self.session + self.agreement + answered + self.opened + self.sharing
        return (content + hashlib.sha256(content).digest()).ljust(SLOT, b"\0")

    @staticmethod
    def from_bytes(slot: bytes) -> "Record":
        """Read a slot; an empty one belongs to a client that has done nothing yet."""
        if not slot.strip(b"\0"):
            return Record()
        content, digest = slot[: 5 * DIGEST_BYTES], slot[5 * DIGEST_BYTES : 6 * DIGEST_BYTES]
        if hashlib.sha256(content).digest() != digest:
            raise UserError("its record of secure sums is damaged; start over with a new secret and a new record")
        session, agreement, answered, *others = (content[at : at + 32] for at in range(0, len(content), 32))
        return Record(session, agreement, int.from_bytes(answered, "big"), *others)


def _either(before: bytes, now: bytes) -> bytes:
    """The digest that is not blank; two different ones are refused."""
    if before != now and NOTHING not in (before, now):
        raise UserError("it has answered or opened its shares for other members; with both a client could be unmasked")
    return max(before, now)


def pin_members(folder: Path, subject: str, members: Mapping[int, tuple[float, int | None]]) -> None:
    """Record the members of this subject's sum in a file, each with its weight and number of examples (None: all).

    Refuses a sum whose members differ from those of an earlier one: the difference of two sums on the same subject, one
    of them without a member, would be that member's part.
    """
    file = folder / hashlib.sha256(subject.encode()).hexdigest()[:32]
    content = hashlib.sha256(repr(sorted(members.items())).encode()).digest()
    known = read_content(file, DIGEST_BYTES)
    if known is None:
        write_whole(file, content)
    elif known != content:
        raise UserError(
            f"{subject.split()[0]} was already summed over other clients, weights or numbers of examples; the "
            "difference of the two sums would reveal single clients"
        )


class Sessions:
    """The records of all clients on this machine, in a file that processes may share.

    It belongs to the machine's secret: a secret may be reused only with its record.
    """

    def __init__(self, descriptor: int, *, durable: bool = False) -> None:
        self.descriptor = descriptor
        self._durable = durable
        self._lock = threading.Lock()  # the file's lock works only between processes

    @staticmethod
    def temporary() -> "Sessions":
        """Records in an unnamed file, which disappears with its last process, as the secret does."""
        return Sessions(anonymous_file())

    @staticmethod
    def in_file(path: Path) -> "Sessions":
        """Records in this file, which outlives the process; every entry is on disk before an answer is sent."""
        with storage_failures():
            return Sessions(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), durable=True)

    def content(self, client: int) -> bytes:
        """The client's slot, for the process that does its next visit."""
        with self._lock, storage_failures():
            return os.pread(self.descriptor, SLOT, SLOT * client).rstrip(b"\0")

    def join(self, client: int, slot: bytes) -> None:
        """Add another process's record of the client."""
        self.change(client, Record.joined, Record.from_bytes(slot.ljust(SLOT, b"\0")))

    def close(self) -> None:
        """Close the file; repeated calls do nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def change(self, client: int, change: Callable[..., Record], *about: Any) -> None:
        """Record what the client is about to do: ``change`` is a method of its record, called with ``about``."""
        import fcntl  # only on Linux and macOS, where processes share the file

        start = SLOT * client
        with self._lock, storage_failures():
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX, SLOT, start)
            try:
                before = Record.from_bytes(os.pread(self.descriptor, SLOT, start))
                after = change(before, *about)
                if after != before:
                    if os.pwrite(self.descriptor, after.to_bytes(), start) != SLOT:
                        raise OSError("the record of secure sums was written only in part")
                    if self._durable:
                        os.fsync(self.descriptor)
            except UserError as error:
                raise UserError(f"client {client} refuses: {error}") from error
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN, SLOT, start)
