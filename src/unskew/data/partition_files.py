"""Partitions as files: our .npz format and the published CSV format."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.files import user_path
from unskew.core.language import Call, apply, parse_call
from unskew.core.limits import check_plain
from unskew.data.arrays import DAMAGED, read_npz
from unskew.data.interface import split_options
from unskew.data.population import Ints, Partition, cells, check_clients, emd_of_cells, number_users
from unskew.data.tables import read_columns

COLUMNS = ("user_id", "image_id", "class")
MAX_USER_ID = 200  # characters: all ids take as much memory as the longest one
IDS_HELP = (
    "ids of the original data set, as in iNaturalist and Landmarks, need a table that maps them to rows: "
    "file:SPLIT.csv(ids=TABLE.csv), with the columns image_id,row"
)


def from_csv(path: Path, labels: Ints, *, seed: int, ids: Path | None = None) -> Partition:
    """Read a partition; image_id is a row of the training set, counted from 0, or an id in the table ``ids``.

    A user id can be any text. Examples that are not in the file belong to no client and are counted in the notes.
    Classes must equal the labels; with a table they may be numbered differently, one to one.
    """
    users, images, classes = read_columns(path, COLUMNS)
    if not users or max(map(len, users)) > MAX_USER_ID:
        raise UserError(f"{path} has no rows, or a user_id of more than {MAX_USER_ID} characters")
    try:
        table = dict(zip(*read_columns(ids, ("image_id", "row")), strict=True)) if ids else None
        rows = np.array([int(image if table is None else table[image]) for image in images], np.int64)
        numbers = np.array(list(map(int, classes)), np.int64)
    except KeyError as error:
        raise UserError(f"{ids} has no image_id {str(error)[:40]}; add it, or remove it from {path}") from error
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path}: image_id and class must be whole numbers ({error}); {IDS_HELP}") from error
    if rows.min() < 0 or rows.max() >= len(labels) or len(np.unique(rows)) < len(rows):
        once = f"every image must be one of the rows 0 to {len(labels) - 1} of the training set, and appear once"
        raise UserError(f"{path}: {once}; {IDS_HELP}")
    pairs = np.unique(np.stack([numbers, labels[rows]], axis=1), axis=0)
    one_to_one = len(pairs) == len(np.unique(pairs[:, 0])) == len(np.unique(pairs[:, 1]))
    if not one_to_one or (ids is None and not np.array_equal(*pairs.T)):
        raise UserError(f"{path}: its classes are not the training set's; is it a split of other data? {IDS_HELP}")
    owner, names = number_users(np.array(users, np.str_))
    client = np.full(len(labels), -1, np.int32)
    client[rows] = owner
    left = len(labels) - len(images)
    note = f"{left} of {len(labels)} training examples are not in the file and belong to no client"
    return Partition(client, len(names), f"file:{path}", seed, names, notes=(note,) if left else ())


def to_csv_rows(partition: Partition, labels: Ints) -> Iterator[tuple[str, str, str]]:
    """The partition in the published format, header first, by image_id; unassigned examples have no row."""
    yield COLUMNS
    for image in np.flatnonzero(partition.client >= 0).tolist():
        client = int(partition.client[image])
        yield (str(client) if partition.names is None else partition.names[client], str(image), str(labels[image]))


def to_arrays(partition: Partition, labels: Ints, classes: int) -> dict[str, npt.NDArray[Any]]:
    """The contents of our .npz file; ``counts`` [cells, 3] lists the nonzero (client, class, examples)."""
    held = holdings_of(partition, labels, classes)
    seed = partition.seed if abs(partition.seed) < 2**63 else str(partition.seed)
    arrays: dict[str, npt.NDArray[Any]] = {
        "client": np.asarray(partition.client, np.int32),
        "clients": np.array(partition.clients, np.int64),
        "scheme": np.array(partition.scheme),
        "seed": np.array(seed),
        "hash": np.array(partition.hash),
        "sizes": held.sizes,
        "counts": held.cells.astype(np.int32),
        "emd": np.array(held.emd),
        "redraws": np.array(partition.redraws, np.int64),
        "notes": np.array(partition.notes, np.str_),
    }
    if partition.names is not None:
        arrays["names"] = np.array(partition.names, np.str_)
    return arrays


def from_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], labels: Ints, classes: int, *, name: str = "the partition"
) -> Partition:
    """Rebuild a partition from ``to_arrays``; rejects one that was modified or made for other labels."""
    partition = _rebuild(arrays, name)
    same = len(partition.client) == len(labels)
    if not same or not np.array_equal(arrays["counts"], np.stack(cells(partition.client, labels, classes), axis=1)):
        origin = f"{name} was made for {len(partition.client)} examples, or other labels than the training set's"
        raise UserError(f"{origin} ({len(labels)} examples); use the data set it was made for, or make a new partition")
    return partition


def _rebuild(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> Partition:
    try:
        client, names = arrays["client"].astype(np.int32, casting="same_kind"), arrays.get("names")
        partition = Partition(
            client=client,
            clients=int(arrays["clients"].item()),
            scheme=str(arrays["scheme"]),
            seed=int(str(arrays["seed"])),
            names=None if names is None else tuple(map(str, names.tolist())),
            redraws=int(arrays["redraws"].item()) if "redraws" in arrays else 0,
            notes=tuple(map(str, arrays["notes"].tolist())) if "notes" in arrays else (),
        )
        check_clients(partition.clients, len(client), name)
        if partition.hash != str(arrays["hash"]) or client.ndim != 1 or client.min(initial=-1) < -1:
            raise ValueError("it was modified after it was written")
        if client.max(initial=-1) >= partition.clients or len(partition.names or ()) not in (0, partition.clients):
            raise ValueError(f"it has other clients than 0 to {partition.clients - 1}")
    except DAMAGED as error:
        raise UserError(f"{name} is damaged, or not an Unskew partition: {error}") from error
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
    path = user_path(text)
    check_plain(path)
    try:
        with path.open("rb") as opened:
            packed = opened.read(2) == b"PK"
        if table or not packed:
            return from_csv(path, labels, seed=seed, ids=user_path(table) if table else None)
        arrays = read_npz(path)
    except DAMAGED as error:
        raise UserError(f"{path} cannot be read as a partition: {error}; give file:FILE") from error
    partition = from_arrays(arrays, labels, classes, name=str(path))
    note = f"made as {partition.scheme} with seed {partition.seed}"
    return partition if note in partition.notes else replace(partition, notes=(*partition.notes, note))


@dataclass(frozen=True, eq=False)
class Holdings:
    """The clients' sizes and classes, which need no data set to be read from a partition's file."""

    scheme: str
    names: tuple[str, ...] | None
    sizes: Ints  # [K]
    cells: Ints  # [cells, 3]: client, class, examples

    @cached_property
    def emd(self) -> float:
        """The label skew, as ``population.emd``."""
        return emd_of_cells(*self.cells.T)

    @cached_property
    def distances(self) -> npt.NDArray[np.float64]:
        """[K], the distance ‖q_k − p‖₁ of each client's label distribution to the overall one; NaN if it is empty."""
        owner, label, count = self.cells.T
        overall = np.bincount(label, count) / max(int(count.sum()), 1)
        share = count / self.sizes[owner]
        filled = np.abs(share - overall[label]) - overall[label]  # a client's empty cells add the rest of 1
        return np.where(self.sizes > 0, 1 + np.bincount(owner, filled, len(self.sizes)), np.nan)


def holdings_of(partition: Partition, labels: Ints, classes: int) -> Holdings:
    """How many examples of each class every client has."""
    return _holdings(partition, np.stack(cells(partition.client, labels, classes), axis=1))


def _holdings(partition: Partition, filled: Ints) -> Holdings:
    sizes = np.bincount(partition.client[partition.client >= 0], minlength=partition.clients)
    return Holdings(partition.scheme, partition.names, sizes.astype(np.int64), filled)


def read_holdings(file: Path) -> Holdings:
    """Read the holdings in our own .npz file, and check it."""
    try:
        arrays = read_npz(file)
        held = _holdings(_rebuild(arrays, str(file)), arrays["counts"].astype(np.int64))
        client, _, count = held.cells.T
        same = np.array_equal(np.bincount(client, count, minlength=len(held.sizes)), held.sizes)
        if not same or not 0 <= arrays["emd"].item() <= 2:
            raise ValueError("it was modified after it was written")
    except DAMAGED as error:
        raise UserError(f"{file} is damaged, or not an Unskew partition: {error}") from error
    return held
