"""Partitions of the training examples: iid, shards, dirichlet, dirichlet-client, users, geo, files, functions.

Shapes: N examples, K clients, C classes. A scheme is a frozen record whose fields are the knobs in its text; ``deal``
returns [N] clients and the number of rejected draws. All draws come from the key: same seed, same partition.
"""

from bisect import bisect_right
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, nearest
from unskew.core.key import Key
from unskew.core.language import Call, apply, check_not_negative, check_positive, parse_call
from unskew.core.plugins import load_function, require_extra
from unskew.core.units import counted
from unskew.data.partition_files import read_partition
from unskew.data.population import Clients, Ints, Partition, number_users

REDRAWS = 1000  # draws before dirichlet gives up …
SHARES = 20_000_000  # … or fewer, to draw at most this many shares: about two seconds
BLOCK = 1 << 20  # shares drawn at once, to limit memory


@dataclass(frozen=True)
class Iid:
    """Uniformly at random; sizes differ by at most one."""

    def deal(self, labels: Ints, clients: int, key: Key) -> tuple[Ints, int]:
        """[N] clients, and no redraws."""
        client = np.empty(len(labels), np.int64)
        client[key.numpy().permutation(len(labels))] = np.arange(len(labels)) % clients
        return client, 0


@dataclass(frozen=True)
class Shards:
    """Sorted by label, cut into K·per_client shards, per_client to each client (McMahan et al. 2017)."""

    per_client: int = 2

    def __post_init__(self) -> None:
        check_positive("shards", per_client=self.per_client)

    def deal(self, labels: Ints, clients: int, key: Key) -> tuple[Ints, int]:
        """[N] clients, and no redraws. Shards differ by at most one example."""
        shards = clients * self.per_client
        if shards > len(labels):
            fewer = "give fewer clients or a smaller per_client"
            raise UserError(f"shards: {shards} shards need as many examples; {fewer}")
        owner = key.fold("shards").numpy().permutation(shards) // self.per_client
        client = np.empty(len(labels), np.int64)
        client[_by_class(labels, key)] = owner[np.arange(len(labels)) * shards // len(labels)]
        return client, 0


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided by its own draw p_c ~ Dir_K(alpha): client k gets the share p_ck.

    Cut points are ⌊n_c·Σ_{j≤k} p_cj + u_c⌋. Everything is drawn again until each client has ``min_size`` examples.
    ``cap`` is the variant in MOON's public code: classes are dealt in order, and a client that already has N/K examples
    gets no share of the next class.

    Departs from the public codes: they lack u_c, uniform in [0, 1). Without it the first client loses half an example
    per class to the last one, which matters if classes are many and small.
    """

    alpha: float = 0.1
    min_size: int = 10
    cap: bool = False

    def __post_init__(self) -> None:
        check_positive("dirichlet", alpha=self.alpha)
        check_not_negative("dirichlet", min_size=self.min_size)

    def deal(self, labels: Ints, clients: int, key: Key) -> tuple[Ints, int]:
        """[N] clients, and the number of draws that left a client too small."""
        if clients * self.min_size > len(labels):
            need = f"{clients} clients with min_size={self.min_size} need {clients * self.min_size} examples"
            raise UserError(f"dirichlet: {need}, but there are {len(labels)}; give fewer clients or a smaller min_size")
        frequency = np.bincount(labels)
        frequency = frequency[frequency > 0]
        rng = key.fold("shares").numpy()
        cost = len(frequency) * (max(clients, 1000) if self.cap else clients)  # cap draws class by class
        draws = max(3, min(REDRAWS, SHARES // cost))
        for redraws in range(draws):
            counts = self._counts(frequency, clients, rng)  # [C, K]
            if counts.sum(axis=0).min() >= self.min_size:
                client = np.empty(len(labels), np.int64)
                owner = np.tile(np.arange(clients), len(frequency))
                client[_by_class(labels, key)] = np.repeat(owner, counts.ravel())
                return client, redraws
        failed = f"none of {draws} draws gave all {clients} clients {self.min_size} examples"
        instead = "give fewer clients, a larger alpha, a smaller min_size, or use dirichlet-client"
        raise UserError(f"dirichlet: {failed}; {instead}")

    def _counts(self, frequency: Ints, clients: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
        counts = np.zeros((len(frequency), clients), np.int32)
        step = 1 if self.cap else max(1, BLOCK // clients)
        sizes, full = np.zeros(clients, np.int64), frequency.sum() / clients
        for at in range(0, len(frequency), step):
            block = frequency[at : at + step, None]
            shares = log_gamma(rng, self.alpha, (len(block), clients))
            if self.cap:
                shares[:, sizes >= full] = -np.inf  # never all: fewer than N examples have been dealt so far
            shares = np.exp(shares - shares.max(axis=1, keepdims=True)).cumsum(axis=1)
            cuts = np.floor(shares / shares[:, -1:] * block + rng.random((len(block), 1)))
            cuts = np.minimum(cuts, block).astype(np.int32)  # n + u may round up to n + 1
            counts[at : at + step] = np.diff(cuts, axis=1, prepend=np.int32(0))
            sizes += counts[at : at + step].sum(axis=0)
        return counts


@dataclass(frozen=True)
class DirichletClient:
    """Each client has its own label distribution q_k ~ Dir(alpha·p), and all have the same size (± 1).

    Examples are drawn without replacement; an exhausted class drops out and q_k is renormalised (Hsu, Qi and
    Brown 2020, eq. 5). p is the distribution of the labels. alpha = 0: one class per client, until it runs out.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_not_negative("dirichlet-client", alpha=self.alpha)

    def deal(self, labels: Ints, clients: int, key: Key) -> tuple[Ints, int]:
        """[N] clients, and no redraws."""
        total = len(labels)
        owner = np.arange(total) * clients // total  # the client of each draw: 0 0 0 1 1 1 …
        drawn = polya(np.bincount(labels), np.bincount(owner, minlength=clients), self.alpha, key.fold("urn"))
        client = np.empty(total, np.int64)
        client[_by_class(labels, key)] = owner[np.argsort(drawn, kind="stable")]
        return client, 0


def polya(frequency: Ints, sizes: Ints, alpha: float, key: Key) -> Ints:
    """[N] classes in the order drawn, client by client, until nothing remains.

    Drawing q ~ Dir(alpha·p) and then examples from q is Pólya's urn: with q integrated out, the next example has class
    y with probability ∝ alpha·p(y) + (this client's examples of y). Renormalising q over the remaining classes S leaves
    a Dirichlet over S, so eq. 5 means dropping the others from both terms. This is exact for every alpha, 0 included;
    no gamma variate underflows, no quotient is 0/0, and ten classes cost the same as thousands.
    """
    rng = key.numpy()
    again, fresh = rng.random(int(sizes.sum())).tolist(), rng.random(int(sizes.sum())).tolist()
    total, left = int(frequency.sum()), frequency.tolist()
    live = [c for c, count in enumerate(left) if count > 0]
    bounds = np.cumsum(frequency[live]).tolist()
    drawn: list[int] = []
    for size in sizes.tolist():
        urn: list[int] = []  # this client's draws of the remaining classes
        for at in range(len(drawn), len(drawn) + size):
            draw = again[at] * (alpha * (bounds[-1] / total) + len(urn))
            if draw < len(urn):
                label = urn[int(draw)]
            else:
                label = live[min(bisect_right(bounds, fresh[at] * bounds[-1]), len(live) - 1)]
            drawn.append(label)
            urn.append(label)
            left[label] -= 1
            if left[label] == 0 and len(live) > 1:
                live.remove(label)
                bounds = np.cumsum(frequency[live]).tolist()
                urn = [c for c in urn if c != label]
    return np.array(drawn, np.int64)


def log_gamma(rng: np.random.Generator, alpha: float, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Logarithms of Gamma(alpha) = Gamma(alpha + 1)·U^(1/alpha): below 0.01, the variates themselves underflow."""
    alpha = min(max(alpha, 1e-300), 1e300)  # more extreme values overflow, and would not change the draws
    return np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha


SCHEMES = {"iid": Iid, "dirichlet": Dirichlet, "dirichlet-client": DirichletClient, "shards": Shards}


def _by_class(labels: Ints, key: Key) -> Ints:
    """[N] example ids, class by class, shuffled within each class."""
    order = key.fold("shuffle").numpy().permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


Places = npt.NDArray[np.float64]  # [N, 2], latitude and longitude in degrees; NaN where unknown
Cells = npt.NDArray[np.uint64]

LEAF = 30  # the level of the smallest cells, about a square centimeter; the six faces of the cube have level 0


@dataclass(frozen=True)
class Geo:
    """The knobs of ``geo``: the most and the fewest examples of a cell.

    Starting from the six faces of the S2 cube, cells with more than ``max`` examples are divided into their four
    children. Then cells with fewer than ``min`` examples, by default 0.01·max, are dropped (Hsu, Qi and Brown 2020,
    section 4.1, N_max and N_min).
    """

    max: int = 1000
    min: int | None = None

    def __post_init__(self) -> None:
        check_positive("geo", max=self.max)
        if not 0 <= self.least <= self.max:
            raise ValueError(f"geo(min={self.min}): min must be between 0 and max ({self.max})")

    @property
    def least(self) -> float:
        """The fewest examples of a cell that becomes a client."""
        return self.max / 100 if self.min is None else self.min


def deal_by_cell(geo: Geo, places: Places, *, scheme: str, seed: int) -> Partition:
    """Partition by cell, whatever the seed: clients are numbered along S2's curve and named by their cells' tokens."""
    known = ~np.isnan(places).any(axis=1)
    if not known.any() or (np.abs(places[known]) > (90, 180)).any():
        raise UserError(f"partition {scheme}: no training example has a place, or one is not in degrees; correct them")
    cell = np.zeros(len(places), np.uint64)
    cell[known] = divide(leaf_cells(places[known]), geo.max)
    tokens, inverse, sizes = np.unique(cell, return_inverse=True, return_counts=True)
    large = (tokens > 0) & (sizes >= geo.least)
    if not large.any():
        raise UserError(f"partition {scheme}: no cell has {geo.least:g} examples; give a smaller min")
    client: Clients = np.where(large, np.cumsum(large) - 1, -1).astype(np.int32)[inverse]
    names = tuple(f"{int(cell_id):016x}".rstrip("0") for cell_id in tokens[large])  # S2's tokens
    notes = []
    if len(small := sizes[(tokens > 0) & ~large]):
        lost = f"{counted(int(small.sum()), 'training example')} in {counted(len(small), 'cell')}"
        notes.append(f"not assigned to any client: {lost} with fewer than {geo.least:g}")
    if unknown := int(np.count_nonzero(~known)):
        notes.append(f"not assigned to any client: {counted(unknown, 'training example')} without a place")
    return Partition(client, len(names), scheme, seed, names, notes=tuple(notes))


def leaf_cells(places: Places) -> Cells:
    """[M] ids of the smallest cells that contain the places."""
    s2 = require_extra("s2geometry", "geo")
    point, cell = s2.S2LatLng.FromDegrees, s2.S2CellId
    return np.fromiter((cell(point(*degrees)).id() for degrees in places.tolist()), np.uint64, len(places))


def divide(leaves: Cells, most: int) -> Cells:
    """[M] the cell of each leaf; starting from the faces, cells with more than ``most`` leaves are divided."""
    cell = np.zeros(len(leaves), np.uint64)
    at = np.argsort(leaves, kind="stable")  # the leaves whose cell is still too large
    for level in range(LEAF + 1):
        cells = parents(leaves[at], level)
        _, inverse, sizes = np.unique(cells, return_inverse=True, return_counts=True)
        done = ((sizes <= most) | (level == LEAF))[inverse]
        cell[at[done]] = cells[done]
        at = at[~done]
    return cell


def parents(leaves: Cells, level: int) -> Cells:
    """[M] the cells of that level: an id is three bits for the face, two per level, a 1 that marks it, and zeros."""
    mark = np.uint64(1 << 2 * (LEAF - level))
    cleared: Cells = leaves & ~np.uint64(2 * int(mark) - 1)
    return cleared | mark


def partition_from(value: Any, labels: Ints, clients: int, seed: int, scheme: str) -> Partition:
    """Make a partition from an array with the client of each training example; −1: none."""
    try:
        client = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    except (ValueError, TypeError):
        client = np.zeros(0)
    if client.shape != (len(labels),) or client.dtype.kind not in "iu" or not -1 <= client.min() <= client.max() >= 0:
        wanted = f"{len(labels):,} integers, one per training example: its client, counting from 0, or -1 for none"
        raise UserError(f"{scheme} must be a list of {wanted}")
    if client.max() >= clients:
        excess = f"{scheme} assigns an example to client {client.max()}"
        raise UserError(f"{excess}, but clients are numbered from 0 to {clients - 1}; raise --clients")
    left = int(np.count_nonzero(client < 0))
    notes = (f"{left} of {len(labels)} training examples belong to no client",) if left else ()
    return Partition(client.astype(np.int32), clients, scheme, seed, notes=notes)


def partition_examples(
    text: str,
    labels: Ints,
    *,
    clients: int | None,
    key: Key,
    classes: int,
    users: npt.NDArray[np.str_] | None = None,
    places: Places | None = None,
) -> Partition:
    """Partition the training examples as in ``"dirichlet(alpha=0.1)"``, ``"file:split.csv"`` or ``"mine:f"``.

    ``users``, ``geo`` and ``file:`` determine the number of clients; ``clients`` must then be that number or None.
    """
    if text.strip().startswith("file:"):
        stored = read_partition(text.strip().removeprefix("file:"), labels, classes, seed=key.seed)
        return _check_count(replace(stored, scheme=text.strip()), clients)
    call = parse_call(text, "partition")
    if call.name == "users":
        apply(call, lambda: None, "partition")
        if users is None or not (users != "").any():
            raise UserError("partition users: this data set has no users; use dirichlet, iid or file:FILE")
        named = users != ""
        client = np.full(len(users), -1, np.int32)  # an example without a user belongs to no client
        client[named], names = number_users(users[named])
        rest = counted(int(np.count_nonzero(~named)), "training example")
        notes = () if named.all() else (f"not assigned to any client: {rest} without a user",)
        return _check_count(Partition(client, len(names), "users", key.seed, names, notes=notes), clients)
    if call.name == "geo":
        geo = apply(call, Geo, "partition")
        if places is None:
            raise UserError("partition geo: this data set has no places; use users, dirichlet-client or file:FILE")
        return _check_count(deal_by_cell(geo, places, scheme=_canonical(call.name, geo), seed=key.seed), clients)
    if ":" in call.name:
        function, clients = load_function(call.name, "partition"), _enough(call.name, clients, labels)
        copied = labels.copy()  # the function may sort in place
        value = apply(call, partial(function, copied, clients, key.fold("partition", call.name)), "partition")
        return partition_from(value, labels, clients, key.seed, str(call))
    if call.name not in SCHEMES:
        hint = nearest(call.name, [*SCHEMES, "users", "geo", "file:FILE", "package.module:function"])
        raise call.error(f"no partition is called {call.name!r}; {hint}")
    scheme = apply(call, SCHEMES[call.name], "partition")
    clients = _enough(call.name, clients, labels)
    client, redraws = scheme.deal(labels, clients, key.fold("partition", call.name))
    return Partition(client.astype(np.int32), clients, _canonical(call.name, scheme), key.seed, redraws=redraws)


def _enough(name: str, clients: int | None, labels: Ints) -> int:
    if clients is None:
        raise UserError(f"partition {name} needs a number of clients; give --clients, such as --clients 10")
    if not 1 <= clients <= len(labels):
        raise UserError(f"{clients} clients for {len(labels)} training examples: give 1 to {len(labels)}")
    return clients


def _canonical(name: str, scheme: Any) -> str:
    """The scheme's text: its first knob, and the others if they differ from the default."""
    knobs = {
        field.name: getattr(scheme, field.name)
        for at, field in enumerate(fields(scheme))
        if at == 0 or field.default is MISSING or getattr(scheme, field.name) != field.default
    }
    return str(Call(name, (), knobs, 0, ""))


def _check_count(partition: Partition, clients: int | None) -> Partition:
    if clients is not None and clients != partition.clients:
        counts = f"{partition.scheme} has {partition.clients} clients, but --clients asks for {clients}"
        raise UserError(f"partition {counts}; leave out --clients")
    return partition
