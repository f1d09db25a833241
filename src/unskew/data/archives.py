"""Unpacks an archive that may be evil: nothing is written outside its folder, nothing that is not a plain file.

Refused with the member's name: paths that lead elsewhere, links and devices, a name twice (also one that differs in
capitals alone), a file where a folder must be, encrypted members, and more than an archive of its size may unpack to.
"""

import gzip
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_unpacked, size_on_disk
from unskew.data.download import check_space, on_disk

MAX_MEMBERS = 2_000_000
MAX_READ = 1 << 24  # bytes of a tar archive that are read at once: far more than the header of a name has
MAX_PART = 255  # bytes of a part of a path, as file systems have it
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, NotImplementedError)
_BLOCK = 1 << 20

Report = Callable[[int], None]  # files so far


@dataclass(frozen=True)
class Member:
    """What an archive has under a name; ``open`` is None for what is neither file nor folder."""

    name: str
    size: int
    folder: bool
    kind: str  # "file", or what it is instead
    open: Callable[[], IO[bytes]] | None


def unpack_members(archive: Path, name: str, wanted: tuple[str, ...], folder: Path) -> None:
    """Copy the wanted members, and nothing else, into ``folder`` under their last names."""
    missing, seen = set(wanted), set[str]()
    with _damage(name):
        for member in _members(archive, name):
            if member.name in seen and member.name in wanted:
                raise UserError(f"{name} has {brief(member.name)} twice; it is not the published archive")
            seen.add(member.name)
            if member.name in missing and member.open is not None:
                missing.remove(member.name)
                _copy(member, folder / member.name.rpartition("/")[2], name)
    if missing:
        raise UserError(f"{name} lacks {', '.join(sorted(missing)[:3])}; it is not the published archive")


def unpack_tree(
    archive: Path, name: str, folder: Path, *, inside: str = "", report: Report = lambda count: None
) -> int:
    """Copy all files below ``inside`` into ``folder``, and give their number; each is checked before it is written."""
    folders, files = set[str](), set[str]()
    count = 0
    with _damage(name):
        for place, member in enumerate(_members(archive, name), 1):
            if place > MAX_MEMBERS:
                raise UserError(f"{name} has more than {MAX_MEMBERS:,} members; it is not the published archive")
            path = _checked(member, name)
            if path is None or member.folder:
                continue
            _claim(path, folders, files, name)
            below = path.as_posix().removeprefix(inside)
            if not path.as_posix().startswith(inside) or not below:
                continue
            with on_disk(folder):
                (folder / below).parent.mkdir(parents=True, exist_ok=True)
            _copy(member, folder / below, name)
            count += 1
            report(count)
    if not count:
        raise UserError(f"{name} has no files below {inside or 'it'}; it is not the published archive")
    return count


def _checked(member: Member, name: str) -> PurePosixPath | None:
    """The member's path; None for the archive's own root."""
    given = member.name
    path = PurePosixPath(given)
    if path.is_absolute() or ".." in path.parts or "\\" in given or "\0" in given or given[1:2] == ":":
        raise UserError(f"{name}: the member {brief(given)} leads out of its folder; nothing of it was written")
    if any(len(part.encode("utf-8", "surrogateescape")) > MAX_PART for part in path.parts):
        raise UserError(
            f"{name}: the member {brief(given)} has a name that is too long; it is not the published archive"
        )
    if member.open is None and not member.folder:
        raise UserError(f"{name}: the member {brief(given)} is {member.kind}; only files and folders are unpacked")
    return path if path.parts else None


def _claim(path: PurePosixPath, folders: set[str], files: set[str], name: str) -> None:
    """Note a file's name and its folders'; refuse one that is taken on any file system."""
    parts = [unicodedata.normalize("NFC", part).casefold() for part in path.parts]
    own, above = "/".join(parts), {"/".join(parts[:n]) for n in range(1, len(parts))}
    if own in files:
        raise UserError(
            f"{name} has {brief(str(path))} twice, perhaps in other capitals; it is not the published archive"
        )
    if own in folders or above & files:
        raise UserError(
            f"{name} has {brief(str(path))} both as a file and as a folder; it is not the published archive"
        )
    files.add(own)
    folders |= above


def _members(archive: Path, name: str) -> Iterator[Member]:
    """The members of a tar or zip archive; what it unpacks to is bounded before it is."""
    if name.endswith(".zip"):
        yield from _zip_members(archive, name)
        return
    with gzip.open(archive) as stream, _tar(_Limited(stream, size_on_disk([archive]), name)) as tar:
        while (entry := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
            check_unpacked(stream.tell() + entry.size, size_on_disk([archive]), name, at_once=False)
            check_space(archive.parent, entry.size, f"unpacking {name}")
            kind = "a link" if entry.islnk() or entry.issym() else "file" if entry.isreg() else "a device or a pipe"
            yield Member(entry.name, entry.size, entry.isdir(), kind, _tar_opener(tar, entry))


class _Limited:
    """An archive's stream as tarfile may read it: a header can claim gigabytes, which it would read at once."""

    def __init__(self, stream: gzip.GzipFile, on_disk: int, name: str) -> None:
        self._stream, self._on_disk, self._name = stream, on_disk, name

    def read(self, size: int) -> bytes:
        """The next bytes."""
        if not 0 <= size <= MAX_READ:
            raise ValueError(f"a header of {size:,} bytes")
        self._check(self.tell() + size)
        return self._stream.read(size)

    def seek(self, place: int) -> int:
        """Go to that byte."""
        self._check(place)
        return self._stream.seek(place)

    def tell(self) -> int:
        """The number of the next byte."""
        return self._stream.tell()

    def _check(self, end: int) -> None:
        check_unpacked(end, self._on_disk, self._name, at_once=False)


def _tar(stream: Any) -> tarfile.TarFile:
    return tarfile.open(fileobj=stream, mode="r:")


def _zip_members(archive: Path, name: str) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as held:
        unpacked = sum(info.file_size for info in held.infolist())
        check_unpacked(unpacked, size_on_disk([archive]), name, at_once=False)
        check_space(archive.parent, unpacked, f"unpacking {name}")
        for info in held.infolist():
            if info.flag_bits & 1:
                raise UserError(f"{name}: the member {brief(info.filename)} is encrypted; give the published archive")
            mode = info.external_attr >> 28  # the kind of file, where the archive was made on Unix
            kind = {0: "file", 8: "file", 10: "a link"}.get(mode, "a device or a pipe")
            folder = info.is_dir() or mode == 4
            opener = _zip_opener(held, info) if kind == "file" and not folder else None
            yield Member(info.filename, info.file_size, folder, kind, opener)


def _tar_opener(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> Callable[[], IO[bytes]] | None:
    if not entry.isreg():
        return None

    def opened() -> IO[bytes]:
        content = tar.extractfile(entry)
        if content is None:
            raise ValueError(f"{entry.name} has no content")
        return content

    return opened


def _zip_opener(held: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
    return lambda: held.open(info)


def _copy(member: Member, path: Path, name: str) -> None:
    """A member under its name, whole or not at all."""
    if member.open is None:
        return
    part = path.with_name(path.name + ".part")
    try:
        with member.open() as stream, on_disk(path), part.open("wb") as out:
            while block := _read(stream, name):
                out.write(block)
        with on_disk(path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _read(stream: IO[bytes], name: str) -> bytes:
    try:
        return stream.read(_BLOCK)
    except (OSError, *_BROKEN) as error:
        raise UserError(f"{name} is damaged inside ({error or type(error).__name__}); fetch it again") from error


@contextmanager
def _damage(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, *_BROKEN) as error:
        raise UserError(f"{name} is damaged inside ({error or type(error).__name__}); fetch it again") from error
