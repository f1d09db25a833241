"""What goes over the wire between server and nodes: the codec's envelopes, with the version of the protocol.

A header has the kind of the message, its run and its number in that run. A hash finds what a machine or a disk
on the way has damaged; who may send is the network's business.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.files import check_fields, parse_json, read_content, record_from, write_again
from unskew.core.types import Local, Tensors
from unskew.engines.blueprint import Blueprint
from unskew.engines.codec import DTYPES, MAX_BODY, NO_TENSORS, BadMessage, Body, Envelope, decode, decode_header, encode

PROTOCOL = 4  # both sides must speak the same


def seal(fields: Mapping[str, Any], tensors: Body | Iterable[tuple[str, Tensor]] = NO_TENSORS) -> Envelope:
    """The message with these fields and tensors, and at the end of its header a hash of all of it."""
    body = tensors if isinstance(tensors, Body) else Body.of(tensors)
    whole = encode({"protocol": PROTOCOL, **fields}, body)
    start = whole.header[:-1]
    return Envelope(start + _HASH % _digest(start, body.sha256), whole.body)


_HASH = b',"sha256":"%s"}'
_HASH_BYTES = len(_HASH % bytes(64))


def _digest(header: bytes, body: bytes) -> bytes:
    return hashlib.sha256(header + body).hexdigest().encode()


def unseal(envelope: Envelope, most: int = MAX_BODY) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
    """The fields and tensors of a message; one that is not whole, or larger than ``most`` bytes, is refused."""
    read_header(envelope)
    header, tensors = decode(envelope, most)
    start, end = envelope.header[:-_HASH_BYTES], envelope.header[-_HASH_BYTES:]
    if end != _HASH % _digest(start, hashlib.sha256(envelope.body).digest()):
        raise BadMessage("it was changed on its way: it does not match its hash")
    del header["protocol"], header["sha256"]
    return header, tensors


def read_header(envelope: Envelope) -> dict[str, Any]:
    """The header alone, if it is one of this protocol."""
    header = decode_header(envelope)
    if (spoken := header.pop("protocol", None)) != PROTOCOL:
        other = spoken if spoken is None or type(spoken) is int else "unknown"
        raise BadMessage(
            f"it speaks protocol {other}, this side {PROTOCOL}; install the same version of unskew on the server and "
            "all nodes"
        )
    header.pop("sha256", None)
    return header


def read_field(header: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a header, of the right type."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    value = header.get(name)
    if type(value) not in kinds:
        expected = " or ".join("nothing" if option is type(None) else option.__name__ for option in kinds)
        raise BadMessage(f"its field {name!r} should be {expected}, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadMessage(f"its field {name!r} is not finite")
    return value


MAX_TEXT = 200  # characters of a name
MAX_SHOWN = 500  # characters of the other side's words
MAX_CLASSES = 300_000  # a landmark set has 203,094
MAX_CLIENTS = 10**6  # numbers of clients are below this: tables have a row for each number
MAX_EXAMPLES = 5 * 10**7  # of all clients of a node: the server lists them

Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=MAX_EXAMPLES)]
Number = Annotated[int, Meta(ge=0, lt=MAX_CLIENTS)]  # of a client
Side = Annotated[int, Meta(gt=0, le=4096)]  # of an image
Mean = Annotated[float, Meta(ge=0, le=1)]  # of pixels, which are from 0 to 1
Deviation = Annotated[float, Meta(ge=1e-9, le=1)]
Run = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Commitment = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]


@dataclass(frozen=True)
class ClientFacts:
    """One client of a node; ``number`` is None where the server may choose one."""

    name: Text
    number: Number | None
    examples: Count
    test: Count  # how many test images of its own it has


@dataclass(frozen=True)
class Description:
    """A node and its data, for the server."""

    node: Text
    version: Text
    clients: Annotated[tuple[ClientFacts, ...], Meta(min_length=1, max_length=100_000)]
    classes: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    shape: tuple[Side, Side, Side]  # of its images, as they are
    mean: tuple[Mean, ...]
    std: tuple[Deviation, ...]
    augment: bool  # whether crops and flips leave a picture's class alone
    augmentation: Text  # which crops suit its images
    data: Commitment = ""  # to its data, by a key that stays on the node

    def to_json(self) -> dict[str, Any]:
        """Plain texts and numbers."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @staticmethod
    def from_json(values: Any) -> "Description":
        """What ``to_json`` gave, checked."""
        found: Description = _convert(values, Description, "its description")
        _require_names("clients", [client.name for client in found.clients])
        _require_names("classes", found.classes)
        _require_names("texts", {found.node, found.version, found.augmentation})
        if not len(found.mean) == len(found.std) == found.shape[0]:
            raise BadMessage("its normalisation does not fit its images")
        if sum(client.examples for client in found.clients) > MAX_EXAMPLES:
            raise BadMessage(f"its clients have more than {MAX_EXAMPLES:,} examples together")
        return found


@dataclass(frozen=True)
class RunAgreement:
    """What a node needs to know for a run: the blueprint, the classes in their order, its clients' numbers."""

    run: str
    blueprint: Blueprint
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    numbers: Mapping[str, int]  # of the node's clients, by name
    views: int = 0  # augmented views of each image that are stored behind a frozen part

    def to_json(self) -> dict[str, Any]:
        """Plain texts and numbers."""
        fields = {name: getattr(self, name) for name in ("run", "classes", "mean", "std", "views")}
        return {**fields, "numbers": dict(self.numbers), "blueprint": self.blueprint.to_json()}

    @property
    def promise(self) -> str:
        """A name for what stays the same during a run, whatever the server is restarted with."""
        blueprint = {
            name: value for name, value in self.blueprint.to_json().items() if name not in ("device", "stored")
        }
        kept = {**self.to_json(), "blueprint": blueprint, "views": 0}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    @property
    def digest(self) -> str:
        """A short name for exactly this agreement."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def common(self) -> bytes:
        """The digest of what all nodes are sent alike: everything but the numbers of their clients."""
        return hashlib.sha256(json.dumps({**self.to_json(), "numbers": None}, sort_keys=True).encode()).digest()

    @staticmethod
    def from_json(values: Any) -> "RunAgreement":
        """What ``to_json`` gave, checked where the node's own data do not matter."""
        sent: _SentAgreement = _convert(values, _SentAgreement, "its agreement")
        blueprint = _blueprint(sent.blueprint)
        _require_names("classes", sent.classes)
        if len(sent.mean) != len(sent.std):
            raise BadMessage("its normalisation is not one")
        if blueprint.classes != len(sent.classes):
            raise BadMessage(f"it names {len(sent.classes)} classes for a network of {blueprint.classes}")
        return RunAgreement(sent.run, blueprint, sent.classes, sent.mean, sent.std, sent.numbers, sent.views)


@dataclass(frozen=True)
class _SentAgreement:
    run: Run
    blueprint: dict[str, Any]
    classes: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    mean: tuple[Mean, ...]
    std: tuple[Deviation, ...]
    numbers: Annotated[dict[str, Number], Meta(min_length=1)]
    views: Annotated[int, Meta(ge=0, le=81)]


def run_of(header: Mapping[str, Any]) -> str:
    """The run that a message belongs to."""
    return str(_convert(header.get("run"), Run, "its run"))


def text(values: Mapping[str, Any], name: str, most: int = MAX_TEXT) -> str:
    """A text that can be shown: not empty, not long, without control characters."""
    value = read_field(values, name, str)
    if not 0 < len(value) <= most or not value.isprintable():
        raise BadMessage(f"its field {name!r} should be a printable text of at most {most} characters")
    return str(value)


def shown(words: object) -> str:
    """The other side's words, as a log may have them: not long, and without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(words)[:MAX_SHOWN])


def _convert(values: Any, kind: Any, what: str) -> Any:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise BadMessage(f"{what} cannot be read: {error}") from error


def _require_names(what: str, names: Iterable[str]) -> None:
    """Refuse texts that cannot be shown, and a name that comes twice."""
    listed = list(names)
    if len(set(listed)) < len(listed) or not all(name.isprintable() for name in listed):
        raise BadMessage(f"its {what} have a name twice, or one that cannot be shown")


def _blueprint(values: dict[str, Any]) -> Blueprint:
    try:
        record_from(Local, values.get("local"))
        msgspec.convert(values.get("shape"), tuple[Side, Side, Side])
        check_fields(Blueprint, {name: value for name, value in values.items() if name not in ("local", "shape")})
        blueprint = Blueprint.from_json(values)
        if not 0 < blueprint.classes <= MAX_CLASSES or blueprint.dtype not in DTYPES or not blueprint.crosses:
            raise ValueError("its classes or its number type are not possible")
        return blueprint
    except (TypeError, ValueError, KeyError) as error:
        raise BadMessage(f"its blueprint cannot be read: {error}", "its blueprint cannot be read") from error


REMEMBERED = 1000
STARTS = 2**20  # a server's message numbers after its n-th start are from n·STARTS on


class Seen:
    """The numbers that a node has seen in one run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._below, self._numbers = _read(file)

    def take(self, number: int, *, in_order: bool = False) -> None:
        """Remember the number; refuse it where it was seen, or is too old to tell.

        ``in_order`` refuses a message that a later one has overtaken as well.
        """
        if number in self._numbers or number < self._below:
            raise BadMessage(f"replayed: message {number} was seen before")
        if in_order and number < max(self._numbers, default=0):
            raise BadMessage(f"overtaken: the server has sent another message since message {number}")
        self._numbers = set(sorted({*self._numbers, number})[-REMEMBERED:])
        if len(self._numbers) == REMEMBERED:
            self._below = max(self._below, min(self._numbers))
        self._below = max(self._below, number - number % STARTS)  # an earlier start of the server has ended
        write_again(self._file, f"[{self._below},{sorted(self._numbers)}]".encode())


def _read(file: Path) -> tuple[int, set[int]]:
    content = read_content(file)
    if content is None:
        return 0, set()
    try:
        match parse_json(content):
            case [int(below), list(numbers)] if all(type(number) is int for number in numbers):
                return below, set(numbers)
    except ValueError:
        pass
    raise UserError(f"{file} is damaged; delete the folder {file.parent}: the node then joins the run anew")


DELTA = "delta/"
PLAIN, SINGLE, MODEL = "plain", "single", "model"
FORMS = (PLAIN, SINGLE, MODEL)


@dataclass(frozen=True)
class WireContext:
    """What both sides have: the tensors that the server sent, the visit's weight, the factor on its update."""

    shared: Tensors
    weight: float
    factor: float = 1.0


def compact(sums: Mapping[str, Tensor], context: WireContext) -> list[tuple[str, str, Tensor]]:
    """(name, form, tensor) for each of the sums; ``restore`` gives the sums back, bit for bit."""
    return [(name, *_compact_one(name, value, context)) for name, value in sums.items()]


def restore(name: str, form: str, sent: Tensor, context: WireContext) -> Tensor:
    """The sum that was sent in this form. Raises BadMessage where it cannot have been."""
    if form == PLAIN and sent.dtype in (torch.float64, torch.int64):
        return sent
    if form == SINGLE and sent.dtype == torch.float32:
        return sent.double()
    if form == MODEL:
        return _from_model(name, sent, context)
    raise BadMessage(f"{sent.dtype} is not the type of a form {form[:20]!r}")


def factor_of(sums: Mapping[str, Tensor], weight: float) -> float:
    """The factor on a visit's update, from its sums; 1 where there is none."""
    scaled = sums.get("scaled")
    if scaled is None or scaled.dtype != torch.float64 or float(scaled) == weight or not float(scaled):
        return 1.0
    return weight / float(scaled)


def _compact_one(name: str, value: Tensor, context: WireContext) -> tuple[str, Tensor]:
    attempts: tuple[tuple[str, Callable[[], Tensor | None]], ...] = (
        (MODEL, lambda: _as_model(name, value, context)),
        (SINGLE, lambda: value.float() if value.numel() > 1 else None),
    )
    for form, make in attempts if value.dtype == torch.float64 else ():
        sent = make()
        if sent is not None and _same_bits(restore(name, form, sent, context), value):
            return form, sent
    return PLAIN, value


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.int64), right.contiguous().view(torch.int64)
    )


def _as_model(name: str, value: Tensor, context: WireContext) -> Tensor | None:
    old = context.shared.get(name.removeprefix(DELTA)) if name.startswith(DELTA) else None
    scale = context.weight * _update_factor(name, context)
    if old is None or old.shape != value.shape or not scale:
        return None
    new = old.double() - value / scale
    return new.to(old.dtype) if old.is_floating_point() else new.round().to(old.dtype)


def _from_model(name: str, sent: Tensor, context: WireContext) -> Tensor:
    old = context.shared.get(name.removeprefix(DELTA))
    if old is None or old.shape != sent.shape or old.dtype != sent.dtype:
        raise BadMessage("a tensor of its update is not like the tensor that was sent")
    delta = torch.sub(old.double(), sent.double()).mul_(context.weight)
    factor = _update_factor(name, context)
    return delta if factor == 1 else delta.mul_(factor)


def _update_factor(name: str, context: WireContext) -> float:
    return context.factor if name.startswith("delta/params/") else 1.0  # buffers are averaged plainly
