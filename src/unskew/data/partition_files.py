"""Partitions as files: our .npz artefact, and the published CSV of user_id, image_id, class.

Nothing is written here: ``to_arrays`` and ``to_csv_rows`` give what a file holds, and others write it.
"""

import csv
import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.data.population import Clients, Ints, Partition, cells, emd

COLUMNS = ("user_id", "image_id", "class")
DAMAGED = (  # all that np.load was seen to raise for files with a few bytes changed or cut off
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    OSError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    MemoryError,
    OverflowError,
)


def number_users(users: npt.NDArray[np.str_]) -> tuple[Clients, tuple[str, ...]]:
    """[N] clients and the K user ids of their numbers, sorted.

    Sorted as numbers if all are whole numbers, so that user 7 of 100 is client 7.
    """
    unique, inverse = np.unique(users, return_inverse=True)
    ids: list[str] = unique.tolist()
    if all(i.isascii() and i.isdecimal() and str(int(i)) == i for i in ids):
        rank = np.argsort(np.array([len(i) for i in ids]), kind="stable")  # by digits, then as text: by number
        inverse = np.argsort(rank)[inverse]
        ids = [ids[r] for r in rank]
    client: Clients = inverse.astype(np.int32)
    client.flags.writeable = False
    return client, tuple(ids)


def to_arrays(partition: Partition, labels: Ints, classes: int) -> dict[str, npt.NDArray[Any]]:
    """What the .npz artefact holds.

    ``counts`` [cells, 3] lists (client, class, examples) where there are any, so that 100,000 clients and
    1203 classes stay small.
    """
    seed = partition.seed if abs(partition.seed) < 2**63 else str(partition.seed)
    arrays: dict[str, npt.NDArray[Any]] = {
        "client": np.asarray(partition.client, np.int32),
        "clients": np.array(partition.clients, np.int64),
        "scheme": np.array(partition.scheme),
        "seed": np.array(seed),
        "hash": np.array(partition.hash),
        "sizes": np.bincount(partition.client[partition.client >= 0], minlength=partition.clients),
        "counts": np.stack(cells(partition.client, labels, classes), axis=1).astype(np.int32),
        "emd": np.array(emd(partition.client, labels, classes)),
        "redraws": np.array(partition.redraws, np.int64),
        "notes": np.array(partition.notes, np.str_),
    }
    if partition.names is not None:
        arrays["names"] = np.array(partition.names, np.str_)
    return arrays


def from_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], labels: Ints, classes: int, *, name: str = "the partition"
) -> Partition:
    """The partition that ``to_arrays`` took apart. Refused: a changed one, and one made for other labels."""
    wanted = ("client", "clients", "scheme", "seed", "hash", "counts")
    missing = [field for field in wanted if field not in arrays]
    if missing:
        raise UserError(f"{name} is not a partition of ours: it lacks {', '.join(missing)}")
    client, names = arrays["client"], arrays.get("names")
    if client.ndim != 1 or client.dtype.kind != "i":
        raise UserError(f"{name} is not a partition of ours: client must be a row of whole numbers")
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
        raise UserError(f"{name} is not a partition of ours: {error}") from error
    partition.client.flags.writeable = False
    if partition.clients < 1 or not -1 <= client.min(initial=-1) <= client.max(initial=-1) < partition.clients:
        raise UserError(f"{name} is not a partition of ours: clients must be between 0 and {partition.clients - 1}")
    if partition.hash != str(arrays["hash"]):
        raise UserError(
            f"{name} was changed after it was made: its hash is {partition.hash[:12]}…, it says "
            f"{str(arrays['hash'])[:12]}…; make a new one (scheme {partition.scheme}, seed {partition.seed})"
        )
    if names is not None and len(names) != partition.clients:
        raise UserError(f"{name} was changed after it was made: {len(names)} names for {partition.clients} clients")
    if len(client) != len(labels):
        raise UserError(
            f"{name} deals out {len(client)} examples, the training set has {len(labels)}; was it made for other data?"
        )
    if not np.array_equal(arrays["counts"], np.stack(cells(partition.client, labels, classes), axis=1)):
        raise UserError(
            f"{name} was made for {len(client)} examples with other labels than the training set's; "
            f"take the data set it was made for, or make a new one"
        )
    return partition


def read_partition(file: str | Path, labels: Ints, classes: int, *, seed: int) -> Partition:
    """The partition in a file, .npz or CSV by its content. A CSV has no seed: it gets this one."""
    path = Path(file).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the partition {path}: {error.strerror or error}") from error
    if not content.startswith(b"PK"):
        return from_csv(content, labels, name=str(path), seed=seed)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {field: archive[field] for field in archive.files}
    except DAMAGED as error:
        raise UserError(f"{path} is damaged, or not a partition of ours: {error}") from error
    partition = from_arrays(arrays, labels, classes, name=str(path))
    made = f"made as {partition.scheme} with seed {partition.seed}"
    return partition if made in partition.notes else replace(partition, notes=(*partition.notes, made))


@dataclass(frozen=True, eq=False)
class Holdings:
    """Who holds how much of what, as a partition's file tells it: no data set is needed."""

    scheme: str
    names: tuple[str, ...] | None
    sizes: Ints  # [K]
    cells: Ints  # [cells, 3]: client, class, examples
    emd: float
    hash: str


def read_holdings(file: Path) -> Holdings:
    """What our own artefact says of itself, if it is whole."""
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as archive:
            arrays = {field: archive[field] for field in archive.files}
        client, names, counts = arrays["client"], arrays.get("names"), arrays["counts"].astype(np.int64)
        partition = Partition(client.astype(np.int32), int(arrays["clients"].item()), str(arrays["scheme"]), 0)
        sizes = np.bincount(client[client >= 0], minlength=partition.clients).astype(np.int64)
        if partition.hash != str(arrays["hash"]) or not np.array_equal(
            np.bincount(counts[:, 0], counts[:, 2], minlength=partition.clients), sizes
        ):
            raise ValueError("it was changed after it was made")
        users = None if names is None else tuple(map(str, names.tolist()))
        return Holdings(partition.scheme, users, sizes, counts, float(arrays["emd"].item()), partition.hash)
    except FileNotFoundError:
        raise UserError(f"{file} is not there; without it, which client has what is not known") from None
    except (*DAMAGED, TypeError, IndexError) as error:
        raise UserError(f"{file} is damaged, or not a partition of ours: {error}") from error


def from_csv(content: bytes, labels: Ints, *, name: str, seed: int) -> Partition:
    """The published form: a row an example; image_id is its row in the training set, counted from 0.

    User ids are any text. Examples that no row names belong to no client, and are counted in the notes.
    """
    users, images, classes, lines = _columns(content, name)
    rows = len(labels)
    if outside := [line for line, image in zip(lines, images, strict=True) if not 0 <= image < rows]:
        image = images[lines.index(outside[0])]
        raise UserError(
            f"{name}, line {outside[0]}: image_id {image} is outside the training set, whose rows are 0 to {rows - 1}"
        )
    image_ids = np.array(images, np.int64)
    order = np.argsort(image_ids, kind="stable")
    twice = np.sort(order[1:][image_ids[order][1:] == image_ids[order][:-1]])
    if len(twice):
        raise UserError(f"{name}, line {lines[twice[0]]}: image_id {images[twice[0]]} is there a second time")
    for line, image, given in zip(lines, images, classes, strict=True):
        if given != labels[image]:
            raise UserError(
                f"{name}, line {line}: image_id {image} is of class {given} there and {labels[image]} "
                f"in the training set; is it the split of another data set, or of another order?"
            )
    owner, names = number_users(np.array(users, np.str_))
    client = np.full(rows, -1, np.int32)
    client[image_ids] = owner
    client.flags.writeable = False
    left = rows - len(images)
    notes = (f"{left} of {rows} training examples are in no row of the file and belong to no client",) if left else ()
    return Partition(client, len(names), f"file:{name}", seed, names, notes=notes)


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


def _columns(content: bytes, name: str) -> tuple[list[str], list[int], list[int], list[int]]:
    """User ids, image ids, classes and line numbers of a CSV's rows."""
    users: list[str] = []
    images: list[int] = []
    classes: list[int] = []
    lines: list[int] = []
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""))
        header = [column.strip() for column in next(reader, [])]
        missing = [column for column in COLUMNS if column not in header]
        if missing:
            raise UserError(
                f"{name} is not a partition we can read: an .npz of ours, or a CSV whose first line is "
                f"{','.join(COLUMNS)}; it lacks {', '.join(missing)}"
            )
        user, image, label = (header.index(column) for column in COLUMNS)
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise UserError(f"{name}, line {reader.line_num}: {len(row)} fields, the header has {len(header)}")
            users.append(row[user].strip())
            images.append(_whole(row[image], "image_id", name, reader.line_num))
            classes.append(_whole(row[label], "class", name, reader.line_num))
            lines.append(reader.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{name} is not a CSV in UTF-8: {error}") from error
    if not lines:
        raise UserError(f"{name} has a header and no rows")
    return users, images, classes, lines


def _whole(text: str, column: str, name: str, line: int) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}, line {line}: {column} must be a whole number, {text!r} given") from None
