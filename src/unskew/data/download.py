"""One file over HTTP, whole and as published, or not at all: continued where it broke off, from mirrors in turn.

A file comes as ``NAME.part`` and takes its name when its checksum is the published one. What has come so far is kept
when a connection breaks or the user stops; beside it ``NAME.part.from`` says from where it came and of which version.
Only this module opens a network connection, and only when asked to.
"""

import hashlib
import http.client
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.units import format_bytes

Report = Callable[[int, int | None], None]  # bytes so far and in all, of the file on its way; None: not said
Say = Callable[[str], None]

TIMEOUT = 60.0  # seconds without a byte
TRIES = 4  # connections to one address, of which each continues the last
PAUSE = 1.0  # seconds before the second; then twice as long each time
MAX_BYTES = 4 * 10**9  # of a download: the largest published archive has 0.7 GB
_BLOCK = 1 << 18


class DiskError(UserError):
    """The disk is full or cannot be written: what was downloaded is still good."""


class _BrokeOff(Exception):
    """The connection ended before the file did: it is worth another try."""


class _Refused(Exception):
    """This address will not give the published file."""


@dataclass(frozen=True)
class _Kept:
    """What is there of a file: how much, and from which address and version."""

    size: int
    url: str = ""
    version: str = ""  # of the server: its ETag, or when the file was last changed


def download(urls: Sequence[str], path: Path, md5: str, *, report: Report, say: Say) -> None:
    """Fetch a file to ``path`` from the first of ``urls`` that has it. ``report`` starts again where the file does."""
    if path.is_file() and _checksum(path) == md5:
        return
    part, reasons = part_of(path), list[str]()
    for url in urls:
        if reasons:
            say(f"{reasons[-1]}; trying {url}")
        try:
            _fetch(url, part, md5, report, say)
        except (_BrokeOff, _Refused) as error:
            reasons.append(str(error))
            continue
        with on_disk(path):
            part.replace(path)
        _origin(part).unlink(missing_ok=True)
        return
    kept = _size(part)
    more = f"; {format_bytes(kept)} are kept, the same command continues there" if kept else ""
    raise UserError("; ".join(reasons) + (more or "; nothing was kept; try again later, or give another --mirror"))


def part_of(path: Path) -> Path:
    """The name of a file that is still on its way."""
    return path.with_name(path.name + ".part")


def check_space(folder: Path, needed: int, what: str) -> None:
    """Refuse what the disk has no room for."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        room = f"{what} needs {format_bytes(needed)}, and {folder} has {format_bytes(free)} free"
        raise DiskError(f"{room}; make room, or give another --data-dir")


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Errors of the disk as the user's: the folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror or error}; give another --data-dir") from error


def _fetch(url: str, part: Path, md5: str, report: Report, say: Say) -> None:
    """The whole file from one address; where its checksum is wrong after it was continued, once more from the start."""
    for tried in range(1, TRIES + 1):
        continued = _size(part) > 0
        try:
            _continue(url, part, report)
        except _BrokeOff as error:
            if tried == TRIES:
                raise
            say(f"{error}; continuing")
            time.sleep(PAUSE * 2 ** (tried - 1))
            continue
        found = _checksum(part)
        if found == md5:
            return
        _forget(part)
        if not continued:
            raise _Refused(f"{url} is not the published file: its MD5 is {found}, {md5} was expected")
        say(f"{url}: what was kept does not belong to it; starting again")
    raise _BrokeOff(f"{url} broke off {TRIES} times")


def _continue(url: str, part: Path, report: Report) -> None:
    """What is missing of the file, appended to what is there."""
    kept = _kept(part)
    with _answer(url, kept) as answer:
        start = _start(answer, kept, url)
        if start is None:  # the server says that nothing is missing; the checksum will tell
            return
        length = answer.headers.get("Content-Length", "")
        total = start + int(length) if length.isascii() and length.isdigit() else None
        if total is not None and total > MAX_BYTES:
            raise _Refused(f"{url} has {format_bytes(total)}: it is not the published file")
        check_space(part.parent, (total or start) - start, url)
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        with on_disk(part):
            _origin(part).write_bytes(f"{url}\n{version}\n".encode())
            _append(answer, part, start, total, url, report)


def _append(
    answer: http.client.HTTPResponse, part: Path, start: int, total: int | None, url: str, report: Report
) -> None:
    done = start
    report(done, total)
    with part.open("ab" if start else "wb") as out:
        while block := _read(answer, url, done, total):
            out.write(block)
            done += len(block)
            report(done, total)
            if done > MAX_BYTES:
                _forget(part)
                raise _Refused(f"{url} goes on after {format_bytes(MAX_BYTES)}: it is not the published file")
    if total is not None and done < total:
        raise _BrokeOff(f"{url} broke off after {done:,} of {total:,} bytes")


def _read(answer: http.client.HTTPResponse, url: str, done: int, total: int | None) -> bytes:
    try:
        return answer.read(_BLOCK)
    except (OSError, http.client.HTTPException, ValueError) as error:
        of = f" of {total:,}" if total is not None else ""
        raise _BrokeOff(f"{url} broke off after {done:,}{of} bytes ({error or type(error).__name__})") from error


def _answer(url: str, kept: _Kept) -> http.client.HTTPResponse:
    headers = {"User-Agent": "unskew", "Accept-Encoding": "identity"}
    if kept.size:
        headers["Range"] = f"bytes={kept.size}-"
        if kept.url == url and kept.version and not kept.version.startswith("W/"):
            headers["If-Range"] = kept.version
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT
        )
    except urllib.error.HTTPError as error:
        if error.code == 416 and kept.size:
            return error  # type: ignore[return-value]
        error.close()
        raise _Refused(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Refused(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error
    return answer


def _start(answer: http.client.HTTPResponse, kept: _Kept, url: str) -> int | None:
    """From which byte on the answer is; None: nothing is missing. A server may ignore what was asked for."""
    if answer.status == 416:
        return None
    if answer.status != 206:
        return 0
    begins = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    if begins != str(kept.size):
        raise _Refused(f"{url} answers from byte {begins or 'unknown'} on, {kept.size} was asked for")
    return kept.size


def _kept(part: Path) -> _Kept:
    size = _size(part)
    if not size:
        return _Kept(0)
    with suppress(OSError, UnicodeDecodeError):
        url, version, *_ = [*_origin(part).read_text().splitlines(), "", ""]
        return _Kept(size, url, version)
    return _Kept(size)


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _origin(part: Path) -> Path:
    return part.with_name(part.name + ".from")


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _origin(part).unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    with on_disk(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
