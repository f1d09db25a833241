"""The clients: their examples, their classes, and how far their label distributions are from the overall one.

Shapes: N training examples, M of them held by a client, K clients, C classes.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import EVERYONE, ImageSet, Roster, Split
from unskew.core.units import span

Ints = npt.NDArray[np.int64]
Clients = npt.NDArray[np.int32]  # [N], the client of each example; -1: no client has it

DENSE = 8  # a table of clients × classes with at most this many cells per example is counted directly
EMPTY_CLIENTS = 1_000_000  # clients that a partition may have even with fewer examples


@dataclass(frozen=True, eq=False)
class Partition:
    """Which client holds which training example, and how that was decided.

    ``scheme`` is the canonical text; ``names`` are the user ids if clients are users; ``redraws`` counts rejected
    draws that left a client too small. Two partitions are equal if their hashes are.
    """

    client: Clients  # [N]
    clients: int
    scheme: str
    seed: int
    names: tuple[str, ...] | None = None
    redraws: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        client = self.client.view()
        client.flags.writeable = False
        object.__setattr__(self, "client", client)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the clients as little-endian int32, then their number as little-endian int64."""
        digest = hashlib.sha256(np.ascontiguousarray(self.client, dtype="<i4").tobytes())
        digest.update(self.clients.to_bytes(8, "little"))
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Population:
    """Examples grouped by client in two flat arrays: client k has ``order[offsets[k]:offsets[k + 1]]``, ascending."""

    order: npt.NDArray[np.int32]  # [M]
    offsets: Ints  # [K + 1]

    @classmethod
    def from_partition(cls, partition: Partition) -> "Population":
        """The partition's clients, including those without examples."""
        unassigned = int(np.count_nonzero(partition.client < 0))
        order = _stable_order(partition.client)[unassigned:].astype(np.int32)
        assigned = partition.client if not unassigned else partition.client[partition.client >= 0]
        offsets = np.zeros(partition.clients + 1, np.int64)
        np.cumsum(np.bincount(assigned, minlength=partition.clients), out=offsets[1:])
        order.flags.writeable = offsets.flags.writeable = False
        return cls(order, offsets)

    @property
    def clients(self) -> int:
        """K."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """[K], the number of examples of each client."""
        return np.diff(self.offsets)

    @cached_property
    def roster(self) -> Roster:
        """What the server may know: the clients and their sizes."""
        return Roster(self.sizes)

    def examples(self, client: int) -> npt.NDArray[np.int32]:
        """The indices of the client's examples, ascending; a view. EVERYONE has the examples of all clients."""
        if client == EVERYONE:
            return self.order
        return self.order[self.offsets[client] : self.offsets[client + 1]]


def _stable_order(client: Clients) -> Ints:
    """A stable argsort by client, in two passes over 16 bits: NumPy sorts these in linear time."""
    if len(client) < 2**20 or bool((client[1:] >= client[:-1]).all()):
        return np.argsort(client, kind="stable")
    shifted = client.astype(np.int64) + 1  # −1 first
    low = np.argsort((shifted & 0xFFFF).astype(np.uint16), kind="stable")
    return low[np.argsort((shifted >> 16).astype(np.uint16)[low], kind="stable")]


def number_users(users: npt.NDArray[np.str_]) -> tuple[Clients, tuple[str, ...]]:
    """Number the users: the client [N] of each example, and the K user ids in sorted order (as numbers, if all are).

    Strings are slow to sort, so only the first of consecutive examples of a user is considered.
    """
    first = np.flatnonzero(np.r_[len(users) > 0, users[1:] != users[:-1]])
    unique, inverse = np.unique(users[first], return_inverse=True)
    inverse = np.repeat(inverse, np.diff(np.r_[first, len(users)]))
    ids: list[str] = unique.tolist()
    if all(i.isascii() and i.isdecimal() and str(int(i)) == i for i in ids):
        rank = np.argsort(np.array([len(i) for i in ids]), kind="stable")  # by number of digits, then as text
        inverse = np.argsort(rank)[inverse]
        ids = [ids[r] for r in rank]
    return inverse.astype(np.int32), tuple(ids)


def describe_sizes(sizes: Ints) -> str:
    """The range of the clients' sizes: "242 examples each", "3 to 910 examples"."""
    low, high = int(sizes.min()), int(sizes.max())
    return span(low, high, "example") + (" each" if low == high and len(sizes) > 1 else "")


def check_clients(clients: int, examples: int, name: str) -> None:
    """Reject more than a million clients if there are fewer examples: empty clients take memory too."""
    if clients > (most := max(EMPTY_CLIENTS, examples)):
        excess = f"{name} has {clients:,} clients for {examples:,} examples; the limit is {most:,}"
        raise UserError(f"{excess}; number the clients without gaps")


def cells(client: Clients, labels: Ints, classes: int) -> tuple[Ints, Ints, Ints]:
    """The nonzero cells of the table clients × classes as (client, class, count), by client, then class.

    A table that is not much larger than the examples is counted directly, which is ten times as fast as sorting.
    """
    assigned = client >= 0
    if not assigned.all():
        client, labels = client[assigned], labels[assigned]
    codes = client.astype(np.int64) * classes + labels
    if (int(client.max(initial=-1)) + 1) * classes <= DENSE * len(client):
        table = np.bincount(codes)
        codes = np.flatnonzero(table)
        counts = table[codes]
    else:
        codes, counts = np.unique(codes, return_counts=True)
    return codes // classes, codes % classes, counts.astype(np.int64)


def emd(client: Clients, labels: Ints, classes: int) -> float:
    """The label skew Σ_k n_k/n · ‖q_k − p‖₁, from 0 (all clients alike) to below 2.

    q_k is a client's label distribution, p that of all assigned examples (Hsu, Qi and Brown 2020, section 6.1). In
    integers it is Σ_k Σ_c |n·n_kc − n_k·n_c| / n²; an empty cell adds n_k·n_c, and all cells together would add n²,
    so only the nonzero ones are visited. The sum is exact, hence the same on every machine.
    """
    return emd_of_cells(*cells(client, labels, classes))


def emd_of_cells(owner: Ints, label: Ints, count: Ints) -> float:
    """``emd`` from the nonzero cells."""
    total = int(count.sum())
    if total == 0:
        return 0.0
    size = np.bincount(owner, count).astype(np.int64)[owner]  # n_k of each cell; exact in float64
    share = size * np.bincount(label, count).astype(np.int64)[label]  # n_k·n_c
    distance = total**2 + int((np.abs(total * count - share) - share).sum())
    return distance / total**2


def hold_out(client: Clients, labels: Ints, share: float, key: Key) -> Ints:
    """[V], the rows to hold out, ascending: this share of every client's examples and of each of its classes.

    The examples are ordered by client, then by class, then at random, and every (1/share)-th is chosen, from a random
    start. A client keeps at least one example. Unassigned examples are not held out.
    """
    generator = key.numpy()
    start, chance = generator.random(), generator.random(len(client))
    order = np.lexsort((chance, labels, client))
    order = order[client[order] >= 0]
    steps = np.floor(share * np.arange(len(order) + 1) + start)
    chosen = np.diff(steps) > 0
    first = np.flatnonzero(np.diff(client[order], prepend=-1))  # where each client's examples begin
    emptied = np.logical_and.reduceat(chosen, first) if len(first) else np.zeros(0, np.bool_)
    chosen[first[emptied]] = False
    rows: Ints = np.sort(order[chosen]).astype(np.int64)
    return rows


def split_validation(images: ImageSet, partition: Partition, share: float, key: Key) -> tuple[ImageSet, Partition]:
    """The images with a validation part instead of the test part, and the partition without that part."""
    labels = images.train.labels
    rows = hold_out(partition.client, labels, share, key)
    if not len(rows):
        count = int(np.count_nonzero(partition.client >= 0))
        raise UserError(
            f"--validation {share:g}: this share of {count:,} examples is less than one; give a larger share"
        )
    part = Split(images.train.images, labels[rows], rows)
    users = None if images.users is None else images.users[rows]
    rest = partition.client.copy()
    rest[rows] = -1
    return replace(images, test=part, test_users=users), replace(partition, client=rest)
