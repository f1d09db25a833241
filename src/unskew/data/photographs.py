"""Photographs that are decoded once, kept in the store on disk, and read when a batch asks for them.

A first pass decodes every photograph, so that broken ones are known before training; an interrupted pass continues
where it stopped. Every image that is read is compared with the checksum of that first pass.

A stored photograph is whole: its shorter side has the set's size, and its longer side at most ``decode.LONGEST`` times
that. Random crops are cut from it; where no crop is drawn, as in evaluation, the middle square is taken.

Shapes: N photographs, B of them in a batch, [ch, h, w] a stored photograph, [ch, H, W] one image; counts [3, 256],
pixels per channel and value.
"""

import hashlib
import json
import os
import threading
import weakref
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL

from unskew.core.errors import StorageFailure, UserError
from unskew.core.files import parse_json, read_content, write_whole
from unskew.core.limits import check_memory
from unskew.core.machine import cores
from unskew.core.plugins import require_extra
from unskew.core.types import Arrays
from unskew.data.decode import DAMAGE, DECODER, Broken, NoBytes, Picture, Pixels, center, decode, quiet
from unskew.data.store import ENTRY, NOT_STORED, Cache, Entries, Store, StoreReader, make_room, open_store

BATCH, BATCH_BYTES = 64, 32 * 10**6  # photographs of a parquet file that are read at a time, and their bytes
PAGE = 1024  # rows of a parquet file that are unpacked together: as many as its usual writers put on a page
BUFFER = 1 << 20
MEMBER_BYTES = 256 * 10**6  # of a picture in an archive
AS_THEY_ARE = 512  # pixels: photographs of one size with longer sides are scaled down too

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Files:
    """Photographs in files below ``root``, a folder or a zip archive."""

    root: Path
    names: npt.NDArray[np.uint8]  # of all files, one text in UTF-8
    ends: Numbers  # [N], where each name ends in it

    @staticmethod
    def of(root: Path, paths: Iterable[str]) -> "Files":
        """Files by their paths."""
        encoded = [os.fsencode(path) for path in paths]
        return Files(root, np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([len(name) for name in encoded]))

    def __len__(self) -> int:
        return len(self.ends)

    def _name(self, row: int) -> str:
        start = self.ends[row - 1] if row else 0
        return os.fsdecode(self.names[start : self.ends[row]].tobytes())

    def name(self, row: int) -> str:
        """What a message calls it: its path."""
        return str(self.root / self._name(row))

    def stamps(self) -> list[bytes | None]:
        """For each 16 bytes that change when its file does, by size or time; None where there is no file."""
        text, root, start, stamps = self.names.tobytes(), os.fsencode(self.root), 0, list[bytes | None]()
        zipped = os.stat(root) if _is_zip(self.root) else None
        for end in self.ends.tolist():
            path = os.path.join(root, text[start:end])
            start = end
            try:
                about = zipped or os.stat(path)
            except (OSError, ValueError):
                stamps.append(None)
                continue
            facts = b"%s\0%d\0%d" % (path, about.st_size, about.st_mtime_ns)
            stamps.append(hashlib.blake2b(facts, digest_size=16).digest())
        return stamps

    def contents(self, rows: Sequence[int]) -> list[Picture | None]:
        """These photographs as ``decode`` takes them: paths, or the bytes in an archive."""
        if not _is_zip(self.root):
            return [self.root / self._name(row) for row in rows]
        archive = _open_zip(self.root, self.root.stat().st_mtime_ns)
        return [_read_member(archive, self._name(row)) for row in rows]

    def together(self) -> int:
        """How many ``contents`` may give at once: of paths all, they take next to nothing."""
        return BATCH if _is_zip(self.root) else max(1, len(self))

    def part(self, rows: Numbers) -> "Files":
        """These rows alone."""
        starts = np.concatenate([[0], self.ends[:-1]])[rows]
        text = self.names.tobytes()
        pieces = [text[start:end] for start, end in zip(starts.tolist(), self.ends[rows].tolist(), strict=True)]
        return Files(self.root, np.frombuffer(b"".join(pieces), np.uint8), np.cumsum([len(piece) for piece in pieces]))

    def described(self) -> tuple[dict[str, Any], Arrays]:
        """How another process opens them: the root as a word, the rest as arrays."""
        return {"kind": "files", "root": str(self.root)}, {"names": self.names, "ends": self.ends}


def _is_zip(root: Path) -> bool:
    return root.suffix.lower() == ".zip" and root.is_file()


@lru_cache(maxsize=2)
def _open_zip(path: Path, changed: int) -> zipfile.ZipFile:
    """The archive, opened once: reading its list of members takes a second where there are many."""
    return zipfile.ZipFile(path)


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes | None:
    try:
        if archive.getinfo(name).file_size <= MEMBER_BYTES:
            return archive.read(name)
    except (KeyError, zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error, *DAMAGE):
        pass
    return None  # decode refuses it


@dataclass(frozen=True, eq=False)
class Parquet:
    """Photographs as bytes in a column of a parquet file, plain or as Hugging Face's struct of bytes and path."""

    file: Path
    column: str
    rows: Numbers  # [N], in the file
    _reader: "list[_Reader]" = field(default_factory=list, repr=False)  # where the last reading ended

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        """The file and the row."""
        return f"{self.file} row {int(self.rows[row])}"

    def stamps(self) -> list[bytes | None]:
        """From the row, and the size of the file and the time of its last change."""
        about = os.stat(self.file)
        facts = f"{self.file}\0{self.column}\0{about.st_size}\0{about.st_mtime_ns}\0".encode()
        return [hashlib.blake2b(facts + str(row).encode(), digest_size=16).digest() for row in self.rows.tolist()]

    def contents(self, rows: Sequence[int]) -> list[Picture | None]:
        """Bytes, read from front to back."""
        wanted = self.rows[np.asarray(rows, np.int64)]
        found = dict[int, Picture | None]()
        for row in np.unique(wanted).tolist():
            if not self._reader or not self._reader[0].reaches(row):
                self._reader[:] = [_Reader(self.file, self.column, row)]
            found[row] = self._reader[0].take(row)
        return [found[row] for row in wanted.tolist()]

    def together(self) -> int:
        """As many as have a few megabytes."""
        return at_once(open_parquet(self.file), self.column)

    def part(self, rows: Numbers) -> "Parquet":
        """These rows alone."""
        return Parquet(self.file, self.column, self.rows[rows])

    def described(self) -> tuple[dict[str, Any], Arrays]:
        """The file as a word, the rows as an array."""
        return {"kind": "parquet", "file": str(self.file), "column": self.column}, {"rows": self.rows}


Pictures = Files | Parquet  # where N photographs are


def open_pictures(about: dict[str, Any], arrays: Arrays) -> Pictures:
    """What ``described`` gave, in another process."""
    if about["kind"] == "files":
        return Files(Path(about["root"]), arrays["names"], arrays["ends"])
    return Parquet(Path(about["file"]), about["column"], arrays["rows"])


class _Reader:
    """One pass through a parquet file from the row group of a row on: rows are taken in ascending order."""

    def __init__(self, file: Path, column: str, row: int) -> None:
        self._file, parquet = file, open_parquet(file)
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        ends = np.cumsum(sizes)
        group = int(np.searchsorted(ends, row, side="right"))
        if group == len(sizes):
            raise StorageFailure(f"{file} has changed since it was read: row {row} is gone; start again")
        self._end = int(ends[group])  # of the first group: a later row is better begun at its own group
        self._next = self._end - sizes[group]
        groups = list(range(group, len(sizes)))
        self._batches: Iterator[Any] = parquet.iter_batches(
            batch_size=at_once(parquet, column), row_groups=groups, columns=[column], use_threads=False
        )
        self._batch: list[Any] = []

    def reaches(self, row: int) -> bool:
        """Whether a row comes soon: later in this pass, and not far."""
        return bool(self._next - len(self._batch) <= row < max(self._end, self._next + 4 * BATCH))

    def take(self, row: int) -> bytes | NoBytes | None:
        arrow = require_extra("pyarrow", "tables")
        while row >= self._next:
            try:
                self._batch = next(self._batches).column(0).to_pylist()
            except (arrow.ArrowException, OSError, StopIteration) as error:
                raise StorageFailure(f"{self._file} is damaged ({reason(error)}); write it again") from error
            self._next += len(self._batch)
        value = self._batch[row - self._next]  # counted from the batch's end
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if isinstance(content, bytes):
            return content
        return NoBytes(str(path)) if path else None


def at_once(parquet: Any, column: str) -> int:
    """How many photographs of a column are read together: a few megabytes of them, by the file's own words."""
    return max(1, min(BATCH, BATCH_BYTES // max(1, _average(parquet, column))))


def check_pages(parquet: Any, column: str, file: Path) -> None:
    """Refuse a file that was written in pieces which do not fit into memory."""
    most = max((parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)), default=0)
    needed = 2 * _average(parquet, column) * min(PAGE, most)
    instead = "write it again with row groups of 100 rows"
    check_memory(needed, f"{file}, read {min(PAGE, most):,} rows at a time,", instead)


def _average(parquet: Any, column: str) -> int:
    return int(column_bytes(parquet, [column]) // max(1, parquet.metadata.num_rows))


def column_bytes(parquet: Any, names: Sequence[str]) -> int:
    """What these columns unpack to, by the file's own account."""
    about = parquet.metadata
    groups = [about.row_group(group) for group in range(about.num_row_groups)]
    chunks = [group.column(column) for group in groups for column in range(about.num_columns)]
    return int(sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in names))


def reason(error: BaseException) -> str:
    """An error of Arrow in one line."""
    return " ".join(str(error).split())[:100] or type(error).__name__


def open_parquet(file: Path) -> Any:
    """The parquet file, by its header; what is read of it is read piece by piece."""
    arrow, parquet = require_extra("pyarrow", "tables"), require_extra("pyarrow.parquet", "tables")
    try:
        return parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
    except FileNotFoundError as error:
        raise UserError(f"{file} does not exist; give the path of a table") from error
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file} is not a parquet file ({reason(error)}); write it again") from error


KEPT = "kept/"  # begins the names of the arrays that say where each image is


class Recent:
    """Images that were decoded last, as decoded: at most so many bytes, the longest unused go first."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._images: OrderedDict[tuple[str, int], Pixels] = OrderedDict()  # by the set's hash and the image's number
        self._lock = threading.Lock()

    def get(self, name: tuple[str, int]) -> Pixels | None:
        """The image of that name, if it is there."""
        with self._lock:
            if name in self._images:
                self._images.move_to_end(name)
            return self._images.get(name)

    def keep(self, name: tuple[str, int], image: Pixels) -> None:
        """Keep it, and let go of others."""
        with self._lock:
            if name in self._images or image.nbytes > self.most:
                return
            self._images[name] = image
            self.bytes += image.nbytes
            while self.bytes > self.most:
                self.bytes -= self._images.popitem(last=False)[1].nbytes


# what all images of one store in this process share, so that the budget is the process's; gone with the last of them
_RECENT: "weakref.WeakValueDictionary[tuple[bytes, int], Recent]" = weakref.WeakValueDictionary()


class Photographs:
    """Images of a table. ``memory`` is how many bytes of images that are not in the store are kept in memory."""

    def __init__(
        self, source: Pictures, where: Arrays, shape: tuple[int, int, int], size: int | None, store: StoreReader,
        memory: int, sha256: str
    ) -> None:  # fmt: skip
        self._source, self._where, self._size, self._store = source, where, size, store
        self.shape = (len(source), *shape)
        self.dtype: np.dtype[np.uint8] = np.dtype(np.uint8)
        self.sha256 = sha256
        self.memory = memory
        self.recent = _RECENT.setdefault((store.number, memory), Recent(memory))
        self._file = store.open()
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)
        if (lock := store.mark_in_use()) is not None:
            weakref.finalize(self, lock.release)

    @property
    def nbytes(self) -> int:
        """What all of them would take in memory."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Pixels:
        """As of an array, along the first axis."""
        rows = np.arange(len(self))[index]
        return self.take(rows) if rows.ndim else self.take(rows[None])[0]

    def take(self, index: npt.NDArray[np.int64]) -> Pixels:
        """[B, ch, H, W], the middle of the photographs of these numbers."""
        images = np.empty((len(index), *self.shape[1:]), np.uint8)
        for image, pixels in zip(images, self.whole(index), strict=True):
            image[:] = center(pixels, self._size)  # a gray one becomes all channels
        return images

    def whole(self, index: npt.NDArray[np.int64]) -> list[Pixels]:
        """[ch, h, w] each, the photographs of these numbers as they are stored."""
        found: dict[int, Pixels] = {}
        for row in dict.fromkeys(index.tolist()):
            if (record := self._stored(row)) is None and (record := self.recent.get((self.sha256, row))) is None:
                continue
            found[row] = record
        for row, record in self._decoded(sorted(set(index.tolist()) - set(found))).items():
            found[row] = record
            self.recent.keep((self.sha256, row), record)
        return [found[row] for row in index.tolist()]

    def described(self) -> tuple[str, Arrays]:
        """How another process opens them."""
        pictures, arrays = self._source.described()
        about: dict[str, Any] = {"pictures": pictures, "shape": self.shape[1:], "size": self._size}
        about |= {"folder": str(self._store.folder), "number": self._store.number.hex()}
        about |= {"memory": self.memory, "sha256": self.sha256}
        return json.dumps(about), arrays | {f"{KEPT}{name}": values for name, values in self._where.items()}

    def _stored(self, row: int) -> Pixels | None:
        """Read it from the store; None where it is not there, or damaged."""
        offset = int(self._where["offset"][row])
        if self._file is None or offset < 0:
            return None
        record = np.empty([int(self._where[side][row]) for side in ("channels", "height", "width")], np.uint8)
        if os.preadv(self._file, [record.data], offset) != record.nbytes:
            return None
        return record if zlib.crc32(record.data) == self._where["crc"][row] else None

    def _decoded(self, rows: list[int]) -> dict[int, Pixels]:
        if not rows:
            return {}
        step, records = self._source.together(), list[Pixels]()
        with quiet(), ThreadPoolExecutor(min(len(rows), cores())) as pool:
            for part in (rows[start : start + step] for start in range(0, len(rows), step)):
                records += pool.map(self._decode_again, part, self._source.contents(part))
        return dict(zip(rows, records, strict=True))

    def _decode_again(self, row: int, content: Picture | None) -> Pixels:
        """The same pixels as at the first pass; what the store has lost is written there again."""
        name = self._source.name(row)
        try:
            record = decode(content, self._size)
        except Broken as error:
            raise StorageFailure(f"{name} {error}, but was intact when the table was read; restore it") from error
        if zlib.crc32(record.data) != self._where["crc"][row]:
            raise StorageFailure(f"{name} has changed since the table was read; start again")
        if self._file is not None and self._where["offset"][row] >= 0:
            self._store.repair(int(self._where["offset"][row]), record.tobytes())
        return record


def open_photographs(text: str, arrays: Arrays) -> Photographs:
    """What ``described`` gave, in another process."""
    about = json.loads(text)
    where = {name.removeprefix(KEPT): values for name, values in arrays.items() if name.startswith(KEPT)}
    source = open_pictures(about["pictures"], arrays)
    store = StoreReader(Path(about["folder"]), bytes.fromhex(about["number"]))
    return Photographs(source, where, tuple(about["shape"]), about["size"], store, about["memory"], about["sha256"])


def with_memory(text: str, share: int) -> str:
    """The description with one part in ``share`` of the memory, for one of so many processes."""
    about = json.loads(text)
    return json.dumps(about | {"memory": about["memory"] // share})


CHUNK, FEW = 256, 4  # photographs at a time: as many as have this many bytes, but at least a few
CHUNK_BYTES = 64 * 10**6
READING = "reading the photographs"

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
Say = Callable[[str, int, int], None]  # the stage, how much is done, of how much


def silent(stage: str, done: int, total: int) -> None:
    """Say nothing."""


class DifferentSizes(Exception):
    """Photographs that cannot be used as they are; the message says which and why."""


@dataclass(frozen=True)
class Scanned:
    """What a pass found: the entry of each photograph, why some have none, the training pixels' values."""

    good: Bools  # [N]
    broken: dict[int, str]  # why, by row
    photographs: Callable[[Numbers], Photographs]  # of these rows, all good
    counts: Counts
    gray: bool
    on_disk: int  # bytes of these photographs in the store
    beyond: int  # how many are not in the store
    sha256: npt.NDArray[np.void]  # [N], of each photograph's pixels
    size: int | None  # what the shorter side was scaled to
    scaled: str = ""  # why, where nobody asked for it


def scan(source: Pictures, name: str, size: int | None, side: int, train: Bools, cache: Cache, say: Say) -> Scanned:
    """Decode whatever the store does not have; ``name`` is the table's own, and decides which store it is.

    Without a ``size``, photographs that all have one are used as they are, unless they are large. Others are scaled to
    ``side``.
    """
    if size is not None:
        return _scan(source, name, size, train, cache, say)
    try:
        return _scan(source, name, None, train, cache, say)
    except DifferentSizes as reason:
        return replace(_scan(source, name, side, train, cache, say), scaled=str(reason))


def _scan(source: Pictures, name: str, size: int | None, train: Bools, cache: Cache, say: Say) -> Scanned:
    def waiting() -> None:
        say("waiting for another process that reads this table", 0, 0)

    about = json.dumps([name, size, DECODER, PIL.__version__])  # one table, one way and version of decoding
    with open_store(cache, hashlib.sha256(about.encode()).hexdigest()[:32], waiting) as store:
        seen = _Pass(source.stamps(), train)
        seen.recall(store.entries())
        room = make_room(cache, store, needed := seen.bytes_to_store(size))
        if room < needed and store.taken > 2 * seen.stored_bytes():  # most of it is of photographs that were changed
            store.begin_again()
            seen = _Pass(seen.stamps, train)
            room = make_room(cache, store, seen.bytes_to_store(size))
        todo = seen.todo(room)
        done = len(source) - len(todo)
        if size is None:
            _check_sizes(source, seen.entries, seen.good)
        for rows, found in _decode_chunks(source, todo, size):
            room -= seen.add(store, rows, found, room)
            done += len(rows)
            say(READING, done, len(source))
            if size is None:
                _check_sizes(source, seen.entries, seen.good)
        good, entries = seen.good, seen.entries
        gray = bool((entries["channels"][good] == 1).all())
        channels, reader = 1 if gray else 3, StoreReader(store.folder, store.number)

        def photographs(rows: Numbers) -> Photographs:
            mine = entries[rows]
            where = {name: mine[name].astype(np.int64) for name in ("offset", "crc", "channels", "height", "width")}
            height, width = (size, size) if size else (int(mine["height"][0]), int(mine["width"][0]))
            digest = hashlib.sha256(f"{channels}\n".encode() + mine["sha256"].tobytes()).hexdigest()
            shape = channels, height, width
            return Photographs(source.part(rows), where, shape, size, reader, cache.memory, digest)

        counts = _all_counts(store, seen, photographs, size, say)
    beyond = int((good & (entries["offset"] == NOT_STORED)).sum())
    on_disk = seen.stored_bytes()
    return Scanned(good, seen.broken, photographs, counts, gray, on_disk, beyond, entries["sha256"], size)


class _Pass:
    def __init__(self, stamps: list[bytes | None], train: Bools) -> None:
        self.stamps, self.train = stamps, train
        self.entries: Entries = np.zeros(len(stamps), ENTRY)
        self.good, self.counted = np.zeros(len(stamps), bool), np.zeros(len(stamps), bool)
        self.broken: dict[int, str] = {}
        self.counts: Counts = np.zeros((3, 256), np.int64)  # of the training photographs that are ``counted``

    def recall(self, stored: Entries) -> None:
        entry_of = {stamp: at for at, stamp in enumerate(stored["stamp"].tolist())}
        found = np.array([-1 if stamp is None else entry_of.get(stamp, -1) for stamp in self.stamps], np.int64)
        self.good = found >= 0
        self.entries[self.good] = stored[found[self.good]]

    def bytes_to_store(self, size: int | None) -> int:
        """What the photographs that are not in the store will take there, as far as that is known."""
        size_of_one = 4 * size**2 if size is not None else int(_bytes(self.entries).max(initial=0))  # sides of 4 : 3
        return int((~self.good | (self.entries["offset"] == NOT_STORED)).sum()) * size_of_one

    def stored_bytes(self) -> int:
        return int(_bytes(self.entries)[self.good & (self.entries["offset"] != NOT_STORED)].sum())

    def todo(self, room: int) -> Numbers:
        """The photographs to decode: those that are not known, and known ones for which there is room now."""
        beyond = self.good & (self.entries["offset"] == NOT_STORED)
        fits = np.cumsum(np.where(beyond, _bytes(self.entries), 0)) <= room
        return np.flatnonzero(~self.good | (beyond & fits))

    def add(self, store: Store, rows: Numbers, found: "list[_Decoded | str]", room: int) -> int:
        """Take what a chunk's decoding gave, and store it; the bytes that were written."""
        self.broken |= {int(row): result for row, result in zip(rows, found, strict=True) if isinstance(result, str)}
        fine = rows[[not isinstance(result, str) for result in found]]
        made = [result for result in found if not isinstance(result, str)]
        entries = np.zeros(len(made), ENTRY)
        for position, (row, result) in enumerate(zip(fine.tolist(), made, strict=True)):
            facts = (self.stamps[row] or b"", result.sha256, NOT_STORED, result.crc, *result.pixels.shape[1:])
            entries[position] = (*facts, result.pixels.shape[0], b"", 0)
            if self.train[row]:
                self.counts += result.counts
        written = store.append(entries, [result.pixels for result in made], room)
        self.entries[fine], self.good[fine], self.counted[fine] = entries, True, True
        return written


@dataclass(frozen=True)
class _Decoded:
    pixels: Pixels
    sha256: bytes
    crc: int
    counts: Counts


def _decode_chunks(source: Pictures, todo: Numbers, size: int | None) -> Iterator[tuple[Numbers, list[_Decoded | str]]]:
    """Chunk after chunk, decoded in threads; a text says why one could not be.

    Where no size is given, how large photographs are is known from those before.
    """
    most, largest, start = source.together() if len(todo) else 1, 4 * (size or 0) ** 2, 0
    with quiet(), ThreadPoolExecutor(cores()) as pool:
        while start < len(todo):
            rows = todo[start : start + (min(most, _together(largest)) if largest else FEW)]
            found = list(pool.map(_examine, source.contents(rows.tolist()), [size] * len(rows)))
            largest = max([largest, *(result.pixels.nbytes for result in found if isinstance(result, _Decoded))])
            start += len(rows)
            yield rows, found


def _together(size: int) -> int:
    """How many photographs of that many bytes are in memory at once."""
    return max(FEW, min(CHUNK, CHUNK_BYTES // max(1, size)))


def _examine(content: Picture | None, size: int | None) -> _Decoded | str:
    try:
        pixels = decode(content, size)
    except Broken as error:
        return str(error)
    if max(pixels.shape) >= 2**16:
        return f"has sides of {pixels.shape[2]:,} and {pixels.shape[1]:,} pixels; scale it down"
    digest = hashlib.sha256(json.dumps(pixels.shape).encode() + b"\n")
    digest.update(pixels.data)
    return _Decoded(pixels, digest.digest(), zlib.crc32(pixels.data), count_values(center(pixels, size)[None]))


def count_values(images: Pixels) -> Counts:
    """[3, 256], how many pixels of each channel have each value; a gray image's count for all three."""
    channels = [np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(images.shape[1])]
    return np.broadcast_to(np.stack(channels), (3, 256)).astype(np.int64)


def _check_sizes(source: Pictures, entries: Entries, good: Bools) -> None:
    rows = np.flatnonzero(good)
    height, width = entries["height"][rows], entries["width"][rows]
    if len(other := np.flatnonzero((height != height[:1]) | (width != width[:1]))):
        one, two = (f"{source.name(int(rows[at]))} is {width[at]}×{height[at]}" for at in (0, other[0]))
        raise DifferentSizes(f"photographs have different sizes ({one}, {two})")
    if len(rows) and max(height[0], width[0]) > AS_THEY_ARE:
        raise DifferentSizes(f"photographs are large ({width[0]}×{height[0]})")


def _all_counts(
    store: Store, seen: _Pass, photographs: Callable[[Numbers], Photographs], size: int | None, say: Say
) -> Counts:
    """The values of all training pixels; photographs not decoded in this pass are read, unless the counts are kept."""
    train, counts = seen.train & seen.good, seen.counts.copy()
    rest = np.flatnonzero(train & ~seen.counted)
    digest = hashlib.sha256(seen.entries["sha256"][train].tobytes()).hexdigest()
    path = store.folder / f"counts-{digest[:32]}.json"
    areas = seen.entries["height"][train].astype(np.int64) * seen.entries["width"][train]
    known = _read_counts(path, int(areas.sum()) if size is None else int(train.sum()) * size**2)
    if known is not None or not train.any():
        return counts if known is None else known
    step = _together(int(_bytes(seen.entries[rest]).max(initial=0)))
    for start in range(0, len(rest), step):
        counts += count_values(photographs(rest[start : start + step])[:])
        say("measuring the photographs", min(start + step, len(rest)), len(rest))
    with suppress(UserError):  # the disk is full: they are counted again another time
        write_whole(path, json.dumps({"counts": counts.tolist()}).encode())
    return counts


def _read_counts(path: Path, pixels: int) -> Counts | None:
    """The counts that were kept for these images, if they can be theirs."""
    try:
        values = np.array(parse_json(read_content(path) or b"")["counts"])
    except (UserError, ValueError, TypeError, KeyError):
        return None
    fits = values.shape == (3, 256) and values.dtype.kind == "i" and (values >= 0).all()
    return values.astype(np.int64) if fits and (values.sum(axis=1) == pixels).all() else None


def _bytes(entries: Entries) -> npt.NDArray[np.int64]:
    taken: npt.NDArray[np.int64] = entries["height"].astype(np.int64) * entries["width"] * entries["channels"]
    return taken
