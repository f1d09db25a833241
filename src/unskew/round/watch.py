"""What a recording sees of a visit: the classifier's norms, the distance from the server's model, the local model.

Shapes: k clients watched, C classes, L layers.
"""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.types import Sums, Tensors, Visit
from unskew.models.networks import by_layer

if TYPE_CHECKING:
    from unskew.round.client import ClientSide


@dataclass(frozen=True)
class Watch:
    """What is looked at, and whose visits; each of these clients has a row in what comes out."""

    what: tuple[str, ...]
    clients: tuple[int, ...]

    def to_text(self) -> str:
        """As it follows the colon of a job's name."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Watch":
        """What ``to_text`` gave."""
        fields = json.loads(text)
        return Watch(tuple(fields["what"]), tuple(fields["clients"]))


def watched(side: "ClientSide", shared: Tensors, visit: Visit, watch: Watch) -> Sums:
    """What the client's training left, in its row; zeros in the rows of others, so that visits add up.

    "visits" [k] says who reported. Of a client that comes twice the first visit is seen. All of it is on the CPU.
    """
    model = tensors.on_device(side.weights, "cpu")
    seen: Sums = {"visits": torch.ones((), dtype=torch.float64)}
    if "norms" in watch.what:
        seen["norms"] = class_norms(side)  # [C]
    if "drift" in watch.what:
        seen["drift"] = distances(model, shared)  # [L]
    if "model" in watch.what:
        seen |= {f"model/{name}": value.detach().double() for name, value in model.items()}
    place = watch.clients.index(visit.client) if visit.client in watch.clients and visit.repeat == 0 else None
    return {name: _in_row(value, place, len(watch.clients)) for name, value in seen.items()}


def class_norms(side: "ClientSide") -> Tensor:
    """[C], the length of each class's row in the classifier as the algorithm uses it; on the CPU."""
    classifier, head = side.network.classifier, side.algorithm.head
    weight = classifier.weight if head is None else head(classifier.weight, classifier.bias)[0]
    lengths: Tensor = weight.detach().cpu().double().norm(dim=1)
    return lengths


def distances(model: Tensors, other: Tensors) -> Tensor:
    """[L], the Euclidean distance between two models' parameters, layer by layer."""
    own = tensors.parameters(model)
    return lengths({name: value.double() - other[name].double() for name, value in own.items()})


def lengths(model: Tensors) -> Tensor:
    """[L], the Euclidean length of each layer's parameters."""
    parts = by_layer(tensors.parameters(model)).values()
    return torch.stack([tensors.flat({name: model[name] for name in names}).norm() for names in parts])


def _in_row(value: Tensor, place: int | None, rows: int) -> Tensor:
    table = torch.zeros(rows, *value.shape, dtype=torch.float64)
    if place is not None:
        table[place] = value
    return table
