"""What a node brings: its images, which clients they belong to, and how they fit what was agreed."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import ImageSet, Split
from unskew.data.batches import AUTO, suited
from unskew.data.partition import partition_examples
from unskew.data.population import Population
from unskew.data.sources import load
from unskew.data.store import cache_of
from unskew.engines.flower.agreement import Agreement, ClientFacts, Description

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class OwnClient:
    """One client of this node: which of the node's images are its own, ascending."""

    name: str
    number: int | None  # None: the server chooses one
    train: Ints
    test: Ints

    @property
    def facts(self) -> ClientFacts:
        """What the server is told of it."""
        return ClientFacts(self.name, self.number, len(self.train), len(self.test))


@dataclass(frozen=True)
class Fitted:
    """A node's images as a run takes them, which client has which, and by client which test images are its own."""

    images: ImageSet
    population: Population
    tests: Mapping[int, Tensor]


@dataclass(frozen=True)
class NodeData:
    """A node's name, its images and its clients."""

    name: str
    images: ImageSet
    clients: tuple[OwnClient, ...]

    def described(self) -> Description:
        """What the server is told before the first round."""
        images = self.images
        return Description(
            node=self.name,
            version=_version(),
            clients=tuple(each.facts for each in self.clients),
            classes=images.classes,
            shape=images.shape,
            mean=images.mean,
            std=images.std,
            augment=images.augment,
            augmentation=suited(AUTO, images),
        )

    def fitted(self, agreement: Agreement) -> Fitted:
        """The images under the agreed classes, numbers and normalisation, and whose they are. Refused where the node
        has what was not agreed on."""
        if set(agreement.numbers) != {each.name for each in self.clients}:
            raise UserError(
                f"node {self.name}: the agreement numbers other clients than the node has; describe it anew"
            )
        stated = {each.name: each.number for each in self.clients if each.number is not None}
        if odd := [name for name, number in stated.items() if agreement.numbers[name] != number]:
            raise UserError(f"node {self.name}: client {odd[0]} is number {stated[odd[0]]}, the server says otherwise")
        parts = (self._relabelled(part, agreement.classes) for part in (self.images.train, self.images.test))
        images = replace(
            self.images, classes=agreement.classes, train=next(parts), test=next(parts), mean=agreement.mean,
            std=agreement.std,
        )  # fmt: skip
        held = sorted(self.clients, key=lambda each: agreement.numbers[each.name])
        offsets = np.zeros(max(agreement.numbers.values()) + 2, np.int64)
        for each in held:
            offsets[agreement.numbers[each.name] + 1] = len(each.train)
        order = np.concatenate([each.train for each in held]).astype(np.int32)
        tests = {agreement.numbers[each.name]: torch.from_numpy(each.test) for each in held}
        return Fitted(images, Population(order, np.cumsum(offsets)), tests)

    def _relabelled(self, part: Split, classes: tuple[str, ...]) -> Split:
        """The same images under the numbers that the agreed classes have."""
        if classes == self.images.classes:
            return part
        number = {name: place for place, name in enumerate(classes)}
        held = np.unique(part.labels).tolist()
        if unknown := [self.images.classes[label] for label in held if self.images.classes[label] not in number]:
            raise UserError(
                f"node {self.name} has images of {unknown[0]!r}, not one of the {len(classes)} classes agreed on"
            )
        table = np.array([number.get(name, -1) for name in self.images.classes], np.int64)
        return replace(part, labels=table[part.labels])


@dataclass(frozen=True)
class Source:
    """Where a node's data come from, as its settings say."""

    data: str
    data_dir: str | None = None
    partition: str | None = None  # None: all images are one client's
    clients: tuple[int, ...] = ()  # which clients of the partition are this node's
    of: int | None = None  # how many clients the partition has, where it does not say so itself
    seed: int = 0  # the partition's


def read_node_data(name: str, source: Source) -> NodeData:
    """The node's own data, or its slice of a set that a partition divides."""
    images = load(source.data, Path(source.data_dir) if source.data_dir else None, cache_of(None, None, None))
    if source.partition is None:
        if source.clients:
            raise UserError(f"node {name}: client {source.clients[0]} is one of a partition; give partition too")
        train, test = (np.arange(len(part), dtype=np.int64) for part in (images.train, images.test))
        return NodeData(name, images, (OwnClient(name, None, train, test),))
    if not source.clients:
        raise UserError(f"node {name}: say which clients of {source.partition} are this node's: client = 0")
    parts = partition_examples(
        source.partition, images.train.labels, clients=source.of, key=Key(source.seed), users=images.users,
        places=images.places, classes=len(images.classes),
    )  # fmt: skip
    if max(source.clients) >= parts.clients or len(set(source.clients)) < len(source.clients):
        raise UserError(
            f"node {name}: clients {source.clients} of {parts.clients}; they are counted from 0, each is named once"
        )
    whose = _test_owners(parts.names, parts.clients, images)
    clients = [
        OwnClient(
            parts.names[number] if parts.names else f"{name}-{number}" if len(source.clients) > 1 else name,
            number,
            np.flatnonzero(parts.client == number).astype(np.int64),
            np.flatnonzero(whose == number).astype(np.int64),
        )
        for number in source.clients
    ]
    return NodeData(name, images, tuple(clients))


def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("unskew")
    return "unknown"


def _test_owners(names: tuple[str, ...] | None, clients: int, images: ImageSet) -> Ints:
    """[n], the client of each test image: its user where users are clients, otherwise they are dealt out in turn."""
    users = images.test_users
    if names is not None and users is not None and len(users) == len(images.test):
        number = {name: place for place, name in enumerate(names)}
        return np.array([number.get(user, -1) for user in users.tolist()], np.int64)
    return np.arange(len(images.test), dtype=np.int64) % clients
