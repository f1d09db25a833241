"""Decoded photographs on disk: an append-only file of pixels, and an index into it.

``<cache>/images/<key>/`` has ``pixels`` and ``index``. A record in ``pixels`` is one image, [ch, H, W] bytes. An entry
of the index has checksums of the record and of itself, so that damage by a crash, a full disk or another program is
detected and the image decoded again. Both files begin with the same random number, which shows that they belong
together. If the disk budget is exceeded, stores of other tables are removed, least recently used first.

LMDB was tried instead: it reads and, without syncing (as here), writes as fast; its files are a third larger.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from unskew.core.errors import UserError
from unskew.core.files import cache_folder
from unskew.core.language import cut
from unskew.core.limits import parse_size
from unskew.core.machine import physical_memory

ENTRY = np.dtype([
    ("stamp", "V16"), ("sha256", "V32"), ("offset", "<i8"), ("crc", "<u4"), ("height", "<u2"), ("width", "<u2"),
    ("channels", "u1"), ("spare", "V3"), ("check", "<u4"),
])  # fmt: skip
CHECKED = ENTRY.itemsize - 4  # the bytes of an entry that its check covers
NOT_STORED = -1  # instead of an offset: there was no room for the image
FILES = ("pixels", "index")
MARKS = (b"unskew pixels 1\n", b"unskew index  1\n")
HEADER = 32  # a mark and a random number
DISK, MEMORY = "20GB", "1GB"  # the default budgets
MEMORY_SHARE = 4  # at most 1/4 of this machine's memory, whatever the budget
FREE_SHARE = 2  # at most 1/2 of the free disk space, whatever the budget
MODE = 0o600

Entries = npt.NDArray[np.void]  # of ENTRY


@dataclass(frozen=True)
class Cache:
    """The folder for decoded photographs, and their budgets on disk and in memory, in bytes."""

    folder: Path
    disk: int
    memory: int


def cache_of(folder: str | None = None, disk: str | None = None, memory: str | None = None) -> Cache:
    """The cache for these options; None means the variable UNSKEW_CACHE, or the default."""
    most = int(physical_memory() / MEMORY_SHARE)
    return Cache(
        cache_folder(folder),
        parse_size(disk or DISK, f"--cache-disk {cut(disk or DISK)}"),
        min(most, parse_size(memory or MEMORY, f"--cache-memory {cut(memory or MEMORY)}")),
    )


def check_size(option: str) -> Callable[[str], object]:
    """Make a check that rejects a text that is not a size."""
    return lambda text: parse_size(text, f"--{option} {cut(text)}")


def pixel_bytes(entries: Entries) -> npt.NDArray[np.int64]:
    """[N], the bytes of each entry's image."""
    area: npt.NDArray[np.int64] = entries["height"].astype(np.int64) * entries["width"] * entries["channels"]
    return area


class Store:
    """The store of one table for one way of decoding; ``open_store`` opens it under its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pixels, self._index = (os.open(folder / name, os.O_RDWR | os.O_CREAT, MODE) for name in FILES)
        heads = [os.pread(file, HEADER, 0) for file in (self._pixels, self._index)]
        self.number = heads[0][len(MARKS[0]) :]
        self._end = os.fstat(self._pixels).st_size
        if heads != [mark + self.number for mark in MARKS] or len(self.number) != HEADER - len(MARKS[0]):
            self.begin_again()

    def close(self) -> None:
        """Close the files."""
        os.close(self._pixels)
        os.close(self._index)

    @property
    def used(self) -> int:
        """The bytes of all images in it, including those that no table refers to any more."""
        return self._end - HEADER

    def begin_again(self) -> None:
        """Forget all images; processes that have the old files open can still read them."""
        self.close()
        self.number, self._end, files = os.urandom(HEADER - len(MARKS[0])), HEADER, list[int]()
        for name, mark in zip(FILES, MARKS, strict=True):
            (self.folder / name).unlink(missing_ok=True)
            files.append(os.open(self.folder / name, os.O_RDWR | os.O_CREAT, MODE))
            os.pwrite(files[-1], mark + self.number, 0)
        self._pixels, self._index = files

    def entries(self) -> Entries:
        """All intact entries whose record is inside the file."""
        size = os.fstat(self._index).st_size - HEADER
        raw = np.frombuffer(os.pread(self._index, size, HEADER), np.uint8)
        table = raw[: len(raw) // ENTRY.itemsize * ENTRY.itemsize].view(ENTRY)
        if len(raw) % ENTRY.itemsize:  # cut off by a crash
            os.ftruncate(self._index, HEADER + table.nbytes)
        content = table.tobytes()
        checks = [zlib.crc32(content[at : at + CHECKED]) for at in range(0, len(content), ENTRY.itemsize)]
        area = pixel_bytes(table)
        stored = (table["offset"] == NOT_STORED) | (table["offset"] >= HEADER)
        inside = table["offset"] + np.where(table["offset"] < 0, 0, area) <= self._end
        intact: Entries = table[(table["check"] == np.array(checks, np.uint32)) & stored & inside & (area > 0)]
        return intact

    def append(self, entries: Entries, records: list[npt.NDArray[np.uint8]], room: int) -> int:
        """Write the images that fit, set their offsets in ``entries``, and return the bytes written."""
        start = self._end
        for entry, record in zip(entries, records, strict=True):
            offset = self._end
            fits = offset - start + record.nbytes <= room
            entry["offset"] = offset if fits and self._write(record) else NOT_STORED
            entry["check"] = zlib.crc32(entry.tobytes()[:CHECKED])
        offset = os.fstat(self._index).st_size
        with suppress(OSError):  # the disk is full: these are decoded again next time
            if os.pwrite(self._index, entries.tobytes(), offset) != entries.nbytes:
                os.ftruncate(self._index, offset)
        return self._end - start

    def _write(self, record: npt.NDArray[np.uint8]) -> bool:
        try:
            if os.pwrite(self._pixels, record.data, self._end) != record.nbytes:
                return False
        except OSError:
            return False
        self._end += record.nbytes
        return True


@contextmanager
def open_store(cache: Cache, key: str, waiting: Callable[[], None]) -> Iterator[Store]:
    """Open or create the store of that key, locked against other writers."""
    if not hasattr(os, "preadv"):
        raise UserError("the photograph cache needs preadv, which this system lacks; use Linux or macOS")
    folder, lock = cache.folder / "images" / key, _lock_of(cache.folder / "images" / key)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
        folder.mkdir(exist_ok=True, mode=0o700)  # another process may have removed it while we waited
        os.utime(folder)
        with closing(Store(folder)) as store:
            yield store
    except OSError as error:
        reason = f"cannot be used: {error.strerror or error}; give another folder, or set UNSKEW_CACHE"
        raise UserError(f"--cache-dir {cache.folder} {reason}") from error
    finally:
        lock.release()


def make_room(cache: Cache, store: Store, needed: int) -> int:
    """Return how many bytes may be added to the store, after removing unused stores if necessary."""
    stores = []
    for folder in (cache.folder / "images").iterdir():
        with suppress(OSError):  # another process may be removing it
            if folder.is_dir():
                size = sum(file.stat().st_size for file in folder.iterdir())
                stores.append((folder.stat().st_mtime, size, folder))
    stores.sort()
    total = sum(size for _, size, _ in stores)
    for _, size, other in stores:
        if total + needed > cache.disk and other != store.folder and _remove_unused(other):
            total -= size
    free = shutil.disk_usage(store.folder).free // FREE_SHARE
    return max(0, min(cache.disk - total, free))


def open_pixels(folder: Path, number: bytes) -> int | None:
    """Open the pixels of the store with that number; None if they are gone. What is open can be read after that."""
    with suppress(OSError):
        descriptor = os.open(folder / FILES[0], os.O_RDONLY)
        if os.pread(descriptor, HEADER, 0) == MARKS[0] + number:
            return descriptor
        os.close(descriptor)
    return None


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder.with_suffix(".lock"), mode=MODE, thread_local=False)


def _remove_unused(folder: Path) -> bool:
    with suppress(OSError, Timeout), _lock_of(folder).acquire(timeout=0):
        shutil.rmtree(folder)
        folder.with_suffix(".lock").unlink(missing_ok=True)
        return True
    return False
