"""A finished run as the measures see it: its folder, its models, its images; each made when first asked for and kept.

Local models are not stored: they are made again from the keys, as the clients would make them in the round after the
one whose state is looked at.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew import config as configs
from unskew import engines, models, recording, runs, tensors
from unskew.afterwards import engine_for, prepared_of, weights_of
from unskew.algorithm import Algorithm
from unskew.calibration.head import stand_in
from unskew.data.partition_files import Holdings, read_holdings
from unskew.engines.blueprint import build, dataset
from unskew.engines.loop import Loop
from unskew.engines.pool import Pool
from unskew.errors import UserError
from unskew.key import Key
from unskew.models.cut import cut
from unskew.preparation import Prepared
from unskew.results import Result, read_result
from unskew.round import driver, statistics
from unskew.round.client import CHUNK, Bench
from unskew.types import ImageSet, ServerState, Tensors, Visit

Say = Callable[[str, int, int], None]  # what is being done, how much of it, of how much
MOST_BYTES = 2**30  # of local models laid out side by side


class Missing(UserError):
    """What a measure needs is not at hand; the message says what and why."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the model makes of the test images: features [n, d], true classes [n], predictions [n] by classifier."""

    features: Tensor
    labels: Tensor
    predicted: Mapping[str, Tensor]  # "" is the run's own classifier, the others are its calibrations


class Subject:
    """One run under study. ``close`` ends the worker processes that it may have started."""

    def __init__(
        self, path: str | Path, *, data_dir: str | Path | None = None, engine: str | None = None,
        workers: int | None = None, say: Say | None = None,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self.result: Result = read_result(self.path)
        self.config = configs.read(self.path / "config.toml")
        self.rows = runs.read_metrics(self.path)
        self.during = runs.read_during(self.path)
        self.say: Say = say or _silent
        self._asked = {"engine": engine, "workers": workers, "data_dir": data_dir}
        self._local: dict[tuple[int, int], dict[int, Tensors]] = {}
        self._engine: Loop | Pool | None = None
        self.notes: list[str] = []  # what a reader of the figures must know

    def __enter__(self) -> "Subject":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def key(self) -> Key:
        """The run's own key: what a measure draws is the same every time."""
        return Key(self.config.seed)

    @cached_property
    def holdings(self) -> Holdings:
        """Who holds what; no data set is needed."""
        return read_holdings(self.path / "partition.npz")

    @cached_property
    def prepared(self) -> Prepared:
        """The federation as it was, or Missing where its data set is not at hand."""
        try:
            self.say("reading the data set", 0, 0)
            return prepared_of(self.path, self.result, **self._asked)  # type: ignore[arg-type]
        except UserError as error:
            raise Missing(str(error)) from error

    @property
    def images(self) -> ImageSet:
        """The data set."""
        return self.prepared.images

    @cached_property
    def _data(self) -> Tensors:
        return dataset(self.prepared.images, self.prepared.population)

    @cached_property
    def bench(self) -> Bench:
        """A network to work with, and all images; its weights are scratch."""
        return build(self.prepared.blueprint, self._data)

    @property
    def algorithm(self) -> Algorithm:
        """What the run trained with."""
        return self.prepared.algorithm

    @cached_property
    def weights(self) -> Tensors:
        """The run's final weights by the network's own names, without a data set; as anybody may use them."""
        return runs.read_model(self.path / "model.safetensors")

    @cached_property
    def model(self) -> Tensors:
        """The final weights as the bench takes them."""
        return weights_of(self.path, self.result, self.bench.network)

    @cached_property
    def calibrated(self) -> dict[str, Tensors]:
        """The calibrated classifiers' tensors by name."""
        return {name: runs.read_calibration(self.path, name) for name in self.result.calibrations}

    @property
    def classes(self) -> list[str]:
        """The classes' names; their numbers where the data set is not at hand."""
        try:
            return list(self.images.classes)
        except Missing:
            return [str(label) for label in range(len(self.weights["classifier.weight"]))]

    @property
    def engine(self) -> Loop | Pool:
        """Where local models are made again."""
        if self._engine is None:
            self._engine = self._opened(runs.open_memories(self.path) if self._remembered else None)
        return self._engine

    @property
    def _remembered(self) -> bool:
        """Whether what clients remember is at hand."""
        return bool(self.algorithm.remember) and (self.path / runs.MEMORIES).exists()

    def _opened(self, memories: int | None) -> Loop | Pool:
        chosen, workers = engine_for(self.prepared, self.bench, passes=self.config.epochs)
        return engines.open_engine(chosen, self.prepared.blueprint, self._data, workers, memories)

    @cached_property
    def outputs(self) -> Outputs:
        """Features and predictions on all test images, by the run's own classifier and each calibrated one."""
        bench, found, features = self.bench, dict[str, list[Tensor]](), []
        bench.load(self.model, training=False)
        pairs = {"": (bench.network.encoder, bench.network.classifier)}
        for name, values in self.calibrated.items():
            encoder, classifier = stand_in(values, lambda layers: cut(bench.network, layers))
            pairs[name] = (encoder, classifier)  # type: ignore[assignment]
        count = len(bench.test.labels)
        with torch.no_grad():
            for some in torch.split(torch.arange(count), CHUNK):
                self.say("classifying the test images", int(some[0]), count)
                images, _ = bench.test.batch(some)
                known = {id(bench.network.encoder): bench.network.encoder(images)}
                features.append(known[id(bench.network.encoder)])
                for name, (encoder, classifier) in pairs.items():
                    inside = known.get(id(encoder))
                    logits = classifier(encoder(images) if inside is None else inside)
                    found.setdefault(name, []).append(logits.argmax(1))
        joined = {name: torch.cat(parts) for name, parts in found.items()}
        return Outputs(torch.cat(features), bench.test.labels, joined)

    def state(self, number: int | None = None) -> ServerState:
        """The server's state after that round (None: the last): as it was kept, or made again by training up to it."""
        last = self.config.rounds
        number = last if number is None else number
        if not 0 <= number <= last:
            raise UserError(f"round {number}: the run has rounds 1 to {last}; 0 is before the first")
        if number == last and (kept := self._last_state()) is not None:
            return kept
        if number == last and not self.algorithm.statistics and self.algorithm.head is None:
            return ServerState(last, self.model, {})
        if not self.algorithm.remember and (file := runs.kept_state(self.path, number)).exists():
            return replace(runs.load_state(file)[0], clients={})
        return self.replayed([number], ())[1]

    def _last_state(self) -> ServerState | None:
        """The checkpoint's state, if it is that of the finished run; other versions' and damaged ones are of no use."""
        with suppress(UserError):
            found = runs.load_checkpoint(self.path)
            used = None if found is None else driver.as_used(self.algorithm, found[0].tensors)
            if found is not None and used is not None and tensors.sha256(used) == self.result.weights_sha256:
                return found[0]
        return None

    def replayed(self, rounds: Sequence[int], what: Sequence[str]) -> tuple[list[dict[str, Any]], ServerState]:
        """What the recorder would have written down at these rounds, made by training again; the last round's state."""
        asked = tuple(recording.Recorded(name, self.config.rounds + 1, 0) for name in what)
        wanted, last, lines = set(rounds), max(rounds), list[dict[str, Any]]()
        state = self._nearest(min(rounds) if what else last)
        # a run's own memories must not be written over
        engine = self._opened(None) if self.algorithm.remember else self.engine
        watching = recording.Watching(engine, lambda number: list(what) if number in wanted else [])
        config = self.prepared.config
        begun = state.round
        try:
            for new, _ in driver.run(
                self.algorithm, watching, state, self.key, rounds=last, per_round=config.per_round or 0,
                skip_failures=config.on_failure == "skip",
            ):  # fmt: skip
                state = new
                self.say("training again up to that round", state.round - begun, last - begun)
                if state.round in wanted:
                    recorder = recording.Recorder(asked, state.round, self.bench, self.key)
                    line = recorder.line(state, watching)
                    lines += [] if line is None else [line]
        finally:
            if engine is not self._engine:
                engine.close()
        return lines, replace(state, clients={})

    def _nearest(self, number: int) -> ServerState:
        """A state from which training up to that round can go on: the latest kept before it, or the very first."""
        models.initialise(self.bench.network, self.key.fold("model"))
        start = driver.start(self.algorithm, tensors.of_module(self.bench.network))
        if self.algorithm.remember:  # what clients remembered then is not kept
            return start
        for earlier in range(number - (number > 0), 0, -1):
            if (file := runs.kept_state(self.path, earlier)).exists():
                return replace(runs.load_state(file)[0], clients={})
        return start

    def local_models(self, number: int | None = None, most: int = 10) -> dict[int, Tensors]:
        """By client, what it makes of the server's model in the round after that one; at most so many clients."""
        last = self.config.rounds if number is None else number
        if (last, most) not in self._local:
            self._local[last, most] = self._made_locally(self.state(number), most)
        return self._local[last, most]

    def _made_locally(self, state: ServerState, most: int) -> dict[int, Tensors]:
        key = self.key.fold("round", state.round + 1)
        if state.round == 0:  # what methods ask everybody beforehand belongs to the first round
            state, _ = driver.survey(self.algorithm, self.engine, state, self.key)
        engine, per_round = self.engine, self.prepared.config.per_round or 0
        coming = self.algorithm.sampler(key.fold("sample"), engine.population, per_round)
        visits = _spread({visit.client: visit for visit in reversed(coming)}, most)
        size = tensors.count_bytes({name: value.double() for name, value in state.tensors.items()})
        if size * len(visits) > MOST_BYTES:
            raise Missing(
                f"{len(visits)} local models of {size / 1e6:.0f} MB take more than {MOST_BYTES / 1e9:.1f} GB side by "
                f"side; give clients={max(2, MOST_BYTES // size)}"
            )
        if engine.memories is not None and self._remembered and state.clients:
            visits = [replace(visit, recall=state.clients.get(visit.client), keep=None) for visit in visits]
        elif engine.memories is not None:
            self.notes.append("local models were made as at a first visit: what clients remembered then is not kept")
        watching = recording.Watching(engine, lambda _: ["model"])
        watching.progress = lambda done, total: self.say("making local models again", done, total)
        try:
            outcome = watching.map_sum("train", statistics.shared(state), visits, key)
        finally:
            watching.progress = None
        if outcome.failures:
            failure = outcome.failures[0]
            raise Missing(f"client {failure.client} fails when its local model is made again: {failure.reason}")
        found: dict[int, Tensors] = {}
        for name, like in self.bench.weights.items():  # in the network's own order, which no file keeps
            clients, values = watching.rows(f"model/{name}")
            for client, value in zip(clients, values, strict=True):
                found.setdefault(client, {})[name] = value.to(like.dtype)
        return found


def _spread(coming: Mapping[int, Visit], most: int) -> list[Visit]:
    """At most so many of the visits, evenly by client."""
    clients = sorted(coming)
    if len(clients) > most:
        clients = [clients[place] for place in np.linspace(0, len(clients) - 1, most).round().astype(int)]
    return [coming[client] for client in clients]


def _silent(words: str, done: int, total: int) -> None:
    return
