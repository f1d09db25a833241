"""What a worker must be told to do any client's work: text and numbers only, and tensors that lie in shared memory."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from unskew import methods, models
from unskew.core import tensors
from unskew.core.types import ImageSet, Local, Tensors
from unskew.data.batches import Pixels
from unskew.data.population import Population
from unskew.round.client import ClientSide
from unskew.round.client_memory import Memories


@dataclass(frozen=True)
class Blueprint:
    """The algorithm by its text, the network by its name, the local settings; JSON can carry it."""

    method: str
    model: str
    shape: tuple[int, int, int]
    classes: int
    local: Local
    dtype: str = "float32"
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)

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

    ``memories`` is the descriptor of the file that holds what clients remember, where they do.
    """
    dtype, device = getattr(torch, blueprint.dtype), torch.device(blueprint.device)
    parts = {
        part: Pixels.of(data[f"{part}/images"], data[f"{part}/labels"], data["mean"], data["std"], dtype).to(device)
        for part in ("train", "test")
    }
    algorithm = methods.parse_method(blueprint.method, blueprint.local)
    network = models.build(blueprint.model, blueprint.shape, blueprint.classes).to(dtype)
    kept = None if memories is None else Memories(algorithm.remember, tensors.of_module(network), memories)
    return ClientSide(
        algorithm=algorithm,
        network=network.to(device),
        train=parts["train"],
        test=parts["test"],
        population=Population(data["population/order"].numpy(), data["population/offsets"].numpy()),
        memories=kept,
    )
