"""Downloads a published image set into the data folder, and unpacks it."""

import hashlib
import http.client
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from filelock import FileLock, Timeout

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_unpacked, size_on_disk
from unskew.core.units import format_bytes
from unskew.data import sources
from unskew.data.interface import Download, Source

Report = Callable[[int, int], None]  # bytes so far and in total, of the current file; 0: unknown
Say = Callable[[str], None]

TIMEOUT = 60.0  # seconds without a byte
TRIES = 4  # connections to one address; each continues the previous one
PAUSE = 1.0  # seconds before the second; doubles each time
MAX_BYTES = 4 * 10**9  # of a download; the largest published archive has 0.7 GB
EVERY = 25_000  # files between two progress lines
_BLOCK = 1 << 18
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, NotImplementedError)


class DiskError(UserError):
    """The disk is full or cannot be written; downloaded files are still good."""


class _Refused(Exception):
    """This address does not have the published file."""


class _BrokeOff(_Refused):
    """The connection was lost before the end of the file; a retry may help."""


def download(urls: Sequence[str], path: Path, md5: str, *, report: Report, say: Say) -> None:
    """Download a file to ``path`` from the first of ``urls`` that has it; ``report`` restarts with the file."""
    if path.is_file() and _checksum(path) == md5:
        return  # without a published checksum it is downloaded again
    part, reasons = part_of(path), list[str]()
    for url in urls:
        if reasons:
            say(f"{reasons[-1]}; trying {url}")
        try:
            _fetch(url, part, md5, report, say)
        except _Refused as error:
            reasons.append(str(error))
        else:
            with on_disk(path):
                part.replace(path)
            return
    kept = f"{format_bytes(_size(part))} were kept; run the same command again to continue, or give another --mirror"
    raise UserError("; ".join([*reasons, kept]))


def part_of(path: Path) -> Path:
    """The name of an incomplete file or folder."""
    return path.with_name(path.name + ".part")


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Turn disk errors into messages for the user."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror or error}; give another --data-dir") from error


def _fetch(url: str, part: Path, md5: str, report: Report, say: Say) -> None:
    """Download a file from one address; if a continued download has a wrong checksum, start again."""
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
        checksum = _checksum(part)
        if checksum == md5 or not md5:
            return
        part.unlink(missing_ok=True)
        if not continued:
            raise _Refused(f"{url} is not the published file: its MD5 is {checksum}, expected {md5}")
        say(f"{url}: the partial download does not match; starting again")
    raise _BrokeOff(f"{url}: the connection was lost {TRIES} times")


def _continue(url: str, part: Path, report: Report) -> None:
    kept, headers = _size(part), {"User-Agent": "unskew", "Accept-Encoding": "identity"}
    if kept:  # if the file has changed since, the checksum will tell
        headers["Range"] = f"bytes={kept}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and kept:  # the server has nothing more; the checksum will tell whether it is complete
            return
        raise _Refused(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Refused(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error
    with answer:
        done = kept if answer.status == 206 else 0  # a server may ignore the range
        if done and not answer.headers.get("Content-Range", "").startswith(f"bytes {kept}-"):
            raise _Refused(f"{url} does not resume at byte {kept}")
        length = answer.headers.get("Content-Length", "")
        total = done + int(length) if length.isascii() and length.isdigit() else 0
        with on_disk(part), part.open("ab" if done else "wb") as out:
            report(done, total)
            while True:
                try:
                    block = answer.read(_BLOCK)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    raise _BrokeOff(f"{url}: the connection was lost after {done:,} bytes ({error})") from error
                if not block:
                    break
                out.write(block)
                done += len(block)
                report(done, total)
                if max(done, total) > MAX_BYTES:
                    part.unlink()
                    raise _Refused(f"{url} is larger than {format_bytes(MAX_BYTES)}, so it is not the published file")
        if done < total:
            raise _BrokeOff(f"{url}: the connection was lost after {done:,} of {total:,} bytes")


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _checksum(path: Path) -> str:
    with on_disk(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def unpack(
    archive: Path, name: str, folder: Path, members: Sequence[str] = (), inside: str = "", say: Say = lambda line: None
) -> None:
    """Extract ``members`` of an archive into ``folder``, without their paths, or else everything below ``inside``.

    ``tarfile``'s data filter would accept links and rewrite absolute paths, and does not cover zip archives.
    """
    copied, unpacked, packed = set[str](), 0, size_on_disk([archive])
    with _damage(name):
        for member, kind, size, open_member in _members(archive, name):
            unpacked += size
            check_unpacked(unpacked, packed, name, at_once=False)
            path = PurePosixPath(member)
            outside = path.is_absolute() or ".." in path.parts or set("\\\0") & set(member) or member[1:2] == ":"
            if outside or kind == "other":
                wrong = "points outside its folder" if outside else "is a link, a device or a pipe"
                raise UserError(f"{name}: the member {brief(member)} {wrong}; it is not the published archive")
            plain = path.as_posix()
            wanted = plain in members if members else plain.startswith(inside) and plain != inside
            if kind == "file" and wanted:
                _copy(open_member, folder / (path.name if members else plain.removeprefix(inside)), name)
                copied.add(plain)
                if len(copied) % EVERY == 0:
                    say(f"unpacking {name}: {len(copied):,} files")
    if not copied.issuperset(members) or not copied:
        wanted_files = ", ".join(sorted(set(members) - copied)[:3]) or f"files below {inside}"
        raise UserError(f"{name} has no {wanted_files}; it is not the published archive")


def _members(archive: Path, name: str) -> Iterator[tuple[str, str, int, Callable[[], IO[bytes] | None]]]:
    """Each member's name, its kind ("file", "folder" or "other"), its size, and a function that opens it."""
    if name.endswith(".zip"):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                mode = 4 if info.is_dir() else info.external_attr >> 28  # if the archive was made on Unix
                kind = {0: "file", 4: "folder", 8: "file"}.get(mode, "other")
                yield info.filename, kind, info.file_size, partial(zipped.open, info)
        return
    with tarfile.open(archive, "r:gz") as tar:
        while (entry := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would remember all of them
            kind = "file" if entry.isreg() else "folder" if entry.isdir() else "other"
            yield entry.name, kind, entry.size, partial(tar.extractfile, entry)


def _copy(open_member: Callable[[], IO[bytes] | None], path: Path, name: str) -> None:
    part = part_of(path)
    try:
        with on_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as out, _damage(name):
                stream = open_member()
                while stream is not None and (block := stream.read(1 << 20)):
                    with on_disk(path):
                        out.write(block)
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _damage(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, *_BROKEN) as error:
        raise UserError(f"{name} is damaged ({error or type(error).__name__}); download it again") from error


def fetch(name: str, data_dir: Path, *, mirror: str | None, report: Report, say: Say = lambda line: None) -> Path:
    """Download a set into a folder below ``data_dir``, unless it is complete; ``mirror`` replaces its addresses."""
    source = sources.parse(name).source
    wanted = source.download
    if wanted is None:
        raise UserError(f"{name}: there is nothing to download; use it as --data {name}")
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise UserError(f"mirror {mirror!r} is not a web address; give one that starts with http:// or https://")
    with _alone(data_dir, wanted.folder):
        complete = None if wanted.splits else _find_complete(source, wanted, data_dir)
        folder = complete or _fetch_files(wanted, data_dir, mirror, report, say)
    if wanted.splits:
        say(f"these are the published splits of {source.name}; get its photographs from {source.address}")
    return folder


def _fetch_files(wanted: Download, data_dir: Path, mirror: str | None, report: Report, say: Say) -> Path:
    """Download all files. What comes from a complete archive gets its folder's name only at the end."""
    folder = data_dir / wanted.folder
    whole = wanted.splits or wanted.tree is not None
    for file, md5 in wanted.files.items():
        target = folder / file.removesuffix(".zip") if wanted.splits else folder
        if wanted.splits and target.exists():
            continue
        path = target.with_name(f"{target.name}.{file}") if whole else target / file
        unpacked = part_of(target) if whole else target
        with on_disk(unpacked):
            unpacked.mkdir(parents=True, exist_ok=True)
        bases = [wanted.base, *wanted.mirrors] if mirror is None else [mirror]
        download([f"{base.rstrip('/')}/{file}" for base in bases], path, md5, report=report, say=say)
        if not whole and not wanted.members:
            continue
        say(f"unpacking {file}")
        try:
            unpack(path, file, unpacked, members=wanted.members, inside=wanted.tree or "", say=say)
        except DiskError:  # the archive is still good
            raise
        except UserError:
            path.unlink(missing_ok=True)
            if whole:
                shutil.rmtree(unpacked, ignore_errors=True)
            raise
        path.unlink(missing_ok=True)
        if wanted.splits:
            unpacked.rename(target)
    if wanted.tree is not None:
        with on_disk(folder):
            part_of(folder).rename(folder)
    return folder


@contextmanager
def _alone(data_dir: Path, folder: str) -> Iterator[None]:
    """Lock a folder against other processes that download into it."""
    path = data_dir / f".{folder}.lock"
    lock = FileLock(path)
    with on_disk(path):
        data_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            waiting = "wait for it to finish"
            raise UserError(f"another process is downloading {folder} into {data_dir}; {waiting}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()


def _find_complete(source: Source, download: Download, data_dir: Path) -> Path | None:
    try:
        folder = sources.locate(source.name, data_dir)
    except UserError:
        folder = data_dir / download.folder if source.rows and (data_dir / download.folder).exists() else None
    if folder is None or source.rows is None:
        return folder if folder and all(finding.whole for finding in sources.check(source.name, data_dir)) else None
    try:
        sources.load_rows(f"{source.name}{download.whole}", data_dir)
    except UserError as error:
        raise UserError(f"{folder} exists but is incomplete ({error}); move it away and download again") from error
    return folder
