"""Partitions as CSV, the published form: a row for each example with user_id, image_id and class.

In the splits of CIFAR an image_id is the example's row in the training set. In those of iNaturalist and Landmarks it is
the image's id in the original data set, any text: a second table then says which row has which id.
"""

import csv
import io
from collections.abc import Iterator

import numpy as np

from unskew.core.errors import UserError
from unskew.data.population import Ints, Partition, number_users

COLUMNS = ("user_id", "image_id", "class")
MAX_USER_ID = 200  # characters: the longest one decides how much memory all of them take
IDS = "?ids="  # between the CSV's path and that of the table of ids
IDS_HELP = (
    "ids of the original data set, as those of iNaturalist and Landmarks, need a table that gives their rows: "
    "file:SPLIT.csv?ids=TABLE.csv, with the columns image_id,row"
)


def from_csv(content: bytes, labels: Ints, *, name: str, seed: int, ids: tuple[bytes, str] | None = None) -> Partition:
    """The partition; image_id is a row of the training set, counted from 0, or an id in the table ``ids``.

    ``ids`` is that table's content and its name. User ids are any text. Examples that no row names belong to no client,
    and are counted in the notes. Classes must be the labels; with a table they may be numbered otherwise, one to one.
    """
    (users, images, classes), lines = _columns(content, name, COLUMNS)
    if too_long := [line for user, line in zip(users, lines, strict=True) if len(user) > MAX_USER_ID]:
        raise UserError(f"{name}, line {too_long[0]}: a user_id has at most {MAX_USER_ID} characters; shorten it")
    examples = len(labels)
    places = _rows(images, lines, name, examples) if ids is None else _found(images, lines, name, _table(ids, examples))
    rows = np.array(places, np.int64)
    order = np.argsort(rows, kind="stable")
    twice = np.sort(order[1:][rows[order][1:] == rows[order][:-1]])
    if len(twice):
        raise UserError(f"{name}, line {lines[twice[0]]}: image_id {_cut(images[twice[0]])} is there a second time")
    _check_classes(classes, lines, images, labels[rows], name, exactly=ids is None)
    owner, names = number_users(np.array(users, np.str_))
    client = np.full(examples, -1, np.int32)
    client[rows] = owner
    client.flags.writeable = False
    left = examples - len(images)
    unheld = f"{left} of {examples} training examples are in no row of the file and belong to no client"
    return Partition(client, len(names), f"file:{name}", seed, names, notes=(unheld,) if left else ())


def to_csv_rows(partition: Partition, labels: Ints) -> Iterator[tuple[str, str, str]]:
    """The partition in the published form, header first, by image_id; examples of no client have no row."""
    yield COLUMNS
    for image in np.flatnonzero(partition.client >= 0).tolist():
        client = int(partition.client[image])
        yield (
            str(client) if partition.names is None else partition.names[client],
            str(image),
            str(labels[image]),
        )


def _rows(images: list[str], lines: list[int], name: str, examples: int) -> list[int]:
    """Image ids that are rows of the training set."""
    rows = []
    for image, line in zip(images, lines, strict=True):
        row = _whole(image, "image_id", name, line, f"; {IDS_HELP}")
        if not 0 <= row < examples:
            raise UserError(
                f"{name}, line {line}: image_id {_cut(image)} is outside the training set, whose rows are 0 to "
                f"{examples - 1}; {IDS_HELP}"
            )
        rows.append(row)
    return rows


def _found(images: list[str], lines: list[int], name: str, table: tuple[dict[str, int], str]) -> list[int]:
    """Image ids by the table of ids."""
    rows, source = table
    for image, line in zip(images, lines, strict=True):
        if image not in rows:
            raise UserError(f"{name}, line {line}: {source} has no image_id {_cut(image)}; add it, or remove the line")
    return [rows[image] for image in images]


def _table(ids: tuple[bytes, str], examples: int) -> tuple[dict[str, int], str]:
    """The row of each id, and the table's name. Each id and each row is there once."""
    content, name = ids
    (images, texts), lines = _columns(content, name, ("image_id", "row"))
    table: dict[str, int] = {}
    seen: set[int] = set()
    for image, text, line in zip(images, texts, lines, strict=True):
        row = _whole(text, "row", name, line)
        if not 0 <= row < examples:
            raise UserError(
                f"{name}, line {line}: row {_cut(text)} is outside the training set, whose rows are 0 to {examples - 1}"
            )
        if image in table or row in seen:
            what = f"image_id {_cut(image)}" if image in table else f"row {row}"
            raise UserError(f"{name}, line {line}: {what} is there a second time; give each once")
        table[image] = row
        seen.add(row)
    return table, name


def _check_classes(
    classes: list[str], lines: list[int], images: list[str], labels: Ints, name: str, *, exactly: bool
) -> None:
    """Refuse a class that is not the example's label, or not the same label everywhere."""
    label_of: dict[int, int] = {}
    class_of: dict[int, int] = {}
    for text, line, image, label in zip(classes, lines, images, labels.tolist(), strict=True):
        given = _whole(text, "class", name, line)
        if exactly and given != label:
            raise UserError(
                f"{name}, line {line}: image_id {image} is of class {given} there and {label} in the training set; is "
                f"it the split of another data set, or of another order? {IDS_HELP}"
            )
        if label_of.setdefault(given, label) != label or class_of.setdefault(label, given) != given:
            before = f"class {given} has the label {label_of[given]}"
            if label_of[given] == label:
                before = f"label {label} is of class {class_of[label]}"
            raise UserError(
                f"{name}, line {line}: image_id {_cut(image)} is of class {given} there and of label {label} in the "
                f"training set, but {before} above; is the table of ids that of another data set?"
            )


def _columns(content: bytes, name: str, wanted: tuple[str, ...]) -> tuple[list[list[str]], list[int]]:
    """The wanted columns of a CSV as texts, and the rows' line numbers."""
    columns: list[list[str]] = [[] for _ in wanted]
    lines: list[int] = []
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""))
        header = [column.strip() for column in next(reader, [])]
        if missing := [column for column in wanted if column not in header]:
            ours = "an .npz of ours, or a CSV" if wanted == COLUMNS else "a table of ids is a CSV"
            raise UserError(
                f"{name} is not a partition we can read: {ours} whose first line is {','.join(wanted)}; it lacks "
                f"{', '.join(missing)}"
            )
        places = [header.index(column) for column in wanted]
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise UserError(f"{name}, line {reader.line_num}: {len(row)} fields, the header has {len(header)}")
            for column, place in zip(columns, places, strict=True):
                column.append(row[place].strip())
            lines.append(reader.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{name} is not a CSV in UTF-8: {error}") from error
    if not lines:
        raise UserError(f"{name} has a header and no rows")
    return columns, lines


def _whole(text: str, column: str, name: str, line: int, hint: str = "") -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}, line {line}: {column} must be a whole number, {_cut(text)!r} given{hint}") from None


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
