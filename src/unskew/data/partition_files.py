"""Partitions as files: our .npz artefact, and by way of ``partition_csv`` the published CSV.

Nothing is written here: ``to_arrays`` and ``to_csv_rows`` give what a file holds, and others write it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.limits import read_plain, user_path
from unskew.data.npz import DAMAGED, read_npz
from unskew.data.partition_csv import IDS, from_csv
from unskew.data.partition_csv import to_csv_rows as to_csv_rows
from unskew.data.population import Ints, Partition, cells, check_clients, emd_of_cells


def to_arrays(partition: Partition, labels: Ints, classes: int) -> dict[str, npt.NDArray[Any]]:
    """What the .npz artefact holds.

    ``counts`` [cells, 3] lists (client, class, examples) where there are any, so that 100,000 clients and
    1203 classes stay small.
    """
    filled = cells(partition.client, labels, classes)
    seed = partition.seed if abs(partition.seed) < 2**63 else str(partition.seed)
    arrays: dict[str, npt.NDArray[Any]] = {
        "client": np.asarray(partition.client, np.int32),
        "clients": np.array(partition.clients, np.int64),
        "scheme": np.array(partition.scheme),
        "seed": np.array(seed),
        "hash": np.array(partition.hash),
        "sizes": np.bincount(partition.client[partition.client >= 0], minlength=partition.clients),
        "counts": np.stack([each.astype(np.int32) for each in filled], axis=1),
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
    check_clients(partition.clients, len(client), name)
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
    """The partition in a file, .npz or CSV by its content; ``split.csv?ids=table.csv`` for a CSV with a table of ids.

    A CSV has no seed: it gets this one.
    """
    text, asked, table = str(file).partition(IDS)
    if not text.strip() or (asked and not table.strip()):
        raise UserError(f"partition file:{file} names no file; give file:FILE or file:SPLIT.csv{IDS}TABLE.csv")
    path = user_path(text)
    content = _content(path)
    if asked and content.startswith(b"PK"):
        raise UserError(f"file:{file}: {path} is an .npz, which has rows and not ids; leave {IDS}{table} out")
    if not content.startswith(b"PK"):
        ids = (_content(user_path(table)), table) if asked else None
        return from_csv(content, labels, name=str(path), seed=seed, ids=ids)
    try:
        arrays, _ = read_npz(path)
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

    @cached_property
    def distances(self) -> npt.NDArray[np.float64]:
        """[K], ‖q_k − p‖₁ of each client's label distribution from the whole; NaN where it has no examples."""
        owner, label, count = self.cells.T
        whole = np.bincount(label, count) / max(int(count.sum()), 1)
        share = count / self.sizes[owner]
        filled = np.abs(share - whole[label]) - whole[label]  # the empty cells of a client add what is left of 1
        return np.where(self.sizes > 0, 1 + np.bincount(owner, filled, len(self.sizes)), np.nan)


def read_holdings(file: Path) -> Holdings:
    """What our own artefact says of itself, if it is whole."""
    try:
        arrays, _ = read_npz(file)
        client, names, counts = arrays["client"], arrays.get("names"), arrays["counts"].astype(np.int64)
        partition = Partition(client.astype(np.int32), int(arrays["clients"].item()), str(arrays["scheme"]), 0)
        check_clients(partition.clients, len(client), str(file))
        sizes = np.bincount(client[client >= 0], minlength=partition.clients).astype(np.int64)
        if partition.hash != str(arrays["hash"]) or not np.array_equal(
            np.bincount(counts[:, 0], counts[:, 2], minlength=partition.clients), sizes
        ):
            raise ValueError("it was changed after it was made")
        users = None if names is None else tuple(map(str, names.tolist()))
        return Holdings(partition.scheme, users, sizes, counts, float(arrays["emd"].item()), partition.hash)
    except FileNotFoundError:
        raise UserError(f"{file} is not there; without it, which client has what is not known") from None
    except (*DAMAGED, IndexError) as error:
        raise UserError(f"{file} is damaged, or not a partition of ours: {error}") from error


def _content(path: Path) -> bytes:
    try:
        return read_plain(path)
    except OSError as error:
        raise UserError(f"cannot read the partition {path}: {error.strerror or error}") from error
