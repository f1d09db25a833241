"""Limits on the sizes of input files, checked before one is read: a few bytes can claim gigabytes.

A file may unpack to ``RATIO`` times its size on disk or to ``FLOOR``, whichever is larger, but to no more than half of
the memory. The variable ``UNSKEW_UNPACK_LIMIT`` sets another limit."""

import os
import re
import stat
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import usable_path
from unskew.core.machine import physical_memory
from unskew.core.units import format_bytes

UNPACK_VARIABLE = "UNSKEW_UNPACK_LIMIT"
FLOOR = 256 * 10**6  # bytes that any file may unpack to
RATIO = 100  # no format compresses photographs this much
MAX_CLASSES = 1_000_000  # more than any image set has: a larger label is not a class number
BLOCK = 4096  # the minimum size of a file, as on most disks

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def _user_limit() -> int | None:
    text = os.environ.get(UNPACK_VARIABLE, "").strip()
    return parse_size(text, f"{UNPACK_VARIABLE}={text[:80]}") if text else None


def parse_size(text: str, where: str) -> int:
    """Parse ``8GB`` or ``1.5 MB`` to bytes; ``where`` begins the error message."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)\s*([kmgt]?b)?", text.strip().lower(), re.ASCII)
    if match is None:
        raise UserError(f"{where}: give a size such as 8GB or 500MB")
    return int(Decimal(match[1]) * _UNITS[match[2] or ""])


def unpack_limit(on_disk: int, *, at_once: bool = True) -> int:
    """How many bytes files of ``on_disk`` bytes may unpack to; ``at_once``: all of them are in memory together."""
    limit = _user_limit()
    most = int(physical_memory() / 2) if at_once else 2**63
    return min(max(FLOOR, RATIO * on_disk), most) if limit is None else limit


def check_memory(needed: int, name: str, instead: str) -> None:
    """Reject a data set that needs too much memory; ``instead`` tells the user what to do."""
    if needed > (most := _user_limit() or int(physical_memory() / 2)):
        excess = f"{name} needs {format_bytes(needed)} of memory, more than the limit of {format_bytes(most)}"
        raise UserError(f"{excess}; {instead}, or set {UNPACK_VARIABLE}={-(-needed // 10**6)}MB")


def check_unpacked(claimed: int, on_disk: int, name: str, *, at_once: bool = True) -> None:
    """Reject a file that claims to unpack to more than the limit."""
    if claimed > (most := unpack_limit(on_disk, at_once=at_once)):
        excess = f"{name} unpacks to {format_bytes(claimed)} from {format_bytes(on_disk)} on disk"
        instead = f"if you trust it and have the memory, set {UNPACK_VARIABLE}={-(-claimed // 10**6)}MB"
        raise UserError(f"{excess}, above the limit of {format_bytes(most)}; {instead}")


def size_on_disk(paths: Iterable[Path]) -> int:
    """The files' bytes on disk, without the holes of sparse files."""
    total = 0
    for path in paths:
        facts = path.stat()
        blocks = getattr(facts, "st_blocks", None)  # missing on Windows
        total += max(BLOCK, facts.st_size if blocks is None else min(facts.st_size, 512 * blocks))
    return total


def check_plain(path: Path) -> None:
    """Reject an invalid path, and anything that exists but is not a file: reading a named pipe would never end."""
    try:
        mode = usable_path(path).stat().st_mode
    except OSError:  # opening it will tell
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UserError(f"{path} cannot be read: it is {kind}; give a file")


def read_plain(path: Path, advice: str = "check the path and its permissions") -> bytes:
    """All bytes of a file, within the limit for its size on disk."""
    check_plain(path)
    try:
        with path.open("rb") as file:
            check_unpacked(os.fstat(file.fileno()).st_size, size_on_disk([path]), str(path))
            return file.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; {advice}") from error
