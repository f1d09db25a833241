"""Partitions as files: our .npz format and the published CSV format."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.limits import read_plain, user_path
from unskew.core.text import Call, apply, cut, parse_call
from unskew.data.arrays import DAMAGED, read_npz
from unskew.data.interface import split_options
from unskew.data.population import Ints, Partition, cells, check_clients, emd_of_cells, number_users
from unskew.data.tables import csv_rows

COLUMNS = ("user_id", "image_id", "class")
MAX_USER_ID = 200  # characters: all ids take as much memory as the longest one
IDS_HELP = (
    "ids of the original data set, as in iNaturalist and Landmarks, need a table that maps them to rows: "
    "file:SPLIT.csv(ids=TABLE.csv), with the columns image_id,row"
)


def from_csv(content: bytes, labels: Ints, *, name: str, seed: int, ids: tuple[bytes, str] | None = None) -> Partition:
    """Parse a partition; image_id is a row of the training set, counted from 0, or an id in the table ``ids``.

    ``ids`` is that table's content and its name. A user id can be any text. Examples that are not in the file belong
    to no client and are counted in the notes. Classes must equal the labels; with a table they may be numbered
    differently, one to one.
    """
    lines, (users, images, classes) = _columns(content, name, COLUMNS)
    if too_long := [line for user, line in zip(users, lines, strict=True) if len(user) > MAX_USER_ID]:
        raise UserError(f"{name}, line {too_long[0]}: the user_id has more than {MAX_USER_ID} characters; shorten it")
    examples = len(labels)
    if ids is None:
        numbered = zip(images, lines, strict=True)
        numbers = [_row(image, "image_id", name, line, examples, f"; {IDS_HELP}") for image, line in numbered]
    else:
        table = _read_ids(*ids, examples)
        if unknown := next(((n, image) for n, image in zip(lines, images, strict=True) if image not in table), None):
            missing = f"{ids[1]} has no image_id {cut(unknown[1], 40)}"
            raise UserError(f"{name}, line {unknown[0]}: {missing}; add it, or remove the line")
        numbers = [table[image] for image in images]
    rows = np.array(numbers, np.int64)
    order = np.argsort(rows, kind="stable")
    twice = np.sort(order[1:][rows[order][1:] == rows[order][:-1]])
    if len(twice):
        raise UserError(f"{name}, line {lines[twice[0]]}: image_id {cut(images[twice[0]], 40)} appears a second time")
    _check_classes(classes, lines, images, labels[rows], name, exactly=ids is None)
    owner, names = number_users(np.array(users, np.str_))
    client = np.full(examples, -1, np.int32)
    client[rows] = owner
    client.flags.writeable = False
    left = examples - len(images)
    note = f"{left} of {examples} training examples are not in the file and belong to no client"
    return Partition(client, len(names), f"file:{name}", seed, names, notes=(note,) if left else ())


def to_csv_rows(partition: Partition, labels: Ints) -> Iterator[tuple[str, str, str]]:
    """The partition in the published format, header first, by image_id; unassigned examples have no row."""
    yield COLUMNS
    for image in np.flatnonzero(partition.client >= 0).tolist():
        client = int(partition.client[image])
        yield (str(client) if partition.names is None else partition.names[client], str(image), str(labels[image]))


def _read_ids(content: bytes, name: str, examples: int) -> dict[str, int]:
    table: dict[str, int] = {}
    rows: set[int] = set()
    lines, (images, texts) = _columns(content, name, ("image_id", "row"))
    for line, image, text in zip(lines, images, texts, strict=True):
        row = _row(text, "row", name, line, examples)
        if image in table or row in rows:
            what = f"image_id {cut(image, 40)}" if image in table else f"row {row}"
            raise UserError(f"{name}, line {line}: {what} appears twice; give it once")
        table[image] = row
        rows.add(row)
    return table


def _check_classes(
    classes: list[str], lines: list[int], images: list[str], labels: Ints, name: str, *, exactly: bool
) -> None:
    label_of: dict[int, int] = {}
    class_of: dict[int, int] = {}
    for text, line, image, label in zip(classes, lines, images, labels.tolist(), strict=True):
        number = _parse_int(text, "class", name, line)
        where = f"{name}, line {line}: image_id {cut(image, 40)}"
        both = f"{where} has class {number} in the file and {label} in the training set"
        if exactly and number != label:
            raise UserError(f"{both}; is the split for other data, or for another order of the images? {IDS_HELP}")
        if label_of.setdefault(number, label) != label or class_of.setdefault(label, number) != number:
            before = f"class {number} has the label {label_of[number]}"
            if label_of[number] == label:
                before = f"label {label} belongs to class {class_of[label]}"
            raise UserError(f"{both}, but {before} above; does the table of ids belong to another data set?")


def _columns(content: bytes, name: str, wanted: tuple[str, ...]) -> tuple[list[int], list[list[str]]]:
    file = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
    rows = list(csv_rows(file, name, wanted))
    if not rows:
        raise UserError(f"{name} has a header but no rows; add one row per example")
    return [line for line, _ in rows], [[fields[column] for _, fields in rows] for column in range(len(wanted))]


def _row(text: str, column: str, name: str, line: int, examples: int, hint: str = "") -> int:
    row = _parse_int(text, column, name, line, hint)
    if not 0 <= row < examples:
        outside = f"{column} {cut(text, 40)} is outside the training set, whose rows are 0 to {examples - 1}"
        raise UserError(f"{name}, line {line}: {outside}{hint}")
    return row


def _parse_int(text: str, column: str, name: str, line: int, hint: str = "") -> int:
    try:
        return int(text)
    except ValueError:
        wrong = f"{column} must be a whole number, not {cut(text, 40)!r}"
        raise UserError(f"{name}, line {line}: {wrong}{hint}") from None


def to_arrays(partition: Partition, labels: Ints, classes: int) -> dict[str, npt.NDArray[Any]]:
    """The contents of our .npz file; ``counts`` [cells, 3] lists the nonzero (client, class, examples)."""
    filled = cells(partition.client, labels, classes)
    seed = partition.seed if abs(partition.seed) < 2**63 else str(partition.seed)
    arrays: dict[str, npt.NDArray[Any]] = {
        "client": np.asarray(partition.client, np.int32),
        "clients": np.array(partition.clients, np.int64),
        "scheme": np.array(partition.scheme),
        "seed": np.array(seed),
        "hash": np.array(partition.hash),
        "sizes": np.bincount(partition.client[partition.client >= 0], minlength=partition.clients),
        "counts": np.stack([column.astype(np.int32) for column in filled], axis=1),
        "emd": np.array(emd_of_cells(*filled)),
        "redraws": np.array(partition.redraws, np.int64),
        "notes": np.array(partition.notes, np.str_),
    }
    if partition.names is not None:
        arrays["names"] = np.array(partition.names, np.str_)
    return arrays


def from_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], labels: Ints, classes: int, *, name: str = "the partition"
) -> Partition:
    """Rebuild a partition from ``to_arrays``; refuses one that was modified or made for other labels."""
    wanted = ("client", "clients", "scheme", "seed", "hash", "counts")
    missing = [field for field in wanted if field not in arrays]
    if missing:
        raise UserError(f"{name} is not an Unskew partition: it has no {', '.join(missing)}")
    client, names = arrays["client"], arrays.get("names")
    if client.ndim != 1 or client.dtype.kind != "i":
        raise UserError(f"{name} is not an Unskew partition: client must be a one-dimensional array of whole numbers")
    try:
        partition = Partition(
            client=client.astype(np.int32),
            clients=int(arrays["clients"].item()),
            scheme=str(arrays["scheme"]),
            seed=int(str(arrays["seed"])),
            names=None if names is None else tuple(map(str, names.tolist())),
            redraws=int(arrays["redraws"].item()) if "redraws" in arrays else 0,
            notes=tuple(map(str, arrays["notes"].tolist())) if "notes" in arrays else (),
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"{name} is not an Unskew partition: {error}") from error
    partition.client.flags.writeable = False
    check_clients(partition.clients, len(client), name)
    if partition.clients < 1 or not -1 <= client.min(initial=-1) <= client.max(initial=-1) < partition.clients:
        raise UserError(f"{name} is not an Unskew partition: clients must be between 0 and {partition.clients - 1}")
    if partition.hash != str(arrays["hash"]):
        hashes = f"its hash is {partition.hash[:12]}…, not {str(arrays['hash'])[:12]}…"
        again = f"make a new one (scheme {partition.scheme}, seed {partition.seed})"
        raise UserError(f"{name} was modified after it was written: {hashes}; {again}")
    if names is not None and len(names) != partition.clients:
        raise UserError(f"{name} was modified after it was written: {len(names)} names for {partition.clients} clients")
    if len(client) != len(labels):
        sizes = f"{name} assigns {len(client)} examples, but the training set has {len(labels)}"
        raise UserError(f"{sizes}; was it made for other data?")
    if not np.array_equal(arrays["counts"], np.stack(cells(partition.client, labels, classes), axis=1)):
        origin = f"{name} was made for {len(client)} examples with other labels than the training set's"
        raise UserError(f"{origin}; use the data set it was made for, or make a new partition")
    return partition


def split_ids(text: str) -> tuple[str, str | None]:
    """Split a file from its table of ids: ``SPLIT.csv(ids=TABLE.csv)``."""
    path, options = split_options(text)

    def take(ids: str) -> str:
        return ids

    return path, apply(parse_call(f"file({options})", "partition"), take, "partition") if options else None


def make_file_absolute(text: str) -> str:
    """Make the paths of a partition ``file:FILE`` absolute, so that a run can be resumed from any folder."""
    if not text.startswith("file:") or text == "file:":
        return text
    path, table = split_ids(text.removeprefix("file:"))
    absolute = f"file:{user_path(path).absolute()}"
    return str(Call(absolute, (), {"ids": str(user_path(table).absolute())}, 0, "")) if table else absolute


def read_partition(file: str | Path, labels: Ints, classes: int, *, seed: int) -> Partition:
    """Read a partition, an .npz or CSV file judging by its content; ``seed`` is for a CSV, which has none."""
    text, table = split_ids(str(file))
    if not text.strip() or table == "":
        raise UserError(f"partition file:{file} has no file name; give file:FILE or file:SPLIT.csv(ids=TABLE.csv)")
    path = user_path(text)
    content = read_plain(path, "give the path of a partition")
    if table and content.startswith(b"PK"):
        raise UserError(f"file:{file}: {path} is an .npz file, which has rows instead of ids; leave out ids={table}")
    if not content.startswith(b"PK"):
        ids = (read_plain(user_path(table)), table) if table else None
        return from_csv(content, labels, name=str(path), seed=seed, ids=ids)
    try:
        arrays, _ = read_npz(path)
    except DAMAGED as error:
        raise UserError(f"{path} is damaged, or not an Unskew partition: {error}") from error
    partition = from_arrays(arrays, labels, classes, name=str(path))
    note = f"made as {partition.scheme} with seed {partition.seed}"
    return partition if note in partition.notes else replace(partition, notes=(*partition.notes, note))


@dataclass(frozen=True, eq=False)
class Holdings:
    """The clients' sizes and classes, from a partition's file alone, without the data set."""

    scheme: str
    names: tuple[str, ...] | None
    sizes: Ints  # [K]
    cells: Ints  # [cells, 3]: client, class, examples
    emd: float
    hash: str

    @cached_property
    def distances(self) -> npt.NDArray[np.float64]:
        """[K], the distance ‖q_k − p‖₁ of each client's label distribution to the overall one; NaN if it is empty."""
        owner, label, count = self.cells.T
        overall = np.bincount(label, count) / max(int(count.sum()), 1)
        share = count / self.sizes[owner]
        filled = np.abs(share - overall[label]) - overall[label]  # a client's empty cells add the rest of 1
        return np.where(self.sizes > 0, 1 + np.bincount(owner, filled, len(self.sizes)), np.nan)


def read_holdings(file: Path) -> Holdings:
    """Read the holdings in our own .npz file, and check it."""
    try:
        arrays, _ = read_npz(file)
        client, names, counts = arrays["client"], arrays.get("names"), arrays["counts"].astype(np.int64)
        partition = Partition(client.astype(np.int32), int(arrays["clients"].item()), str(arrays["scheme"]), 0)
        check_clients(partition.clients, len(client), str(file))
        sizes = np.bincount(client[client >= 0], minlength=partition.clients).astype(np.int64)
        if partition.hash != str(arrays["hash"]) or not np.array_equal(
            np.bincount(counts[:, 0], counts[:, 2], minlength=partition.clients), sizes
        ):
            raise ValueError("it was modified after it was written")
        users = None if names is None else tuple(map(str, names.tolist()))
        return Holdings(partition.scheme, users, sizes, counts, float(arrays["emd"].item()), partition.hash)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; it records which client holds which examples") from None
    except DAMAGED as error:
        raise UserError(f"{file} is damaged, or not an Unskew partition: {error}") from error
