"""Tables: ``table:FILE.csv`` and ``table:FILE.parquet`` with a user's photographs, labels, users and places.

Also reads columns of other CSV files, and writes tables. Shapes: N rows.
"""

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief
from unskew.core.limits import MAX_CLASSES, check_memory, check_plain, check_unpacked, size_on_disk, user_path
from unskew.core.plugins import require_extra
from unskew.core.text import cut
from unskew.data import photographs
from unskew.data.arrays import every_fifth
from unskew.data.interface import OWN, DataRequest, Rows, Source

OPTIONAL = ("user", "latitude", "longitude", "split")
COLUMNS = ("path", "image", "label", *OPTIONAL)
LEFT_OUT = ("validation", "valid", "val", "dev")  # values of split that are neither train nor test
ROW_BYTES = 20  # in memory per byte of a CSV file, approximately
OTHER_NAMES = {
    "label": ("class", "category", "target", "species", "label_id", "class_id", "category_id"),
    "image": ("img", "picture", "photo", "photograph", "jpg", "png", "bytes"),
    "path": ("file", "filename", "file_name", "image_path", "file_path"),
    "user": (
        "user_id", "author", "client", "client_id", "owner", "site", "site_id", "hospital", "clinic", "camera",
        "station", "patient", "photographer", "observer",
    ),
    "latitude": ("lat",),
    "longitude": ("lon", "lng", "long"),
}  # fmt: skip
EXCEL = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}  # the start of its "Unicode text"

Texts = Sequence[str]


@dataclass(frozen=True)
class Columns:
    """A table's columns as strings; None if the table has no such column."""

    file: Path
    line: Callable[[int], str]  # a row's name in messages
    label: Texts
    path: Texts | None = None
    names: tuple[str, ...] | None = None  # of the classes, if the labels are their numbers
    user: Texts | None = None
    latitude: Texts | None = None
    longitude: Texts | None = None
    split: Texts | None = None
    notes: tuple[str, ...] = ()
    image: str | None = None  # the column with the photographs as bytes

    def refuse(self, row: int, why: str) -> NoReturn:
        """Raise a UserError about a row."""
        raise UserError(f"{self.file} {self.line(row)}: {why}")


def read_csv(path: Path) -> Columns:
    """Read a CSV file in UTF-8 with a header, or as Excel writes it; separated by commas, semicolons or tabs."""
    check_plain(path)
    try:
        with path.open("rb") as start:
            encoding = EXCEL.get(start.read(2), "utf-8-sig")
        with path.open(encoding=encoding, newline="") as file:
            check_memory(ROW_BYTES * path.stat().st_size, str(path), "split the table")
            while (first := file.readline(100_000)).isspace():
                pass
            named = re.fullmatch(r"sep=(.)\s*", first)  # Excel's first line
            file.seek(0)
            delimiter = named[1] if named else max(",;\t", key=first.count)
            lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
            rows = filter(None, lines)
            if named:
                next(rows)
            header = [name.strip().lower() for name in next(rows, [])]
            positions, notes = choose_columns(header, str(path), without=("image",))
            columns: dict[str, Any] = {name: [] for name in positions}
            wanted = [(columns[name], column) for name, column in positions.items()]
            numbers: list[int] = []
            for row in rows:
                if len(row) != len(header):
                    sizes = f"{len(row)} values for {len(header)} columns"
                    raise UserError(f"{path} line {lines.line_num}: {sizes}; give one value per column")
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
    """The positions of the known columns, and a note on the others; refuses a header without the required ones."""
    if not any(header):
        raise UserError(f"{where} is empty; give a header with path and label, then one row per photograph")
    if double := next((name for name in COLUMNS if header.count(name) > 1), None):
        raise UserError(f"{where}: the column {double} appears twice; remove one")
    positions = {name: list(header).index(name) for name in COLUMNS if name in header and name not in without}
    for name in ("label", "path"):
        if name not in positions and not (name == "path" and "image" in positions):
            raise UserError(f"{where} has no column {name}; {_instead(name, header)}")
    for one, other in (("latitude", "longitude"), ("longitude", "latitude")):
        if one in positions and other not in positions:
            instead = _instead(other, header)
            raise UserError(f"{where} has a column {one} but no {other}; {instead}, or leave out both")
    free = [column for column in OPTIONAL if column not in positions]
    others = [name for name in header if name not in positions]
    meant = {
        name: next((c for c in free if name in OTHER_NAMES.get(c, ())), None) or _near(name, free, 0.75)
        for name in others
    }
    wanted = {"user": "rename it to user for one client per value"}
    hints = {name: wanted.get(like, f"did you mean {like}?") for name, like in meant.items() if like}
    shown = _shown([f"{name} ({hints[name]})" if name in hints else name for name in others])
    return positions, (f"unused columns: {shown}",) if others else ()


def _instead(name: str, header: Sequence[str]) -> str:
    other = next((column for column in header if column in OTHER_NAMES[name]), None)
    if name == "path" and other is None and (image := next((e for e in header if e in OTHER_NAMES["image"]), None)):
        return f"rename {image} to path if it contains file names, or to image if it contains bytes (parquet only)"
    if close := other or _near(name, header, 0.6):
        return f"rename {close} to {name}"
    return f"its columns are {_shown(header)}; add it, or rename the column you mean"


def _near(name: str, names: Sequence[str], cutoff: float) -> str | None:
    return next(iter(get_close_matches(name, names, n=1, cutoff=cutoff)), None)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(brief(name, 80)[1:-1] for name in names[:9]) + (" …" if len(names) > 9 else "")


def check_columns(columns: Columns) -> Rows:
    """Check the columns, number the labels and choose the test part; rows of a validation part are left out."""
    if not len(columns.label):
        raise UserError(f"{columns.file} has a header but no rows; add one row per photograph")
    test, used, notes = _split(columns)
    labels, classes = _number_labels(columns)
    root, users = columns.file.absolute().parent, None
    if columns.user is not None and any(user.strip() for user in columns.user):
        users = np.array([user.strip() for user in columns.user], np.str_)  # empty: the example belongs to no client
    rows = Rows(root, list(columns.path or ()), labels, classes, test, users, _places(columns))
    if columns.image is not None:
        rows = replace(rows, root=columns.file.absolute(), numbers=np.arange(len(labels)), column=columns.image)
    return replace(rows.part(used), notes=(*columns.notes, *notes))


def _split(columns: Columns) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], list[str]]:
    if columns.split is None:
        test = every_fifth(len(columns.label))
        if not test.any():
            few = "has no column split, and too few rows to use every fifth for testing"
            raise UserError(f"{columns.file} {few}; add the column, or more rows")
        return test, np.arange(len(test)), ["every fifth row is used for testing, since the table has no column split"]
    splits = [word.strip().lower() for word in columns.split]
    known = {"train", "test", *LEFT_OUT}
    if (wrong := next((row for row, word in enumerate(splits) if word not in known), None)) is not None:
        columns.refuse(wrong, f"split is {brief(columns.split[wrong])}; give train, test or validation")
    out = np.isin(splits, LEFT_OUT)
    notes = [f"{int(out.sum()):,} rows with split validation are left out"] if out.any() else []
    return np.equal(splits, "test"), np.flatnonzero(~out), notes


def _number_labels(columns: Columns) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    texts = [text.strip() for text in columns.label]
    if (empty := next((row for row, text in enumerate(texts) if not text), None)) is not None:
        columns.refuse(empty, "the label is empty; give one, or remove the row")
    if (names := columns.names) is not None:
        wrong = (row for row, text in enumerate(texts) if not text.isdigit() or int(text) >= len(names))
        if (first := next(wrong, None)) is not None:
            columns.refuse(first, f"the label is {texts[first]}, but there are {len(names)} classes; correct the label")
        return np.array(texts, np.int64), names
    distinct = set(texts)
    if len(distinct) > MAX_CLASSES:
        raise UserError(f"{columns.file} has {len(distinct):,} different labels; the limit is {MAX_CLASSES:,}")
    integers = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text) for text in distinct)
    classes = sorted(distinct, key=int) if integers else sorted(distinct)
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
        columns.refuse(int(half[0]), f"there is a {has} but no {lacks}; give both, or leave both empty")
    return places


def _degrees(columns: Columns, name: str, texts: Iterable[str], most: int) -> npt.NDArray[np.float64]:
    values = []
    for row, text in enumerate(texts):
        try:
            value = float(text.replace(",", ".")) if text.strip() else float("nan")  # Excel's decimal comma
        except ValueError:
            value = float("inf")
        if abs(value) > most:
            degrees = f"degrees from -{most} to {most}, or leave it empty if unknown"
            columns.refuse(row, f"the {name} is {brief(text)}; give {degrees}")
        values.append(value)
    return np.array(values, np.float64)


TEXTS = ("is_string", "is_large_string", "is_string_view")
NUMBERS = ("is_floating", "is_integer", "is_decimal", "is_null")
NAMES = (*TEXTS, "is_integer", "is_floating")  # pandas turns whole numbers into floats if some are missing
KINDS = {"label": NAMES, "user": NAMES, "path": TEXTS, "split": TEXTS, "latitude": NUMBERS, "longitude": NUMBERS}
EXPECTED = {TEXTS: "strings", NUMBERS: "numbers", NAMES: "strings or whole numbers"}


def read_parquet(path: Path) -> Columns:
    """Read all columns except the photographs themselves."""
    check_plain(path)
    parquet = photographs.open_parquet(path)
    arrow = require_extra("pyarrow", "tables")
    schema = parquet.schema_arrow
    positions, notes = choose_columns([name.lower() for name in schema.names], str(path))
    names = {known: schema.names[column] for known, column in positions.items()}
    image = names.pop("image", None)
    if image is not None:
        kind, types = schema.field(image).type, arrow.types
        inner = kind.field("bytes").type if types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
        if not (types.is_binary(inner) or types.is_large_binary(inner) or types.is_binary_view(inner)):
            wanted = "the bytes of image files, or a struct with bytes"
            raise UserError(f"{path}: the column {image} has type {kind}; give {wanted}")
        photographs.check_pages(parquet, image, path)
        names.pop("path", None)
    check_unpacked(photographs.column_bytes(parquet, list(names.values())), size_on_disk([path]), str(path))
    try:
        table = parquet.read(columns=list(names.values()))
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({photographs.reason(error)}); write it again") from error
    columns: dict[str, Any] = {
        known: _texts(arrow, table.column(name), known, f"{path}: {name}") for known, name in names.items()
    }
    classes = None
    if arrow.types.is_integer(schema.field(names["label"]).type):
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            metadata = json.loads((schema.metadata or {})[b"huggingface"])
            listed = metadata["info"]["features"][names["label"]]["names"]
            if isinstance(listed, list) and listed and all(isinstance(name, str) for name in listed):
                classes = tuple(listed)
    return Columns(path, lambda row: f"row {row}", notes=notes, names=classes, image=image, **columns)


def _texts(arrow: Any, column: Any, known: str, where: str) -> list[str]:
    if arrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    wanted = EXPECTED[KINDS[known]]
    if not any(getattr(arrow.types, kind)(column.type) for kind in KINDS[known]):
        raise UserError(f"{where} has type {column.type}; give {wanted}")
    values = column.to_pylist()
    if KINDS[known] is NAMES and arrow.types.is_floating(column.type):
        for row, value in enumerate(values):
            if value is not None and not math.isnan(value) and value % 1:
                raise UserError(f"{where} is {value} in row {row}; give {wanted}")
        values = [None if value is None or math.isnan(value) else int(value) for value in values]
    return ["" if value is None else repr(value) if isinstance(value, float) else str(value) for value in values]


def read_table(request: DataRequest) -> Rows:
    """List the photographs of a table."""
    path = user_path(request.path)
    kind = path.suffix.lower()
    if kind not in (".csv", ".tsv", ".parquet"):
        raise UserError(f"{cut(request.name)}: {brief(request.path)} is not a table; give FILE.csv or FILE.parquet")
    request.say("reading the table", 0, 0)
    return check_columns(read_parquet(path) if kind == ".parquet" else read_csv(path))


TABLE = Source(
    "table",
    "your own photographs: path or image, label, user, latitude, longitude, split",
    OWN,
    rows=read_table,
    path="FILE.csv",
)


def table_csv(rows: Rows, out: Path) -> bytes:
    """Write a table; paths in it are relative to the folder of ``out``, so that both can be moved together."""
    root = os.path.relpath(rows.root.resolve(), out.resolve().parent)
    prefix = "" if root == os.curdir else f"{root}/"
    columns: dict[str, Iterable[str]] = {
        "path": (f"{prefix}{path}" for path in rows.paths),
        "label": (rows.classes[label] for label in rows.labels.tolist()),
    }
    if rows.users is not None:
        columns["user"] = rows.users.tolist()
    if rows.places is not None:
        for name, degrees in zip(("latitude", "longitude"), rows.places.T.tolist(), strict=True):
            columns[name] = ("" if math.isnan(value) else repr(value) for value in degrees)
    columns["split"] = ("test" if test else "train" for test in rows.test.tolist())
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()


MAX_FIELD = 1 << 24  # characters: in train_clean.csv of Landmarks, one field lists all images of a landmark


def read_columns(path: Path, wanted: Sequence[str], *, only: set[str] | None = None) -> list[list[str]]:
    """Read columns of a CSV file; ``only`` selects the rows whose first wanted column is in it."""
    columns: list[list[str]] = [[] for _ in wanted]
    check_plain(path)
    before = csv.field_size_limit(MAX_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for _, fields in csv_rows(file, str(path), wanted):
                if only is None or fields[0] in only:
                    for column, field in zip(columns, fields, strict=True):
                        column.append(field)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; it is part of the data set") from error
    finally:
        csv.field_size_limit(before)
    return columns


def csv_rows(file: Iterable[str], name: str, wanted: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Read the wanted columns of a CSV with a header: the line number and the fields of each row."""
    try:
        rows = csv.reader(file)
        header = [column.strip() for column in next(rows, [])]
        if missing := [column for column in wanted if column not in header]:
            raise UserError(f"{name} has no column {missing[0]!r}; its first line must contain {', '.join(wanted)}")
        columns = [header.index(column) for column in wanted]
        for row in filter(None, rows):
            if len(row) != len(header):
                raise UserError(f"{name}, line {rows.line_num}: {len(row)} fields, but the header has {len(header)}")
            yield rows.line_num, [row[column].strip() for column in columns]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{name} is not a CSV file in UTF-8: {error}") from error
