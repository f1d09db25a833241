"""Photographs that are decoded once, stored on disk, and read batch by batch.

A first pass decodes every photograph, so that broken ones are known before training; an interrupted pass continues
where it stopped. Photographs are stored uncropped, so that random crops can be cut from them.

Shapes: N photographs, B of them in a batch, [ch, h, w] a stored photograph, [ch, H, W] one image.
"""

import hashlib
import json
import math
import os
import threading
import warnings
import weakref
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
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
from unskew.data.decode import DAMAGE, DECODER, Broken, Picture, Pixels, center, decode
from unskew.data.store import ENTRY, NOT_STORED, Cache, Entries, Store, make_room, open_pixels, open_store, pixel_bytes

BATCH, BATCH_BYTES = 64, 32 * 10**6  # photographs of a parquet file read at a time, and their bytes
PAGE = 1024  # rows of a parquet file that are unpacked together: the usual page size
BUFFER = 1 << 20
MEMBER_BYTES = 256 * 10**6  # limit for a picture in an archive
MAX_SIDE = 512  # pixels: photographs of equal size are scaled down if a side is longer

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Files:
    """Photographs in files below ``root``, a folder or a zip archive."""

    root: Path
    names: npt.NDArray[np.uint8]  # [N, longest], paths below the root, padded with zeros

    @staticmethod
    def of(root: Path, paths: Iterable[str]) -> "Files":
        """Make the list from paths."""
        encoded = [os.fsencode(path) for path in paths]
        longest = max(map(len, encoded), default=0) or 1
        check_memory(longest * len(encoded), f"the list of {len(encoded):,} paths", "shorten the longest path")
        return Files(root, np.array(encoded, f"S{longest}").view(np.uint8).reshape(-1, longest))

    def __len__(self) -> int:
        return len(self.names)

    def _name(self, row: int) -> str:
        return os.fsdecode(self.names[row].tobytes().rstrip(b"\0"))

    def name(self, row: int) -> str:
        """The path, for messages."""
        return str(self.root / self._name(row))

    def stamps(self) -> list[bytes]:
        """16 bytes per photograph that change with its file's size or time; none if there is no file."""
        root, stamps = os.fsencode(self.root), list[bytes]()
        archive = os.stat(root) if self._zipped else None
        for name in self.names:
            path, stamp = os.path.join(root, name.tobytes().rstrip(b"\0")), b""
            with suppress(OSError, ValueError):
                status = archive or os.stat(path)
                facts = b"%s\0%d\0%d" % (path, status.st_size, status.st_mtime_ns)
                stamp = hashlib.blake2b(facts, digest_size=16).digest()
            stamps.append(stamp)
        return stamps

    def contents(self, rows: Sequence[int]) -> list[Picture | None]:
        """These photographs for ``decode``: paths, or bytes from an archive."""
        if not self._zipped:
            return [self.root / self._name(row) for row in rows]
        archive, members = _open_zip(self.root, self.root.stat().st_mtime_ns), list[Picture | None]()
        for row in rows:
            members.append(None)  # decode rejects it
            with suppress(KeyError, zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error, *DAMAGE):
                if archive.getinfo(name := self._name(row)).file_size <= MEMBER_BYTES:
                    members[-1] = archive.read(name)
        return members

    def together(self) -> int:
        """How many ``contents`` may return at once: paths take almost no memory."""
        return BATCH if self._zipped else max(1, len(self))

    def part(self, rows: Numbers) -> "Files":
        """Select these rows."""
        return Files(self.root, self.names[rows])

    @property
    def _zipped(self) -> bool:
        return self.root.suffix.lower() == ".zip" and self.root.is_file()


@lru_cache(maxsize=2)
def _open_zip(path: Path, changed: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)  # reading a long list of members takes a second


@dataclass(frozen=True, eq=False)
class Parquet:
    """Photographs in a column of a parquet file, as bytes or as Hugging Face's struct of bytes and path."""

    root: Path
    column: str
    rows: Numbers  # [N], in the file
    _reader: "list[_Reader]" = field(default_factory=list, repr=False)  # of the last call, if any

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        """The file and the row, for messages."""
        return f"{self.root} row {int(self.rows[row])}"

    def stamps(self) -> list[bytes]:
        """16 bytes per photograph that change with its row, or the file's size or time."""
        status = os.stat(self.root)
        facts = f"{self.root}\0{self.column}\0{status.st_size}\0{status.st_mtime_ns}\0".encode()
        return [hashlib.blake2b(facts + str(row).encode(), digest_size=16).digest() for row in self.rows.tolist()]

    def contents(self, rows: Sequence[int]) -> list[Picture | None]:
        """Bytes, read from front to back."""
        wanted = self.rows[np.asarray(rows, np.int64)]
        pictures = dict[int, Picture | None]()
        for row in np.unique(wanted).tolist():
            if not self._reader or not self._reader[0].reaches(row):
                self._reader[:] = [_Reader(self.root, self.column, row)]
            pictures[row] = self._reader[0].take(row)
        return [pictures[row] for row in wanted.tolist()]

    def together(self) -> int:
        """How many ``contents`` may return at once: a few megabytes."""
        return _at_once(open_parquet(self.root), self.column)

    def part(self, rows: Numbers) -> "Parquet":
        """Select these rows."""
        return Parquet(self.root, self.column, self.rows[rows])


Pictures = Files | Parquet  # where N photographs are


class _Reader:
    """One pass through a parquet file, from a row's group on; rows are read in ascending order."""

    def __init__(self, file: Path, column: str, row: int) -> None:
        self._file, parquet = file, open_parquet(file)
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        ends = np.cumsum(sizes)
        group = int(np.searchsorted(ends, row, side="right"))
        if group == len(sizes):
            raise StorageFailure(f"{file} has changed since it was read: row {row} is gone; start again")
        self._end = int(ends[group])  # of the first group: for later rows, starting at their group is faster
        self._next = self._end - sizes[group]
        self._batches: Iterator[Any] = parquet.iter_batches(
            batch_size=_at_once(parquet, column),
            row_groups=list(range(group, len(sizes))),
            columns=[column],
            use_threads=False,
        )
        self._batch: list[Any] = []

    def reaches(self, row: int) -> bool:
        return bool(self._next - len(self._batch) <= row < max(self._end, self._next + 4 * BATCH))

    def take(self, row: int) -> bytes | None:
        arrow = require_extra("pyarrow", "tables")
        while row >= self._next:
            try:
                self._batch = next(self._batches).column(0).to_pylist()
            except (arrow.ArrowException, OSError, StopIteration) as error:
                raise StorageFailure(f"{self._file} is damaged ({reason(error)}); write it again") from error
            self._next += len(self._batch)
        value = self._batch[row - self._next]  # negative: counted from the batch's end
        content = value.get("bytes") if isinstance(value, dict) else value
        return content if isinstance(content, bytes) else None


def _at_once(parquet: Any, column: str) -> int:
    average: int = column_bytes(parquet, [column]) // max(1, parquet.metadata.num_rows)
    return max(1, min(BATCH, BATCH_BYTES // max(1, average)))


def check_pages(parquet: Any, column: str, file: Path) -> None:
    """Reject a file whose pages do not fit in memory."""
    most = max((parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)), default=0)
    needed = 2 * (column_bytes(parquet, [column]) // max(1, parquet.metadata.num_rows)) * min(PAGE, most)
    check_memory(needed, str(file), "write it again with row groups of 100 rows")


def column_bytes(parquet: Any, names: Sequence[str]) -> int:
    """The bytes that these columns unpack to, according to the metadata."""
    metadata = parquet.metadata
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    chunks = [group.column(column) for group in groups for column in range(metadata.num_columns)]
    return int(sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in names))


def reason(error: BaseException) -> str:
    """An Arrow error in one line."""
    return " ".join(str(error).split())[:100] or type(error).__name__


def open_parquet(file: Path) -> Any:
    """Open a parquet file, reading only its metadata."""
    arrow, parquet = require_extra("pyarrow", "tables"), require_extra("pyarrow.parquet", "tables")
    try:
        return parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
    except FileNotFoundError as error:
        raise UserError(f"{file} does not exist; give the path to a Parquet file") from error
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file} is not a parquet file ({reason(error)}); write it again") from error


class Recent:
    """An LRU cache of decoded images with a budget of bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._images: OrderedDict[tuple[str, int], Pixels] = OrderedDict()  # by the set's hash and the image's index
        self._lock = threading.Lock()

    def get(self, name: tuple[str, int]) -> Pixels | None:
        """The image of that name, if it is cached."""
        with self._lock:
            if name in self._images:
                self._images.move_to_end(name)
            return self._images.get(name)

    def keep(self, name: tuple[str, int], image: Pixels) -> None:
        """Cache an image, and drop others if necessary."""
        with self._lock:
            if name in self._images or image.nbytes > self.most:
                return
            self._images[name] = image
            self.bytes += image.nbytes
            while self.bytes > self.most:
                self.bytes -= self._images.popitem(last=False)[1].nbytes


# shared by all images of a store, so that the budget holds for the process; removed with the last of them
_RECENT: "weakref.WeakValueDictionary[tuple[bytes, int], Recent]" = weakref.WeakValueDictionary()


class Photographs:
    """The images of a table; ``memory`` is the budget for images that are not in the store."""

    def __init__(
        self, source: Pictures, where: Arrays, shape: tuple[int, int, int], size: int | None, folder: Path,
        number: bytes, memory: int, sha256: str
    ) -> None:  # fmt: skip
        self._source, self._where, self._size = source, where, size
        self._folder, self._number = folder, number
        self.shape = (len(source), *shape)
        self.nbytes = math.prod(self.shape)
        self.dtype: np.dtype[np.uint8] = np.dtype(np.uint8)
        self.sha256 = sha256
        self.memory = memory
        self.recent = _RECENT.setdefault((number, memory), Recent(memory))
        self._file = open_pixels(folder, number)
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Pixels:
        rows = np.arange(len(self))[index]
        return self.take(rows) if rows.ndim else self.take(rows[None])[0]

    def take(self, index: npt.NDArray[np.int64]) -> Pixels:
        """[B, ch, H, W], the centers of the photographs with these indices."""
        images = np.empty((len(index), *self.shape[1:]), np.uint8)
        for image, pixels in zip(images, self.whole(index), strict=True):
            image[:] = center(pixels, self._size)  # a gray one fills all channels
        return images

    def whole(self, index: npt.NDArray[np.int64]) -> list[Pixels]:
        """[ch, h, w] each, the photographs with these indices, uncropped."""
        photographs: dict[int, Pixels] = {}
        for row in dict.fromkeys(index.tolist()):
            if (record := self._stored(row)) is not None or (record := self.recent.get((self.sha256, row))) is not None:
                photographs[row] = record
        if rows := sorted(set(index.tolist()) - set(photographs)):
            step = self._source.together()
            with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(min(len(rows), cores())) as pool:
                for part in (rows[start : start + step] for start in range(0, len(rows), step)):
                    records = pool.map(self._decode_again, part, self._source.contents(part))
                    photographs |= zip(part, records, strict=True)
        for row in rows:
            self.recent.keep((self.sha256, row), photographs[row])
        return [photographs[row] for row in index.tolist()]

    def described(self) -> tuple[str, Arrays]:
        """What another process needs to open them."""
        text: dict[str, Any] = {"root": str(self._source.root), "shape": self.shape[1:], "size": self._size}
        text |= {"folder": str(self._folder), "number": self._number.hex()}
        text |= {"memory": self.memory, "sha256": self.sha256}
        if isinstance(self._source, Files):
            return json.dumps(text), self._where | {"names": self._source.names}
        return json.dumps(text | {"column": self._source.column}), self._where | {"rows": self._source.rows}

    def _stored(self, row: int) -> Pixels | None:
        offset = int(self._where["offset"][row])
        if self._file is None or offset < 0:
            return None
        record = np.empty([int(self._where[side][row]) for side in ("channels", "height", "width")], np.uint8)
        if os.preadv(self._file, [record.data], offset) != record.nbytes:
            return None
        return record if zlib.crc32(record.data) == self._where["crc"][row] else None

    def _decode_again(self, row: int, content: Picture | None) -> Pixels:
        """Decode to the same pixels as in the first pass."""
        name = self._source.name(row)
        try:
            record = decode(content, self._size)
        except Broken as error:
            raise StorageFailure(f"{name} {error}; it was intact when the table was read: restore it") from error
        if zlib.crc32(record.data) != self._where["crc"][row]:
            raise StorageFailure(f"{name} has changed since the table was read; start again")
        return record


def open_photographs(text: str, arrays: Arrays) -> Photographs:
    """Open, in another process, what ``described`` returned."""
    values = json.loads(text)
    root = Path(values["root"])
    source = Files(root, arrays["names"]) if "names" in arrays else Parquet(root, values["column"], arrays["rows"])
    shape, folder, number = tuple(values["shape"]), Path(values["folder"]), bytes.fromhex(values["number"])
    return Photographs(source, arrays, shape, values["size"], folder, number, values["memory"], values["sha256"])


def with_memory(text: str, share: int) -> str:
    """The description with the memory divided by ``share``, the number of processes."""
    values = json.loads(text)
    return json.dumps(values | {"memory": values["memory"] // share})


CHUNK, FEW = 256, 4  # the most and the fewest photographs at a time
CHUNK_BYTES = 64 * 10**6
READING = "reading the photographs"

_Decoded = tuple[Pixels, tuple[Any, ...], Numbers]  # a photograph, its entry of ENTRY and the counts of its values
Bools = npt.NDArray[np.bool_]
Say = Callable[[str, int, int], None]  # the stage, done, total


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


class DifferentSizes(Exception):
    """Photographs that must be scaled; the message names them and the reason."""


class Scan:
    """N photographs: the store's entry for each, or the reason why it cannot be read."""

    def __init__(self, source: Pictures, train: Bools, size: int | None, cache: Cache, store: Store) -> None:
        self.source, self.train, self.size, self.cache = source, train, size, cache
        self.folder, self.number = store.folder, store.number
        self.scaled = ""  # why photographs were scaled without a given size
        self.broken: dict[int, str] = {}  # row -> reason
        self.counts: Numbers = np.zeros((3, 256), np.int64)  # of the training photographs
        self.stamps, stored = source.stamps(), store.entries()
        entry_of = {stamp: at for at, stamp in enumerate(stored["stamp"].tolist())}
        index = np.array([entry_of.get(stamp, -1) for stamp in self.stamps], np.int64)
        self.good = index >= 0
        self.entries: Entries = np.zeros(len(index), ENTRY)
        self.entries[self.good] = stored[index[self.good]]

    @property
    def sizes(self) -> Numbers:
        """[N], the bytes of each photograph's pixels."""
        return pixel_bytes(self.entries)

    @property
    def beyond(self) -> Bools:
        """[N], which photographs did not fit in the store."""
        return np.asarray(self.good & (self.entries["offset"] == NOT_STORED))

    @property
    def on_disk(self) -> int:
        """The bytes of these photographs in the store."""
        return int(self.sizes[self.good & ~self.beyond].sum())

    @property
    def channels(self) -> int:
        """1 if all photographs are gray, otherwise 3."""
        return 1 if (self.entries["channels"][self.good] == 1).all() else 3

    def photographs(self, rows: Numbers) -> "Photographs":
        """The photographs of these rows, which must be good."""
        mine = self.entries[rows]
        where = {name: mine[name].astype(np.int64) for name in ("offset", "crc", "channels", "height", "width")}
        height, width = (self.size,) * 2 if self.size else (int(mine["height"][0]), int(mine["width"][0]))
        digest = hashlib.sha256(f"{self.channels}\n".encode() + mine["sha256"].tobytes()).hexdigest()
        shape = self.channels, height, width
        source, memory = self.source.part(rows), self.cache.memory
        return Photographs(source, where, shape, self.size, self.folder, self.number, memory, digest)

    @property
    def missing(self) -> int:
        """The bytes of the photographs that are not in the store, approximately."""
        one = 4 * self.size**2 if self.size is not None else int(self.sizes.max(initial=0))  # an aspect ratio of 4:3
        return int((~self.good | self.beyond).sum()) * one

    def run(self, store: Store, room: int, say: Say) -> None:
        """Decode every photograph that the store does not have, and store at most ``room`` bytes."""
        fits = np.cumsum(np.where(self.beyond, self.sizes, 0)) <= room
        todo = np.flatnonzero(~self.good | (self.beyond & fits))
        known, done = self.good.copy(), len(self.good) - len(todo)
        known[todo] = False
        self._check_sizes()
        for rows, results in _decode_chunks(self.source, self.stamps, todo, self.size):
            room -= self._add(store, rows, results, room)
            done += len(rows)
            say(READING, done, len(self.good))
            self._check_sizes()
        self._count_values(np.flatnonzero(self.train & known), say)

    def _check_sizes(self) -> None:
        if self.size is not None:
            return
        rows = np.flatnonzero(self.good)
        height, width = self.entries["height"][rows], self.entries["width"][rows]
        if len(other := np.flatnonzero((height != height[:1]) | (width != width[:1]))):
            one, two = (f"{self.source.name(int(rows[n]))} is {width[n]}×{height[n]}" for n in (0, other[0]))
            raise DifferentSizes(f"photographs have different sizes ({one}, {two})")
        if len(rows) and max(height[0], width[0]) > MAX_SIDE:
            raise DifferentSizes(f"photographs are large ({width[0]}×{height[0]})")

    def _add(self, store: Store, rows: Numbers, results: "list[_Decoded | str]", room: int) -> int:
        self.broken |= {int(row): result for row, result in zip(rows, results, strict=True) if isinstance(result, str)}
        fine = rows[[not isinstance(result, str) for result in results]]
        decoded = [result for result in results if not isinstance(result, str)]
        entries = np.array([entry for _, entry, _ in decoded], ENTRY)
        written = store.append(entries, [pixels for pixels, _, _ in decoded], room)
        self.entries[fine], self.good[fine] = entries, True
        self.counts += sum(counts for row, (_, _, counts) in zip(fine, decoded, strict=True) if self.train[row])
        return written

    def _count_values(self, rest: Numbers, say: Say) -> None:
        """Add the values of the training pixels that were not decoded in this pass, unless all counts are stored."""
        train = self.entries[self.train & self.good]
        digest = hashlib.sha256(train["sha256"].tobytes()).hexdigest()
        path = self.folder / f"counts-{digest[:32]}.json"
        areas = train["height"].astype(np.int64) * train["width"]
        known = _read_counts(path, int(areas.sum()) if self.size is None else len(train) * self.size**2)
        if known is not None or not len(train):
            self.counts = self.counts if known is None else known
            return
        step = _together(int(self.sizes[rest].max(initial=0)))
        for start in range(0, len(rest), step):
            self.counts += count_values(self.photographs(rest[start : start + step])[:])
            say("measuring the photographs", min(start + step, len(rest)), len(rest))
        with suppress(UserError):  # the disk is full: they are counted again next time
            write_whole(path, json.dumps({"counts": self.counts.tolist()}).encode())


def scan(source: Pictures, name: str, size: int | None, side: int, train: Bools, cache: Cache, say: Say) -> Scan:
    """Decode what is not yet in the store; without a ``size``, photographs of several sizes are scaled to ``side``."""

    def attempt(size: int | None) -> Scan:
        version = json.dumps([name, size, DECODER, PIL.__version__])
        key = hashlib.sha256(version.encode()).hexdigest()[:32]
        with open_store(cache, key, lambda: say("waiting for another process that reads this table", 0, 0)) as store:
            result = Scan(source, train, size, cache, store)
            room = make_room(cache, store, result.missing)
            if room < result.missing and store.used > 2 * result.on_disk:  # most photographs in it have changed
                store.begin_again()
                result = Scan(source, train, size, cache, store)
                room = make_room(cache, store, result.missing)
            result.run(store, room, say)
        return result

    if size is not None:
        return attempt(size)
    try:
        return attempt(None)
    except DifferentSizes as reason:
        result = attempt(side)
        result.scaled = str(reason)
        return result


def _decode_chunks(
    source: Pictures, stamps: list[bytes], todo: Numbers, size: int | None
) -> Iterator[tuple[Numbers, list[_Decoded | str]]]:
    """Decode in threads, chunk by chunk; a string is the reason why a photograph cannot be used."""
    most, largest, start = source.together() if len(todo) else 1, 4 * (size or 0) ** 2, 0
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(cores()) as pool:
        while start < len(todo):
            rows = todo[start : start + (min(most, _together(largest)) if largest else FEW)]
            chosen = [stamps[row] for row in rows]
            results = list(pool.map(_examine, source.contents(rows.tolist()), chosen, [size] * len(rows)))
            largest = max([largest, *(result[0].nbytes for result in results if not isinstance(result, str))])
            start += len(rows)
            yield rows, results


def _together(size: int) -> int:
    return max(FEW, min(CHUNK, CHUNK_BYTES // max(1, size)))


def _examine(content: Picture | None, stamp: bytes, size: int | None) -> _Decoded | str:
    try:
        pixels = decode(content, size)
    except Broken as error:
        return str(error)
    if max(pixels.shape) >= 2**16:
        return f"has sides of {pixels.shape[2]:,} and {pixels.shape[1]:,} pixels; scale it down"
    digest = hashlib.sha256(json.dumps(pixels.shape).encode() + b"\n")
    digest.update(pixels.data)
    channels, height, width = pixels.shape
    entry = (stamp, digest.digest(), NOT_STORED, zlib.crc32(pixels.data), height, width, channels, b"", 0)
    return pixels, entry, count_values(center(pixels, size)[None])


def count_values(images: Pixels) -> Numbers:
    """[3, 256], the pixels of each channel with each value; a gray image counts for all three channels."""
    channels = [np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(images.shape[1])]
    return np.broadcast_to(np.stack(channels), (3, 256)).astype(np.int64)


def _read_counts(path: Path, pixels: int) -> Numbers | None:
    """The stored counts, if they match the number of pixels."""
    with suppress(UserError, ValueError, TypeError, KeyError, OverflowError):
        values = np.array(parse_json(read_content(path) or b"")["counts"], np.int64).reshape(3, 256)
        if (values >= 0).all() and (values.sum(axis=1) == pixels).all():
            return values
    return None
