"""What the parties tell each other before the first round: a node describes its data, the server says what is agreed.

A description has names, sizes and shapes: no image, and no count of labels.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unskew.core.files import check_fields, record_from
from unskew.core.types import Local
from unskew.engines.blueprint import Blueprint
from unskew.engines.flower.messages import DTYPES, BadMessage, field

MAX_TEXT = 200  # characters of a name
MAX_COUNT = 2**40
MAX_VIEWS = 81
MAX_CLASSES = 10**6
MAX_CLIENTS = 100_000  # of one node


@dataclass(frozen=True)
class ClientFacts:
    """One client of a node; ``number`` is None where the server may choose one."""

    name: str
    number: int | None
    examples: int
    test: int  # how many test images of its own it has


@dataclass(frozen=True)
class Description:
    """What a node says of itself."""

    node: str
    version: str
    clients: tuple[ClientFacts, ...]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # of its images, as they are
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool  # whether crops and flips leave a picture's class alone
    augmentation: str  # which crops suit its images

    def to_json(self) -> dict[str, Any]:
        """Plain texts and numbers."""
        return asdict(self)

    @staticmethod
    def from_json(values: Any) -> "Description":
        """What ``to_json`` gave, checked."""
        if not isinstance(values, dict):
            raise BadMessage("its description is not an object")
        clients = tuple(_client(each) for each in field(values, "clients", list))
        if not 1 <= len(clients) <= MAX_CLIENTS or len({each.name for each in clients}) < len(clients):
            raise BadMessage("its clients are none, too many, or two of one name")
        shape = _numbers(values, "shape", int)
        mean, std = _numbers(values, "mean", float), _numbers(values, "std", float)
        if len(shape) != 3 or not all(0 < side <= 2**16 for side in shape):
            raise BadMessage("its images have no shape of channels, height and width")
        if not len(mean) == len(std) == shape[0] or not all(0 < each <= 1e6 for each in std):
            raise BadMessage("its normalisation does not fit its images")
        return Description(
            node=text(values, "node"),
            version=text(values, "version"),
            clients=clients,
            classes=texts(values, "classes"),
            shape=(shape[0], shape[1], shape[2]),
            mean=mean,
            std=std,
            augment=field(values, "augment", bool),
            augmentation=text(values, "augmentation"),
        )


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
        """What ``to_json`` gave, checked as far as the node's own data do not matter."""
        if not isinstance(values, dict):
            raise BadMessage("its agreement is not an object")
        numbers = field(values, "numbers", dict)
        if not numbers or not all(type(each) is int and 0 <= each < 2**31 for each in numbers.values()):
            raise BadMessage("its clients have no numbers")
        mean, std = _numbers(values, "mean", float), _numbers(values, "std", float)
        if len(mean) != len(std) or not all(0 < each <= 1e6 for each in std):
            raise BadMessage("its normalisation is not one")
        classes = texts(values, "classes")
        blueprint = _blueprint(field(values, "blueprint", dict))
        if blueprint.classes != len(classes):
            raise BadMessage(f"it names {len(classes)} classes for a network of {blueprint.classes}")
        if not 0 <= (views := field(values, "views", int)) <= MAX_VIEWS:
            raise BadMessage(f"it asks for {views} views of each image")
        return Agreement(run_of(values), blueprint, classes, mean, std, numbers, views)


def run_of(header: Mapping[str, Any]) -> str:
    """The run that a message belongs to."""
    run = field(header, "run", str)
    if len(run) != 32 or not set(run) <= set("0123456789abcdef"):
        raise BadMessage("it names no run")
    return str(run)


def text(values: Mapping[str, Any], name: str, most: int = MAX_TEXT) -> str:
    """A text that can be shown: not empty, not long, without control characters."""
    value = field(values, name, str)
    if not 0 < len(value) <= most or not value.isprintable():
        raise BadMessage(f"its field {name!r} should be a printable text of at most {most} characters")
    return str(value)


def texts(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Several such texts, all different."""
    found = tuple(text({name: each}, name) for each in field(values, name, list))
    if not found or len(set(found)) < len(found):
        raise BadMessage(f"its field {name!r} is empty, or names one thing twice")
    return found


def _client(values: Any) -> ClientFacts:
    if not isinstance(values, dict):
        raise BadMessage("a client is not an object")
    number = field(values, "number", (int, type(None)))
    examples, test = field(values, "examples", int), field(values, "test", int)
    if not (0 <= examples < MAX_COUNT and 0 <= test < MAX_COUNT and 0 <= (number or 0) < 2**31):
        raise BadMessage("a client's numbers are not possible")
    return ClientFacts(text(values, "name"), number, examples, test)


def _numbers(values: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    kinds = (int, float) if kind is float else (int,)
    return tuple(kind(field({name: each}, name, kinds)) for each in field(values, name, list))


def _blueprint(values: dict[str, Any]) -> Blueprint:
    try:
        local, shape = values.get("local"), _numbers(values, "shape", int)
        record_from(Local, local)
        check_fields(Blueprint, {name: value for name, value in values.items() if name not in ("local", "shape")})
        if len(shape) != 3 or not all(0 < side <= 2**16 for side in shape):
            raise ValueError("its shape is not one of an image")
        blueprint = Blueprint.from_json(values)
        if not 0 < blueprint.classes <= MAX_CLASSES or blueprint.dtype not in DTYPES or not blueprint.crosses:
            raise ValueError("its classes or its number type are not possible")
        return blueprint
    except (TypeError, ValueError, KeyError) as error:
        raise BadMessage(f"its blueprint cannot be read: {error}") from error
