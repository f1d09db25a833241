"""A node's secret for the secure sums of one run, and the record of what was answered in them: files that go together.

The secret is made here, of the operating system's randomness, and never sent. The record is on disk before an answer
leaves, so that a kill at any moment cannot make the node answer twice. A secret without its record is not used again.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import read_content, write_whole
from unskew.privacy.sessions import Sessions

SECRET, RECORD = "secret", "sessions"
LENGTH = 32  # bytes


@dataclass(frozen=True)
class NodeSecret:
    """What masks follow from, and what was answered under them."""

    secret: bytes
    sessions: Sessions


def open_secret(folder: Path) -> NodeSecret:
    """The secret of the run in this folder; a new one where it has none."""
    known = read_content(folder / SECRET, 2 * LENGTH)
    if known is not None and len(known) != LENGTH:
        raise UserError(f"{folder / SECRET} is damaged; delete it, and the node makes another")
    if known is None or not (folder / RECORD).exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        forget_secret(folder)
        write_whole(folder / RECORD, b"", secret=True)  # first: whoever finds a secret without a record makes another
        known = os.urandom(LENGTH)
        write_whole(folder / SECRET, known, secret=True)
    return NodeSecret(known, Sessions.in_file(folder / RECORD))


def forget_secret(folder: Path) -> None:
    """Delete both: whoever comes by the node's files later cannot undo a mask."""
    for name in (SECRET, RECORD):
        (folder / name).unlink(missing_ok=True)
