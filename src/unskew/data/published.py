"""Reads the files of a published image set, and compares them with what was published.

A file that differs from the published one is legal as long as it reads whole.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from unskew.core.errors import UserError
from unskew.core.types import Split
from unskew.data import binary, cifar_python
from unskew.data.binary import Images, Labels
from unskew.data.catalogue import SOURCES, Layout, Source

AS_PUBLISHED = "as published"
OTHER = "reads whole, but is not the published file"
NO_CHECKSUM = "no published checksum"
DAMAGED = "does not read whole"
BROKEN = "is a broken photograph"
_OWNER = {md5: source.name for source in SOURCES.values() for md5 in source.md5.values()}


@dataclass(frozen=True)
class Finding:
    """A row of ``unskew data check``: what a file is and what is in it, or what is wrong with it."""

    path: str
    size: int  # bytes
    status: str  # AS_PUBLISHED | OTHER | NO_CHECKSUM | DAMAGED | BROKEN
    detail: str
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it reads from its beginning to its end."""
        return self.status not in (DAMAGED, BROKEN)


def read_part(source: Source, layout: Layout, paths: tuple[Path, ...]) -> tuple[Split, list[Path]]:
    """One part of a set, and those of its files that are not the published ones."""
    with ThreadPoolExecutor() as pool:  # reading and hashing leave the interpreter free
        raws = list(pool.map(binary.read_file, paths))
        status = list(pool.map(partial(_checksum, source), paths, raws))
    strange = [path for path, each in zip(paths, status, strict=True) if each == OTHER]
    images: Images
    if layout.kind == "idx":
        pixels, numbers = (_idx(path, raw) for path, raw in zip(paths, raws, strict=True))
        images, labels = binary.join(
            pixels, numbers, (paths[0], paths[1]),
            classes=len(source.classes), first=source.first, transposed=source.transposed,
        )  # fmt: skip
        images = np.array(images, order="C")
    else:
        parts = [_batch(source, layout, path, raw) for path, raw in zip(paths, raws, strict=True)]
        images, labels = np.concatenate([i for i, _ in parts]), np.concatenate([n for _, n in parts])
    if images.shape[1:] != source.shape:
        given, wanted = list(images.shape[1:]), list(source.shape)
        raise UserError(f"{paths[0]} holds images of {given}, {source.name} has {wanted}; give it as arrays:FILE.npz")
    return Split(images, labels), strange


def _idx(path: Path, raw: bytes) -> Images:
    return binary.idx(raw, path, dimensions=3 if "images" in path.name else 1)


def _batch(source: Source, layout: Layout, path: Path, raw: bytes) -> tuple[Images, Labels]:
    classes = len(source.classes)
    if layout.kind == "binary":
        return binary.cifar(raw, path, label_bytes=source.label_bytes, classes=classes)
    key = "labels" if source.label_bytes == 1 else "fine_labels"
    return binary.cifar_python(cifar_python.read(raw, path), path, key=key, classes=classes)


def examine(source: Source, layout: Layout, path: Path) -> Finding:
    """What a file of a set is: as published or not, whole or damaged."""
    size = path.stat().st_size
    try:
        raw = binary.read_file(path)
        status = _checksum(source, path, raw)
        held = _idx(path, raw) if layout.kind == "idx" else _batch(source, layout, path, raw)[0]
    except UserError as error:
        return Finding(str(path), size, DAMAGED, str(error))
    return Finding(str(path), size, status, f"{len(held):,} {'labels' if held.ndim == 1 else 'images'}")


def _checksum(source: Source, path: Path, raw: bytes) -> str:
    if path.name not in source.md5:
        return NO_CHECKSUM
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if _OWNER.get(md5, source.name) != source.name:
        raise UserError(
            f"{path} is the published file of {_OWNER[md5]}, not of {source.name}; give --data {_OWNER[md5]}"
        )
    return AS_PUBLISHED if md5 == source.md5[path.name] else OTHER
