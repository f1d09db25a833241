"""The records and protocols that several packages share.

Shapes used throughout: B examples in a batch, N in a data set, C classes, [ch, H, W] one image.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:
    from unskew.core.key import Key


Arrays = dict[str, npt.NDArray[Any]]


class StoredImages(Protocol):
    """Images that are read on demand; they behave like an array where the rest of the package needs it."""

    shape: tuple[int, int, int, int]  # [N, ch, H, W]
    dtype: np.dtype[np.uint8]
    nbytes: int  # the size of all images in memory
    sha256: str  # over all pixels: the same on every machine, for the same images in the same order

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> npt.NDArray[np.uint8]:
        """Index the first axis, as in an array."""

    def take(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[B, ch, H, W], the images with these indices."""

    def whole(self, index: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
        """The images before cropping, [ch, h, w] each: random crops are cut from these."""

    def described(self) -> tuple[str, Arrays]:
        """What another process needs to open them: a JSON text, and arrays with one entry per image."""


@dataclass(frozen=True)
class Split:
    """Images, as bytes before normalisation, and their labels.

    Instead of images there may be the floating-point output of a frozen part of a network.
    """

    images: npt.NDArray[Any] | StoredImages  # [N, ch, H, W]
    labels: npt.NDArray[np.int64]  # [N], each in 0..C-1
    rows: npt.NDArray[np.int64] | None = None  # [N], the rows of ``images`` that belong here; None: all, in order

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Examples:
    """The training examples without their images, as partitions need them."""

    labels: npt.NDArray[np.int64]  # [N]
    classes: tuple[str, ...]
    users: npt.NDArray[np.str_] | None = None  # [N]
    places: npt.NDArray[np.float64] | None = None  # [N, 2]


@dataclass(frozen=True)
class ImageSet:
    """A data set: its train and test parts, and how its pixels are normalised.

    ``mean`` and ``std`` are per channel, for pixels scaled to 0..1. ``augment``: crops and flips do not change a
    picture's class (a mirrored digit is not a digit). ``users`` are the owners of the training examples, ``places``
    the locations where they were taken, ``test_users`` the owners of the test examples.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool = False
    users: npt.NDArray[np.str_] | None = None  # [N]
    notes: tuple[str, ...] = ()
    places: npt.NDArray[np.float64] | None = None  # [N, 2], latitude and longitude in degrees; NaN where unknown
    test_users: npt.NDArray[np.str_] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """[ch, H, W] of one image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def examples(self) -> Examples:
        """The training examples without their images."""
        return Examples(self.train.labels, self.classes, self.users, self.places)


Tensors = dict[str, Tensor]  # flat; names have a namespace: "params/conv1.weight", "buffers/…"
Sums = dict[str, Tensor]  # every entry may be added, all float64: "weight", "delta/…", "stat/<name>/…", "metric/…"

CLASSIFIER = ("params/classifier.weight", "params/classifier.bias")  # in our own networks

EVERYONE = -1  # instead of a client: the pooled examples of all clients


@dataclass(frozen=True)
class Visit:
    """One client's turn in a round.

    ``weight`` is its weight in the sum (FedAvg: its number of examples), ``take`` how many of its examples it draws
    (None: all of them, once per epoch), ``repeat`` numbers the visits to one client within a round. ``ticket`` names
    the memory that the client stored at its last visit; the client issues it, and the server only passes it back.
    ``keep``: this visit stores a new memory. If a client has two visits in a round, both read the memory of the
    round before, and the last one stores.
    """

    client: int
    weight: float
    take: int | None = None
    repeat: int = 0
    ticket: str | None = None  # None: the client has stored nothing yet
    keep: bool = False
    slot: int | None = None  # where the memory is written; set by the client, never by the server
    parcel: bytes = b""  # data from the server for this visit only


@dataclass(frozen=True)
class TestPart:
    """The server's test images from ``start`` up to ``stop``: an evaluation is split into such parts."""

    __test__ = False  # not for pytest

    start: int
    stop: int


@dataclass(frozen=True)
class Local:
    """Settings of a client's training. Optimizer state starts from zero at every visit.

    Within a round ``lr`` is the scheduled rate; elsewhere it is the configured one.
    """

    epochs: int = 5
    batch: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    augment: bool = False
    schedule: str = "constant"  # of the learning rate over the rounds
    optimizer: str = "sgd"
    clip: float = 0.0  # longer gradients are scaled down to this length; 0: none are
    decay: str = "all"  # what weight_decay shrinks: all parameters, or only weights
    augmentation: str = "shift"  # or resized-crop; used if ``augment``
    steps: int | None = None  # per visit, instead of epochs


@dataclass(frozen=True)
class Loss:
    """A mini-batch's loss in parts: value = Σ w·e / Σ w + penalty.

    A term multiplies the weights and adds to the penalty. Only margin and blend change ``example``.
    """

    example: Tensor  # [B]
    weight: Tensor | None = None  # [B]; None: all one
    penalty: Tensor | None = None  # []; None: zero

    def value(self) -> Tensor:
        """The scalar that is minimised."""
        weight = self.weight
        mean = self.example.mean() if weight is None else (weight * self.example).sum() / weight.sum()
        return mean if self.penalty is None else mean + self.penalty

    def plus(self, penalty: Tensor) -> "Loss":
        """This loss with one more penalty."""
        total = penalty if self.penalty is None else self.penalty + penalty
        return Loss(self.example, self.weight, total)


@dataclass(frozen=True)
class Step:
    """One step of a client's training, as margins, blend and terms see it."""

    features: Tensor  # [B, d], the classifier's input
    logits: Tensor  # [B, C]
    labels: Tensor  # [B]
    params: Tensors  # the client's own, with gradient; names as in ``shared``: "params/…"
    shared: Tensors  # what the server sent this round: "params/…", "buffers/…", "sent/<name>/…"
    memory: Tensors  # what this client stored at its last visit: "<name>/…"; empty at its first
    counts: Tensor  # [C], the client's examples of each class
    encode: Callable[[str], Tensor]  # "shared" or a memory's name -> [B, d], features of that model: eval, no gradient
    predict: Callable[[str], Tensor]  # the same name -> [B, C], logits of that model: eval, no gradient
    classifier: tuple[str, ...] = CLASSIFIER  # the names of the classifier's weight and, if it has one, bias


@dataclass(frozen=True)
class Visited:
    """A client's state after its training, from which statistics are measured and memories stored."""

    visit: Visit
    shared: Tensors  # as in Step
    memory: Tensors  # as in Step
    model: Tensors  # the client's, after training: "params/…", "buffers/…"; overwritten by the next visit
    counts: Tensor  # [C]
    steps: int
    local: Local
    features: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # ([B, d], [B]) over the visit's examples, each once
    classifier: tuple[str, ...] = CLASSIFIER  # as in Step


@dataclass(frozen=True)
class PrivacyBudget:
    """Differential privacy of released statistics: (ε, δ) for features of length ``clip`` at most."""

    epsilon: float
    delta: float
    clip: float
    release: bool = False  # noise from the operating system, not from the run's seed

    def __str__(self) -> str:
        """As written in a method's text."""
        last = ", release=true" if self.release else ""
        return f"private(epsilon={self.epsilon:g}, delta={self.delta:g}, clip={self.clip:g}{last})"


@dataclass(frozen=True)
class RoundInfo:
    """What the server knows about the round when it updates the model."""

    round: int  # the round that has just ended; the first is 1
    rounds: int
    roster: "Roster"
    turnout: float  # Σ weights of the reporting visits / examples of all clients; 1: every client took part


Margin = Callable[[Step], Tensor]  # [B, C], or [C] for all examples: added to the logits before cross-entropy
Blend = Callable[[Tensor, Step], Tensor]  # [B] cross-entropy of each example -> [B], what is minimised instead
Term = Callable[[Loss, Step], Loss]  # multiplies weights, adds penalties
Head = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]  # classifier weight and bias -> those applied
Correction = Callable[[Tensors, Tensors], Tensors]  # shared, memory -> "params/…", added to every gradient; {}: none
Gradient = Callable[[], Tensors]  # the mini-batch's, at the client's model: "params/…"
Displacement = Callable[[Gradient], Tensors]  # in each step: "params/…", added to the model for its gradient; {}: none
Perturbation = Callable[[Tensors, Tensors], Displacement]  # shared, memory -> the displacement in a visit's steps
Mask = npt.NDArray[np.bool_]
Available = Callable[["Key", int, "Roster"], Mask | None]  # run's key, round -> [K], who can be drawn; None: all
Sampler = Callable[["Key", "Roster", int], list[Visit]]
Arrive = Callable[["Key", list[Visit]], list[Visit] | None]  # drawn visits -> those that take place; None: all
Scale = Callable[[int, Local], float]  # the steps of a visit -> the factor on its update
Aggregate = Callable[[Sums], Tensors]
Exchange = Callable[["Engine", "Job", Tensors, Sequence[Visit], "Key"], "Outcome"]  # the sums of a job over the visits
Progress = Callable[[int, int], None]  # done, total


@dataclass(frozen=True)
class Memory:
    """What a client stores at a visit for its next one.

    ``blank`` maps the model to tensors with the names, shapes and dtypes that are stored; ``keep`` returns the values.
    """

    name: str
    blank: Callable[[Tensors], Tensors]
    keep: Callable[[Visited], Tensors]


@dataclass(frozen=True)
class Statistic:
    """Something sent in addition to the model: clients measure it after training, and the server sums and folds it.

    ``init`` receives the model's tensors, the classifier also as "classifier/weight" and "classifier/bias".
    ``fold(last sent, sums, info)`` returns what is sent to the clients next, in float64; they find it in ``shared`` as
    "sent/<name>/…", in the model's dtype. ``survey`` is measured once, on every client, before the first round.
    ``steady``: a client's values do not change between rounds, such as the classes it has. Sums over changing groups of
    clients would reveal them, so under secure aggregation all rounds need the same clients.
    """

    name: str
    init: Callable[[Tensors], Tensors] = lambda model: {}
    measure: Callable[[Visited], Sums] | None = None
    fold: Callable[[Tensors, Sums, RoundInfo], Tensors] | None = None
    survey: Callable[[Visited], Sums] | None = None
    surveyed: Callable[[Sums], Tensors] | None = None
    steady: bool = False


@dataclass(frozen=True)
class ServerOptimizer:
    """A pair of pure functions: ``init(params) -> memory``, ``update(params, ḡ, memory, info) -> (params, memory)``.

    ḡ is the pseudo-gradient old − new; it and the memory are float64. Only parameters are updated this way: buffers
    are averaged, since momentum could push BatchNorm's running variance below zero.
    """

    init: Callable[[Tensors], Tensors]
    update: Callable[[Tensors, Tensors, Tensors, RoundInfo], tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class ServerState:
    """Everything the next round needs: its number, the model, the optimizer's memory, other tensors for the clients.

    ``clients`` has the ticket for each client's memory.
    """

    round: int
    tensors: Tensors
    memory: Tensors
    sent: Tensors = field(default_factory=dict)  # "<name>/…", float64
    clients: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What one visit returns.

    Everything in ``sums`` may be added to other clients' sums: float64, or int64 modulo 2⁶⁴ (masked words). ``extra``
    belongs to this visit alone: keys, shares, recordings, marks. In ``keep`` a job returns what the client stores for
    its next visit; it never leaves the client, which sends the ``ticket`` for it instead. With its ``visit``, a reply
    in the wrong place is noticed.
    """

    sums: Mapping[str, Tensor]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    ticket: str | None = None
    keep: Tensors | None = None
    visit: "Visit | TestPart | None" = None


@dataclass(frozen=True)
class Failure:
    """A failed visit and the reason; ``client`` is None if it was a part of the test images."""

    client: int | None
    reason: str
    repeat: int = 0


@dataclass(frozen=True)
class Note:
    """Something to report that belongs to no visit, such as a client that joined."""

    text: str


@runtime_checkable
class Job(Protocol):
    """The client-side work of every visit in an exchange. Jobs are frozen msgspec structs, so they serialize."""

    def __call__(self, side: Any, shared: Tensors, visit: Any, key: "Key") -> Reply:
        """Do the job for one visit."""


class MemoryStore(Protocol):
    """The store of clients' memories, as the server handles it; the server never sees their content."""

    def assign(self, visits: Sequence[Visit]) -> Sequence[Visit]:
        """Return the visits, with a slot for each that stores a memory."""

    def release(self, visits: Sequence[Visit], tickets: Mapping[int, str]) -> None:
        """The visits are over: keep the memories of these tickets, and drop what else they stored."""

    def supersede(self, tickets: Iterable[str]) -> None:
        """The server has newer tickets: these memories may be overwritten, unless a checkpoint refers to them."""

    def sync(self) -> None:
        """Make every memory durable, before a checkpoint refers to it."""

    def pin(self, tickets: Iterable[str]) -> None:
        """Record that a checkpoint refers to these memories only. Raises LostMemory if one is missing."""


class Engine(Protocol):
    """The connection between server and clients: jobs go out, replies come back."""

    @property
    def roster(self) -> "Roster":
        """The clients as they are now; in a federation, clients may join between two rounds."""

    @property
    def memory(self) -> MemoryStore | None:
        """The store for clients' memories; None if no method stores anything."""

    def visit(
        self, job: Job, shared: Tensors, visits: "Sequence[Visit] | Sequence[TestPart]", key: "Key"
    ) -> Iterator[Reply | Failure | Note]:
        """Do the job for each visit: one reply or failure per visit, in visit order, with notes in between.

        A reply's tensors are valid until the next item is requested.
        """

    def close(self) -> None:
        """Release the engine's resources."""


@dataclass(frozen=True)
class Outcome:
    """The result of an exchange: sums over the visits that succeeded, and details of each visit.

    ``tickets`` are those for new memories, by client; ``extra`` has per-visit data, by the visit's index.
    """

    sums: Sums
    failures: tuple[Failure, ...] = ()
    tickets: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    replied: tuple[int, ...] = ()  # indices of the visits that succeeded
    void: str = ""  # why there are no sums, if fewer clients stayed than the exchange needs
    bytes_up: int | None = None  # sent by all visits, if the exchange counts it; None: as ``statistics`` counts it
    bytes_down: int = 0  # sent to the clients by the exchange in addition to the model


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Roster:
    """The clients 0 … K − 1 and their numbers of examples, ``sizes`` [K]."""

    sizes: Ints

    @property
    def clients(self) -> int:
        """K."""
        return len(self.sizes)

    @cached_property
    def ends(self) -> Ints:
        """[K], running totals of the sizes: example e belongs to the first client whose end is above e."""
        return np.cumsum(self.sizes)

    @cached_property
    def examples(self) -> int:
        """The examples of all clients together."""
        return int(self.sizes.sum())

    @cached_property
    def inhabited(self) -> Ints:
        """The clients with at least one example, ascending."""
        return np.flatnonzero(self.sizes)

    def size(self, client: int) -> int:
        """The client's number of examples; EVERYONE has them all."""
        if client == EVERYONE:
            return self.examples
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} does not exist: clients are numbered from 0 to {self.clients - 1}")
        return int(self.sizes[client])


THRESHOLD = 0.66  # share of the clients of a secure sum that must stay to the end


@dataclass(frozen=True)
class SecureAggregation:
    """Sums are masked; ``threshold`` is the share of the clients that must stay until they are unmasked."""

    threshold: float = THRESHOLD

    def __str__(self) -> str:
        """As written in a method's text."""
        return "secure" if self.threshold == THRESHOLD else f"secure(threshold={self.threshold:g})"
