"""A client's record of secure sums: it takes part in one agreement a session, answers it once and opens it one way.

Without the record a server could ask twice under the same masks, and subtract; or have both secrets of one member
opened, by two questions. The record is on the client's side: a slot of a file for each client, so that it holds for all
processes that do this client's work and for the time after a crash. Sessions have growing numbers, which makes the last
one enough to keep: an earlier one is never answered again.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import read_content, write_whole
from unskew.privacy.agreement import MOST_CLIENTS
from unskew.round.client_memory import anonymous_file, storage_failures

SESSION_BYTES = 32
NUMBER_BYTES = 8  # at the beginning of a session id, growing from session to session
DIGEST_BYTES = 32
MOST_VISITS = 256  # of one client in one session: a bit each
SLOT = 256  # bytes: a disk writes them whole or not at all
NOTHING = bytes(DIGEST_BYTES)


def new_session() -> bytes:
    """The id of a session, for the server: the time in nanoseconds, then random bytes."""
    return time.time_ns().to_bytes(NUMBER_BYTES, "big") + os.urandom(SESSION_BYTES - NUMBER_BYTES)


@dataclass(frozen=True)
class Record:
    """What a client has done in its last session."""

    session: bytes = bytes(SESSION_BYTES)
    agreement: bytes = NOTHING  # the digest of the one it takes part in
    answered: int = 0  # a bit for each of its visits
    opened: bytes = NOTHING  # the digest of the one question that it opened
    sharing: bytes = NOTHING  # the digest of the members that it shares masks with

    def agreed(self, session: bytes, agreement: bytes) -> "Record":
        """Takes part in this agreement of this session; refused where it has another, or a later session."""
        if len(session) != SESSION_BYTES:
            raise UserError(f"a session id has {SESSION_BYTES} bytes, this one {len(session)}")
        if session == self.session:
            if self.agreement != agreement:
                raise UserError("it takes part in another agreement of this session, with other members")
            return self
        if session[:NUMBER_BYTES] <= self.session[:NUMBER_BYTES]:
            raise UserError("it has answered a later session; each is answered once (did the server's clock go back?)")
        return Record(session, agreement)

    def with_answer(self, session: bytes, agreement: bytes, sharing: bytes, visit: int) -> "Record":
        """Has answered this visit, under masks that it shares with these members."""
        if not 0 <= visit < MOST_VISITS:
            raise UserError(f"visit {visit + 1}: a client takes part in a session with at most {MOST_VISITS} visits")
        now = self.agreed(session, agreement)
        if now is not self:
            raise UserError("it has handed out no shares in this session")
        if now.answered >> visit & 1 or now.opened != NOTHING:
            raise UserError("a session is answered once, and not after it was opened")
        if now.sharing not in (NOTHING, sharing):
            raise UserError("it has answered this session under masks with other members")
        return replace(now, answered=now.answered | 1 << visit, sharing=sharing)

    def with_opening(self, session: bytes, agreement: bytes, sharing: bytes, question: bytes, visit: int) -> "Record":
        """Has opened its shares as this question asks; the same question may come again, another is refused."""
        now = self.agreed(session, agreement)
        if not now.answered >> visit & 1:
            raise UserError("it has not answered this session")
        if now.sharing != sharing:
            raise UserError("it has answered this session under masks with other members")
        if now.opened not in (NOTHING, question):
            raise UserError("it has opened this session for other members; with both openings one would be unmasked")
        return replace(now, opened=question)

    def joined(self, other: "Record") -> "Record":
        """What both say, where two processes did visits of one client at the same time."""
        later, earlier = (self, other) if self.session[:NUMBER_BYTES] >= other.session[:NUMBER_BYTES] else (other, self)
        if earlier.session != later.session:
            return later
        later = later.agreed(earlier.session, earlier.agreement)
        if NOTHING not in (later.opened, earlier.opened) and later.opened != earlier.opened:
            raise UserError("it has opened this session twice, for other members")
        if NOTHING not in (later.sharing, earlier.sharing) and later.sharing != earlier.sharing:
            raise UserError("it has answered this session under masks with other members")
        return replace(
            later,
            answered=later.answered | earlier.answered,
            opened=max(later.opened, earlier.opened),
            sharing=max(later.sharing, earlier.sharing),
        )

    def to_bytes(self) -> bytes:
        """As a slot holds it, with its hash."""
        answered = self.answered.to_bytes(MOST_VISITS // 8, "big")
        content = self.session + self.agreement + answered + self.opened + self.sharing
        return (content + hashlib.sha256(content).digest()).ljust(SLOT, b"\0")

    @staticmethod
    def from_bytes(slot: bytes) -> "Record":
        """A slot's record; one never written is a client that has done nothing yet."""
        if not slot.strip(b"\0"):
            return Record()
        content, digest = slot[: 5 * DIGEST_BYTES], slot[5 * DIGEST_BYTES : 6 * DIGEST_BYTES]
        if hashlib.sha256(content).digest() != digest:
            raise UserError("its record of secure sums is damaged; start again with a new secret and a new record")
        session, agreement, answered, *others = (content[at : at + 32] for at in range(0, len(content), 32))
        return Record(session, agreement, int.from_bytes(answered, "big"), *others)


class PinnedSums:
    """What sums of a run were about, and over which members: a file each, in a folder.

    From two sums about one subject, one of them without a member, the difference is that member's own part.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, subject: str, members: Mapping[int, tuple[float, int | None]]) -> None:
        """Remember the members of this subject's sum, each with its weight and number of examples (None: all).

        Refuse the sum where they differ from those of an earlier one.
        """
        file = self._folder / hashlib.sha256(subject.encode()).hexdigest()[:32]
        content = b"".join(
            hashlib.sha256(repr(part).encode()).digest() for part in (sorted(members), sorted(members.items()))
        )
        known = read_content(file, 2 * DIGEST_BYTES)
        if known is None:
            write_whole(file, content)
        elif known != content:
            same = known[:DIGEST_BYTES] == content[:DIGEST_BYTES]
            what = "with other weights or numbers of examples" if same else "over other clients"
            raise UserError(
                f"{subject.split()[0]} has been summed {what}; the difference between both sums would reveal single "
                "clients"
            )


class Sessions:
    """The records of all clients of this machine, in a file that processes may share.

    It belongs to the machine's secret: a secret that is used again needs its record too.
    """

    def __init__(self, descriptor: int, *, durable: bool = False) -> None:
        self.descriptor = descriptor
        self._durable = durable
        self._lock = threading.Lock()  # the file's own lock is one between processes

    @staticmethod
    def temporary() -> "Sessions":
        """In a file without a name, gone with the last process that has it open: for a secret that goes with it."""
        return Sessions(anonymous_file())

    @staticmethod
    def in_file(path: Path) -> "Sessions":
        """In this file, which outlives the process; every entry is on disk before an answer leaves."""
        with storage_failures():
            return Sessions(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), durable=True)

    def agree(self, client: int, session: bytes, agreement: bytes) -> None:
        """The client takes part; see ``Record``."""
        self._change(client, lambda record: record.agreed(session, agreement))

    def answer(self, client: int, session: bytes, agreement: bytes, sharing: bytes, visit: int) -> None:
        """The client is about to answer."""
        self._change(client, lambda record: record.with_answer(session, agreement, sharing, visit))

    def open(self, client: int, session: bytes, agreement: bytes, sharing: bytes, question: bytes, visit: int) -> None:
        """The client is about to open, or to sign that it will."""
        self._change(client, lambda record: record.with_opening(session, agreement, sharing, question, visit))

    def content(self, client: int) -> bytes:
        """The client's slot, for another process that does its next visit."""
        with self._lock, storage_failures():
            return os.pread(self.descriptor, SLOT, SLOT * client).rstrip(b"\0")

    def join(self, client: int, slot: bytes) -> None:
        """Add what another process has recorded of the client."""
        self._change(client, lambda record: record.joined(Record.from_bytes(slot.ljust(SLOT, b"\0"))))

    def close(self) -> None:
        """Close the file; once is enough."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _change(self, client: int, change: Callable[[Record], Record]) -> None:
        import fcntl  # only on Linux and macOS, where processes share the file

        if not 0 <= client < MOST_CLIENTS:
            raise UserError(f"client {client}: a client's number must be from 0 to 2^40 - 1")
        start = SLOT * client
        with self._lock, storage_failures():
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX, SLOT, start)
            try:
                before = Record.from_bytes(os.pread(self.descriptor, SLOT, start))
                after = change(before)
                if after != before:
                    if os.pwrite(self.descriptor, after.to_bytes(), start) != SLOT:
                        raise OSError("the record of secure sums was cut short")
                    if self._durable:
                        os.fsync(self.descriptor)
            except UserError as error:
                raise UserError(f"client {client} refuses: {error}") from error
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN, SLOT, start)
