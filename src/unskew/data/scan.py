"""The first pass through a table's photographs: each is decoded once, so that broken ones are known before training.

What was decoded before is taken from the store, so that an interrupted pass goes on where it was.

Shapes: N photographs, [ch, H, W] one of them; counts [3, 256], how many pixels of each channel have each value.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL

from unskew.core.errors import UserError
from unskew.core.files import parse_json, read_content, write_whole
from unskew.core.machine import cores
from unskew.data.decode import DECODER, Broken, Picture, Pixels, decode, quiet
from unskew.data.photographs import Photographs
from unskew.data.pictures import Pictures
from unskew.data.store import ENTRY, NOT_STORED, Cache, Entries, Store, make_room, open_store

CHUNK, FEW = 256, 4  # photographs at a time: as many as have this many bytes, but at least a few
CHUNK_BYTES = 64 * 10**6
READING = "reading the photographs"

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Say = Callable[[str, int, int], None]  # the stage, how much is done, of how much


@dataclass(frozen=True)
class Scanned:
    """What a pass found: the entry of each photograph, why some have none, the training pixels' values."""

    good: Bools  # [N]
    broken: dict[int, str]  # why, by row
    photographs: Callable[[Rows], Photographs]  # of these rows, all good
    counts: Counts
    grey: bool
    on_disk: int  # bytes of these photographs in the store
    beyond: int  # how many are not in the store


def scan(source: Pictures, name: str, size: int | None, train: Bools, cache: Cache, say: Say) -> Scanned:
    """Decode whatever the store does not have; ``name`` is the table's own, and decides which store it is."""

    def waiting() -> None:
        say("waiting for another process that reads this table", 0, 0)

    with open_store(cache, _key(name, size), waiting) as store:
        seen = _Pass(source.stamps(), train)
        seen.recall(store.entries())
        room = make_room(cache, store, needed := seen.bytes_to_store(size))
        if room < needed and store.taken > 2 * seen.stored_bytes():  # most of it is of photographs that were changed
            store.begin_again()
            seen = _Pass(seen.stamps, train)
            room = make_room(cache, store, seen.bytes_to_store(size))
        todo = seen.todo(room)
        done = len(source) - len(todo)
        for rows, found in _decoded(source, todo, size):
            room -= seen.add(store, rows, found, room)
            done += len(rows)
            say(READING, done, len(source))
            if size is None:
                _check_sizes(source, seen.entries, seen.good, name)
        if size is None:
            _check_sizes(source, seen.entries, seen.good, name)
        good, entries = seen.good, seen.entries
        grey = bool((entries["channels"][good] == 1).all())
        photographs = _opener(source, entries, size, store, cache, 1 if grey else 3)
        counts = _all_counts(store, seen, photographs, say)
    beyond = int((good & (entries["offset"] == NOT_STORED)).sum())
    return Scanned(good, seen.broken, photographs, counts, grey, seen.stored_bytes(), beyond)


class _Pass:
    """What is known of each photograph so far."""

    def __init__(self, stamps: list[bytes | None], train: Bools) -> None:
        self.stamps, self.train = stamps, train
        self.entries: Entries = np.zeros(len(stamps), ENTRY)
        self.good, self.counted = np.zeros(len(stamps), bool), np.zeros(len(stamps), bool)
        self.broken: dict[int, str] = {}
        self.counts: Counts = np.zeros((3, 256), np.int64)  # of the training photographs that are ``counted``

    def recall(self, stored: Entries) -> None:
        """Take the entries that the store has."""
        place = {stamp: at for at, stamp in enumerate(stored["stamp"].tolist())}
        found = np.array([-1 if stamp is None else place.get(stamp, -1) for stamp in self.stamps], np.int64)
        self.good = found >= 0
        self.entries[self.good] = stored[found[self.good]]

    def bytes_to_store(self, size: int | None) -> int:
        """What the photographs that are not in the store will take there, as far as that is known."""
        each = 3 * size**2 if size is not None else int(_bytes(self.entries).max(initial=0))
        return int((~self.good | (self.entries["offset"] == NOT_STORED)).sum()) * each

    def stored_bytes(self) -> int:
        """What the photographs of this table take in the store."""
        return int(_bytes(self.entries)[self.good & (self.entries["offset"] != NOT_STORED)].sum())

    def todo(self, room: int) -> Rows:
        """The photographs to decode: those that are not known, and known ones for which there is room now."""
        beyond = self.good & (self.entries["offset"] == NOT_STORED)
        fits = np.cumsum(np.where(beyond, _bytes(self.entries), 0)) <= room
        return np.flatnonzero(~self.good | (beyond & fits))

    def add(self, store: Store, rows: Rows, found: "list[_Decoded | str]", room: int) -> int:
        """Take what a chunk's decoding gave, and store it; the bytes that were written."""
        self.broken |= {int(row): each for row, each in zip(rows, found, strict=True) if isinstance(each, str)}
        fine = rows[[not isinstance(each, str) for each in found]]
        made = [each for each in found if not isinstance(each, str)]
        entries = np.zeros(len(made), ENTRY)
        for place, (row, each) in enumerate(zip(fine.tolist(), made, strict=True)):
            facts = (self.stamps[row] or b"", each.sha256, NOT_STORED, each.crc, *each.pixels.shape[1:])
            entries[place] = (*facts, each.pixels.shape[0], b"", 0)
            if self.train[row]:
                self.counts += each.counts
        written = store.append(entries, [each.pixels for each in made], room)
        self.entries[fine], self.good[fine], self.counted[fine] = entries, True, True
        return written


@dataclass(frozen=True)
class _Decoded:
    pixels: Pixels
    sha256: bytes
    crc: int
    counts: Counts


def _decoded(source: Pictures, todo: Rows, size: int | None) -> Iterator[tuple[Rows, list[_Decoded | str]]]:
    """Chunk after chunk, decoded in threads; a text says why one could not be.

    Where no size is given, how large photographs are is known from those before.
    """
    most, largest, start = source.together() if len(todo) else 1, 3 * (size or 0) ** 2, 0
    with quiet(), ThreadPoolExecutor(cores()) as pool:
        while start < len(todo):
            rows = todo[start : start + (min(most, _together(largest)) if largest else FEW)]
            found = list(pool.map(_examined, source.contents(rows.tolist()), [size] * len(rows)))
            largest = max([largest, *(each.pixels.nbytes for each in found if isinstance(each, _Decoded))])
            start += len(rows)
            yield rows, found


def _together(size: int) -> int:
    """How many photographs of that many bytes are in memory at once."""
    return max(FEW, min(CHUNK, CHUNK_BYTES // max(1, size)))


def _examined(content: Picture | None, size: int | None) -> _Decoded | str:
    try:
        pixels = decode(content, size)
    except Broken as error:
        return str(error)
    if max(pixels.shape) >= 2**16:
        return f"has sides of {pixels.shape[2]:,} and {pixels.shape[1]:,} pixels; scale it down"
    counts = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in pixels])
    digest = hashlib.sha256(json.dumps(pixels.shape).encode() + b"\n")
    digest.update(pixels.data)
    return _Decoded(pixels, digest.digest(), zlib.crc32(pixels.data), np.broadcast_to(counts, (3, 256)))


def _check_sizes(source: Pictures, entries: Entries, good: Bools, name: str) -> None:
    """Without a size all photographs must have one."""
    rows = np.flatnonzero(good)
    height, width = entries["height"][rows], entries["width"][rows]
    if not len(rows) or (len(other := np.flatnonzero((height != height[0]) | (width != width[0]))) == 0):
        return
    at = other[0]
    raise UserError(
        f"photographs must have one size: {source.name(int(rows[0]))} is {width[0]}×{height[0]}, "
        f"{source.name(int(rows[at]))} is {width[at]}×{height[at]}; {name}?size=128 scales and crops all to 128×128"
    )


def _opener(
    source: Pictures, entries: Entries, size: int | None, store: Store, cache: Cache, channels: int
) -> Callable[[Rows], Photographs]:
    def photographs(rows: Rows) -> Photographs:
        mine = entries[rows]
        where = {name: mine[name].astype(np.int64) for name in ("offset", "crc", "channels")}
        shape = channels, int(mine["height"][0]), int(mine["width"][0])
        digest = hashlib.sha256(f"{channels}\n".encode() + mine["sha256"].tobytes()).hexdigest()
        return Photographs(source.part(rows), where, shape, size, (store.folder, store.number), cache.memory, digest)

    return photographs


def _all_counts(store: Store, seen: _Pass, photographs: Callable[[Rows], Photographs], say: Say) -> Counts:
    """The values of all training pixels; photographs not decoded in this pass are read, unless the counts are kept."""
    train, counts = seen.train & seen.good, seen.counts.copy()
    rest = np.flatnonzero(train & ~seen.counted)
    digest = hashlib.sha256(seen.entries["sha256"][train].tobytes()).hexdigest()
    path = store.folder / f"counts-{digest[:32]}.json"
    known = _read_counts(path, seen.entries[train])
    if known is not None or not train.any():
        return counts if known is None else known
    step = _together(int(_bytes(seen.entries[rest]).max(initial=0)))
    for start in range(0, len(rest), step):
        part = photographs(rest[start : start + step])[:]
        for channel in range(3):
            counts[channel] += np.bincount(part[:, min(channel, part.shape[1] - 1)].ravel(), minlength=256)
        say("measuring the photographs", min(start + step, len(rest)), len(rest))
    with suppress(UserError):  # the disk is full: they are counted again another time
        write_whole(path, json.dumps({"counts": counts.tolist()}).encode())
    return counts


def _read_counts(path: Path, entries: Entries) -> Counts | None:
    """The counts that were kept for these images, if they can be theirs."""
    try:
        values = np.array(parse_json(read_content(path) or b"")["counts"])
    except (UserError, ValueError, TypeError, KeyError):
        return None
    pixels = int((entries["height"].astype(np.int64) * entries["width"]).sum())
    fits = values.shape == (3, 256) and values.dtype.kind == "i" and (values >= 0).all()
    return values.astype(np.int64) if fits and (values.sum(axis=1) == pixels).all() else None


def _bytes(entries: Entries) -> npt.NDArray[np.int64]:
    taken: npt.NDArray[np.int64] = entries["height"].astype(np.int64) * entries["width"] * entries["channels"]
    return taken


def _key(name: str, size: int | None) -> str:
    """A store belongs to one table, one way of decoding and one version of what decodes."""
    about = json.dumps([name, size, DECODER, PIL.__version__])
    return hashlib.sha256(about.encode()).hexdigest()[:32]
