"""A federation's data as its server has them: sizes by client, classes, perhaps test images; no training image."""

import numpy as np

from unskew.core.errors import Missing, UserError
from unskew.core.images import ImageSet, Split
from unskew.core.types import Engine
from unskew.data.population import Partition
from unskew.engines import EngineSetup
from unskew.engines.flower.members import roster_of
from unskew.runs.config import NODES, Config
from unskew.runs.federation_file import Terms
from unskew.runs.given import Nodes

ENGINE = "flower"


def images_of(terms: Terms, config: Config, own: ImageSet | None) -> ImageSet:
    """What the server has of the images: their classes and shape, and its own test images where it has some."""
    empty = Split(np.zeros((0, *terms.shape), np.uint8), np.zeros(0, np.int64))
    if own is not None and own.shape != terms.shape:
        raise UserError(
            f"the server's test images, {config.data}, are {own.shape[2]}x{own.shape[1]} with {own.shape[0]} channels, "
            f'the nodes\' are {terms.shape[2]}x{terms.shape[1]} with {terms.shape[0]}; give data = "{NODES}"'
        )
    return ImageSet(
        name=config.data if own else "the nodes' images",
        classes=terms.classes,
        train=empty,
        test=_relabelled(own, terms.classes) if own else empty,
        mean=terms.mean,
        std=terms.std,
        augment=terms.augment,
    )


def nodes_of(terms: Terms, config: Config) -> Nodes:
    """Who the clients were when the run began, and how many examples each has; nobody can be asked."""
    roster = roster_of(known for known in terms.clients.values() if not known.late)
    client = np.repeat(np.arange(roster.clients, dtype=np.int32), roster.sizes)
    return Nodes(Partition(client, roster.clients, NODES, config.seed), _nobody, ENGINE)


def _nobody(setup: EngineSetup) -> Engine:
    raise Missing("the clients of this run are the nodes of a federation; only while it runs can they be asked")


def _relabelled(own: ImageSet, classes: tuple[str, ...]) -> Split:
    """The server's test images under the numbers of the classes agreed on."""
    if own.classes == classes:
        return own.test
    if odd := [name for name in own.classes if name not in classes]:
        raise UserError(f"the server's test images have the class {odd[0]!r}, which the nodes have not agreed on")
    table = np.array([classes.index(name) for name in own.classes], np.int64)
    return Split(own.test.images, table[own.test.labels], own.test.rows)
