"""Reads .npz files that may come from a stranger: sizes are checked in the headers before anything is unpacked.

Nothing is unpickled. Only what ``np.savez`` and ``np.savez_compressed`` write is read.
"""

import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from unskew.core.limits import check_plain, check_unpacked, size_on_disk

DAMAGED = (  # all that reading was seen to raise for files with a few bytes changed or cut off
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    OSError,
    KeyError,
    NotImplementedError,
    RuntimeError,  # also RecursionError
    MemoryError,
    OverflowError,
    TypeError,
    AttributeError,
    SyntaxError,
    tokenize.TokenError,  # of a header that is not a Python literal
)
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_SUFFIX = ".npy"

Array = npt.NDArray[Any]


def read_npz(path: Path, wanted: Collection[str] | None = None) -> tuple[dict[str, Array], list[str]]:
    """The arrays of these names, or all, and the names of everything in the file.

    One of ``DAMAGED`` where it is not a whole .npz of plain arrays; UserError where it is not a file or too large.
    """
    check_plain(path)
    on_disk = size_on_disk([path])
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(_SUFFIX): info for info in archive.infolist()}
        chosen = {name: info for name, info in members.items() if wanted is None or name in wanted}
        entries = 0
        for name, info in chosen.items():
            if info.compress_type not in _METHODS:
                raise ValueError(f"{name} is packed in a way that np.savez does not use")
            with archive.open(info) as stream:
                shape, dtype = _header(stream)
                entries += math.prod(shape) * max(1, dtype.itemsize)
                if math.prod(shape) * dtype.itemsize != info.file_size - stream.tell():
                    raise ValueError(f"{name} is not as long as its header says")
        check_unpacked(entries, on_disk, str(path))  # also entries of no bytes: 2^40 empty texts
        arrays = {}
        for name, info in chosen.items():
            with archive.open(info) as stream:  # gives no more than file_size bytes, and compares their checksum
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
                if stream.read(1):
                    raise ValueError(f"{name} is longer than its header says")
        return arrays, list(members)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"the array format {version} is not known")
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    return shape, dtype
