"""Downloads a published image set into the data folder, and unpacks it."""

import gzip
import hashlib
import http.client
import io
import shutil
import tarfile
import time
import unicodedata
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, cast

from filelock import FileLock, Timeout

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_unpacked, size_on_disk
from unskew.core.units import format_bytes
from unskew.data import sources
from unskew.data.interface import Download, Source

Report = Callable[[int, int | None], None]  # bytes so far and in total, of the current file; None: unknown
Say = Callable[[str], None]

TIMEOUT = 60.0  # seconds without a byte
TRIES = 4  # connections to one address; each continues the previous one
PAUSE = 1.0  # seconds before the second; doubles each time
MAX_BYTES = 4 * 10**9  # of a download; the largest published archive has 0.7 GB
_BLOCK = 1 << 18


class DiskError(UserError):
    """The disk is full or cannot be written; downloaded files are still good."""


class _BrokeOff(Exception):
    """The connection was lost before the end of the file; a retry may help."""


class _Refused(Exception):
    """This address does not have the published file."""


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
        except (_BrokeOff, _Refused) as error:
            reasons.append(str(error))
            continue
        with on_disk(path):
            part.replace(path)
        return
    kept = _size(part)
    more = f"; {format_bytes(kept)} were kept; run the same command again to continue" if kept else ""
    raise UserError("; ".join(reasons) + (more or "; nothing was kept; try again later, or give another --mirror"))


def part_of(path: Path) -> Path:
    """The name of an incomplete file."""
    return path.with_name(path.name + ".part")


def check_space(folder: Path, needed: int, what: str) -> None:
    """Refuse a file that does not fit on the disk."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        room = f"{what} needs {format_bytes(needed)}, but {folder} has only {format_bytes(free)} free"
        raise DiskError(f"{room}; make room, or give another --data-dir")


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
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and kept:  # the server has nothing more; the checksum will tell whether it is complete
            return
        raise _Refused(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Refused(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error
    with answer:
        start = kept if answer.status == 206 else 0  # a server may ignore the range
        begins = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
        if start and begins != str(kept):
            raise _Refused(f"{url} resumes at byte {begins or 'unknown'} instead of {kept}")
        length = answer.headers.get("Content-Length", "")
        total = start + int(length) if length.isascii() and length.isdigit() else None
        if total is not None and total > MAX_BYTES:
            raise _Refused(f"{url} has {format_bytes(total)}, so it is not the published file")
        check_space(part.parent, (total or start) - start, url)
        with on_disk(part), part.open("ab" if start else "wb") as out:
            done = start
            report(done, total)
            while True:
                try:
                    block = answer.read(_BLOCK)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    lost = f"the connection was lost after {done:,}{'' if total is None else f' of {total:,}'} bytes"
                    raise _BrokeOff(f"{url}: {lost} ({error or type(error).__name__})") from error
                if not block:
                    break
                out.write(block)
                done += len(block)
                report(done, total)
                if done > MAX_BYTES:
                    part.unlink()
                    raise _Refused(f"{url} is larger than {format_bytes(MAX_BYTES)}, so it is not the published file")
        if total is not None and done < total:
            raise _BrokeOff(f"{url}: the connection was lost after {done:,} of {total:,} bytes")


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _checksum(path: Path) -> str:
    with on_disk(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


MAX_MEMBERS = 2_000_000
MAX_READ = 1 << 24  # bytes of a tar archive read at once: far more than any header has
MAX_PART = 255  # bytes of a path's part, the limit of file systems
EVERY = 25_000  # files between two progress lines
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, NotImplementedError)


Member = tuple[str, str, Callable[[], IO[bytes] | None]]  # its name; "file", "folder" or another kind; opens it


def unpack(
    archive: Path, name: str, folder: Path, members: Sequence[str] = (), inside: str = "", say: Say = lambda line: None
) -> None:
    """Extract ``members`` of an archive into ``folder``, without their paths, or else everything below ``inside``."""
    folders, files, copied = set[str](), set[str](), set[str]()
    with _damage(name):
        for number, (member, kind, open_member) in enumerate(_members(archive, name), 1):
            if number > MAX_MEMBERS:
                raise UserError(f"{name} has more than {MAX_MEMBERS:,} members; it is not the published archive")
            path = _check_member(member, kind, folders, files, name)
            wanted = path in members if members else path.startswith(inside) and path != inside
            if kind != "file" or not wanted:
                continue
            target = folder / (path.rpartition("/")[2] if members else path.removeprefix(inside))
            with on_disk(folder):
                target.parent.mkdir(parents=True, exist_ok=True)
            _copy(open_member, target, name)
            copied.add(path)
            if len(copied) % EVERY == 0:
                say(f"unpacking {name}: {len(copied):,} files")
    if missing := sorted(set(members) - copied):
        raise UserError(f"{name} is missing {', '.join(missing[:3])}; it is not the published archive")
    if not copied:
        raise UserError(f"{name} has no files below {inside or 'it'}; it is not the published archive")


def _check_member(member: str, kind: str, folders: set[str], files: set[str], name: str) -> str:
    """Return the path of an acceptable member, and add it to ``folders`` and ``files``.

    ``tarfile``'s data filter would accept links and rewrite absolute paths, and does not cover zip archives.
    """
    path = PurePosixPath(member)
    outside = path.is_absolute() or ".." in path.parts or set("\\\0") & set(member) or member[1:2] == ":"
    parts = [unicodedata.normalize("NFC", part).casefold() for part in path.parts]  # some file systems ignore case
    own, above = "/".join(parts), {"/".join(parts[:n]) for n in range(1, len(parts))}
    wrong = None
    if outside:
        wrong = "points outside its folder"
    elif any(len(part.encode("utf-8", "surrogateescape")) > MAX_PART for part in path.parts):
        wrong = "has a name that is too long"
    elif kind not in ("file", "folder"):
        wrong = f"is {kind}; only files and folders are unpacked"
    elif kind == "file" and own in files:
        wrong = "appears twice, perhaps in different case"
    elif kind == "file" and (own in folders or above & files):
        wrong = "appears both as a file and as a folder"
    if wrong:
        raise UserError(f"{name}: the member {brief(member)} {wrong}; it is not the published archive")
    if kind == "file":
        files.add(own)
        folders |= above
    return path.as_posix()


def _members(archive: Path, name: str) -> Iterator[Member]:
    packed = size_on_disk([archive])
    if name.endswith(".zip"):
        with zipfile.ZipFile(archive) as zipped:
            unpacked = sum(info.file_size for info in zipped.infolist())
            check_unpacked(unpacked, packed, name, at_once=False)
            check_space(archive.parent, unpacked, f"unpacking {name}")
            for info in zipped.infolist():
                if info.flag_bits & 1:
                    raise UserError(f"{name}: the member {brief(info.filename)} is encrypted; download it again")
                mode = 4 if info.is_dir() else info.external_attr >> 28  # if the archive was made on Unix
                kind = {0: "file", 4: "folder", 8: "file", 10: "a link"}.get(mode, "a device or a pipe")
                yield info.filename, kind, partial(zipped.open, info)
        return
    with (
        gzip.open(archive) as stream,
        tarfile.open(fileobj=cast(IO[bytes], _Limited(stream, packed, name)), mode="r:") as tar,
    ):
        while (entry := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would remember all of them
            check_unpacked(stream.tell() + entry.size, packed, name, at_once=False)
            check_space(archive.parent, entry.size, f"unpacking {name}")
            kind = "a link" if entry.islnk() or entry.issym() else "a device or a pipe"
            kind = "file" if entry.isreg() else "folder" if entry.isdir() else kind
            yield entry.name, kind, partial(tar.extractfile, entry)


class _Limited:
    """A stream that limits tarfile's reads: a header can claim gigabytes, which tarfile would read at once."""

    def __init__(self, stream: gzip.GzipFile, packed: int, name: str) -> None:
        self._stream, self._packed, self._name, self.tell = stream, packed, name, stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ:
            raise ValueError(f"a header of {size:,} bytes")
        check_unpacked(self.tell() + size, self._packed, self._name, at_once=False)
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        check_unpacked(position, self._packed, self._name, at_once=False)
        return self._stream.seek(position)


def _copy(open_member: Callable[[], IO[bytes] | None], path: Path, name: str) -> None:
    part = part_of(path)
    try:
        with open_member() or io.BytesIO() as stream, on_disk(path), part.open("wb") as out:
            while True:
                with _damage(name):
                    block = stream.read(1 << 20)
                if not block:
                    break
                out.write(block)
        with on_disk(path):
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
    """Download a set into a folder below ``data_dir``, unless it is complete, and return that folder.

    ``mirror`` replaces the published addresses up to the file name. ``report`` restarts with every file; ``say`` is
    called with problems and retries.
    """
    source = sources.parse(name)[0]
    if source.locate is None:
        where = "it comes with scikit-learn" if name == "digits" else "it is your own file"
        raise UserError(f"{name}: there is nothing to download, since {where}; use it as --data {name}")
    if source.download is None:
        where = source.origin.split()[-1]
        raise UserError(f"{name}: Unskew cannot download this data set; get it from {where} and pass --data-dir DIR")
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise UserError(f"mirror {mirror!r} is not a web address; give one that starts with http:// or https://")
    if source.download.splits:
        with _alone(data_dir, f"{source.download.folder}-splits"):
            return _fetch_splits(source, source.download, data_dir, mirror, report, say)
    with _alone(data_dir, source.download.folder):
        complete = _find_complete(source, source.download, data_dir)
        return complete or _fetch_files(source.download, data_dir, mirror, report, say)


def _fetch_files(wanted: Download, data_dir: Path, mirror: str | None, report: Report, say: Say) -> Path:
    bases = [wanted.base, *wanted.mirrors] if mirror is None else [mirror]
    folder = data_dir / wanted.folder
    target = folder if wanted.tree is None else folder.with_name(f"{folder.name}.part")
    with on_disk(target):
        target.mkdir(parents=True, exist_ok=True)
    for file, md5 in wanted.files.items():
        urls = [f"{base.rstrip('/')}/{file}" for base in bases]
        path = target / file if wanted.tree is None else folder.with_name(f"{folder.name}.{file}")
        download(urls, path, md5, report=report, say=say)
        if not wanted.members and wanted.tree is None:
            continue
        if wanted.tree is not None:
            say(f"unpacking {file}")
        try:
            unpack(path, file, target, members=wanted.members, inside=wanted.tree or "", say=say)
        except DiskError:  # the archive is still good
            raise
        except UserError:
            path.unlink(missing_ok=True)
            if wanted.tree is not None:
                shutil.rmtree(target, ignore_errors=True)
            raise
        path.unlink(missing_ok=True)
    if target != folder:
        with on_disk(folder):
            target.rename(folder)
    return folder


def _fetch_splits(
    source: Source, wanted: Download, data_dir: Path, mirror: str | None, report: Report, say: Say
) -> Path:
    """Put the published splits next to the set's files, each in its own folder, unless it exists."""
    folder = data_dir / wanted.folder
    for file, md5 in wanted.files.items():
        archive, target = folder / file, folder / file.removesuffix(".zip")
        if target.exists():
            continue
        with on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
        download([f"{(mirror or wanted.base).rstrip('/')}/{file}"], archive, md5, report=report, say=say)
        temporary = part_of(target)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            unpack(archive, file, temporary)
        finally:
            archive.unlink(missing_ok=True)
        with on_disk(target):
            temporary.rename(target)
    say(f"these are the published splits of {source.name}; get its photographs from {source.origin.split()[-1]}")
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
            raise UserError(
                f"another process is downloading {folder} into {data_dir}; wait for it to finish"
            ) from error
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
