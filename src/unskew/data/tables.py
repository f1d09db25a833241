"""``table:FILE.csv`` and ``table:FILE.parquet``: a user's own photographs with labels, users and places.

Whatever is needed of the photographs themselves is read once, before any training; pixels are read when asked for.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unskew.core.cache import cache_folder
from unskew.core.errors import UserError, brief, nearest
from unskew.core.images import Examples
from unskew.core.limits import parse_size, user_path
from unskew.core.machine import physical_memory
from unskew.core.text import cut
from unskew.core.types import ImageSet, Split
from unskew.core.units import counted, format_bytes
from unskew.data.arrays import moments
from unskew.data.pictures import Files, Parquet, Pictures
from unskew.data.rows import Rows
from unskew.data.scan import Say, Scanned, scan
from unskew.data.store import Cache
from unskew.data.table_columns import Facts, facts, read_csv
from unskew.data.table_parquet import read_parquet

DISK, MEMORY = "20GB", "1GB"  # the default budgets
MEMORY_SHARE = 4  # at most 1/4 of this machine's memory, whatever the budget
ASKED = ("size", "broken")
BROKEN = ("stop", "skip")
NAMED = 5  # broken photographs in a message


@dataclass(frozen=True)
class Wanted:
    """How photographs are read: the side of their square, what broken ones lead to, where decoded ones are kept."""

    size: int | None
    broken: str
    cache: Cache
    say: Say


def cache_of(folder: str | None = None, disk: str | None = None, memory: str | None = None) -> Cache:
    """The cache that these options mean; what is None is the variable UNSKEW_CACHE, or the default."""
    most = int(physical_memory() / MEMORY_SHARE)
    return Cache(
        cache_folder(folder),
        parse_size(disk or DISK, f"--cache-disk {cut(disk or DISK)}"),
        min(most, parse_size(memory or MEMORY, f"--cache-memory {cut(memory or MEMORY)}")),
    )


def check_size(option: str) -> Callable[[str], None]:
    """A check that refuses a text that is not a size."""

    def check(text: str) -> None:
        parse_size(text, f"--{option} {cut(text)}")

    return check


def silent(stage: str, done: int, total: int) -> None:
    """Say nothing."""


def load_table(text: str, cache: Cache | None = None, say: Say = silent) -> ImageSet:
    """``FILE.csv`` or ``FILE.parquet``, with ``?size=128`` and ``&broken=skip`` behind it."""
    path, wanted = _parse(text, cache, say)
    pictures, told = _read(path, say)
    found = scan(pictures, _store_name(path), wanted.size, ~told.test, wanted.cache, say)
    return _image_set(f"table:{text}", pictures, told, found, wanted)


def check_table(
    text: str, cache: Cache | None = None, say: Say = silent
) -> tuple[list[tuple[str, str]], int, ImageSet | None]:
    """Which photographs are broken and why, of how many, and the image set; None where they would stop a run."""
    path, wanted = _parse(text, cache, say)
    pictures, told = _read(path, say)
    found = scan(pictures, _store_name(path), wanted.size, ~told.test, wanted.cache, say)
    broken = [(pictures.name(row), why) for row, why in sorted(found.broken.items())]
    if broken and wanted.broken == "stop":
        return broken, len(pictures), None
    return broken, len(pictures), _image_set(f"table:{text}", pictures, told, found, wanted)


def table_examples(text: str, cache: Cache | None = None, say: Say = silent) -> Examples:
    """A table's training examples; photographs are read only where broken ones are to be left out."""
    path, wanted = _parse(text, cache, say)
    if wanted.broken == "skip":
        return load_table(text, cache, say).examples
    return _examples(_read(path, say)[1])


def row_examples(rows: Rows) -> Examples:
    """The training examples of these rows."""
    return _examples(_facts(rows))


def _examples(told: Facts) -> Examples:
    train = ~told.test
    return Examples(
        told.labels[train], told.classes, None if told.users is None else told.users[train],
        None if told.places is None else told.places[train],
    )  # fmt: skip


def _read(path: Path, say: Say) -> tuple[Pictures, Facts]:
    """Where a table's photographs are, and what it says of them."""
    say("reading the table", 0, 0)
    if path.suffix.lower() == ".parquet":
        columns, image = read_parquet(path)
    else:
        columns, image = read_csv(path), None
    told = facts(columns)
    if image is not None:
        return Parquet(path.absolute(), image, told.kept), told
    named = columns.path or ()
    return Files.of(path.absolute().parent, [named[row] for row in told.kept.tolist()]), told


def _store_name(path: Path) -> str:
    return f"table:{path.absolute()}"


def from_rows(
    rows: Rows, *, name: str, size: int | None, broken: str = "stop", cache: Cache | None = None, say: Say = silent
) -> ImageSet:
    """The image set of these rows; ``name`` is the set's own."""
    told, wanted = _facts(rows), Wanted(size, broken, cache or cache_of(), say)
    pictures = Files.of(rows.root.absolute(), rows.paths.tolist())
    store = f"{name.partition('?')[0]} in {rows.root.absolute()}"
    found = scan(pictures, store, size, ~told.test, wanted.cache, say)
    return _image_set(name, pictures, told, found, wanted)


def _facts(rows: Rows) -> Facts:
    return Facts(np.arange(len(rows)), rows.labels, rows.classes, rows.test, rows.users, rows.places, rows.notes)


def _image_set(name: str, pictures: Pictures, told: Facts, found: Scanned, wanted: Wanted) -> ImageSet:
    notes = [*told.notes, *_broken(name, pictures, found, wanted.broken)]
    if wanted.size is not None:
        notes.append(f"photographs are scaled and cropped to {wanted.size}×{wanted.size}")
    parts = [np.flatnonzero(found.good & part) for part in (~told.test, told.test)]
    for part, rows in zip(("train", "test"), parts, strict=True):
        if not len(rows):
            raise UserError(f"{name} has no photographs for {part}; add some, with split {part}")
    if len(np.unique(told.labels[parts[0]])) < 2:
        raise UserError(f"{name}: all training photographs have one label; a classifier needs two or more")
    train, test = (Split(found.photographs(rows), told.labels[rows]) for rows in parts)
    mean, std = moments(found.counts[: 1 if found.grey else 3])
    users = [None if told.users is None else told.users[rows] for rows in parts]
    notes += _used(found, wanted.cache)
    return ImageSet(
        name, told.classes, train, test, mean, std, users=users[0], notes=tuple(notes),
        places=None if told.places is None else told.places[parts[0]], test_users=users[1],
    )  # fmt: skip


def _broken(name: str, pictures: Pictures, found: Scanned, policy: str) -> list[str]:
    """A note on the photographs that are left out, or a refusal, which names them."""
    if not found.broken:
        return []
    first = [f"{pictures.name(row)} {why}" for row, why in sorted(found.broken.items())[:NAMED]]
    more = f"; and {len(found.broken) - NAMED:,} more" if len(found.broken) > NAMED else ""
    share = f"{len(found.broken):,} of {counted(len(pictures), 'photograph')}"
    if policy == "skip":
        return [f"{share} cannot be read and are left out: {'; '.join(first)}{more}"]
    instead = f"{name}{'&' if '?' in name else '?'}broken=skip leaves them out"
    raise UserError(f"{share} cannot be read: {'; '.join(first)}{more}; replace them, or {instead}")


def _used(found: Scanned, cache: Cache) -> list[str]:
    disk = f"{format_bytes(found.on_disk)} on disk (at most {format_bytes(cache.disk)})"
    notes = [f"images: {disk}, at most {format_bytes(cache.memory)} in memory"]
    if found.beyond:
        notes.append(
            f"{counted(found.beyond, 'photograph')} beyond --cache-disk {format_bytes(cache.disk)} (or half of what is "
            "free there): each is decoded again when it is needed"
        )
    return notes


def asked_for(name: str, query: str) -> tuple[int | None, str]:
    """How photographs are read, as said behind the question mark: the size and what happens to broken ones."""
    asked: dict[str, str] = {}
    for each in filter(None, query.split("&")):
        key, _, value = each.partition("=")
        if key not in ASKED or key in asked:
            raise UserError(f"{name}: {cut(key)}={cut(value)}: give size=128 or broken=skip, each once")
        asked[key] = value
    size, broken = asked.get("size"), asked.get("broken", BROKEN[0])
    if size is not None and not (size.isascii() and size.isdigit() and 1 <= int(size[:6]) <= 4096):
        raise UserError(f"{name}: size={cut(size)} is not a size; give 1 to 4096, as in ?size=128")
    if broken not in BROKEN:
        raise UserError(f"{name}: broken={cut(broken)}: {nearest(broken, BROKEN)}")
    return None if size is None else int(size), broken


def _parse(text: str, cache: Cache | None, say: Say) -> tuple[Path, Wanted]:
    """The file, and what is asked for behind the question mark."""
    match = re.fullmatch(r"(.*?)(?:\?([a-z]+=[^?/]*))?", text, re.DOTALL)
    name, query = (match[1], match[2] or "") if match else (text, "")
    size, broken = asked_for(f"table:{cut(text)}", query)
    path = user_path(name)
    if path.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        raise UserError(f"table:{cut(text)}: {brief(name)} is not a table; give FILE.csv or FILE.parquet")
    return path, Wanted(size, broken, cache or cache_of(), say)
