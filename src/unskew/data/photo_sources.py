"""Data sources of photographs: from where the pictures are and what is known of them to an image set.

A new kind of such files is one function and one line in the registry: ``read(request, *, options)`` returns where the
pictures are, a ``Rows`` with their labels, and a name for their store; ``photograph_source`` makes the rest.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unskew.core.errors import UserError, nearest
from unskew.core.limits import is_folder, user_path
from unskew.core.text import cut
from unskew.core.types import Examples, ImageSet, Split
from unskew.core.units import counted, format_bytes
from unskew.data.arrays import moments
from unskew.data.interface import BROKEN, DAMAGED, NO_CHECKSUM, OWN, SIDE, Finding, Request, Source
from unskew.data.photographs import Files, Pictures, Scanned, scan
from unskew.data.review import summarize
from unskew.data.rows import Rows
from unskew.data.store import cache_of

NAMED = 5  # photographs in a message
LOOKED_FOR = 50  # of the pictures that annotations name, check looks for every 50th

Read = Callable[..., tuple[Pictures, Rows, str]]


def photograph_source(name: str, what: str, read: Read, path: str, **facts: Any) -> Source:
    """Make a source of the user's own photographs.

    Parameters
    ----------
    name, what, path, facts
        As in ``Source``.
    read
        ``read(request, *, options)`` returns where the photographs are, what is known of them, and a name for the store
        of their pixels. Its options are the source's, in addition to ``size`` and ``broken``.
    """
    load, examples, check = partial(_load, read), partial(_examples, read), partial(_check, read)
    return Source(name, what, OWN, load, path, examples=examples, check=check, reads=read, **facts)


def _load(read: Read, request: Request, *, size: int | None = None, broken: str = "stop", **options: Any) -> ImageSet:
    """``size``: the side in pixels of the images; ``broken``: stop, or skip what cannot be read."""
    _check_reading(request, size, broken)
    pictures, rows, store = read(request, **options)
    return _image_set(request, pictures, rows, _scan(request, pictures, rows, store, size), broken)


def _examples(
    read: Read, request: Request, *, size: int | None = None, broken: str = "stop", **options: Any
) -> Examples:
    """Photographs are read only where broken ones are to be skipped."""
    _check_reading(request, size, broken)
    if broken == "skip":
        return _load(read, request, size=size, broken=broken, **options).examples
    rows = read(request, **options)[1]
    train = rows.part(np.flatnonzero(~rows.test))
    return Examples(train.labels, train.classes, train.users, train.places)


def _check(
    read: Read, request: Request, *, size: int | None = None, broken: str = "stop", **options: Any
) -> list[Finding]:
    """Return a finding for each broken photograph, then one for the whole."""
    _check_reading(request, size, broken)
    pictures, rows, store = read(request, **options)
    scanned = _scan(request, pictures, rows, store, size)
    findings = [Finding(pictures.name(row), 0, BROKEN, why) for row, why in sorted(scanned.broken.items())]
    if findings and broken == "stop":
        share = f"{len(findings):,} of {counted(len(pictures), 'photograph')} cannot be read"
        detail = f"{share}; replace them, or leave them out: {request.spell(broken='skip')}"
        return [*findings, Finding(request.name, 0, DAMAGED, detail)]
    images = _image_set(request, pictures, rows, scanned, broken)
    return [*findings, describe_images(user_path(request.path), images)]


def describe_images(where: Path, images: ImageSet) -> Finding:
    """Return the finding for data that were read whole."""
    detail = f"{len(images.train):,} training and {len(images.test):,} test images"
    size = where.stat().st_size if where.is_file() else images.train.images.nbytes + images.test.images.nbytes
    return Finding(str(where), size, NO_CHECKSUM, detail, images.notes, summarize(images))


def published_source(
    name: str,
    what: str,
    origin: str,
    rows: Callable[..., Rows],
    *,
    folders: tuple[str, ...],
    known_by: tuple[str, ...],
    **facts: Any,
) -> Source:
    """Make the source of a published set of photographs, found by its name below the data folder.

    Parameters
    ----------
    rows
        ``rows(folder, *, options)`` lists the photographs in the set's folder.
    folders
        Where the set is looked for below the data folder, which is looked in last.
    known_by
        Files or folders of the set, any one of which shows that it is there.
    name, what, origin, facts
        As in ``Source``: classes, shape, sizes, download.
    """

    def locate(data_dir: Path | None) -> Path:
        files = " or ".join(known_by)
        if data_dir is None or not is_folder(data_dir):
            given = "no data folder was given" if data_dir is None else f"the data folder {data_dir} does not exist"
            raise UserError(f"{name}: {given}; pass the folder that has {folders[0]}/{files} as --data-dir DIR")
        looked = [*(data_dir / folder for folder in folders), data_dir]
        for folder in looked:
            if any((folder / file).exists() for file in known_by):
                return folder
        places = ", ".join(map(str, looked))
        raise UserError(f"{name} was not found: {files} is in none of {places}; get it from {origin.split()[-1]}")

    def read_rows(request: Request, **options: Any) -> Rows:
        folder = locate(request.data_dir)
        request.say(f"reading the files of {name} in {folder}", 0, 0)
        return rows(folder, **options)

    def read(request: Request, **options: Any) -> tuple[Pictures, Rows, str]:
        made = read_rows(request, **options)
        root = made.root.absolute()
        return Files.of(root, made.paths), made, f"{request.call.name} in {root}"

    def check(request: Request, *, size: int | None = None, broken: str = "stop", **options: Any) -> list[Finding]:
        """Count the rows, and those of the pictures that are there, of the ones looked for."""
        made = read_rows(request, **options)
        train, looked = int(np.count_nonzero(~made.test)), made.paths[::LOOKED_FOR]
        present = sum((made.root / str(path)).is_file() for path in looked)
        numbers = f"{train:,} training and {len(made) - train:,} test images of {len(made.classes):,} classes"
        detail = f"{numbers}; of {counted(len(looked), 'picture')} looked for, {present:,} exist"
        return [Finding(str(locate(request.data_dir)), 0, NO_CHECKSUM, detail, made.notes)]

    load, examples = partial(_load, read), partial(_examples, read)
    return Source(name, what, origin, load, "", locate, read_rows, examples, check, reads=rows, **facts)


def _check_reading(request: Request, size: int | None, broken: str) -> None:
    if size is not None and not 1 <= size <= 4096:
        raise UserError(f"{cut(request.name)}: size={cut(str(size))} must be from 1 to 4096, as in (size=128)")
    if broken not in ("stop", "skip"):
        raise UserError(f"{cut(request.name)}: broken={cut(broken)}: {nearest(broken, ('stop', 'skip'))}")


def _scan(request: Request, pictures: Pictures, rows: Rows, store: str, size: int | None) -> Scanned:
    return scan(pictures, store, size, request.side or SIDE, ~rows.test, request.cache or cache_of(), request.say)


def _image_set(request: Request, pictures: Pictures, rows: Rows, scanned: Scanned, broken: str) -> ImageSet:
    name, cache, size = request.name, request.cache or cache_of(), scanned.size
    notes = [*rows.notes, *_note_broken(request, pictures, scanned, broken), *_note_repeated(pictures, rows, scanned)]
    if scanned.scaled and size is not None:
        which = "size of photographs where no network is given" if request.side is None else "network's input size"
        to = f"all are scaled and cropped to {size}×{size}, the {which}"
        notes.append(f"{scanned.scaled}: {to}; (size={size}) keeps it for every network")
    elif size is not None:
        notes.append(f"photographs are scaled and cropped to {size}×{size}")
    parts = [np.flatnonzero(scanned.good & part) for part in (~rows.test, rows.test)]
    for part, numbers in zip(("train", "test"), parts, strict=True):
        if not len(numbers):
            raise UserError(f"{name} has no photographs in the {part} part; add rows with split = {part}")
    train, test = (rows.part(numbers) for numbers in parts)
    first, second = (Split(scanned.photographs(numbers), rows.labels[numbers]) for numbers in parts)
    mean, std = moments(scanned.counts[: 1 if scanned.gray else 3])
    disk = f"{format_bytes(scanned.on_disk)} on disk (at most {format_bytes(cache.disk)})"
    notes.append(f"images: {disk}, at most {format_bytes(cache.memory)} in memory")
    if scanned.beyond:
        limit = f"--cache-disk {format_bytes(cache.disk)} (or half of the free space there)"
        notes.append(f"{counted(scanned.beyond, 'photograph')} beyond {limit}: each is decoded again when it is needed")
    images = ImageSet(name, rows.classes, first, second, mean, std, notes=tuple(notes), places=train.places)
    return replace(images, users=train.users, test_users=test.users)


def _note_broken(request: Request, pictures: Pictures, scanned: Scanned, broken: str) -> list[str]:
    if not scanned.broken:
        return []
    first = [f"{pictures.name(row)} {why}" for row, why in sorted(scanned.broken.items())[:NAMED]]
    more = f"; and {len(scanned.broken) - NAMED:,} more" if len(scanned.broken) > NAMED else ""
    share = f"{len(scanned.broken):,} of {counted(len(pictures), 'photograph')}"
    if broken == "skip":
        return [f"{share} cannot be read and are skipped: {'; '.join(first)}{more}"]
    instead = f"{request.spell(broken='skip')} leaves them out"
    raise UserError(f"{share} cannot be read: {'; '.join(first)}{more}; replace them, or {instead}")


def _note_repeated(pictures: Pictures, rows: Rows, scanned: Scanned) -> list[str]:
    """Notes on equal photographs: in train and in test they raise accuracy, with two labels one of them is wrong."""
    by_pixels = defaultdict[bytes, list[int]](list)
    for row in np.flatnonzero(scanned.good).tolist():
        by_pixels[scanned.sha256[row].tobytes()].append(row)
    groups = [group for group in by_pixels.values() if len(group) > 1]
    if not groups:
        return []
    count = sum(len(group) - 1 for group in groups)
    both = sum(len(set(rows.test[group].tolist())) > 1 for group in groups)
    more = f"; {both:,} of them are in train and in test" if both else ""
    notes = [f"{counted(count, 'photograph')} {'repeats' if count == 1 else 'repeat'} another one{more}"]
    torn = [group for group in groups if len(set(rows.labels[group].tolist())) > 1]
    if torn:
        first = []
        for group in torn[:NAMED]:
            labels = sorted({rows.classes[label] for label in rows.labels[group].tolist()})
            first.append(f"{pictures.name(group[0])} ({', '.join(labels)})")
        more = f" and {len(torn) - NAMED:,} more" if len(torn) > NAMED else ""
        have = "photograph has" if len(torn) == 1 else "photographs have"
        notes.append(f"{len(torn):,} {have} two labels or more: {', '.join(first)}{more}")
    return notes
