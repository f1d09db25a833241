"""Recordings while a run trains, at chosen rounds: ``--during "silhouette(every=5) + norms(first=3)"``.

They do not change the result: they are removed from the replies before the server uses them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unskew.core import language, tensors
from unskew.core.errors import nearest
from unskew.core.key import Key
from unskew.core.types import ServerState, Tensors
from unskew.models.networks import InParts, by_layer
from unskew.round import driver
from unskew.round.client import IMAGES_AT_ONCE, ClientSide, class_norms, layer_norms

MAX_CLIENTS = 100  # recorded in one round, in the order of visits
MAX_IMAGES = 2000  # test images of the silhouette
OF_CLIENTS = ("norms", "drift")  # recordings that measure single clients' models


@dataclass(frozen=True)
class Recorded:
    """A quantity to record, and the rounds to record it in."""

    name: str
    every: int = 1
    first: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.first < 0:
            raise ValueError(f"every={self.every}, first={self.first}: give every=1 or more, first=0 or more")

    def due(self, number: int, rounds: int) -> bool:
        """Whether it is recorded after this round; the last round always is."""
        return number % self.every == 0 or number <= self.first or number == rounds


RECORDED: dict[str, Callable[..., Recorded]] = {
    "silhouette": partial(Recorded, "silhouette"),  # coefficient of the server's features of test images, by class
    "norms": partial(Recorded, "norms"),  # of each class's row in the classifier: the server's and the clients'
    "drift": partial(Recorded, "drift"),  # distance between the round's clients and the model sent, by layer
    "model": partial(Recorded, "model", every=10),  # the server's state, for measures of that round
}


def parse_recording(source: str) -> tuple[Recorded, ...]:
    """Parse a text such as ``"silhouette(every=5) + norms"``."""
    recordings: dict[str, Recorded] = {}
    for call in language.parse_calls(source, "recording"):
        if call.name not in RECORDED or call.name in recordings:
            raise call.error(f"{call.name!r} cannot be recorded, or is given twice; {nearest(call.name, RECORDED)}")
        recordings[call.name] = language.apply(call, RECORDED[call.name], "recording")
    return tuple(recordings.values())


@dataclass
class Recorder:
    """Decides what is recorded in each round, and builds the row written after it."""

    recordings: tuple[Recorded, ...]
    rounds: int
    side: ClientSide  # its network is overwritten
    key: Key
    _recorded: tuple[Tensors, driver.Recordings] = ({}, {})

    def record(self, sent: Tensors, clients: driver.Recordings) -> None:
        """Store what the visits of a round recorded, for its row."""
        self._recorded = sent, clients

    def due(self, number: int) -> list[str]:
        """The quantities recorded after this round."""
        return [recording.name for recording in self.recordings if recording.due(number, self.rounds)]

    def watched(self, number: int) -> list[str]:
        """Those that clients report."""
        return [name for name in self.due(number) if name in OF_CLIENTS]

    def line(self, state: ServerState) -> dict[str, Any] | None:
        """The row of during.jsonl for the round that has just ended; None if nothing is due."""
        (sent, recorded), self._recorded = self._recorded, ({}, {})
        due = self.due(state.round)
        if not set(due) - {"model"}:
            return None
        row: dict[str, Any] = {"round": state.round}
        self.side.load(state.tensors, training=False)
        clients = dict(list(recorded.items())[:MAX_CLIENTS])
        for name in self.watched(state.round):
            row[name] = {"clients": list(clients), "local": [values[name].tolist() for values in clients.values()]}
        if "norms" in due:
            row["norms"]["server"] = class_norms(self.side).tolist()
        if "drift" in due:
            own = tensors.parameters(self.side.weights)
            server = layer_norms({name: sent[name] for name in own}).tolist() if sent else []
            row["drift"] |= {"layers": list(by_layer(own)), "server": server}
        if "silhouette" in due:
            row["silhouette"] = silhouette_of(*some_features(self.side, self.key))
        return row


def some_features(side: ClientSide, key: Key, most: int = MAX_IMAGES) -> tuple[Tensor, Tensor]:
    """Features [n, d] and classes [n] of at most ``most`` test images, always the same ones for a seed."""
    count = len(side.test.labels)
    index = torch.arange(count)
    if count > most:
        index = torch.randperm(count, generator=key.fold("analysis", "images").torch())[:most].sort().values
    side.network.eval()
    encoder, batches = InParts(side.network.encoder), torch.split(index, IMAGES_AT_ONCE)
    with torch.no_grad(), tensors.one_thread():
        features = [encoder(side.test.batch(batch)[0]).cpu() for batch in batches]
    return torch.cat(features), side.test.labels.cpu()[index]


def silhouette_of(features: Tensor, labels: Tensor) -> float | None:
    """The mean silhouette coefficient (Rousseeuw 1987), −1 to 1; None if there are too few classes or features."""
    from sklearn.metrics import silhouette_score  # a second to import

    classes = len(torch.unique(labels))
    if not 2 <= classes < len(labels) or not bool(features.isfinite().all()):
        return None
    return float(silhouette_score(features.cpu().double().numpy(), labels.cpu().numpy()))
