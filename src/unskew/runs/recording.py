"""What is recorded while a run trains, at chosen rounds: ``--during "silhouette(every=5) + norms(first=3)"``.

It does not change a bit of the result: clients are measured after their training, the server between two rounds, and
what was recorded is taken out of the sums before the server uses them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unskew.core import tensors, text
from unskew.core.errors import nearest
from unskew.core.key import Key
from unskew.core.types import Engine, Outcome, Progress, Roster, ServerState, Sums, Tensors, TestPart, Visit
from unskew.models.networks import by_layer
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.jobs import job_text
from unskew.round.watch import Watch, class_norms, lengths

MAX_CLIENTS = 100  # recorded in one round: those of the round's first visits
MAX_IMAGES = 2000  # test images of the silhouette


@dataclass(frozen=True)
class Recorded:
    """One thing to record, and in which rounds."""

    name: str
    every: int
    first: int

    def due(self, number: int, rounds: int) -> bool:
        """Whether it is recorded after this round; the last round always is."""
        return number % self.every == 0 or number <= self.first or number == rounds


def silhouette(every: int = 1, first: int = 0) -> Recorded:
    """The silhouette coefficient of the server's features of test images, by their true classes."""
    return _recorded("silhouette", every, first)


def norms(every: int = 1, first: int = 0) -> Recorded:
    """The length of each class's row in the classifier: the server's, and those of the round's clients."""
    return _recorded("norms", every, first)


def drift(every: int = 1, first: int = 0) -> Recorded:
    """How far the round's clients went from the model they got, by layer."""
    return _recorded("drift", every, first)


def model(every: int = 10, first: int = 0) -> Recorded:
    """The server's whole state, so that any measure can be taken of that round later."""
    return _recorded("model", every, first)


RECORDED: dict[str, Callable[..., Recorded]] = {
    "silhouette": silhouette, "norms": norms, "drift": drift, "model": model,
}  # fmt: skip


def parse_recording(source: str) -> tuple[Recorded, ...]:
    """What a text such as ``"silhouette(every=5) + norms"`` asks for."""
    recordings: list[Recorded] = []
    for call in text.parse_calls(source, "recording"):
        build = RECORDED.get(call.name)
        if build is None:
            raise text.complain(
                source, call.start, f"nothing called {call.name!r} can be recorded; {nearest(call.name, RECORDED)}"
            )
        if any(each.name == call.name for each in recordings):
            raise text.complain(source, call.start, f"{call.name} is named twice; name it once")
        recordings.append(text.apply(call, build, "recording"))
    return tuple(recordings)


def plain_spelling(source: str) -> str:
    """The text in its plainest spelling."""
    return " + ".join(map(str, text.parse_calls(source, "recording")))


class RecordingEngine:
    """An engine around another: in the chosen rounds it also records the visits and keeps what it saw."""

    def __init__(self, engine: Engine, choose: Callable[[int], Sequence[str]], most: int = MAX_CLIENTS) -> None:
        self._engine = engine
        self._choose = choose
        self._most = most
        self.watch: Watch | None = None
        self.seen: Sums = {}
        self.sent: Tensors = {}  # to the visits that were recorded

    @property
    def roster(self) -> Roster:
        """As the other engine has it now: clients may join."""
        return self._engine.roster

    @property
    def progress(self) -> Progress | None:
        """What is called after each visit."""
        return self._engine.progress

    @progress.setter
    def progress(self, report: Progress | None) -> None:
        self._engine.progress = report

    def map_sum(
        self, job: str, shared: Tensors, visits: Sequence[Visit | TestPart], key: Key, *, round: int = 0
    ) -> Outcome:
        """The other engine's sums, with nothing added to them."""
        if job != "train":
            return self._engine.map_sum(job, shared, visits, key, round=round)
        self.watch, self.seen, self.sent = None, {}, {}
        if not (what := tuple(self._choose(round))):
            return self._engine.map_sum(job, shared, visits, key, round=round)
        clients = dict.fromkeys(visit.client for visit in visits if isinstance(visit, Visit))
        self.watch = Watch(what, tuple(clients)[: self._most])
        outcome = self._engine.map_sum(job_text(job, self.watch.to_text()), shared, visits, key, round=round)
        self.seen, self.sent = tensors.under(outcome.sums, "watch/"), shared
        rest = {name: value for name, value in outcome.sums.items() if not name.startswith("watch/")}
        return replace(outcome, sums=rest)

    def accept(self, superseded: Iterable[str]) -> None:
        """As the other engine does."""
        self._engine.accept(superseded)

    def sync(self) -> None:
        """As the other engine does."""
        self._engine.sync()

    def pin(self, tickets: Iterable[str]) -> None:
        """As the other engine does."""
        self._engine.pin(tickets)

    def close(self) -> None:
        """Close the other engine."""
        self._engine.close()

    def rows(self, name: str) -> tuple[list[int], Tensor]:
        """The clients that reported, and what was seen of each."""
        if self.watch is None or not self.seen:
            return [], torch.zeros(0, dtype=torch.float64)
        came = self.seen["visits"] > 0
        clients = [client for client, there in zip(self.watch.clients, came.tolist(), strict=True) if there]
        return clients, self.seen[name][came]


@dataclass(frozen=True)
class Recorder:
    """Decides what is recorded in each round, and makes the row that is written after it."""

    asked: tuple[Recorded, ...]
    rounds: int
    side: ClientSide  # its network is overwritten
    key: Key

    def due(self, number: int) -> list[str]:
        """What is recorded after this round."""
        return [each.name for each in self.asked if each.due(number, self.rounds)]

    def watched(self, number: int) -> list[str]:
        """The part of it that clients report."""
        return [name for name in self.due(number) if name in ("norms", "drift")]

    def line(self, state: ServerState, seen: RecordingEngine) -> dict[str, Any] | None:
        """The row of during.jsonl for the round that has just ended; None where nothing is due."""
        due = self.due(state.round)
        if not set(due) - {"model"}:
            return None
        row: dict[str, Any] = {"round": state.round}
        self.side.load(state.tensors, training=False)
        for name in ("norms", "drift"):
            if name in due:
                clients, rows = seen.rows(name)
                row[name] = {"clients": clients, "local": rows.tolist()}
        if "norms" in due:
            row["norms"]["server"] = class_norms(self.side).tolist()
        if "drift" in due:
            own = tensors.parameters(self.side.weights)
            row["drift"]["layers"] = list(by_layer(own))
            row["drift"]["server"] = lengths({name: seen.sent[name] for name in own}).tolist()
        if "silhouette" in due:
            row["silhouette"] = silhouette_of(*some_features(self.side, self.key))
        return row


def some_features(side: ClientSide, key: Key, most: int = MAX_IMAGES) -> tuple[Tensor, Tensor]:
    """Features [n, d] and classes [n] of at most ``most`` test images, the same ones every time for a seed."""
    count = len(side.test.labels)
    index = torch.arange(count)
    if count > most:
        index = torch.randperm(count, generator=key.fold("analysis", "images").torch())[:most].sort().values
    features = []
    side.network.eval()
    with torch.no_grad(), tensors.one_thread():
        for some in torch.split(index, IMAGES_AT_ONCE):
            features.append(side.network.encoder(side.test.batch(some)[0]).cpu())
    return torch.cat(features), side.test.labels.cpu()[index]


def silhouette_of(features: Tensor, labels: Tensor) -> float | None:
    """The mean silhouette coefficient, −1 to 1: how much nearer features are to their own class than to the next.

    None where there are fewer than two classes, or as many classes as features.

    Reference: Rousseeuw, "Silhouettes", 1987; Zeng et al. 2023, section 4.5.
    """
    from sklearn.metrics import silhouette_score  # a second to import

    classes = len(torch.unique(labels))
    if not 2 <= classes < len(labels) or not bool(features.isfinite().all()):
        return None
    return float(silhouette_score(features.cpu().double().numpy(), labels.cpu().numpy()))


def _recorded(name: str, every: int, first: int) -> Recorded:
    if every < 1:
        raise ValueError(f"every={every}: give 1 (each round) or more")
    if first < 0:
        raise ValueError(f"first={first}: give 0 or more rounds")
    return Recorded(name, every, first)
