"""The columns of a table of photographs, from CSV or parquet: checked, labels numbered, as ``Rows``.

Shapes: N rows.
"""

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief
from unskew.core.limits import MAX_CLASSES, check_memory, check_plain
from unskew.core.units import counted

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
