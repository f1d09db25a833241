"""The clients: which examples each has, how many of each class, and how far their labels are from the whole.

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

DENSE = 8  # a table of clients × classes with at most that many cells an example is counted whole
EMPTY_CLIENTS = 1_000_000  # clients that a partition may have without examples for all of them


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds which training example, and how that was decided.

    ``scheme`` is the canonical text; ``names`` are the user ids where clients are users; ``redraws`` counts
    the draws that were thrown away because a client fell below the least size. Two partitions are equal when
    their hashes are.
    """

    client: Clients  # [N]
    clients: int
    scheme: str
    seed: int
    names: tuple[str, ...] | None = None
    redraws: int = 0
    notes: tuple[str, ...] = ()

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
        """The partition's clients; those without an example stay, with size 0."""
        unheld = int(np.count_nonzero(partition.client < 0))
        order = _stable_order(partition.client)[unheld:].astype(np.int32)
        held = partition.client if not unheld else partition.client[partition.client >= 0]
        offsets = np.zeros(partition.clients + 1, np.int64)
        np.cumsum(np.bincount(held, minlength=partition.clients), out=offsets[1:])
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
        """What the server may know: who there is and how much each holds."""
        return Roster(self.sizes)

    def examples(self, client: int) -> npt.NDArray[np.int32]:
        """The row numbers of the client's examples, ascending; a view. EVERYONE holds the examples of all clients."""
        if client == EVERYONE:
            return self.order
        return self.order[self.offsets[client] : self.offsets[client + 1]]


def _stable_order(client: Clients) -> Ints:
    """The examples by client, ascending where they have the same one: what a stable argsort gives.

    NumPy sorts 16 bits at a time in linear time, so two such passes sort millions of clients faster than comparing.
    """
    if len(client) < 2**20 or bool((client[1:] >= client[:-1]).all()):
        return np.argsort(client, kind="stable")
    shifted = client.astype(np.int64) + 1  # −1 first
    low = np.argsort((shifted & 0xFFFF).astype(np.uint16), kind="stable")
    return low[np.argsort((shifted >> 16).astype(np.uint16)[low], kind="stable")]


def number_users(users: npt.NDArray[np.str_]) -> tuple[Clients, tuple[str, ...]]:
    """[N] clients and the K user ids of their numbers, sorted.

    Sorted as numbers if all are whole numbers, so that user 7 of 100 is client 7. Texts are slow to sort: of
    examples of one user in a row only the first is looked at.
    """
    first = np.flatnonzero(np.r_[len(users) > 0, users[1:] != users[:-1]])
    unique, inverse = np.unique(users[first], return_inverse=True)
    inverse = np.repeat(inverse, np.diff(np.r_[first, len(users)]))
    ids: list[str] = unique.tolist()
    if all(i.isascii() and i.isdecimal() and str(int(i)) == i for i in ids):
        rank = np.argsort(np.array([len(i) for i in ids]), kind="stable")  # by digits, then as text: by number
        inverse = np.argsort(rank)[inverse]
        ids = [ids[r] for r in rank]
    client: Clients = inverse.astype(np.int32)
    client.flags.writeable = False
    return client, tuple(ids)


def describe_sizes(sizes: Ints) -> str:
    """How many examples the clients have: "242 examples each", "3 to 910 examples"."""
    low, high = int(sizes.min()), int(sizes.max())
    return span(low, high, "example") + (" each" if low == high and len(sizes) > 1 else "")


def check_clients(clients: int, examples: int, name: str) -> None:
    """Refuse more clients than there are examples for, beyond a million: an empty one takes memory too."""
    if clients > (most := max(EMPTY_CLIENTS, examples)):
        given = f"{name} has {clients:,} clients for {examples:,} examples; the limit is {most:,}"
        raise UserError(f"{given}; number them without gaps")


def cells(client: Clients, labels: Ints, classes: int) -> tuple[Ints, Ints, Ints]:
    """The filled cells of the table clients × classes as (client, class, count), by client, then class.

    At most one cell an example, however many clients and classes there are. Where the whole table is not much larger
    than the examples it is counted, which is ten times as fast as sorting them.
    """
    held = client >= 0
    if not held.all():
        client, labels = client[held], labels[held]
    codes = client.astype(np.int64) * classes + labels
    if (int(client.max(initial=-1)) + 1) * classes <= DENSE * len(client):
        table = np.bincount(codes)
        codes = np.flatnonzero(table)
        counts = table[codes]
    else:
        codes, counts = np.unique(codes, return_counts=True)
    return codes // classes, codes % classes, counts.astype(np.int64)


def emd(client: Clients, labels: Ints, classes: int) -> float:
    """How unlike the clients are: Σ_k n_k/n · ‖q_k − p‖₁, from 0 (all alike) to below 2.

    q_k is a client's distribution of labels, p that of all held examples (Hsu, Qi and Brown 2020, section
    6.1). In whole numbers it is Σ_k Σ_c |n·n_kc − n_k·n_c| / n²; an empty cell adds n_k·n_c, and all cells
    together would add n², so only the filled ones are visited. The sum is exact, hence the same on every
    machine.
    """
    return emd_of_cells(*cells(client, labels, classes))


def emd_of_cells(owner: Ints, label: Ints, count: Ints) -> float:
    """The same from the filled cells."""
    total = int(count.sum())
    if total == 0:
        return 0.0
    size = np.bincount(owner, count).astype(np.int64)[owner]  # n_k of each cell; float64 has whole numbers exactly
    share = size * np.bincount(label, count).astype(np.int64)[label]  # n_k·n_c
    distance = total**2 + int((np.abs(total * count - share) - share).sum())
    return distance / total**2


def hold_out(client: Clients, labels: Ints, share: float, key: Key) -> Ints:
    """[V], the rows that are held out, ascending: that share of every client's examples and of each of its classes.

    The examples are put in order by client, then by class, then at random, and every (1/share)-th is taken, from a
    random start. So a client and each of its classes give their share up to one example, and the whole gives it too.
    A client keeps at least one example. What no client has is not held out.
    """
    generator = key.numpy()
    start, chance = generator.random(), generator.random(len(client))
    order = np.lexsort((chance, labels, client))
    order = order[client[order] >= 0]
    steps = np.floor(share * np.arange(len(order) + 1) + start)
    taken = np.diff(steps) > 0
    owner = client[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))  # where each client's examples begin
    emptied = np.logical_and.reduceat(taken, first) if len(first) else np.zeros(0, np.bool_)
    taken[first[emptied]] = False
    rows: Ints = np.sort(order[taken]).astype(np.int64)
    return rows


def split_validation(images: ImageSet, partition: Partition, share: float, key: Key) -> tuple[ImageSet, Partition]:
    """The images with the validation part instead of the test part, and the partition without it."""
    labels = images.train.labels
    rows = hold_out(partition.client, labels, share, key)
    if not len(rows):
        held = int(np.count_nonzero(partition.client >= 0))
        raise UserError(f"--validation {share:g}: this share of {held:,} examples holds out none; give a larger one")
    part = Split(images.train.images, labels[rows], rows)
    users = None if images.users is None else images.users[rows]
    rest = partition.client.copy()
    rest[rows] = -1
    return replace(images, test=part, test_users=users), replace(partition, client=rest)
