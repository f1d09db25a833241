"""A finished run opened for measures: its folder, models and images, each loaded when first used."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unskew import engines
from unskew.core import tensors
from unskew.core.errors import Missing, UserError
from unskew.core.key import Key
from unskew.core.limits import usable_path
from unskew.core.types import Engine, ImageSet, ServerState, Tensors, Visit
from unskew.data.partition_files import Holdings, read_holdings
from unskew.engines.blueprint import build
from unskew.round import driver, statistics
from unskew.round.algorithm import Algorithm
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.local_optimizers import rate_of_round, sent_rate
from unskew.round.sampling import draw
from unskew.runs import config as configs
from unskew.runs import journal, recording
from unskew.runs.checkpoint import (
    CHECKPOINT,
    MEMORIES,
    Progress,
    kept_state,
    load_checkpoint,
    load_state,
    open_memories,
)
from unskew.runs.federation_file import FEDERATION
from unskew.runs.finished import calibrated_parts, engine_for, final_weights, prepared_of, weights_of
from unskew.runs.folder import MODEL, classifier_names, read_calibration
from unskew.runs.journal import read_metrics
from unskew.runs.manifest import SealBroken, require_sealed
from unskew.runs.prepare import Prepared
from unskew.runs.result import Result, read_result
from unskew.runs.start import with_start

MAX_BYTES = 2**30  # of local models in memory at one time
T = TypeVar("T")


def state_after(run: "FinishedRun", number: int) -> ServerState:
    """The server's state after that round, 0 being before the first; clients' saved states are not part of it."""
    rounds, last = run.result.rounds, run.result.final_round
    if not 0 <= number <= rounds:
        raise UserError(f"round {number}: the run has rounds 1 to {rounds}; 0 is before the first, -1 the last")
    if number == last and (state := _checkpoint_state(run)) is not None:
        return state
    if (state := _kept_state(run, number)) is not None:
        return state
    if number == last and not run.algorithm.statistics and run.algorithm.head is None:
        return ServerState(last, run.model, {})
    return replayed(run, number, lambda engine, state: replace(state, clients={}))


def local_models(run: "FinishedRun", number: int, most: int) -> dict[int, Tensors]:
    """By client, its local model of the round after that one."""
    if run.algorithm.remember and 0 < number != run.result.final_round:  # what they remembered then comes with it
        return replayed(run, number, lambda engine, state: _trained(run, engine, state, most))
    state = run.state(number)
    if run.algorithm.remember and number and not (run.remembered and state.clients):
        run.notes.append(
            "local models were trained as at a first visit: the clients' saved states of that round were not kept"
        )
        state = replace(state, clients={})
    return _trained(run, run.engine, state, most)


def replayed(run: "FinishedRun", number: int, then: Callable[[Engine, ServerState], T]) -> T:
    """Train again up to that round, then call ``then`` while the engine still has the clients' saved states."""
    state, config = _earlier_state(run, number), run.prepared.config
    begun = state.round
    if begun < number and run.algorithm.mechanism is not None and not run.algorithm.mechanism.repeatable:
        raise Missing(
            f"round {number} cannot be trained again: its noise came from the operating system (private-updates with "
            "release=true); --during model keeps the server's state of chosen rounds"
        )
    # a run's own memories must not be written over
    engine = run.opened(None) if run.algorithm.remember else run.engine
    rounds = driver.run(
        run.algorithm, engine, state, run.key, rounds=config.rounds, per_round=config.per_round or 0,
        skip_failures=config.on_failure == "skip",
    )  # fmt: skip
    try:
        while state.round < number:
            state, _ = next(rounds)
            run.say("training again up to that round", state.round - begun, number - begun)
        return then(engine, state)
    finally:
        if run.algorithm.remember:
            engine.close()


def _checkpoint_state(run: "FinishedRun") -> ServerState | None:
    """The checkpoint's state, if it is that of the finished run; only saved states need it undamaged."""
    try:
        checkpoint = load_checkpoint(run.path)
    except UserError as error:
        if run.remembered:
            file = run.path / CHECKPOINT
            raise UserError(
                f"{file} is damaged, and the clients' saved states cannot be read without it; restore it from a copy, "
                "or delete it to train local models as at a first visit"
            ) from error
        return None
    if checkpoint is None:
        return None
    used = driver.as_used(run.algorithm, checkpoint[0].tensors, run.side.classifier)
    return checkpoint[0] if tensors.sha256(run.prepared.whole(used)) == run.result.weights_sha256 else None


def _kept_state(run: "FinishedRun", number: int) -> ServerState | None:
    """What ``--during model`` kept of that round; None where the file is damaged or of another round or run."""
    file = kept_state(run.path, number)
    with suppress(UserError):
        if file.exists():
            state, progress = load_state(file)
            return replace(state, clients={}) if state.round == number and _of_this_run(run, progress) else None
    return None


def _of_this_run(run: "FinishedRun", progress: Progress) -> bool:
    """Whether a kept state was made with the run's data, partition and configuration, or with its checkpoint's."""
    if (progress.data_sha256, progress.partition_hash) != (run.result.data_sha256, run.result.partition_hash):
        return False
    if progress.config_sha256 == configs.fingerprint(run.config):
        return True
    checkpoint = load_checkpoint(run.path)  # a path in config.toml may have been changed since
    return checkpoint is not None and checkpoint[1].config_sha256 == progress.config_sha256


def _earlier_state(run: "FinishedRun", number: int) -> ServerState:
    """A state from which that round can be reached by training: the latest kept before it, or the first."""
    if not run.algorithm.remember:  # what clients remembered at a kept state is gone
        for earlier in range(number, 0, -1):
            if (state := _kept_state(run, earlier)) is not None:
                return state
    run.prepared.initialise(run.side.network)
    model = tensors.on_device(tensors.of_module(run.side.network), "cpu")
    if run.prepared.start is not None:
        model = with_start(tensors.copy(model), run.prepared.start, run.side, run.engine, run.key, _unheard)[0]
    return driver.start(run.algorithm, model, run.side.classifier)


def _unheard(event: object) -> None:
    return


def _trained(run: "FinishedRun", engine: Engine, state: ServerState, most: int) -> dict[int, Tensors]:
    key = run.key.fold("round", state.round + 1)
    if state.round == 0:  # the survey of all clients belongs to the first round
        state, _ = driver.survey(run.algorithm, engine, state, run.key)
    config, number = run.prepared.config, state.round + 1
    coming = draw(run.algorithm, run.key, number, engine.roster, config.per_round or 0).visits
    if not coming:
        raise Missing(f"no client comes to round {number}, so that there are no local models; give another round")
    visits = _spread({visit.client: visit for visit in reversed(coming)}, most)  # of two to one client, the first
    size = tensors.count_bytes({name: value.double() for name, value in state.tensors.items()})
    if size * len(visits) > MAX_BYTES:
        raise Missing(
            f"{len(visits)} local models of {size / 1e6:.0f} MB take more than {MAX_BYTES / 1e9:.1f} GB; "
            f"give clients={max(1, MAX_BYTES // size)}"
        )
    visits = [replace(visit, ticket=state.clients.get(visit.client)) for visit in visits]
    watching = recording.RecordingEngine(engine, lambda _: ["model"], most=len(visits))
    watching.progress = lambda done, total: run.say("training local models again", done, total)
    try:
        sent = sent_rate(rate_of_round(run.algorithm.local, number, config.rounds))
        outcome = watching.map_sum("train", statistics.shared(state) | sent, visits, key, round=number)
    finally:
        watching.progress = None
    if outcome.failures:
        failure = outcome.failures[0]
        raise Missing(f"client {failure.client} failed when its local model was trained again: {failure.reason}")
    by_client: dict[int, Tensors] = {}
    for name, like in run.side.weights.items():  # in the network's own order, which files do not keep
        clients, values = watching.rows(f"model/{name}")
        for client, value in zip(clients, values, strict=True):
            by_client.setdefault(client, {})[name] = value.to(like.dtype)
    return by_client


def _spread(coming: Mapping[int, Visit], most: int) -> list[Visit]:
    """At most ``most`` of the visits, evenly by client."""
    clients = sorted(coming)
    if len(clients) > most:
        clients = [clients[place] for place in np.linspace(0, len(clients) - 1, most).round().astype(int)]
    return [coming[client] for client in clients]


Say = Callable[[str, int, int], None]  # progress: the stage, how much is done, of how much


@dataclass(frozen=True, eq=False)
class Outputs:
    """The model's outputs on the test images: features [n, d], true classes [n], predictions [n] by classifier."""

    features: Tensor
    labels: Tensor
    predicted: Mapping[str, Tensor]  # "" is the run's own classifier, the others are its calibrations


class FinishedRun:
    """A finished run, read from its folder. ``close`` ends the worker processes that it may have started."""

    def __init__(
        self, path: str | Path, *, data_dir: str | Path | None = None, engine: str | None = None,
        workers: int | None = None, device: str | None = None, say: Say | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if engine == "torchrun":
            raise UserError("--engine torchrun: measures of finished runs are taken on one machine; give auto or pool")
        self.path = usable_path(path)
        self.result: Result = read_result(self.path)
        self.config = configs.read_run(self.path)
        self.rows = read_metrics(self.path)
        self.during = journal.read(self.path)
        self.say: Say = say or _silent
        self._asked = {
            "engine": engine, "workers": workers, "data_dir": data_dir, "device": device, "values": values,
        }  # fmt: skip
        self._local: dict[tuple[int, int], dict[int, Tensors]] = {}
        self._states: dict[int, ServerState] = {}
        self._lacking: Missing | None = None
        self._engine: Engine | None = None
        self.notes: list[str] = []  # what a reader of the charts must know

    def __enter__(self) -> "FinishedRun":
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
        """How many examples of each class every client has; no data set is needed."""
        if (self.path / FEDERATION).exists():
            raise Missing("which client has what is known to the nodes of the federation alone")
        require_sealed(self.path, "partition.npz")
        return read_holdings(self.path / "partition.npz")

    @cached_property
    def prepared(self) -> Prepared:
        """The federation as it was; raises Missing where its data set is not available."""
        if self._lacking is not None:
            raise self._lacking
        try:
            self.say("reading the data set", 0, 0)
            return prepared_of(self.path, self.result, **self._asked)  # type: ignore[arg-type]
        except SealBroken:
            raise
        except UserError as error:
            self._lacking = Missing(str(error))
            raise self._lacking from error

    @property
    def without_data(self) -> bool:
        """Whether the data set was needed and is not available."""
        return self._lacking is not None

    @property
    def at_hand(self) -> bool:
        """Whether the data set is available."""
        with suppress(Missing):
            return self.prepared is not None
        return False

    @property
    def images(self) -> ImageSet:
        """The data set."""
        return self.prepared.images

    @cached_property
    def _data(self) -> Tensors:
        return replace(self.prepared, say=self.say).data

    @cached_property
    def side(self) -> ClientSide:
        """A network to work with, and all images; its weights are scratch."""
        return build(self.prepared.blueprint, self._data)

    @property
    def algorithm(self) -> Algorithm:
        """What the run trained with."""
        return self.prepared.algorithm

    @cached_property
    def weights(self) -> Tensors:
        """The run's final weights by the network's own names, without a data set."""
        return self._final[0]

    @cached_property
    def _final(self) -> tuple[Tensors, dict[str, str]]:
        return final_weights(self.path, self.result)

    @property
    def classifier_weight(self) -> Tensor:
        """[C, d], the weight of the run's own classifier at its end."""
        name = classifier_names(self.path, self._final[1])[0]
        weight = self.weights.get(name)
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            raise UserError(f"{self.path / MODEL} has no classifier weight {name!r}; restore the file from a copy")
        return weight

    @cached_property
    def model(self) -> Tensors:
        """The final weights as the side takes them."""
        return weights_of(self.path, self.result, self.side.network)

    @cached_property
    def calibrated(self) -> dict[str, Tensors]:
        """The calibrated classifiers' tensors by name; one that cannot be read is left out, with a note."""
        classifiers = {}
        for name in self.result.calibrations:
            try:
                classifiers[name] = read_calibration(self.path, name)
            except SealBroken:
                raise
            except UserError as error:
                self.notes.append(f"the calibration {name} is left out: {error}")
        return classifiers

    @property
    def classes(self) -> list[str]:
        """The classes' names; their numbers where the data set is not available."""
        try:
            return list(self.images.classes)
        except Missing:
            return [str(label) for label in range(len(self.classifier_weight))]

    @property
    def engine(self) -> Engine:
        """Where local models are trained again."""
        if self._engine is None:
            self._engine = self.opened(open_memories(self.path) if self.remembered else None)
        return self._engine

    @property
    def remembered(self) -> bool:
        """Whether the clients' saved states are available."""
        return bool(self.algorithm.remember) and (self.path / MEMORIES).exists()

    def opened(self, memories: int | None) -> Engine:
        """An engine; without a file for what clients remember, it has one that goes with it."""
        if self.prepared.nodes is not None:
            return self.prepared.nodes.open_engine(engines.EngineSetup(self.prepared.blueprint, self._data))
        chosen, workers = engine_for(self.prepared, self.side, passes=self.config.epochs)
        return engines.open_engine(chosen, engines.EngineSetup(self.prepared.blueprint, self._data, workers, memories))

    @cached_property
    def outputs(self) -> Outputs:
        """Features and predictions on all test images, by the run's own classifier and each calibrated one."""
        side, predicted, features = self.side, dict[str, list[Tensor]](), []
        if not len(side.test.labels):
            raise Missing("the test images are at the nodes of the federation")
        side.load(self.model, training=False)
        pairs = {"": (side.network.encoder, side.network.classifier)}
        for name, values in self.calibrated.items():
            encoder, classifier = calibrated_parts(self.path, name, values, side.network)
            pairs[name] = (encoder, classifier.cpu())  # type: ignore[assignment]
        count = len(side.test.labels)
        with torch.no_grad():
            for some in torch.split(torch.arange(count), IMAGES_AT_ONCE):
                self.say("classifying the test images", int(some[0]), count)
                images, _ = side.test.batch(some)
                known = {id(side.network.encoder): side.network.encoder(images)}
                features.append(known[id(side.network.encoder)].cpu())
                for name, (encoder, classifier) in pairs.items():
                    inside = known[id(encoder)] if id(encoder) in known else encoder(images)
                    logits = classifier(inside.cpu() if name else inside)  # a calibrated one works on the CPU
                    predicted.setdefault(name, []).append(logits.argmax(1).cpu())
        joined = {name: torch.cat(batches) for name, batches in predicted.items()}
        return Outputs(torch.cat(features), side.test.labels.cpu(), joined)

    def state(self, number: int | None = None) -> ServerState:
        """The server's state after that round (None: the last): as it was kept, or by training again up to it."""
        number = self.result.final_round if number is None else number
        if number not in self._states:
            self._states[number] = state_after(self, number)
        return self._states[number]

    def local_models(self, number: int | None = None, most: int = 10) -> dict[int, Tensors]:
        """By client, its local model of the round after that one; at most ``most`` clients."""
        number = self.result.final_round if number is None else number
        if most < 1:
            raise UserError(f"clients={most}: give at least one")
        if (number, most) not in self._local:
            self._local[number, most] = local_models(self, number, most)
        return self._local[number, most]

    def number(self, round: int) -> int:
        """The round that a knob means: −1 is the one whose model is the result (the last; with --patience the best)."""
        return self.result.final_round if round == -1 else round


def _silent(stage: str, done: int, total: int) -> None:
    return
