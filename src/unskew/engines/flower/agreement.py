"""What the parties tell each other before the first round: a node describes its data, the server says what is agreed.

A description has names, sizes and shapes: no image, and no count of labels.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from unskew.core.files import check_fields, record_from
from unskew.core.types import Local
from unskew.engines.blueprint import Blueprint
from unskew.engines.codec import DTYPES, BadMessage
from unskew.engines.flower.messages import field

MAX_TEXT = 200  # characters of a name
MAX_CLASSES = 10**6

Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, lt=2**40)]
Number = Annotated[int, Meta(ge=0, lt=2**31)]  # of a client
Side = Annotated[int, Meta(gt=0, le=2**16)]  # of an image
Deviation = Annotated[float, Meta(gt=0, le=1e6)]
Run = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class ClientFacts:
    """One client of a node; ``number`` is None where the server may choose one."""

    name: Text
    number: Number | None
    examples: Count
    test: Count  # how many test images of its own it has


@dataclass(frozen=True)
class Description:
    """What a node says of itself."""

    node: Text
    version: Text
    clients: Annotated[tuple[ClientFacts, ...], Meta(min_length=1, max_length=100_000)]
    classes: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    shape: tuple[Side, Side, Side]  # of its images, as they are
    mean: tuple[float, ...]
    std: tuple[Deviation, ...]
    augment: bool  # whether crops and flips leave a picture's class alone
    augmentation: Text  # which crops suit its images

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
        return found


@dataclass(frozen=True)
class Agreement:
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
    def digest(self) -> str:
        """A short name for exactly this agreement."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @staticmethod
    def from_json(values: Any) -> "Agreement":
        """What ``to_json`` gave, checked where the node's own data do not matter."""
        sent: _SentAgreement = _convert(values, _SentAgreement, "its agreement")
        blueprint = _blueprint(sent.blueprint)
        _require_names("classes", sent.classes)
        if len(sent.mean) != len(sent.std):
            raise BadMessage("its normalisation is not one")
        if blueprint.classes != len(sent.classes):
            raise BadMessage(f"it names {len(sent.classes)} classes for a network of {blueprint.classes}")
        return Agreement(sent.run, blueprint, sent.classes, sent.mean, sent.std, sent.numbers, sent.views)


@dataclass(frozen=True)
class _SentAgreement:
    run: Run
    blueprint: dict[str, Any]
    classes: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    mean: tuple[float, ...]
    std: tuple[Deviation, ...]
    numbers: Annotated[dict[str, Number], Meta(min_length=1)]
    views: Annotated[int, Meta(ge=0, le=81)]


def run_of(header: Mapping[str, Any]) -> str:
    """The run that a message belongs to."""
    return str(_convert(header.get("run"), Run, "its run"))


def text(values: Mapping[str, Any], name: str, most: int = MAX_TEXT) -> str:
    """A text that can be shown: not empty, not long, without control characters."""
    value = field(values, name, str)
    if not 0 < len(value) <= most or not value.isprintable():
        raise BadMessage(f"its field {name!r} should be a printable text of at most {most} characters")
    return str(value)


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
        raise BadMessage(f"its blueprint cannot be read: {error}") from error
