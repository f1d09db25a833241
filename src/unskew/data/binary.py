"""Reads the layouts in which CIFAR and the MNIST family are distributed, and says what is wrong with a file.

A reader takes the file's bytes and its path (for the error) and gives arrays; nothing is skipped or repaired.
Shapes: N records in a file, images [N, ch, H, W] (CIFAR) or [N, H, W] (idx), labels [N].
"""

import gzip
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.limits import BLOCK, check_unpacked, read_plain

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

CIFAR_SHAPE = (3, 32, 32)
CIFAR_PIXELS = 3 * 32 * 32
REPLACE = "replace it with a whole copy"
_IDX = {1: ("labels", 0x00000801), 3: ("images", 0x00000803)}  # unsigned bytes in 1 or 3 dimensions
_DEFLATE_LIMIT = 1032  # deflate never packs more than this many bytes into one


def read_file(path: Path) -> bytes:
    """All bytes of a file; an unreadable or empty one is a UserError."""
    try:
        raw = read_plain(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; check the path and its rights") from error
    if not raw:
        raise UserError(f"{path} is empty, data was expected; {REPLACE}")
    return raw


def cifar(raw: bytes, path: Path, *, label_bytes: int, classes: int) -> tuple[Images, Labels]:
    """One CIFAR binary file: records of ``label_bytes`` labels (the last is the one used) and 3072 pixels.

    The images are a view into ``raw``: putting files together is the only copy.
    """
    record = label_bytes + CIFAR_PIXELS
    if not raw or len(raw) % record:
        whole = -(-max(len(raw), 1) // record) * record
        raise UserError(
            f"{path} is truncated: {len(raw):,} bytes are no whole number of records of {record:,} "
            f"(the next whole size is {whole:,}); {REPLACE}"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].astype(np.int64)
    in_range(labels, path, classes=classes)
    return records[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), labels


def cifar_python(batch: dict[str, Any], path: Path, *, key: str, classes: int) -> tuple[Images, Labels]:
    """One batch of CIFAR's Python layout; its labels are under "labels", those of CIFAR-100 under "fine_labels"."""
    for wanted in ("data", key):
        if wanted not in batch:
            have = ", ".join(map(repr, sorted(batch)[:9])) or "nothing"
            raise UserError(f"{path} has no {wanted!r}, it holds {have}; give a batch of CIFAR's Python layout")
    data, listed = batch["data"], batch[key]
    pixels = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (CIFAR_PIXELS,)
    if not pixels or not len(data):
        raise UserError(f"{path}: 'data' is not an array of bytes [N, {CIFAR_PIXELS}] with N > 0; {REPLACE}")
    if isinstance(listed, list) and all(type(n) is int and abs(n) < 2**31 for n in listed):
        labels = np.array(listed, np.int64)
    elif isinstance(listed, np.ndarray) and listed.ndim == 1:
        labels = listed.astype(np.int64)
    else:
        raise UserError(f"{path}: {key!r} is not a list of whole numbers; {REPLACE}")
    if len(labels) != len(data):
        raise UserError(f"{path} holds {len(data):,} images and {len(labels):,} labels; {REPLACE}")
    in_range(labels, path, classes=classes)
    return data.reshape(-1, *CIFAR_SHAPE), labels


def in_range(labels: Labels, path: Path, *, classes: int, first: int = 0) -> None:
    """Refuse a label outside ``first`` .. ``first + classes - 1``, naming the record that holds it."""
    wrong = np.flatnonzero((labels < first) | (labels >= first + classes))
    if len(wrong):
        raise UserError(
            f"{path}: the label of record {wrong[0]} is {labels[wrong[0]]}, labels go from {first} to "
            f"{first + classes - 1}; the file is damaged or belongs to another data set: {REPLACE}"
        )


def idx(raw: bytes, path: Path, *, dimensions: int) -> Images:
    """One idx file of unsigned bytes, gzipped or not: labels have 1 dimension, images 3."""
    what, magic = _IDX[dimensions]
    header_size = 4 * (1 + dimensions)
    packed = raw[:2] == b"\x1f\x8b"
    stream = gzip.GzipFile(fileobj=io.BytesIO(raw)) if packed else io.BytesIO(raw)
    try:
        header = stream.read(header_size)
        if len(header) < 4 or int.from_bytes(header[:4], "big") != magic:
            raise UserError(
                f"{path} starts with {header[:4].hex() or 'nothing'}, an idx file of {what} starts with "
                f"{magic:08x}; give the file of that name as it was published"
            )
        if len(header) < header_size:
            raise UserError(f"{path} is truncated inside its header of {header_size} bytes; {REPLACE}")
        shape = struct.unpack(f">{dimensions}I", header[4:])
        wanted = int(np.prod(shape, dtype=object))
        if wanted == 0:
            raise UserError(f"{path} declares the shape {_times(shape)}: it holds no {what}; {REPLACE}")
        # Bounds the reading buffer, too: a damaged count must not ask for terabytes.
        most = len(raw) * (_DEFLATE_LIMIT if packed else 1)
        if packed and wanted <= most:
            check_unpacked(wanted, max(BLOCK, len(raw)), f"{path} ({_times(shape)} {what})")
        body = stream.read(wanted + 1) if wanted <= most else b""
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged inside its gzip compression ({error}); {REPLACE}") from error
    if wanted > most or len(body) != wanted:
        have = f"{len(body):,}" if len(body) < wanted <= most else "fewer" if wanted > most else "more"
        wrong = "is longer than it declares" if have == "more" else "is truncated"
        raise UserError(f"{path} {wrong}: {_times(shape)} {what} take {wanted:,} bytes, {have} follow; {REPLACE}")
    return np.frombuffer(body, np.uint8).reshape(shape)


def join(
    images: Images,
    labels: Images,
    paths: tuple[Path, Path],
    *,
    classes: int,
    first: int = 0,
    transposed: bool = False,
) -> tuple[Images, Labels]:
    """The images of one idx file and the labels of the other, as [N, 1, H, W] and classes from 0.

    ``first`` is the files' smallest label. ``transposed`` turns EMNIST's pictures upright, whose files hold
    each image with rows and columns exchanged.
    """
    if len(images) != len(labels):
        raise UserError(
            f"{paths[0]} holds {len(images):,} images, {paths[1]} {len(labels):,} labels; "
            "they must be a pair of one data set"
        )
    numbers = labels.astype(np.int64)
    in_range(numbers, paths[1], classes=classes, first=first)
    upright = images.transpose(0, 2, 1) if transposed else images
    return upright[:, None], numbers - first


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(f"{n:,}" for n in shape)
