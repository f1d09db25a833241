"""Messages between server and nodes, and what carries them: a header in JSON and tensors as bytes, nothing pickled.

A header has the protocol version, the message's kind, its run and its number within the run, the name, type and shape
of every tensor, and a hash of the whole message. The body is the tensors' bytes, little-endian, without gaps. The hash
detects corruption on the way; authentication is the network's job.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.files import check_fields, parse_json, read_content, record_from, write_again
from unskew.core.types import Local, Tensors
from unskew.engines.blueprint import Blueprint

PROTOCOL = 4  # both sides must use the same
T = TypeVar("T")

MAX_HEADER = 16 * 2**20  # bytes
MAX_BODY = 8 * 2**30  # bytes, unless the caller sets a lower limit
MAX_NAME = 300  # characters
MAX_TENSORS = 20_000  # in one message; the largest networks have a few thousand
TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in TYPES}

Entry = tuple[str, str, tuple[int, ...]]  # name, type, shape


class BadMessage(Exception):
    """An invalid message. ``logged`` is the reason for logs, without content from the sender."""

    def __init__(self, reason: str, logged: str | None = None) -> None:
        super().__init__(reason)
        self.logged = logged or reason


@dataclass(frozen=True)
class Envelope:
    """A message as bytes."""

    header: bytes
    body: bytes = b""

    def __len__(self) -> int:
        return len(self.header) + len(self.body)

    def to_bytes(self) -> bytes:
        """Header and body in one piece."""
        return b"".join((len(self.header).to_bytes(8, "little"), self.header, self.body))

    @staticmethod
    def from_bytes(content: bytes) -> "Envelope":
        """Read what ``to_bytes`` returned."""
        end = 8 + int.from_bytes(content[:8], "little")
        return Envelope(content[8:end], content[end:])


Response = Envelope | str  # a str is the reason why there is no reply


@dataclass(frozen=True)
class Presence:
    """A connected node: the name and fingerprint of its registered key, and when it connected."""

    name: str | None = None  # None: the network has no names
    since: str = ""  # in any format
    key: str | None = None


class Transport(Protocol):
    """A network whose nodes come and go. Node ids have no meaning outside it."""

    def nodes(self) -> Mapping[int, Presence]:
        """The nodes that are connected now, by id."""

    def send(self, node: int, message: Envelope) -> str | None:
        """Send a message and return its id for ``receive``; None if it could not be sent."""

    def receive(self, ids: Iterable[str]) -> dict[str, Response]:
        """The replies to these messages that have arrived, each returned once."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Body:
    """Tensors as bytes, with their names, types and shapes."""

    entries: list[Entry]
    content: bytes

    @cached_property
    def sha256(self) -> bytes:
        """The hash of the bytes, computed once for all recipients."""
        return hashlib.sha256(self.content).digest()

    @staticmethod
    def of(tensors: Iterable[tuple[str, Tensor]]) -> "Body":
        """The bytes of these tensors, one after another."""
        if sys.byteorder != "little":
            raise UserError("only little-endian machines can exchange tensors, but this one is big-endian")
        pairs = list(tensors)
        entries = [(name, _dtype(value), tuple(value.shape)) for name, value in pairs]
        return Body(entries, b"".join(raw(value).numpy().data for _, value in pairs if value.numel()))


NO_TENSORS = Body([], b"")


def seal(fields: Mapping[str, Any], tensors: Body | Iterable[tuple[str, Tensor]] = NO_TENSORS) -> Envelope:
    """A message with these fields and tensors; its header ends with a hash of the whole message."""
    body = tensors if isinstance(tensors, Body) else Body.of(tensors)
    start = msgspec.json.encode({"protocol": PROTOCOL, **fields, "tensors": body.entries})[:-1]
    return Envelope(start + _HASH % _digest(start, body.sha256), body.content)


_HASH = b',"sha256":"%s"}'
_HASH_BYTES = len(_HASH % bytes(64))


def _digest(header: bytes, body: bytes) -> bytes:
    return hashlib.sha256(header + body).hexdigest().encode()


def unseal(envelope: Envelope, max_bytes: int = MAX_BODY) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
    """A message's fields and tensors. Refuses a damaged message, or one with more than ``max_bytes``."""
    header = read_header(envelope)
    tensors = decode_tensors(header.pop("tensors", None), envelope.body, max_bytes)
    start, end = envelope.header[:-_HASH_BYTES], envelope.header[-_HASH_BYTES:]
    if end != _HASH % _digest(start, hashlib.sha256(envelope.body).digest()):
        raise BadMessage("it was damaged on the way: its hash does not match")
    return header, tensors


def read_header(envelope: Envelope) -> dict[str, Any]:
    """The header, without its hash. Refuses another protocol version."""
    if len(envelope.header) > MAX_HEADER:
        raise BadMessage(f"oversized: its header takes {len(envelope.header):,} bytes; the limit is {MAX_HEADER:,}")
    try:
        header = parse_json(envelope.header)
    except ValueError as error:
        raise BadMessage(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadMessage("its header is not a JSON object")
    if (version := header.pop("protocol", None)) != PROTOCOL:
        other = version if type(version) is int else "unknown"
        raise BadMessage(f"it uses protocol {other}, but this side uses {PROTOCOL}; install the same version of unskew")
    header.pop("sha256", None)
    return header


def decode_tensors(described: Any, body: bytes, most: int) -> list[tuple[str, Tensor]]:
    """The tensors in a message's body; ``described`` is its list of names, types and shapes."""
    if len(body) > most:
        raise BadMessage(f"oversized: its tensors take {len(body):,} bytes; the limit is {most:,}")
    try:
        entries = msgspec.convert(described, list[Entry])
    except msgspec.ValidationError as error:
        raise BadMessage(f"its tensors are not described by name, type and shape: {error}") from error
    if len(entries) > MAX_TENSORS:
        raise BadMessage(f"it has {len(entries):,} tensors; the limit is {MAX_TENSORS:,}")
    for name, dtype, shape in entries:
        if dtype not in DTYPES or len(name) > MAX_NAME or len(shape) > 16 or not all(0 <= n <= MAX_BODY for n in shape):
            raise BadMessage("a tensor is not described by its name, type and shape")
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in entries]
    if sum(sizes) != len(body):
        raise BadMessage(f"its tensors should take {sum(sizes):,} bytes, but {len(body):,} arrived")
    tensors, start, content = list[tuple[str, Tensor]](), 0, memoryview(body)
    for (name, dtype, shape), size in zip(entries, sizes, strict=True):
        value = torch.empty(shape, dtype=DTYPES[dtype])  # aligned, because alignment affects how kernels round
        if size:
            raw(value).numpy().data[:] = content[start : start + size]
        tensors.append((name, value))
        start += size
    return tensors


def by_name(tensors: Iterable[tuple[str, Tensor]]) -> Tensors:
    """The tensors by name; a repeated name is refused."""
    named: Tensors = {}
    for name, value in tensors:
        if name in named:
            raise BadMessage("a tensor appears twice")
        named[name] = value
    return named


def raw(value: Tensor) -> Tensor:
    """[bytes], the tensor's own memory if it is contiguous and on the CPU."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _dtype(value: Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"tensors of type {name} cannot be sent; supported types: {', '.join(DTYPES)}")
    return name


def read(values: Any, kind: type[T]) -> T:
    """These values as a record of their types and limits, or refused. The reason does not quote them."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise BadMessage(f"it cannot be read: {error}") from error


MAX_TEXT = 200  # characters in a name
MAX_CLASSES = 300_000  # a landmark set has 203,094
MAX_CLIENTS = 10**6  # client numbers are below this: tables have a row per number
MAX_EXAMPLES = 5 * 10**7  # over all clients of a node: the server lists them

Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=MAX_EXAMPLES)]
Number = Annotated[int, Meta(ge=0, lt=MAX_CLIENTS)]  # of a client
Side = Annotated[int, Meta(gt=0, le=4096)]  # of an image
Mean = Annotated[float, Meta(ge=0, le=1)]  # pixels are between 0 and 1
Deviation = Annotated[float, Meta(ge=1e-9, le=1)]
Run = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Names = Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
Ticket = Annotated[str, Meta(max_length=64)]
Commitment = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]


@dataclass(frozen=True)
class Header:
    """What every message has: its kind, its run and its number within the run."""

    kind: str
    run: Run
    number: int


@dataclass(frozen=True)
class SentVisit:
    """A ``Visit`` as the server sends it."""

    client: Number
    weight: Annotated[float, Meta(gt=0)]
    take: Annotated[int, Meta(ge=1, le=10**9)] | None
    repeat: Annotated[int, Meta(ge=0, le=10**9)]
    ticket: Ticket | None
    keep: bool
    parcel: Annotated[bytes, Meta(max_length=3 * 2**18)]


@dataclass(frozen=True)
class JobRequest:
    """A message that asks for a job."""

    agreement: str  # its digest
    job: dict[str, Any]
    seed: int
    key: tuple[int | str, ...]
    visits: Annotated[tuple[SentVisit, ...], Meta(min_length=1, max_length=100_000)]
    keep: tuple[Ticket, ...]  # memories that the server still needs


@dataclass(frozen=True)
class SentResult:
    """The result of one visit: the form of each sum, the number of extra tensors, or why there are none."""

    client: int
    repeat: int
    forms: tuple[Annotated[str, Meta(pattern=r"^(plain|single|model)\Z")], ...] = ()
    extra: Annotated[int, Meta(ge=0)] = 0
    factor: Annotated[float, Meta(gt=0)] = 1.0
    ticket: str | None = None
    failure: str | None = None
    anew: bool = False  # the client's memory was lost


@dataclass(frozen=True)
class ClientFacts:
    """A client of a node; ``number`` is None if the server may assign one."""

    name: Text
    number: Number | None
    examples: Count
    test: Count  # its own test images


@dataclass(frozen=True)
class Description:
    """What a node reports about itself and its data."""

    node: Text
    version: Text
    clients: Annotated[tuple[ClientFacts, ...], Meta(min_length=1, max_length=100_000)]
    classes: Names
    shape: tuple[Side, Side, Side]  # of its images, as stored
    mean: tuple[Mean, ...]
    std: tuple[Deviation, ...]
    augment: bool  # whether crops and flips preserve the class of an image
    augmentation: Text  # which crops suit its images
    data: Commitment = ""  # a commitment to its data; the key stays on the node

    @staticmethod
    def from_json(values: Any) -> "Description":
        """Parse and check a description that was sent."""
        found = read(values, Description)
        _require_names([client.name for client in found.clients])
        _require_names(found.classes)
        _require_names(list({found.node, found.version, found.augmentation}))
        if not len(found.mean) == len(found.std) == found.shape[0]:
            raise BadMessage("its normalization does not match its images' channels")
        if sum(client.examples for client in found.clients) > MAX_EXAMPLES:
            raise BadMessage(f"its clients have more than {MAX_EXAMPLES:,} examples in total")
        return found


@dataclass(frozen=True)
class SentAgreement:
    """A ``RunAgreement`` as the server sends it."""

    run: Run
    blueprint: dict[str, Any]
    classes: Names  # in order
    mean: tuple[Mean, ...]
    std: tuple[Deviation, ...]
    numbers: Annotated[Mapping[str, Number], Meta(min_length=1)]  # its clients' numbers, by name
    views: Annotated[int, Meta(ge=0, le=81)] = 0  # augmented views stored per image, if a part is frozen


@dataclass(frozen=True)
class RunAgreement(SentAgreement):
    """What a node needs for a run: the blueprint, the classes in order, its clients' numbers."""

    blueprint: Blueprint  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        fields = {name: getattr(self, name) for name in ("run", "classes", "mean", "std", "views")}
        return {**fields, "numbers": dict(self.numbers), "blueprint": self.blueprint.to_json()}

    @property
    def promise(self) -> str:
        """A hash of what must not change during a run, even if the server restarts with other settings."""
        values = self.to_json()
        kept = {name: value for name, value in values["blueprint"].items() if name not in ("device", "stored")}
        return _sha256({**values, "blueprint": kept, "views": 0}).hex()

    @cached_property
    def digest(self) -> str:
        """A short hash of exactly this agreement."""
        return _sha256(self.to_json()).hex()[:32]

    @property
    def common(self) -> bytes:
        """The digest of what every node is sent: everything except its clients' numbers."""
        return _sha256({**self.to_json(), "numbers": None})

    @staticmethod
    def from_json(values: Any) -> "RunAgreement":
        """Parse what ``to_json`` returned, with the checks that do not need the node's data."""
        sent = read(values, SentAgreement)
        _require_names(sent.classes)
        plain = sent.blueprint
        try:
            record_from(Local, plain.get("local"))
            msgspec.convert(plain.get("shape"), tuple[Side, Side, Side])
            check_fields(Blueprint, {name: value for name, value in plain.items() if name not in ("local", "shape")})
            blueprint = Blueprint.from_json(plain)
            if blueprint.classes != len(sent.classes) or len(sent.mean) != len(sent.std):
                raise ValueError("its classes or its normalization do not match")
            if blueprint.dtype not in DTYPES or not blueprint.crosses:
                raise ValueError("its dtype is not supported")
        except (TypeError, ValueError, KeyError) as error:
            raise BadMessage(f"its blueprint cannot be read: {error}", "its blueprint cannot be read") from error
        return RunAgreement(**{**vars(sent), "blueprint": blueprint})


def printable(content: object) -> str:
    """Content from the other side, safe to log: short and without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(content)[:500])


def _require_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names) or not all(name.isprintable() for name in names):
        raise BadMessage("its clients, classes or texts contain a duplicate or unprintable name")


def _sha256(values: Any) -> bytes:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


REMEMBERED = 1000  # message numbers per run
STARTS = 2**20  # after a server's n-th restart its message numbers begin at n·STARTS
Numbers = tuple[int, set[int]]  # all below the first have been seen, and these


class Seen:
    """The message numbers that a node has seen in one run."""

    def __init__(self, file: Path) -> None:
        self._file, content = file, read_content(file)
        try:
            self._below, self._numbers = (0, set()) if content is None else msgspec.json.decode(content, type=Numbers)
        except msgspec.MsgspecError as error:
            remedy = f"delete the folder {file.parent} to let the node rejoin the run"
            raise UserError(f"{file} is damaged; {remedy}") from error

    def take(self, number: int, *, in_order: bool = False) -> None:
        """Record a number. Refuse it if it was seen, or is too old to tell.

        ``in_order`` also refuses a number below the highest one seen.
        """
        if number in self._numbers or number < self._below:
            raise BadMessage(f"replayed: message {number} was seen before")
        if in_order and number < max(self._numbers, default=0):
            raise BadMessage(f"overtaken: the server has sent another message since message {number}")
        self._numbers = set(sorted({*self._numbers, number})[-REMEMBERED:])
        if len(self._numbers) == REMEMBERED:
            self._below = max(self._below, min(self._numbers))
        self._below = max(self._below, number - number % STARTS)  # numbers from before a restart are void
        write_again(self._file, f"[{self._below},{sorted(self._numbers)}]".encode())


DELTA = "delta/"
PLAIN, SINGLE, MODEL = "plain", "single", "model"


@dataclass(frozen=True)
class WireContext:
    """What both sides know: the tensors that the server sent, the visit's weight, the factor on its update."""

    shared: Tensors
    weight: float
    factor: float = 1.0


def compact(sums: Mapping[str, Tensor], context: WireContext) -> list[tuple[str, str, Tensor]]:
    """(name, form, tensor) for each sum, in fewer bytes where possible; ``restore`` recovers every bit."""
    return [(name, *_compact_one(name, value, context)) for name, value in sums.items()]


def restore(name: str, form: str, sent: Tensor, context: WireContext) -> Tensor:
    """Recover a sum. Refuses a tensor that this form cannot have."""
    if form == PLAIN and sent.dtype in (torch.float64, torch.int64):
        return sent
    if form == SINGLE and sent.dtype == torch.float32:
        return sent.double()
    if form == MODEL:
        return _from_model(name, sent, context)
    raise BadMessage(f"its form cannot have type {sent.dtype}")


def factor_of(sums: Mapping[str, Tensor], weight: float) -> float:
    """The factor on a visit's update, from its sums; 1 if there is none."""
    scaled = sums.get("scaled")
    if scaled is None or scaled.dtype != torch.float64 or float(scaled) == weight or not float(scaled):
        return 1.0
    return weight / float(scaled)


def _compact_one(name: str, value: Tensor, context: WireContext) -> tuple[str, Tensor]:
    if value.dtype == torch.float64:
        old = context.shared.get(name.removeprefix(DELTA)) if name.startswith(DELTA) else None
        scale = context.weight * _update_factor(name, context)
        if old is not None and old.shape == value.shape and scale:
            new = old.double() - value / scale
            model = new.to(old.dtype) if old.is_floating_point() else new.round().to(old.dtype)
            if _same_bits(_from_model(name, model, context), value):
                return MODEL, model
        if value.numel() > 1 and _same_bits((single := value.float()).double(), value):
            return SINGLE, single
    return PLAIN, value


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.int64), right.contiguous().view(torch.int64))


def _from_model(name: str, sent: Tensor, context: WireContext) -> Tensor:
    old = context.shared.get(name.removeprefix(DELTA))
    if old is None or old.shape != sent.shape or old.dtype != sent.dtype:
        raise BadMessage("a tensor of its update differs in shape or type from the model's")
    delta = torch.sub(old.double(), sent.double()).mul_(context.weight)
    factor = _update_factor(name, context)
    return delta if factor == 1 else delta.mul_(factor)


def _update_factor(name: str, context: WireContext) -> float:
    return context.factor if name.startswith("delta/params/") else 1.0  # buffers are averaged without it
