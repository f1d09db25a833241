"""What a process must know to do any client's work: texts and numbers, and tensors in shared memory."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from unskew import methods, models
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.machine import ready_device
from unskew.core.packing import pack
from unskew.core.types import ImageSet, Local, Tensors
from unskew.data.batches import Pixels
from unskew.data.population import Population
from unskew.models.layers import Network
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.round.client_memory import ClientMemory

CANNOT_CROSS = (
    "a lambda, a closure or a function of __main__ cannot go to another process; "
    "give --engine loop, or put it into a module as a plain function"
)


@dataclass(frozen=True)
class Values:
    """The values of a blueprint's texts, where this process already has them: nothing is parsed twice."""

    algorithm: Algorithm | None = None
    network: Callable[..., nn.Module] | None = None  # (shape, classes) -> the network, where it has no name


@dataclass(frozen=True)
class Blueprint:
    """The algorithm by its text, the network by its name, the local settings, the device; JSON can carry it.

    ``values`` stay in this process. Without them the texts are parsed, as a worker process does.
    """

    method: str
    model: str
    shape: tuple[int, int, int]
    classes: int
    local: Local
    dtype: str = "float32"
    device: str = "cpu"
    crosses: bool = True  # whether another process can build the same from the texts alone
    values: Values = field(default=Values(), compare=False, repr=False)

    def algorithm(self) -> Algorithm:
        """The algorithm: the value where there is one, otherwise parsed from the text."""
        return self.values.algorithm or methods.parse_method(self.method, self.local)

    def network(self) -> Network:
        """A new network of the blueprint's shape, from the value where there is one, otherwise by its name."""
        return models.build(self.values.network or self.model, self.shape, self.classes)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; refused where they do not say enough for another process."""
        if not self.crosses:
            raise UserError(f"{self.method}, {self.model}: {CANNOT_CROSS}")
        fields = asdict(replace(self, values=Values()))
        del fields["values"]
        return fields

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Blueprint":
        """What ``to_json`` gave, as it was."""
        return Blueprint(**{**fields, "shape": tuple(fields["shape"]), "local": Local(**fields["local"])})


def dataset(images: ImageSet, population: Population) -> Tensors:
    """All that the clients hold, as tensors by name: what goes into shared memory."""
    return {
        "train/images": torch.from_numpy(np.ascontiguousarray(images.train.images)),
        "train/labels": torch.from_numpy(images.train.labels),
        "test/images": torch.from_numpy(np.ascontiguousarray(images.test.images)),
        "test/labels": torch.from_numpy(images.test.labels),
        "population/order": torch.tensor(population.order),
        "population/offsets": torch.tensor(population.offsets),
        "mean": torch.tensor(images.mean, dtype=torch.float64),
        "std": torch.tensor(images.std, dtype=torch.float64),
    }


def build(blueprint: Blueprint, data: Tensors, memories: int | None = None) -> ClientSide:
    """The same side in every process that has the same blueprint and data.

    ``memories`` is the descriptor of the file with the clients' saved states, where a method keeps some.
    """
    dtype, device = getattr(torch, blueprint.dtype), ready_device(blueprint.device)
    parts = {
        part: Pixels.of(data[f"{part}/images"], data[f"{part}/labels"], data["mean"], data["std"], dtype).to(device)
        for part in ("train", "test")
    }
    algorithm, network = blueprint.algorithm(), blueprint.network().to(dtype)
    kept = None if memories is None else ClientMemory(algorithm.remember, tensors.of_module(network), memories)
    return ClientSide(
        algorithm=algorithm,
        network=network.to(device),
        packed=pack(network),
        train=parts["train"],
        test=parts["test"],
        population=Population(data["population/order"].numpy(), data["population/offsets"].numpy()),
        memory=kept,
    )
