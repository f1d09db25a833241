"""``table:FILE.csv`` and ``table:FILE.parquet``: a user's own photographs with labels, users and places.

Whatever is needed of the photographs themselves is read once, before any training; pixels are read when asked for.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief, nearest
from unskew.core.limits import (
    MAX_CLASSES,
    cache_folder,
    check_memory,
    check_plain,
    check_unpacked,
    parse_size,
    size_on_disk,
    user_path,
)
from unskew.core.machine import physical_memory
from unskew.core.plugins import require_extra
from unskew.core.text import cut
from unskew.core.types import Examples, ImageSet, Split
from unskew.core.units import counted, format_bytes
from unskew.data.arrays import moments
from unskew.data.photographs import Files, Parquet, Pictures, Say, Scanned, check_pages, open_parquet, reason, scan
from unskew.data.rows import Rows
from unskew.data.store import Cache

WANTED = ("path", "image", "label")
OPTIONAL = ("user", "latitude", "longitude", "split")
COLUMNS = (*WANTED, *OPTIONAL)
LEFT_OUT = ("validation", "valid", "val", "dev")  # values of split that are neither train nor test
SEPARATORS = (",", ";", "\t")
ROW_BYTES = 20  # in memory for each byte of a CSV, about
OTHER_NAMES = {
    "label": ("class", "category", "target", "species", "label_id", "class_id", "category_id"),
    "image": ("img", "picture", "photo", "photograph", "jpg", "png", "bytes"),
    "path": ("file", "filename", "file_name", "image_path", "file_path"),
    "user": ("user_id", "author", "client", "client_id", "owner"),
    "latitude": ("lat",),
    "longitude": ("lon", "lng", "long"),
}

Texts = Sequence[str]


@dataclass(frozen=True)
class Columns:
    """A table as it was read: texts, one for each row; None where there is no such column. ``line`` numbers rows."""

    where: str
    line: Callable[[int], str]  # what a message calls a row
    label: Texts
    path: Texts | None = None
    names: tuple[str, ...] | None = None  # of the classes, where the labels number them
    user: Texts | None = None
    latitude: Texts | None = None
    longitude: Texts | None = None
    split: Texts | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What the columns say of the rows that are kept."""

    kept: npt.NDArray[np.int64]  # the rows of the table that are train or test
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    test: npt.NDArray[np.bool_]
    users: npt.NDArray[np.str_] | None
    places: npt.NDArray[np.float64] | None
    notes: tuple[str, ...]


def read_csv(path: Path) -> Columns:
    """A CSV in UTF-8 with a header; commas, semicolons or tabs separate."""
    check_plain(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            check_memory(ROW_BYTES * path.stat().st_size, str(path), "split the table")
            first = "\n"
            while first.isspace():
                first = file.readline(100_000)
            file.seek(0)
            separator = max(SEPARATORS, key=first.count)
            lines = csv.reader(file, delimiter=separator, skipinitialspace=True, strict=True)
            header = [name.strip().lower() for name in next(filter(None, lines), [])]
            places, notes = chosen(header, str(path), "a row for each photograph", without=("image",))
            columns, numbers = _rows(lines, header, places, path)
    except FileNotFoundError as error:
        raise UserError(f"{path} is not there; give the path of a table") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start:,}); save it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV: {_csv_error(error)}; write it again") from error
    return Columns(str(path), lambda row: f"line {numbers[row]}", notes=notes, **columns)


def _csv_error(error: csv.Error) -> str:
    unclosed = str(error) == "unexpected end of data"
    return "a quotation mark is not closed before the file ends" if unclosed else str(error)


def _rows(lines: Any, header: list[str], places: dict[str, int], path: Path) -> tuple[dict[str, Any], list[int]]:
    """The columns that are wanted, and the number of each row's line."""
    kept, numbers = [list[str]() for _ in places], list[int]()
    for row in lines:
        if not row:
            continue
        if len(row) != len(header):
            raise UserError(
                f"{path} line {lines.line_num}: {len(row)} values under {len(header)} columns; give one for each"
            )
        for column, place in zip(kept, places.values(), strict=True):
            column.append(row[place])
        numbers.append(lines.line_num)
    return dict(zip(places, kept, strict=True)), numbers


def chosen(
    header: Sequence[str], where: str, rows: str, without: tuple[str, ...] = ()
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Where each known column is, and a note on the others; refuses a header without what is wanted."""
    if not any(header):
        raise UserError(f"{where} is empty; give a header with path and label, then {rows}")
    if double := next((name for name in COLUMNS if header.count(name) > 1), None):
        raise UserError(f"{where}: the column {double} is there twice; remove one")
    places = {name: list(header).index(name) for name in COLUMNS if name in header and name not in without}
    for name in ("label", "path"):
        if name not in places and not (name == "path" and "image" in places):
            raise UserError(f"{where} has no column {name}; {_instead(name, header)}")
    if ("latitude" in places) != ("longitude" in places):
        given, other = ("latitude", "longitude") if "latitude" in places else ("longitude", "latitude")
        raise UserError(f"{where} has a column {given} but no {other}; {_instead(other, header)}, or leave both out")
    others = [name for name in header if name not in places]
    near = [f"{name} (meant as {like}?)" if (like := _meant(name, places)) else name for name in others]
    shown = ", ".join(brief(name, 40)[1:-1] for name in near[:9]) + (" …" if len(near) > 9 else "")
    return places, (f"columns that are not used: {shown}",) if others else ()


def _instead(name: str, header: Sequence[str]) -> str:
    other = next((each for each in header if each in OTHER_NAMES[name]), None)
    if name == "path" and other is None and (image := next((e for e in header if e in OTHER_NAMES["image"]), None)):
        return f"rename {image} to path if it has the files' names, or to image if it has their bytes (parquet only)"
    close = other or next(iter(get_close_matches(name, header, n=1, cutoff=0.6)), None)
    shown = ", ".join(brief(each, 40)[1:-1] for each in header[:9])
    return f"rename {close} to {name}" if close else f"its columns are {shown}: add it, or rename the one that is meant"


def _meant(name: str, places: dict[str, int]) -> str | None:
    """The optional column that an unknown one may be meant as."""
    free = [each for each in OPTIONAL if each not in places]
    named = next((each for each in free if name in OTHER_NAMES.get(each, ())), None)
    return named or next(iter(get_close_matches(name, free, n=1, cutoff=0.75)), None)


def facts(columns: Columns) -> Facts:
    """Labels as numbers, users, places and what is test; rows of a validation part are left out."""
    count = len(columns.label)
    if not count:
        raise UserError(f"{columns.where} has a header and no rows; give a row for each photograph")
    test, kept, notes = _split(columns, count)
    labels, classes = _numbered(columns)
    users = _users(columns)
    places = _places(columns)
    notes += _repeated(columns, kept, test)
    return Facts(
        kept, labels[kept], classes, test[kept], None if users is None else users[kept],
        None if places is None else places[kept], (*columns.notes, *notes),
    )  # fmt: skip


def _repeated(columns: Columns, kept: npt.NDArray[np.int64], test: npt.NDArray[np.bool_]) -> list[str]:
    """A note on photographs that are listed twice: in train and in test, they make accuracy look better than it is."""
    if columns.path is None:
        return []
    parts = [{columns.path[row] for row in kept[test[kept] == part].tolist()} for part in (False, True)]
    both = len(parts[0] & parts[1])
    twice = len(kept) - len(parts[0]) - len(parts[1]) + both
    if not twice:
        return []
    more = f", {both:,} of them in train and in test" if both else ""
    return [f"{counted(twice, 'row')} {'repeats' if twice == 1 else 'repeat'} a photograph of another row{more}"]


def _split(columns: Columns, count: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], list[str]]:
    if columns.split is None:
        test = np.equal(np.arange(count) % 5, 4)
        if not test.any():
            raise UserError(
                f"{columns.where} has no column split, and too few rows to take every fifth as test; add the column, "
                "or rows"
            )
        return test, np.arange(count), ["every fifth row is test: the table has no column split"]
    words = [word.strip().lower() for word in columns.split]
    known = {"train", "test", *LEFT_OUT}
    if (odd := next((row for row, word in enumerate(words) if word not in known), None)) is not None:
        raise UserError(
            f"{columns.where} {columns.line(odd)}: split is {brief(columns.split[odd])}; give train, test or validation"
        )
    out = np.isin(words, LEFT_OUT)
    notes = [f"{int(out.sum()):,} rows of the validation part are left out"] if out.any() else []
    return np.equal(words, "test"), np.flatnonzero(~out), notes


def _numbered(columns: Columns) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels as class numbers: whole numbers in their order, texts in alphabetical order."""
    texts = [text.strip() for text in columns.label]
    if (empty := next((row for row, text in enumerate(texts) if not text), None)) is not None:
        raise UserError(f"{columns.where} {columns.line(empty)}: the label is empty; give one, or remove the row")
    if columns.names is not None:
        odd = next(
            (row for row, text in enumerate(texts) if not text.isdigit() or int(text) >= len(columns.names)), None
        )
        if odd is not None:
            named = f"{len(columns.names)} classes are named"
            raise UserError(f"{columns.where} {columns.line(odd)}: the label is {texts[odd]}, but {named}; correct it")
        return np.array(texts, np.int64), columns.names
    distinct = set(texts)
    if len(distinct) > MAX_CLASSES:
        raise UserError(f"{columns.where} has {len(distinct):,} different labels; {MAX_CLASSES:,} is the most")
    whole = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text) for text in distinct)
    classes = sorted(distinct, key=int) if whole else sorted(distinct)
    place = {text: number for number, text in enumerate(classes)}
    return np.array([place[text] for text in texts], np.int64), tuple(classes)


def _users(columns: Columns) -> npt.NDArray[np.str_] | None:
    """[N], empty where a row has none: under ``users`` such an example belongs to no client."""
    if columns.user is None or not any(user.strip() for user in columns.user):
        return None
    return np.array([user.strip() for user in columns.user], np.str_)


def _places(columns: Columns) -> npt.NDArray[np.float64] | None:
    """[N, 2], latitude and longitude; NaN where unknown."""
    if columns.latitude is None or columns.longitude is None:
        return None
    pairs = (("latitude", columns.latitude, 90), ("longitude", columns.longitude, 180))
    places = np.stack([_degrees(columns, name, texts, most) for name, texts, most in pairs], axis=1)
    known = ~np.isnan(places)
    if len(half := np.flatnonzero(known[:, 0] != known[:, 1])):
        has, lacks = ("latitude", "longitude") if known[half[0], 0] else ("longitude", "latitude")
        line = columns.line(int(half[0]))
        raise UserError(f"{columns.where} {line} has a {has} and no {lacks}; give both, or leave both empty")
    return places


def _degrees(columns: Columns, name: str, texts: Iterable[str], most: int) -> npt.NDArray[np.float64]:
    values = []
    for row, text in enumerate(texts):
        try:
            value = float(text) if text.strip() else float("nan")
        except ValueError:
            value = float("inf")
        if abs(value) > most:
            raise UserError(
                f"{columns.where} {columns.line(row)}: {name} is {brief(text)}; give degrees from -{most} to {most}, "
                "or nothing where it is not known"
            )
        values.append(value)
    return np.array(values, np.float64)


TEXTS = ("is_string", "is_large_string", "is_string_view")
NUMBERS = ("is_floating", "is_integer", "is_decimal", "is_null")
NAMES = (*TEXTS, "is_integer", "is_floating")  # floating: pandas makes them of whole numbers where some are missing
KINDS = {"label": NAMES, "user": NAMES, "path": TEXTS, "split": TEXTS, "latitude": NUMBERS, "longitude": NUMBERS}
WORDS = {TEXTS: "texts", NUMBERS: "numbers", NAMES: "texts or whole numbers"}


def read_parquet(path: Path) -> tuple[Columns, str | None]:
    """The columns, and the name of the one that has the photographs as bytes, if there is one."""
    check_plain(path)
    parquet = open_parquet(path)
    arrow = require_extra("pyarrow", "tables")
    schema = parquet.schema_arrow
    places, notes = chosen([name.lower() for name in schema.names], str(path), "a row for each photograph")
    names = {known: schema.names[place] for known, place in places.items()}
    image = names.pop("image", None)
    if image is not None:
        _check_image(arrow, schema.field(image).type, f"{path}: the column {image}")
        check_pages(parquet, image, path)
        names.pop("path", None)
    _check_size(parquet, list(names.values()), path)
    try:
        table = parquet.read(columns=list(names.values()))
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({reason(error)}); write it again") from error
    columns = {known: _texts(arrow, table.column(name), known, f"{path}: {name}") for known, name in names.items()}
    classes = (
        _class_names(schema, names["label"]) if arrow.types.is_integer(schema.field(names["label"]).type) else None
    )
    return Columns(str(path), lambda row: f"row {row}", notes=notes, names=classes, **columns), image


def _texts(arrow: Any, column: Any, known: str, where: str) -> list[str]:
    if arrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    wanted = WORDS[KINDS[known]]
    if not any(getattr(arrow.types, kind)(column.type) for kind in KINDS[known]):
        raise UserError(f"{where} is of type {column.type}; give {wanted}")
    values = column.to_pylist()
    if KINDS[known] is NAMES and arrow.types.is_floating(column.type):
        for row, value in enumerate(values):
            if value is not None and not math.isnan(value) and value % 1:
                raise UserError(f"{where} is {value} in row {row}; give {wanted}")
        values = [None if value is None or math.isnan(value) else int(value) for value in values]
    return ["" if value is None else repr(value) if isinstance(value, float) else str(value) for value in values]


def _check_image(arrow: Any, kind: Any, where: str) -> None:
    types = arrow.types
    inner = kind.field("bytes").type if types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    if not (types.is_binary(inner) or types.is_large_binary(inner) or types.is_binary_view(inner)):
        raise UserError(f"{where} is of type {kind}; give the bytes of image files, or a struct with bytes")


def _check_size(parquet: Any, names: list[str], path: Path) -> None:
    """What the columns unpack to, by the file's own words, before they are read."""
    about, claimed = parquet.metadata, 0
    for group in range(about.num_row_groups):
        for place in range(about.num_columns):
            column = about.row_group(group).column(place)
            claimed += column.total_uncompressed_size if column.path_in_schema in names else 0
    check_unpacked(claimed, size_on_disk([path]), str(path))


def _class_names(schema: Any, label: str) -> tuple[str, ...] | None:
    """The names of the classes in Hugging Face's description of the file."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        about = json.loads((schema.metadata or {})[b"huggingface"])
        names = about["info"]["features"][label]["names"]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    return None


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
