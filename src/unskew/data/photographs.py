"""A table's photographs as images that are read when asked for: from the store on disk, or decoded again.

Nothing that is read is trusted: each image must have the checksum that it had when the table was first read.

Shapes: N images, B of them in a batch, [ch, H, W] one image.
"""

import json
import os
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import StorageFailure
from unskew.core.machine import cores
from unskew.core.types import Arrays
from unskew.data import pictures
from unskew.data.decode import Broken, Pixels, decode, quiet
from unskew.data.pictures import Pictures
from unskew.data.store import mark_in_use, pixels_file, repair

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
        self, source: Pictures, where: Arrays, shape: tuple[int, int, int], size: int | None, store: tuple[Path, bytes],
        memory: int, sha256: str,
    ) -> None:  # fmt: skip
        self._source, self._where, self._size, self._store = source, where, size, store
        self._offset, self._crc, self._channels = where["offset"], where["crc"], where["channels"]
        self.shape = (len(source), *shape)
        self.dtype: np.dtype[np.uint8] = np.dtype(np.uint8)
        self.sha256 = sha256
        self.memory = memory
        self.recent = _RECENT.setdefault((store[1], memory), Recent(memory))
        self._file = pixels_file(*store)
        for descriptor in (self._file, mark_in_use(store[0])):
            if descriptor is not None:
                weakref.finalize(self, os.close, descriptor)

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
        """[B, ch, H, W], the images of these numbers."""
        images = np.empty((len(index), *self.shape[1:]), np.uint8)
        missing: dict[int, list[int]] = {}  # the places of each image that is not in the store
        for place, row in enumerate(index.tolist()):
            if not self._stored(row, images[place]):
                missing.setdefault(row, []).append(place)
        known = {row: record for row in missing if (record := self.recent.get((self.sha256, row))) is not None}
        known |= self._decoded(sorted(set(missing) - set(known)))
        for row, record in known.items():
            images[missing[row]] = record  # a grey one becomes all channels
            self.recent.keep((self.sha256, row), record)
        return images

    def described(self) -> tuple[str, Arrays]:
        """How another process opens them."""
        words, arrays = self._source.described()
        folder, number = self._store
        about = {
            "pictures": words, "shape": self.shape[1:], "size": self._size, "folder": str(folder),
            "number": number.hex(), "memory": self.memory, "sha256": self.sha256,
        }  # fmt: skip
        return json.dumps(about), arrays | {f"{KEPT}{name}": values for name, values in self._where.items()}

    def _stored(self, row: int, image: Pixels) -> bool:
        """Read it from the store into its place; False where it is not there, or damaged."""
        offset = int(self._offset[row])
        if self._file is None or offset < 0:
            return False
        record = image if self._channels[row] == len(image) else np.empty((1, *image.shape[1:]), np.uint8)
        if os.preadv(self._file, [record.data], offset) != record.nbytes or zlib.crc32(record.data) != self._crc[row]:
            return False
        if record is not image:
            image[:] = record
        return True

    def _decoded(self, rows: list[int]) -> dict[int, Pixels]:
        """Decode these from their files, in threads; what the store has lost is written there again."""
        if not rows:
            return {}
        step, records = self._source.together(), list[Pixels]()
        with quiet(), ThreadPoolExecutor(min(len(rows), cores())) as pool:
            for part in (rows[start : start + step] for start in range(0, len(rows), step)):
                contents = self._source.contents(part)
                try:
                    records += pool.map(decode, contents, [self._size] * len(part))
                except Broken as error:
                    raise StorageFailure(self._changed(part, contents, str(error))) from error
        for row, record in zip(rows, records, strict=True):
            if zlib.crc32(record.data) != self._crc[row]:
                raise StorageFailure(f"{self._source.name(row)} has changed since the table was read; start again")
            if self._file is not None and self._offset[row] >= 0:
                repair(*self._store, int(self._offset[row]), record.tobytes())
        return dict(zip(rows, records, strict=True))

    def _changed(self, rows: list[int], contents: Iterable[Any], why: str) -> str:
        for row, content in zip(rows, contents, strict=True):
            try:
                decode(content, self._size)
            except Broken as error:
                return f"{self._source.name(row)} {error}; it was whole when the table was read: restore it"
        return f"a photograph {why}"


def open_photographs(text: str, arrays: Arrays) -> Photographs:
    """What ``described`` gave, in another process."""
    about = json.loads(text)
    where = {name.removeprefix(KEPT): values for name, values in arrays.items() if name.startswith(KEPT)}
    source = pictures.opened(about["pictures"], arrays)
    store = Path(about["folder"]), bytes.fromhex(about["number"])
    channels, height, width = about["shape"]
    return Photographs(source, where, (channels, height, width), about["size"], store, about["memory"], about["sha256"])


def with_memory(text: str, share: int) -> str:
    """The description with one part in ``share`` of the memory, for one of so many processes."""
    about = json.loads(text)
    return json.dumps(about | {"memory": about["memory"] // share})
