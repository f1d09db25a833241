"""A table of photographs as columns, written as CSV; and the published splits of iNaturalist and Landmarks.

``federated_train*.csv`` has user_id, image_id and class, ``test.csv`` next to it image_id and class (Hsu, Qi and Brown
2020). An image id is that of the original data set, a user id any text: a number, an author, a cell of the S2 grid.

Shapes: N rows.
"""

import csv
import io
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_plain, user_path


@dataclass(frozen=True)
class Rows:
    """Photographs, by their files or in a table that has their bytes. ``labels`` number the classes."""

    root: Path
    paths: list[str]  # [N], below ``root``; none where a table has the bytes
    labels: npt.NDArray[np.int64]  # [N]
    classes: tuple[str, ...]
    test: npt.NDArray[np.bool_]  # [N]
    users: npt.NDArray[np.str_] | None = None  # [N]
    places: npt.NDArray[np.float64] | None = None  # [N, 2], latitude and longitude in degrees; NaN where unknown
    notes: tuple[str, ...] = ()
    kept: npt.NDArray[np.int64] | None = None  # [N], the rows of the user's table that are train or test

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, index: npt.NDArray[np.int64]) -> "Rows":
        """These rows alone."""
        own: dict[str, Any] = {
            name: None if (column := getattr(self, name)) is None else column[index]
            for name in ("labels", "test", "users", "places", "kept")
        }
        return replace(self, paths=[self.paths[row] for row in index.tolist()] if self.paths else [], **own)


def table_csv(rows: Rows, out: Path) -> bytes:
    """The table; paths in it are relative to the folder of ``out``, so that both can be moved together."""
    root = os.path.relpath(rows.root.resolve(), out.resolve().parent)
    before = "" if root == os.curdir else f"{root}/"
    columns: dict[str, Iterable[str]] = {
        "path": (f"{before}{path}" for path in rows.paths),
        "label": (rows.classes[label] for label in rows.labels.tolist()),
    }
    if rows.users is not None:
        columns["user"] = rows.users.tolist()
    if rows.places is not None:  # a place that is not known is empty
        for name, degrees in zip(("latitude", "longitude"), rows.places.T.tolist(), strict=True):
            columns[name] = ("" if math.isnan(value) else repr(value) for value in degrees)
    columns["split"] = ("test" if test else "train" for test in rows.test.tolist())
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()


TEST = "test.csv"
MAX_FIELD = 1 << 24  # characters: train_clean.csv of Landmarks has all images of a landmark in one field


@dataclass(frozen=True)
class PublishedSplit:
    """Train first, then test: which image, of which class (numbered by the split), of which user ("" in test)."""

    images: list[str]
    labels: npt.NDArray[np.int64]
    users: list[str]
    test: npt.NDArray[np.bool_]


def read_split(text: str, folder: Path) -> PublishedSplit:
    """The split in a CSV and in the test.csv next to it; a name alone is looked for in the set's folder."""
    path = user_path(text)
    if not os.path.lexists(path):
        found = (there for depth in ("", "*/", "*/*/") for there in sorted(folder.glob(f"{depth}{path.name}")))
        given, path = path, next(found, folder / path.name)
        if not os.path.lexists(path):
            instead = f"fetch it (unskew data fetch {folder.name} --data-dir DIR), or give its path"
            raise UserError(f"the split {given} does not exist, not even in {folder}; {instead}")
    users, images, classes = read_columns(path, ("user_id", "image_id", "class"))
    test_images, test_classes = read_columns(path.with_name(TEST), ("image_id", "class"))
    names = [*images, *test_images]
    if wrong := next((text for text in [*classes, *test_classes] if not is_number(text)), None):
        raise UserError(f"{path}: the class {brief(wrong)} is not a whole number; give the published split")
    labels = np.array([*classes, *test_classes], np.int64)
    if len(names) and len(np.unique(labels)) != labels.max() + 1:
        raise UserError(f"{path}: its classes are not numbered from 0 without gaps; give the published split")
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise UserError(f"{path}: image_id {brief(twice)} appears twice, in it or in {TEST}; give the published files")
    test = np.arange(len(names)) >= len(images)
    return PublishedSplit(names, labels, [*users, *[""] * len(test_images)], test)


def read_columns(path: Path, wanted: Sequence[str], *, only: set[str] | None = None) -> list[list[str]]:
    """Read columns of a CSV row by row; ``only`` keeps the rows whose first wanted column is in it."""
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
    """Read the wanted columns of a CSV with a header: for each row its line number and its fields."""
    try:
        rows = csv.reader(file)
        header = [column.strip() for column in next(rows, [])]
        if missing := [column for column in wanted if column not in header]:
            raise UserError(f"{name} has no column {missing[0]!r}: its first line must name {', '.join(wanted)}")
        places = [header.index(column) for column in wanted]
        for row in filter(None, rows):
            if len(row) != len(header):
                raise UserError(f"{name}, line {rows.line_num}: {len(row)} fields, but the header has {len(header)}")
            yield rows.line_num, [row[column].strip() for column in places]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{name} is not a CSV file in UTF-8: {error}") from error


def draw_from_each(
    rows: npt.NDArray[np.int64], owner: npt.NDArray[np.int64], most: int, draw: np.random.Generator
) -> npt.NDArray[np.int64]:
    """At most so many of the rows of each owner, drawn; ``owner`` is over all rows."""
    mixed = draw.permutation(rows)
    order = mixed[np.argsort(owner[mixed], kind="stable")]
    sizes = np.unique(owner[order], return_counts=True)[1]
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[rank < most]


def is_number(text: str) -> bool:
    """Whether a text is a whole number of few digits."""
    return text.isascii() and text.isdigit() and len(text) < 10
