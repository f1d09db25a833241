"""Who the clients are: which examples each holds, how many of each class, how far from the whole.

Shapes: N training examples, M of them held by a client, K clients, C classes.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.roster import Roster
from unskew.core.types import EVERYONE
from unskew.core.units import span

Ints = npt.NDArray[np.int64]
Clients = npt.NDArray[np.int32]  # [N], the client of each example; -1: no client has it

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
    """The examples grouped by client: client k holds ``order[offsets[k]:offsets[k + 1]]``, ascending.

    Two flat arrays and nothing for each client, so that 100,000 clients cost 8 bytes each beyond their
    examples.
    """

    order: npt.NDArray[np.int32]  # [M]
    offsets: Ints  # [K + 1]

    @classmethod
    def from_partition(cls, partition: Partition) -> "Population":
        """The partition's clients; those without an example stay, with size 0."""
        unheld = int(np.count_nonzero(partition.client < 0))
        order = np.argsort(partition.client, kind="stable")[unheld:].astype(np.int32)
        sizes = np.bincount(partition.client[order], minlength=partition.clients)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
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
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client}: there are {self.clients}, counted from 0")
        return self.order[self.offsets[client] : self.offsets[client + 1]]


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


def sizes_in_words(sizes: Ints) -> str:
    """How many examples the clients have: "242 examples each", "3 to 910 examples"."""
    low, high = int(sizes.min()), int(sizes.max())
    return span(low, high, "example") + (" each" if low == high and len(sizes) > 1 else "")


def check_clients(clients: int, examples: int, name: str) -> None:
    """Refuse more clients than there are examples for, beyond a million: an empty one takes memory too."""
    if clients > (most := max(EMPTY_CLIENTS, examples)):
        raise UserError(
            f"{name} has {clients:,} clients for {examples:,} examples, {most:,} is the most; number them without gaps"
        )


def cells(client: Clients, labels: Ints, classes: int) -> tuple[Ints, Ints, Ints]:
    """The filled cells of the table clients × classes as (client, class, count), by client, then class.

    At most one cell an example, however many clients and classes there are.
    """
    held = client >= 0
    codes, counts = np.unique(client[held].astype(np.int64) * classes + labels[held], return_counts=True)
    return codes // classes, codes % classes, counts.astype(np.int64)


def emd(client: Clients, labels: Ints, classes: int) -> float:
    """How unlike the clients are: Σ_k n_k/n · ‖q_k − p‖₁, from 0 (all alike) to below 2.

    q_k is a client's distribution of labels, p that of all held examples (Hsu, Qi and Brown 2020, section
    6.1). In whole numbers it is Σ_k Σ_c |n·n_kc − n_k·n_c| / n²; an empty cell adds n_k·n_c, and all cells
    together would add n², so only the filled ones are visited. The sum is exact, hence the same on every
    machine.
    """
    owner, label, count = cells(client, labels, classes)
    total = int(count.sum())
    if total == 0:
        return 0.0
    size = np.bincount(client[client >= 0])[owner].astype(np.int64)  # n_k of each cell
    frequency = np.bincount(labels[client >= 0], minlength=classes)[label].astype(np.int64)  # n_c of each cell
    share = size * frequency
    distance = total**2 + int((np.abs(total * count - share) - share).sum())
    return distance / total**2


def label_counts(population: Population, labels: Ints, classes: int, client: int) -> Ints:
    """[C], how many examples of each class the client holds."""
    return np.bincount(labels[population.examples(client)], minlength=classes).astype(np.int64)


def counts_table(population: Population, labels: Ints, classes: int) -> Ints:
    """[K, C], the examples of each class for each client: dense, for few clients."""
    owner = np.repeat(np.arange(population.clients), population.sizes)
    codes = owner * classes + labels[population.order]
    counts = np.bincount(codes, minlength=population.clients * classes)
    return counts.reshape(population.clients, classes).astype(np.int64)
