"""``table:FILE.csv`` and ``table:FILE.parquet``: a user's own photographs with labels, users and places.

Whatever is needed of the photographs themselves is read once, before any training; pixels are read when asked for.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from unskew.core import limits
from unskew.core.errors import UserError, brief, nearest
from unskew.core.limits import MAX_CLASSES, check_memory, check_plain, check_unpacked, is_folder, user_path
from unskew.core.plugins import require_extra
from unskew.core.text import cut
from unskew.core.types import Examples, ImageSet, Split
from unskew.core.units import counted, format_bytes
from unskew.data import photographs
from unskew.data.arrays import every_fifth, moments
from unskew.data.interface import BROKEN, DAMAGED, NO_CHECKSUM, Finding, Request, Source
from unskew.data.photographs import Files, Parquet, Pictures, Scanned, scan
from unskew.data.rows import Rows
from unskew.data.store import cache_of

OPTIONAL = ("user", "latitude", "longitude", "split")
COLUMNS = ("path", "image", "label", *OPTIONAL)
LEFT_OUT = ("validation", "valid", "val", "dev")  # values of split that are neither train nor test
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
    """A table as it was read: texts, one for each row; None where there is no such column."""

    file: Path
    line: Callable[[int], str]  # what a message calls a row
    label: Texts
    path: Texts | None = None
    names: tuple[str, ...] | None = None  # of the classes, where the labels number them
    user: Texts | None = None
    latitude: Texts | None = None
    longitude: Texts | None = None
    split: Texts | None = None
    notes: tuple[str, ...] = ()

    def refuse(self, row: int, why: str) -> NoReturn:
        """Raise a UserError that names the row."""
        raise UserError(f"{self.file} {self.line(row)}: {why}")


def read_csv(path: Path) -> Columns:
    """A CSV in UTF-8 with a header; commas, semicolons or tabs separate."""
    check_plain(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            check_memory(ROW_BYTES * path.stat().st_size, str(path), "split the table")
            while (first := file.readline(100_000)).isspace():
                pass
            file.seek(0)
            lines = csv.reader(file, delimiter=max(",;\t", key=first.count), skipinitialspace=True, strict=True)
            rows = filter(None, lines)
            header = [name.strip().lower() for name in next(rows, [])]
            places, notes = choose_columns(header, str(path), without=("image",))
            columns: dict[str, Any] = {name: [] for name in places}
            wanted = [(columns[name], column) for name, column in places.items()]
            numbers: list[int] = []
            for row in rows:
                if len(row) != len(header):
                    given = f"{len(row)} values for {len(header)} columns"
                    raise UserError(f"{path} line {lines.line_num}: {given}; give one value per column")
                numbers.append(lines.line_num)
                for texts, column in wanted:
                    texts.append(row[column])
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give the path of a table") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start:,}); save it as UTF-8") from error
    except csv.Error as error:
        unclosed = str(error) == "unexpected end of data"
        why = "a quotation mark is never closed" if unclosed else error
        raise UserError(f"{path} is not a CSV file: {why}; write it again") from error
    return Columns(path, lambda row: f"line {numbers[row]}", notes=notes, **columns)


def choose_columns(
    header: Sequence[str], where: str, without: tuple[str, ...] = ()
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Where each known column is, and a note on the others; refuses a header without what is wanted."""
    if not any(header):
        raise UserError(f"{where} is empty; give a header with path and label, then one row per photograph")
    if double := next((name for name in COLUMNS if header.count(name) > 1), None):
        raise UserError(f"{where}: the column {double} appears twice; remove one")
    places = {name: list(header).index(name) for name in COLUMNS if name in header and name not in without}
    for name in ("label", "path"):
        if name not in places and not (name == "path" and "image" in places):
            raise UserError(f"{where} has no column {name}; {_instead(name, header)}")
    for given, other in (("latitude", "longitude"), ("longitude", "latitude")):
        if given in places and other not in places:
            instead = _instead(other, header)
            raise UserError(f"{where} has a column {given} but no {other}; {instead}, or leave both out")
    free = [column for column in OPTIONAL if column not in places]
    others = [name for name in header if name not in places]
    meant = {
        name: next((c for c in free if name in OTHER_NAMES.get(c, ())), None) or _near(name, free, 0.75)
        for name in others
    }
    shown = _shown([f"{name} (did you mean {like}?)" if like else name for name, like in meant.items()])
    return places, (f"unused columns: {shown}",) if others else ()


def _instead(name: str, header: Sequence[str]) -> str:
    other = next((column for column in header if column in OTHER_NAMES[name]), None)
    if name == "path" and other is None and (image := next((e for e in header if e in OTHER_NAMES["image"]), None)):
        return f"rename {image} to path if it has the files' names, or to image if it has their bytes (parquet only)"
    if close := other or _near(name, header, 0.6):
        return f"rename {close} to {name}"
    return f"its columns are {_shown(header)}: add it, or rename the column you mean"


def _near(name: str, names: Sequence[str], cutoff: float) -> str | None:
    return next(iter(get_close_matches(name, names, n=1, cutoff=cutoff)), None)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(brief(name, 40)[1:-1] for name in names[:9]) + (" …" if len(names) > 9 else "")


def check_columns(columns: Columns) -> Rows:
    """Labels as numbers, users, places and what is test; rows of a validation part are left out."""
    if not len(columns.label):
        raise UserError(f"{columns.file} has a header but no rows; give one row per photograph")
    test, kept, notes = _split(columns)
    labels, classes = _numbered(columns)
    every, users = np.arange(len(labels)), None
    if columns.user is not None and any(user.strip() for user in columns.user):
        users = np.array([user.strip() for user in columns.user], np.str_)  # empty: the example belongs to no client
    root, paths = columns.file.absolute().parent, list(columns.path or ())
    rows = Rows(root, paths, labels, classes, test, users, _places(columns), kept=every).part(kept)
    return replace(rows, notes=(*columns.notes, *notes, *_repeated(rows)))


def _repeated(rows: Rows) -> list[str]:
    """A note on photographs that are listed twice: in train and in test, they make accuracy look better than it is."""
    listed = list(zip(rows.paths, rows.test.tolist(), strict=False))  # no paths where the table has the bytes
    parts = [{path for path, test in listed if test is part} for part in (False, True)]
    both = len(parts[0] & parts[1])
    twice = len(listed) - len(parts[0]) - len(parts[1]) + both
    if not twice:
        return []
    more = f", {both:,} of them in train and in test" if both else ""
    return [f"{counted(twice, 'row')} {'repeats' if twice == 1 else 'repeat'} a photograph of another row{more}"]


def _split(columns: Columns) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], list[str]]:
    if columns.split is None:
        test = every_fifth(len(columns.label))
        if not test.any():
            few = "has no column split, and too few rows to use every fifth for testing"
            raise UserError(f"{columns.file} {few}; add the column, or rows")
        return test, np.arange(len(test)), ["every fifth row is used for testing, since the table has no column split"]
    splits = [word.strip().lower() for word in columns.split]
    known = {"train", "test", *LEFT_OUT}
    if (wrong := next((row for row, word in enumerate(splits) if word not in known), None)) is not None:
        columns.refuse(wrong, f"split is {brief(columns.split[wrong])}; give train, test or validation")
    out = np.isin(splits, LEFT_OUT)
    notes = [f"{int(out.sum()):,} rows with split validation are left out"] if out.any() else []
    return np.equal(splits, "test"), np.flatnonzero(~out), notes


def _numbered(columns: Columns) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels as class numbers: whole numbers in their order, texts in alphabetical order."""
    texts = [text.strip() for text in columns.label]
    if (empty := next((row for row, text in enumerate(texts) if not text), None)) is not None:
        columns.refuse(empty, "the label is empty; give one, or remove the row")
    if (names := columns.names) is not None:
        wrong = (row for row, text in enumerate(texts) if not text.isdigit() or int(text) >= len(names))
        if (first := next(wrong, None)) is not None:
            columns.refuse(first, f"the label is {texts[first]}, but {len(names)} classes are named; correct the label")
        return np.array(texts, np.int64), names
    distinct = set(texts)
    if len(distinct) > MAX_CLASSES:
        raise UserError(f"{columns.file} has {len(distinct):,} different labels; the limit is {MAX_CLASSES:,}")
    whole = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text) for text in distinct)
    classes = sorted(distinct, key=int) if whole else sorted(distinct)
    number_of = {text: number for number, text in enumerate(classes)}
    return np.array([number_of[text] for text in texts], np.int64), tuple(classes)


def _places(columns: Columns) -> npt.NDArray[np.float64] | None:
    if columns.latitude is None or columns.longitude is None:
        return None
    pairs = (("latitude", columns.latitude, 90), ("longitude", columns.longitude, 180))
    places = np.stack([_degrees(columns, name, texts, most) for name, texts, most in pairs], axis=1)
    known = ~np.isnan(places)
    if len(half := np.flatnonzero(known[:, 0] != known[:, 1])):
        has, lacks = ("latitude", "longitude") if known[half[0], 0] else ("longitude", "latitude")
        columns.refuse(int(half[0]), f"it has a {has} but no {lacks}; give both, or leave both empty")
    return places


def _degrees(columns: Columns, name: str, texts: Iterable[str], most: int) -> npt.NDArray[np.float64]:
    values = []
    for row, text in enumerate(texts):
        try:
            value = float(text) if text.strip() else float("nan")
        except ValueError:
            value = float("inf")
        if abs(value) > most:
            degrees = f"degrees from -{most} to {most}, or leave it empty if unknown"
            columns.refuse(row, f"{name} is {brief(text)}; give {degrees}")
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
    parquet = photographs.open_parquet(path)
    arrow = require_extra("pyarrow", "tables")
    schema = parquet.schema_arrow
    places, notes = choose_columns([name.lower() for name in schema.names], str(path))
    names = {known: schema.names[column] for known, column in places.items()}
    image = names.pop("image", None)
    if image is not None:
        _check_image(arrow, schema.field(image).type, f"{path}: the column {image}")
        photographs.check_pages(parquet, image, path)
        names.pop("path", None)
    unpacked = photographs.column_bytes(parquet, list(names.values()))
    check_unpacked(unpacked, limits.size_on_disk([path]), str(path))
    try:
        table = parquet.read(columns=list(names.values()))
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({photographs.reason(error)}); write it again") from error
    columns = {known: _texts(arrow, table.column(name), known, f"{path}: {name}") for known, name in names.items()}
    numbered = arrow.types.is_integer(schema.field(names["label"]).type)
    classes = _class_names(schema, names["label"]) if numbered else None
    return Columns(path, lambda row: f"row {row}", notes=notes, names=classes, **columns), image


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


def _class_names(schema: Any, label: str) -> tuple[str, ...] | None:
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        about = json.loads((schema.metadata or {})[b"huggingface"])
        names = about["info"]["features"][label]["names"]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    return None


NAMED = 5  # broken photographs in a message
LOOKED_FOR = 50  # of the pictures that annotations name, check looks for every 50th


def make_loaders(
    read: Callable[..., tuple[Pictures, Rows, str]], side: int | None = None
) -> tuple[Callable[..., ImageSet], Callable[..., Examples]]:
    """Make ``load`` and ``examples`` of a source of photographs; ``side`` is the default of the option ``size``.

    ``read(request, *, options)`` returns where the photographs are, what is said of them, and their store's name.
    """

    def load(request: Request, *, size: int | None = side, broken: str = "stop", **options: Any) -> ImageSet:
        """``size``: the side in pixels that photographs are scaled and cropped to; ``broken``: stop or skip."""
        _check_reading(request, size, broken)
        pictures, rows, store = read(request, **options)
        return _image_set(request, pictures, rows, _scan(request, pictures, rows, store, size), size, broken)

    def examples(request: Request, *, size: int | None = side, broken: str = "stop", **options: Any) -> Examples:
        """Photographs are read only where broken ones are to be skipped."""
        _check_reading(request, size, broken)
        if broken == "skip":
            return load(request, size=size, broken=broken, **options).examples
        rows = read(request, **options)[1]
        train = rows.part(np.flatnonzero(~rows.test))
        return Examples(train.labels, train.classes, train.users, train.places)

    return load, examples


def read_table(request: Request) -> tuple[Pictures, Rows, str]:
    """Read where a table's photographs are, what it says of them, and the name of its store."""
    path = user_path(request.path)
    if path.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        raise UserError(f"{cut(request.name)}: {brief(request.path)} is not a table; give FILE.csv or FILE.parquet")
    request.say("reading the table", 0, 0)
    columns, image = read_parquet(path) if path.suffix.lower() == ".parquet" else (read_csv(path), None)
    rows, store = check_columns(columns), f"table:{path.absolute()}"
    if image is not None and rows.kept is not None:
        return Parquet(path.absolute(), image, rows.kept), rows, store
    return Files.of(rows.root, rows.paths), rows, store


def check_table(request: Request, *, size: int | None = None, broken: str = "stop") -> list[Finding]:
    """Return a finding for each broken photograph, then one for the table."""
    _check_reading(request, size, broken)
    pictures, rows, store = read_table(request)
    scanned = _scan(request, pictures, rows, store, size)
    findings = [Finding(pictures.name(row), 0, BROKEN, why) for row, why in sorted(scanned.broken.items())]
    if findings and broken == "stop":
        share = f"{len(findings):,} of {counted(len(pictures), 'photograph')} cannot be read"
        detail = f"{share}; replace them, or leave them out: {request.spell(broken='skip')}"
        return [*findings, Finding(request.name, 0, DAMAGED, detail)]
    images = _image_set(request, pictures, rows, scanned, size, broken)
    return [*findings, describe_images(user_path(request.path), images, images.notes)]


def describe_images(where: Path, images: ImageSet, notes: tuple[str, ...] = ()) -> Finding:
    """Return the finding for data that were read whole."""
    detail = f"{len(images.train):,} training and {len(images.test):,} test images"
    size = where.stat().st_size if where.is_file() else images.train.images.nbytes + images.test.images.nbytes
    return Finding(str(where), size, NO_CHECKSUM, detail, notes)


_WHAT = "your own photographs: path or image, label, user, latitude, longitude, split (.parquet too)"
_LOAD, _EXAMPLES = make_loaders(read_table)
TABLE = Source("table", _WHAT, "yours", _LOAD, path="FILE.csv", examples=_EXAMPLES, check=check_table)


def row_source(
    name: str,
    what: str,
    origin: str,
    rows: Callable[..., Rows],
    *,
    folders: tuple[str, ...],
    known_by: tuple[str, ...],
    side: int | None = None,
    **facts: Any,
) -> Source:
    """Make the source of a published set of photographs, which is read like a table.

    Parameters
    ----------
    rows
        ``rows(folder, *, options)`` lists the photographs in the set's folder.
    folders
        Where the set is looked for below the data folder, which is looked in last.
    known_by
        Files or folders of the set, any one of which shows that it is there.
    side
        The default of the option ``size``.
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

    @wraps(rows)
    def read_rows(request: Request, **options: Any) -> Rows:
        folder = locate(request.data_dir)
        request.say(f"reading the files of {name} in {folder}", 0, 0)
        return rows(folder, **options)

    def read(request: Request, **options: Any) -> tuple[Pictures, Rows, str]:
        made = read_rows(request, **options)
        root = made.root.absolute()
        return Files.of(root, made.paths), made, f"{request.call.name} in {root}"

    def check(request: Request, *, size: int | None = side, broken: str = "stop", **options: Any) -> list[Finding]:
        """Count the rows, and those of the pictures that are there, of the ones looked for."""
        made = read_rows(request, **options)
        train, looked = int(np.count_nonzero(~made.test)), made.paths[::LOOKED_FOR]
        present = sum((made.root / str(path)).is_file() for path in looked)
        numbers = f"{train:,} training and {len(made) - train:,} test images of {len(made.classes):,} classes"
        detail = f"{numbers}; of {counted(len(looked), 'picture')} looked for, {present:,} exist"
        return [Finding(str(locate(request.data_dir)), 0, NO_CHECKSUM, detail, made.notes)]

    load, examples = make_loaders(read, side)
    return Source(name, what, origin, load, "", locate, read_rows, examples, check, **facts)


def _check_reading(request: Request, size: int | None, broken: str) -> None:
    check_side(request, size)
    if broken not in ("stop", "skip"):
        raise UserError(f"{cut(request.name)}: broken={cut(broken)}: {nearest(broken, ('stop', 'skip'))}")


def check_side(request: Request, size: int | None) -> None:
    """Refuse a side that a square of pixels cannot have."""
    if size is not None and not 1 <= size <= 4096:
        raise UserError(f"{cut(request.name)}: size={cut(str(size))} must be from 1 to 4096, as in (size=128)")


def _scan(request: Request, pictures: Pictures, rows: Rows, store: str, size: int | None) -> Scanned:
    return scan(pictures, store, size, ~rows.test, request.cache or cache_of(), request.say)


def _image_set(
    request: Request, pictures: Pictures, rows: Rows, scanned: Scanned, size: int | None, broken: str
) -> ImageSet:
    name, cache = request.name, request.cache or cache_of()
    notes = [*rows.notes, *_note_broken(request, pictures, scanned, broken)]
    if size is not None:
        notes.append(f"photographs are scaled and cropped to {size}×{size}")
    parts = [np.flatnonzero(scanned.good & part) for part in (~rows.test, rows.test)]
    for part, numbers in zip(("train", "test"), parts, strict=True):
        if not len(numbers):
            raise UserError(f"{name} has no photographs in the {part} part; add rows with split = {part}")
    if len(np.unique(rows.labels[parts[0]])) < 2:
        raise UserError(f"{name}: all training photographs have the same label; a classifier needs two or more")
    train, test = (rows.part(numbers) for numbers in parts)
    first, second = (Split(scanned.photographs(numbers), rows.labels[numbers]) for numbers in parts)
    mean, std = moments(scanned.counts[: 1 if scanned.grey else 3])
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
