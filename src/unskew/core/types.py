"""The records and protocols that cross a module border.

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
    """Images that are read when asked for, instead of an array: as much like one as the rest of the package needs.

    Another process opens the same images from ``described``: a JSON text, and arrays of one entry for each image.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[N, ch, H, W]."""

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        """Bytes."""

    @property
    def nbytes(self) -> int:
        """What all of them would take in memory."""

    @property
    def sha256(self) -> str:
        """Of all pixels: the same on every machine, for the same images in the same order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> npt.NDArray[np.uint8]:
        """As of an array, along the first axis."""

    def take(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[B, ch, H, W], the images of these numbers."""

    def whole(self, index: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
        """The same without cropping: [ch, h, w] each, where random crops are cut from."""

    def described(self) -> tuple[str, Arrays]:
        """How another process opens them."""


@dataclass(frozen=True)
class Split:
    """Images and their labels, as they are in the files: bytes, not yet normalised.

    What a frozen part of a network made of the images may be in their place: floating point.
    """

    images: npt.NDArray[Any] | StoredImages  # [N, ch, H, W]
    labels: npt.NDArray[np.int64]  # [N], each in 0..C-1
    rows: npt.NDArray[np.int64] | None = None  # [N], which of more images these are; None: all, in their order

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Examples:
    """The training examples without their images: all that a partition is made from."""

    labels: npt.NDArray[np.int64]  # [N]
    classes: tuple[str, ...]
    users: npt.NDArray[np.str_] | None = None  # [N]
    places: npt.NDArray[np.float64] | None = None  # [N, 2]


@dataclass(frozen=True)
class ImageSet:
    """A data set: what is train, what is test, how its pixels are normalised.

    ``mean`` and ``std`` are per channel, for pixels scaled to 0..1. ``augment`` says whether crops and flips
    leave a picture's class alone (a mirrored digit is not one). ``users`` names the owner of each training example,
    ``places`` says where it was taken, ``test_users`` names the owners of the test examples.
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


Tensors = dict[str, Tensor]  # flat, the name carries the namespace: "params/conv1.weight", "buffers/…"
Sums = dict[str, Tensor]  # every entry may be added, all float64: "weight", "delta/…", "stat/<name>/…", "metric/…"

CLASSIFIER = ("params/classifier.weight", "params/classifier.bias")  # in our own networks

EVERYONE = -1  # instead of a client: the examples of all clients, as if in one place


@dataclass(frozen=True)
class Visit:
    """One client's turn in a round.

    ``weight`` is its share in the sum (FedAvg: its number of examples), ``take`` how many examples it draws from
    its own (None: all of them, once an epoch), ``repeat`` numbers the visits to one client in one round.
    ``ticket`` names the memory that the client kept at its last visit, written by the client's side; the server only
    passes it back. ``keep`` says whether this visit leaves a new memory. Of two visits to one client both read what
    the round before left, and the last one keeps.
    """

    client: int
    weight: float
    take: int | None = None
    repeat: int = 0
    ticket: str | None = None  # None: the client has kept nothing yet
    keep: bool = False
    slot: int | None = None  # where the memory is written; set on the client's side, never by the server
    parcel: bytes = b""  # what the server hands to this visit alone


@dataclass(frozen=True)
class TestPart:
    """A part of the server's own test images, from ``start`` up to ``stop``: what an evaluation is spread over."""

    __test__ = False  # not for pytest

    start: int
    stop: int


@dataclass(frozen=True)
class Local:
    """What a client does with its objective: SGD or Adam, whose momentum starts from zero at every visit.

    In a round ``lr`` is the rate that the schedule gives for it; outside rounds it is the one that was asked for.
    """

    epochs: int = 5
    batch: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    augment: bool = False
    schedule: str = "constant"  # of the rate over the rounds
    optimizer: str = "sgd"
    clip: float = 0.0  # the longest gradient that is used as it is; 0: any is
    decay: str = "all"  # what weight_decay shrinks: all, or weights
    augmentation: str = "shift"  # drawn where ``augment`` is on; or resized-crop
    steps: int | None = None  # of a visit, instead of epochs


@dataclass(frozen=True)
class Loss:
    """A mini-batch's loss in parts: value = Σ w·e / Σ w + penalty.

    A term multiplies the weights and adds to the penalty. It leaves ``example`` alone: that is for margin and blend.
    """

    example: Tensor  # [B]
    weight: Tensor | None = None  # [B]; None: all one
    penalty: Tensor | None = None  # []; None: zero

    def value(self) -> Tensor:
        """The number that is minimised."""
        weight = self.weight
        mean = self.example.mean() if weight is None else (weight * self.example).sum() / weight.sum()
        return mean if self.penalty is None else mean + self.penalty

    def plus(self, penalty: Tensor) -> "Loss":
        """This loss with one more penalty."""
        total = penalty if self.penalty is None else self.penalty + penalty
        return Loss(self.example, self.weight, total)


@dataclass(frozen=True)
class Step:
    """What margins, blend and terms may look at in one step of a client's training."""

    features: Tensor  # [B, d], what enters the classifier
    logits: Tensor  # [B, C]
    labels: Tensor  # [B]
    params: Tensors  # the client's own, with gradient; names as in ``shared``: "params/…"
    shared: Tensors  # what the server sent this round: "params/…", "buffers/…", "sent/<name>/…"
    memory: Tensors  # what this client kept at its last visit: "<name>/…"; empty at its first
    counts: Tensor  # [C], how many examples of each class the client holds
    encode: Callable[[str], Tensor]  # "shared" or a memory's name -> [B, d], features of that model: eval, no gradient
    predict: Callable[[str], Tensor]  # the same name -> [B, C], logits of that model: eval, no gradient
    classifier: tuple[str, ...] = CLASSIFIER  # the names of the classifier's weight and, where it has one, bias


@dataclass(frozen=True)
class Visited:
    """What a client knows when its training has ended: what statistics measure and what memories keep."""

    visit: Visit
    shared: Tensors  # as in Step
    memory: Tensors  # as in Step
    model: Tensors  # the client's own after training: "params/…", "buffers/…"; overwritten by the next visit
    counts: Tensor  # [C]
    steps: int
    local: Local
    features: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # ([B, d], [B]) over the visit's examples, each once
    classifier: tuple[str, ...] = CLASSIFIER  # as in Step


@dataclass(frozen=True)
class PrivacyBudget:
    """Differential privacy of what is released: (ε, δ) for features of length ``clip`` at most."""

    epsilon: float
    delta: float
    clip: float
    release: bool = False  # noise from the operating system, not from the run's seed

    def __str__(self) -> str:
        """As the text of a method has it."""
        last = ", release=true" if self.release else ""
        return f"private(epsilon={self.epsilon:g}, delta={self.delta:g}, clip={self.clip:g}{last})"


@dataclass(frozen=True)
class RoundInfo:
    """What the server knows of the round when it moves."""

    round: int  # the one that has just ended; the first is 1
    rounds: int
    roster: "Roster"
    turnout: float  # Σ weights of the reporting visits / examples of all clients; 1: every client took part


Margin = Callable[[Step], Tensor]  # [B, C], or [C] for all examples: added to the logits before cross-entropy
Blend = Callable[[Tensor, Step], Tensor]  # [B] cross-entropy of each example -> [B], what is minimised in its place
Term = Callable[[Loss, Step], Loss]  # multiplies weights, adds penalties
Head = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]  # the classifier's weight and bias, as used
Correction = Callable[[Tensors, Tensors], Tensors]  # shared, memory -> "params/…", added to every gradient; {}: none
Gradient = Callable[[], Tensors]  # the mini-batch's, at the client's model: "params/…"
Displacement = Callable[[Gradient], Tensors]  # in each step: "params/…", added to the model for its gradient; {}: none
Perturbation = Callable[[Tensors, Tensors], Displacement]  # shared, memory -> what a visit's steps use
Mask = npt.NDArray[np.bool_]
Available = Callable[
    ["Key", int, "Roster"], Mask | None
]  # the run's key, the round -> [K], who can be drawn; None: all
Sampler = Callable[["Key", "Roster", int], list[Visit]]
Arrive = Callable[["Key", list[Visit]], list[Visit] | None]  # of the visits that were drawn, those that come; None: all
Scale = Callable[[int, Local], float]  # the steps of a visit -> the factor on its update
Aggregate = Callable[[Sums], Tensors]
Progress = Callable[[int, int], None]  # how much is done, of how much


@dataclass(frozen=True)
class Memory:
    """What a client keeps from its visit for its next one.

    ``blank`` takes the model and gives tensors of the names, shapes and types that are kept, ``keep`` their values.
    """

    name: str
    blank: Callable[[Tensors], Tensors]
    keep: Callable[[Visited], Tensors]


@dataclass(frozen=True)
class Statistic:
    """A second thing that travels: clients measure it after their training, it is added up, the server folds it.

    ``init`` takes the model's tensors; its classifier is there also as "classifier/weight" and "classifier/bias".
    ``fold(last sent, sums, info)`` gives what is sent to the clients next, in float64; they find it in ``shared`` as
    "sent/<name>/…", in the model's own type. ``survey`` is measured once, on every client, before the first round.
    ``steady``: a client measures the same in every round, such as which classes it has; from sums over changing clients
    it can be solved for, so that under secure aggregation all rounds need the same clients.
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

    ḡ is the pseudo-gradient old − new, in float64; memory is float64 too. Parameters only: buffers such as
    BatchNorm's running variance are averaged plainly, since momentum could push a variance below zero.
    """

    init: Callable[[Tensors], Tensors]
    update: Callable[[Tensors, Tensors, Tensors, RoundInfo], tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class ServerState:
    """All that the next round needs: its number, the model, the optimiser's memory, what else is sent to clients.

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
    belongs to this visit alone: keys, shares, recordings, marks. A job puts what the client stores for its next visit
    into ``keep``; it never leaves the client, which returns the ``ticket`` for it instead.
    """

    sums: Mapping[str, Tensor]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    ticket: str | None = None
    keep: Tensors | None = None


@dataclass(frozen=True)
class Failure:
    """One visit that failed, and why; ``client`` is None where a part of the test images failed."""

    client: int | None
    reason: str
    repeat: int = 0


@dataclass(frozen=True)
class Note:
    """Something to report that belongs to no visit, such as a client that joined."""

    text: str


@runtime_checkable
class Job(Protocol):
    """What every visit of an exchange does on the client's side. Jobs are frozen msgspec structs, so they serialize."""

    def __call__(self, side: Any, shared: Tensors, visit: Any, key: "Key") -> Reply:
        """Do the job for one visit."""


class MemoryStore(Protocol):
    """Where clients' memories are stored, as the server's side handles them: it never sees what is in them."""

    def assign(self, visits: Sequence[Visit]) -> Sequence[Visit]:
        """The visits, each one that keeps a memory with room for it."""

    def release(self, visits: Sequence[Visit], tickets: Mapping[int, str]) -> None:
        """The visits are over, and these tickets count: what else they stored is dropped."""

    def supersede(self, tickets: Iterable[str]) -> None:
        """The server has newer tickets; these memories may be overwritten, unless a checkpoint refers to them."""

    def sync(self) -> None:
        """Make every memory durable: a checkpoint is about to refer to it."""

    def pin(self, tickets: Iterable[str]) -> None:
        """A checkpoint refers to these memories and to no others. Raises LostMemory where one is missing."""


class Engine(Protocol):
    """The connection between server and clients: jobs go out, replies come back."""

    @property
    def roster(self) -> "Roster":
        """The clients as they are now; in a federation, clients may join between two rounds."""

    @property
    def memory(self) -> MemoryStore | None:
        """The store that the engine was given for what clients keep; None where no method keeps anything."""

    def visit(
        self, job: Job, shared: Tensors, visits: "Sequence[Visit] | Sequence[TestPart]", key: "Key"
    ) -> Iterator[Reply | Failure | Note]:
        """Do the job for each visit: one reply or failure per visit, in visit order, with notes in between.

        A reply's tensors are valid until the next item is asked for.
        """

    def close(self) -> None:
        """Release what the engine holds."""


@dataclass(frozen=True)
class Outcome:
    """The result of an exchange: sums over the visits that succeeded, and what is known about each visit.

    ``tickets`` are those for new memories, by client; ``extra`` has what belongs to one visit, by its index.
    """

    sums: Sums
    failures: tuple[Failure, ...] = ()
    tickets: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    replied: tuple[int, ...] = ()  # indices of the visits that succeeded
    void: str = ""  # why there are no sums, where an exchange needs more clients than stayed
    bytes_up: int | None = None  # what all visits sent, where an exchange counts it; None: as ``statistics`` counts it
    bytes_down: int = 0  # what an exchange sent to the clients in addition to the model


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Roster:
    """Clients are numbered 0 … K − 1; ``sizes`` [K] says how many examples each holds."""

    sizes: Ints

    @property
    def clients(self) -> int:
        """K."""
        return len(self.sizes)

    @cached_property
    def ends(self) -> Ints:
        """[K], running totals of the sizes: example number e belongs to the first client whose end is above e."""
        return np.cumsum(self.sizes)

    @cached_property
    def examples(self) -> int:
        """How many examples all clients hold together."""
        return int(self.sizes.sum())

    @cached_property
    def inhabited(self) -> Ints:
        """The clients that hold at least one example, ascending."""
        return np.flatnonzero(self.sizes)

    def size(self, client: int) -> int:
        """How many examples the client holds; EVERYONE holds them all."""
        if client == EVERYONE:
            return self.examples
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} does not exist: there are {self.clients}, counted from 0")
        return int(self.sizes[client])


THRESHOLD = 0.66  # of the clients that begin a secure sum, so many must stay to the end


@dataclass(frozen=True)
class SecureAggregation:
    """Sums are masked; ``threshold`` is the share of the clients that must stay until the masks are taken off."""

    threshold: float = THRESHOLD

    def __str__(self) -> str:
        """As the text of a method has it."""
        return "secure" if self.threshold == THRESHOLD else f"secure(threshold={self.threshold:g})"


class Exchange(Protocol):
    """How the sums of a job reach the server, where a method puts something between it and the engine."""

    def __call__(self, engine: Engine, job: Job, shared: Tensors, visits: Sequence[Visit], key: "Key") -> Outcome:
        """The job's sums over the visits; ``void`` where too few stayed."""


class Mechanism(Protocol):
    """Differential privacy of updates: what a client does to its own, what the server does to their sum, its price."""

    @property
    def delta(self) -> float:
        """The chance for which nothing is promised."""

    @property
    def repeatable(self) -> bool:
        """Whether noise and participation follow from the key."""

    def through(self, exchange: Exchange) -> "Mechanism":
        """The same where updates reach the server through this exchange."""

    def clip_update(self, sums: Sums) -> Sums:
        """A client's sums as it may send them."""

    def with_share(self, words: Tensors, needed: int, members: int) -> Tensors:
        """A client's words with its share of the noise, before they are masked."""

    def add_noise(self, sums: Sums, params: Tensors, expected: int, key: "Key") -> Sums:
        """The sums over a round's visits with noise; nobody may have come. ``expected`` visits were to come."""

    def unit(self, drawn: int, clients: int) -> str:
        """Whom ε protects."""

    def epsilon(self, rounds: int, drawn: int, clients: int, *, replaced: bool = False) -> float | None:
        """ε of so many rounds with ``drawn`` of all ``clients`` in each; None: without noise nothing is promised.

        ``replaced``: for a client whose data are replaced, which covers one example that it has or has not.
        """
