"""A finished run: load its model, add calibrations, open it for measures."""

import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from unskew import engines, methods, models
from unskew.calibration.classifier import load_calibrated
from unskew.calibration.federated import Calibrator, Known, check, named, protections
from unskew.calibration.finisher import Finisher, RealFeatures
from unskew.core import tensors
from unskew.core.errors import Missing, UserError, accepts
from unskew.core.files import CACHE_VARIABLE, parse_json, usable_path
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.plugins import remember
from unskew.core.types import CLASSIFIER, Engine, ImageSet, ServerState, Tensors
from unskew.data.partition_files import Holdings, read_holdings
from unskew.data.photographs import Say, silent
from unskew.models.any_module import AnyNetwork
from unskew.models.cut import cut
from unskew.models.networks import InParts
from unskew.privacy.ledger import add_release
from unskew.round import driver, statistics
from unskew.round.algorithm import Algorithm
from unskew.round.client import IMAGES_AT_ONCE, ClientSide, Train
from unskew.round.jobs import add
from unskew.round.local_optimizers import encode_rate, rate_of_round
from unskew.round.sampling import draw
from unskew.runs import checkpoint as checkpoints
from unskew.runs import config as configs
from unskew.runs import folder as folders
from unskew.runs import result as records
from unskew.runs.execute import Calibrated, Event, Stage, calibrate_start, choose_engine, finish, untrained_model
from unskew.runs.federated import FEDERATION, images_of, nodes_of, read_terms
from unskew.runs.journal import read_during, read_metrics
from unskew.runs.prepare import Prepared, prepare, read_data
from unskew.runs.python_values import PythonValues, match_values, require_values
from unskew.runs.result import MODEL_INFO, RESULT, ModelInfo, Result, read_model_info, read_result, to_json
from unskew.runs.seals import unsealed_note


@neutral()
@accepts
def calibrate_run(
    path: str | Path,
    *sources: str | Finisher,
    engine: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    data_dir: str | Path | None = None,
    observe: Callable[[Event], None] | None = None,
    trust: bool = False,
    data: Any = None,
    model: Any = None,
    method: Any = None,
) -> Result:
    """Add calibrations to a finished run; its own weights stay as they are.

    Each calibration is written as soon as it is ready, so an interrupt loses at most the current one.

    Parameters
    ----------
    path
        The run directory.
    *sources
        Calibrations such as ``"ccvr(per_class=2000) + secure"`` or ``"package.module:function(…)"``, or Finishers.
    engine, workers, device
        As in ``unskew.run``; by default as in the run.
    data_dir
        The folder of the data set, if it was moved since the run.
    observe
        Called with the progress and with each calibration.
    trust
        Whether plug-ins named in somebody else's run directory may run.
    data, model, method
        The run's own values, if they were passed from Python.
    """
    engines.serve_rank_zero(engine)
    if not sources:
        raise UserError(f"no calibration was named for {path}; give one or more, such as ccvr or lda")
    algorithms, notify = [_parse_calibration(source) for source in sources], observe or (lambda event: None)
    where: dict[str, Any] = {"data_dir": data_dir, "engine": engine, "workers": workers, "device": device}
    where |= {"values": {"data": data, "model": model, "method": method}, "trust": trust}
    run = FinishedRun(path, say=lambda *stage: notify(Stage(*stage)), **where)
    result, side = run.result, run.side
    remember(source if isinstance(source, str) else source.text for source in sources)
    if run.prepared.nodes is not None:
        problem = f"{run.path} is a federated run, whose images stay at the nodes"
        raise UserError(f"{problem}; add the calibration to the recipe's method")
    for algorithm in algorithms:
        for finisher in algorithm.finish:
            check(finisher, algorithm, side)
            if result.released and (isinstance(finisher.needs, RealFeatures) or not algorithm.released):
                needed = f"{finisher.text} + private(release=true)"
                raise UserError(f"{run.path} is a release, so (ε, δ) must cover everything in it; give {needed}")
    known: Known = {}
    by_image, untrained = run.prepared.test_owners is not None, None
    with suppress(UserError):  # the pretrained weights may have been deleted
        untrained = untrained_model(run.prepared)
    images = int(run.prepared.population.sizes.sum())
    with folders.locked_folder(run.path), closing(run.opened(None, images / 3)) as opened:  # without gradients
        for algorithm in algorithms:
            calibrator = Calibrator(opened, side, run.model, algorithm, run.key, notify, known)
            rival = None if protections(algorithm) else untrained
            for event in finish(calibrator, by_image=by_image, untrained=rival):
                result = _add_calibration(run.path, event, run.prepared)
                notify(event)
    return result


@neutral()
@accepts
def load(path: str | Path, calibration: str | None = None, *, trust: bool = False, model: Any = None) -> nn.Module:
    """Load a finished run's model in eval mode, [B, ch, H, W] -> [B, C], without the training data.

    Images must be normalized as (x/255 − mean) / std, with the mean and std in model.json.

    Parameters
    ----------
    path
        The run directory.
    calibration
        The calibrated classifier to use instead of the run's own.
    trust
        Whether the network may be a plug-in of somebody else's run directory.
    model
        The run's network, if it was passed from Python.
    """
    run, _, network = open_network(path, calibration, trust=trust, model=model)
    if note := unsealed_note(run.path):
        warnings.warn(note, stacklevel=4)
    return network


def open_network(
    path: str | Path, calibration: str | None, *, trust: bool, model: Any
) -> tuple["FinishedRun", str | None, nn.Module]:
    """A run, a calibration's canonical name, and the network with the final weights and the calibrated classifier."""
    run = FinishedRun(path, device="cpu", trust=trust, only_model=True)
    name, names = calibration, run.result.calibrations
    if name is not None and name not in names:
        with suppress(UserError):
            name = plain_name(name)  # ccvr(per_class=2000) is ccvr
        if name not in names:
            raise UserError(f"{run.path} has no calibration {calibration!r}; available: {', '.join(names) or 'none'}")
    own = match_values({"model": model}, run.config)
    require_values(own, run.config, ("model",))
    network = models.build(own.model or run.config.model or "", run.info.shape, len(run.info.classes))
    tensors.overwrite(network, run.weights_for(network))
    network.eval()
    if name is None:
        return run, name, network.module if isinstance(network, AnyNetwork) else network
    encoder, classifier = calibrated_parts(run.path, name, read_calibration(run.path, name), network)
    return run, name, nn.Sequential(OrderedDict(encoder=encoder, classifier=classifier)).eval()


def read_calibration(path: Path, name: str) -> Tensors:
    """A calibrated classifier's tensors, from its file."""
    file = folders.calibration_file(path, name)
    folders.require_sealed(path, file.name)
    with folders.reading(file):
        values, about = folders.read_tensors(file)
        if (method := parse_json(about["unskew"])["method"]) != name:
            raise ValueError(f"it contains another calibration, {method!r}")
        return values


def calibrated_parts(path: Path, name: str, values: Tensors, network: Any) -> tuple[nn.Module, nn.Module]:
    """The encoder and calibrated classifier, from the tensors in the calibration's file."""
    with folders.reading(folders.calibration_file(path, name)):
        return load_calibrated(values, lambda layers: cut(network, layers))


def _parse_calibration(source: str | Finisher) -> Algorithm:
    return source(Algorithm()) if isinstance(source, Finisher) else methods.parse_calibrations(str(source))


def plain_name(source: str) -> str:
    """A calibration's canonical name, as in results."""
    algorithm = _parse_calibration(source)
    return named(algorithm.finish[0], algorithm)


def _add_calibration(path: Path, event: Calibrated, prepared: Prepared) -> Result:
    """Write the calibration into the run directory; one of the same name is replaced."""
    result, name, added = read_result(path), event.result.name, event.result
    release = event.classifier.report.release
    files = {folders.calibration_file(path, name).name: folders.calibration_bytes(name, event.classifier)}
    if not result.released:
        files[MODEL_INFO] = read_model_info(path).with_score(name, event.score).to_bytes()
    if release is None or not release.released:  # accuracy by client would show which classes each one holds
        by_client = prepared.measure_clients(event.score)
        added = replace(added, clients_accuracy=records.summarise_clients(by_client))
        arrays = records.with_classifier(records.read_clients(path), name, by_client)
        files[records.CLIENTS] = folders.arrays_bytes(arrays)
    calibrations = {**result.calibrations, name: added}
    result = replace(result, calibrations=calibrations, privacy=add_release(result.privacy, release))
    folders.write_sealed(path, {**files, RESULT: folders.json_bytes(to_json(result))})
    return result


# States and local models of any round


UNCOVERED = "the run is a release (release=true), and this would reveal more than (ε, δ) covers"
T = TypeVar("T")


def replay(run: "FinishedRun", number: int, then: Callable[[Engine, ServerState], T]) -> T:
    """Retrain up to that round, then call ``then`` while the engine still has the clients' saved states."""
    state, mechanism = _earlier_state(run, number), run.algorithm.mechanism
    first = state.round
    if first < number and mechanism is not None and mechanism.release:
        reason = "its noise came from the operating system (private-updates with release=true)"
        hint = "--during model saves the server's state of chosen rounds"
        raise Missing(f"round {number} cannot be retrained: {reason}; {hint}")
    # the run's own memories must not be overwritten
    with closing(run.opened(None)) if run.algorithm.remember else nullcontext(run.engine) as engine:
        rounds = run.prepared.run_rounds(engine, state, run.key)
        while state.round < number:
            state, _ = next(rounds)
            run.say(f"retraining up to round {number}", state.round - first, number - first)
        return then(engine, state)


def _final_state(run: "FinishedRun") -> ServerState | None:
    if (checkpoint := checkpoints.load_checkpoint(run.path)) is not None:
        used = driver.as_used(run.algorithm, checkpoint[0].tensors, run.side.classifier)
        if tensors.sha256(run.prepared.whole(used)) == run.result.weights_sha256:
            return checkpoint[0]
    return None


def _saved_state(run: "FinishedRun", number: int) -> ServerState | None:
    """The state that ``--during model`` saved after that round, if it did."""
    file = checkpoints.state_file(run.path, number)
    if not file.exists():
        return None
    state, progress = checkpoints.load_state(file)
    data = run.result.data_sha256 or "", run.result.partition_hash or ""
    checkpoint = checkpoints.load_checkpoint(run.path)  # its fingerprint, as config.toml may have a new path
    known = {configs.fingerprint(run.config), *([checkpoint[1].config_sha256] if checkpoint else [])}
    same = state.round == number and progress.run[:2] == data and progress.config_sha256 in known
    return replace(state, clients={}) if same else None


def _earlier_state(run: "FinishedRun", number: int) -> ServerState:
    """A state to retrain from up to that round: the latest saved one, or the initial one."""
    if not run.algorithm.remember:  # a saved state lacks the clients' memories
        for earlier in range(number, 0, -1):
            if (state := _saved_state(run, earlier)) is not None:
                return state
    tensors.overwrite(run.side.network, run.prepared.first)
    model = tensors.on_device(tensors.of_module(run.side.network), "cpu")
    if (start := run.prepared.start) is not None:
        calibrator = Calibrator(run.engine, run.side, tensors.copy(model), start, run.key, lambda event: None, {})
        model = calibrate_start(calibrator)[0]
    return driver.start(run.algorithm, model, run.side.classifier)


def _train_locally(run: "FinishedRun", engine: Engine, state: ServerState, most: int) -> dict[int, Tensors]:
    if run.result.released:
        raise Missing(UNCOVERED)
    config, number = run.prepared.config, state.round + 1
    if state.round == 0:  # the survey of all clients belongs to the first round
        state, _ = driver.survey(run.algorithm, engine, state, run.key)
    drawn = draw(run.algorithm, run.key, number, engine.roster, config.per_round or 0).visits
    if not drawn:
        raise Missing(f"no client takes part in round {number}, so there are no local models; choose another round")
    first = {visit.client: visit for visit in reversed(drawn)}  # a client's first visit
    clients, count = sorted(first), min(most, len(first))
    visits = [first[clients[index]] for index in np.linspace(0, len(clients) - 1, count).round().astype(int)]
    visits = [replace(visit, ticket=state.clients.get(visit.client)) for visit in visits]
    sent = statistics.build_shared(state) | encode_rate(rate_of_round(run.algorithm.local, number, config.rounds))
    replies = engine.visit(Train(number, ("model",)), sent, visits, run.key.fold("round", number))
    outcome = add(replies, visits, partial(run.say, "retraining local models"))
    if outcome.failures:
        failure = outcome.failures[0]
        raise Missing(f"client {failure.client} failed while its local model was retrained: {failure.reason}")
    return {  # in the network's own order, which files do not preserve
        visits[index].client: {name: extra[f"model/{name}"].to(like.dtype) for name, like in run.side.weights.items()}
        for index, extra in outcome.extra.items()
    }


@dataclass(frozen=True, eq=False)
class Outputs:
    """The model's outputs on the test images: features [n, d], true classes [n], predictions [n] by classifier."""

    features: Tensor
    labels: Tensor
    predicted: Mapping[str, Tensor]  # "" is the run's own classifier, the others are its calibrations


class FinishedRun:
    """A finished run, read from its directory. ``close`` ends its worker processes, if any.

    Parameters
    ----------
    path
        The run directory.
    say
        Called with the current activity, the work done and the total.
    values
        The run's own data, model and method, if they were passed from Python.
    trust
        Whether plug-ins named in somebody else's run directory may run.
    only_model
        Whether only the network is needed; other plug-ins then need no trust until the data set is read.
    changes
        ``data_dir``, ``engine``, ``workers`` and ``device``, as in ``unskew.run``; by default as in the run.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        say: Say | None = None,
        values: Mapping[str, Any] | None = None,
        trust: bool = False,
        only_model: bool = False,
        **changes: str | int | Path | None,
    ) -> None:
        self.path = usable_path(path)
        self.result: Result = read_result(self.path)
        self.config = configs.read_own_run(self.path, trust=trust, only=("model",) if only_model else configs.PLUGGABLE)
        self.rows = read_metrics(self.path)
        self.during = read_during(self.path)
        self.say: Say = say or silent
        self._changes, self._trust = changes, trust
        self.values = values or {}
        self._local: dict[tuple[int, int], dict[int, Tensors]] = {}
        self._states: dict[int, ServerState] = {}
        self.no_data: Missing | None = None  # why the data set is not available, once it was needed
        self._engine: Engine | None = None
        self.notes: list[str] = []  # for readers of the charts

    def __enter__(self) -> "FinishedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, if any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def key(self) -> Key:
        """The run's own key, so that a measure always draws the same."""
        return Key(self.config.seed)

    @cached_property
    def holdings(self) -> Holdings:
        """How many examples of each class every client has; does not need the data set."""
        if self.result.released:
            raise Missing(UNCOVERED)
        if (self.path / FEDERATION).exists():
            raise Missing("only the nodes of the federation know which client has which examples")
        folders.require_sealed(self.path, folders.PARTITION)
        return read_holdings(self.path / folders.PARTITION)

    @cached_property
    def info(self) -> ModelInfo:
        """The model's classes and inputs."""
        return read_model_info(self.path)

    @cached_property
    def prepared(self) -> Prepared:
        """The federation as it was; raises Missing if its data set is not available."""
        if self.no_data is not None:
            raise self.no_data
        try:
            self.say("reading the data set", 0, 0)
            return self._prepare()
        except folders.SealBroken:
            raise
        except UserError as error:
            self.no_data = Missing(str(error))
            raise self.no_data from error

    def _prepare(self) -> Prepared:
        path, config = self.path, self.config
        configs.read_own_run(path, trust=self._trust)  # from here on, all of its plug-ins may run
        cache = os.environ.get(CACHE_VARIABLE) or config.cache_dir  # the run may be from another machine
        config = replace(config, engine=engines.default_engine(config.engine), cache_dir=cache, baseline=None)
        changes = {name: value for name, value in self._changes.items() if value is not None}
        config = configs.with_values(config, changes, str(path))
        values, saved = match_values(self.values, config), None
        config = configs.checked(config)
        if (path / FEDERATION).exists():  # the server has no training images
            terms = read_terms(path)
            own = None if config.data == configs.NODES else read_data(config)
            values = PythonValues(data=images_of(terms, config, own), nodes=nodes_of(terms, config))
        elif self.result.released:  # its partition was deleted; sums over all clients are the same with any other
            config = replace(config, partition="iid")
        else:
            folders.require_sealed(path, folders.PARTITION)
            saved = f"file:{(path / folders.PARTITION).absolute()}"
        weights = self.weights if config.pretrained is not None or config.train != "all" else None
        prepared = prepare(config, saved, values, weights, self.say)
        before = self.result.data_sha256, self.result.partition_hash if saved else None
        now = prepared.data_sha256, prepared.partition.hash
        if any(known not in (None, found) for known, found in zip(before, now, strict=True)):
            changed = f"the data set {config.data} or its partition changed after {path} was trained"
            raise UserError(f"{changed}; restore the original")
        return prepared

    @property
    def has_data(self) -> bool:
        """Whether the data set is available."""
        with suppress(Missing):
            return self.prepared is not None
        return False

    @property
    def images(self) -> ImageSet:
        """The data set."""
        return self.prepared.images

    @property
    def side(self) -> ClientSide:
        """A network to work with, and all images; its weights are scratch."""
        return self.prepared.side

    @property
    def algorithm(self) -> Algorithm:
        """The run's algorithm."""
        return self.prepared.algorithm

    @property
    def weights(self) -> Tensors:
        """The run's final weights by the network's own names."""
        return self._final[0]

    @cached_property
    def _final(self) -> tuple[Tensors, dict[str, str]]:
        """The weights, which must match the result, and the file's metadata."""
        weights, metadata = folders.read_model(self.path)
        hashes = folders.seal(weights, metadata), tensors.sha256(weights)
        if hashes != (self.result.weights_seal, self.result.weights_sha256):
            file = self.path / folders.MODEL
            raise UserError(f"{file} does not match the hash in result.json; restore it from a copy")
        return weights, metadata

    def weights_for(self, network: nn.Module) -> Tensors:
        """The final weights by the names of ``tensors.of_module``, if they fit the network."""
        names = tensors.of_module(network)
        found = {}
        for (name, own), plain in zip(names.items(), folders.plain_names(names), strict=True):
            value = self.weights.get(plain)
            if value is None or (value.dtype, value.shape) != (own.dtype, own.shape):
                file = self.path / folders.MODEL
                raise UserError(f"{file} does not fit the network: {plain} must be {own.dtype} {list(own.shape)}")
            found[name] = value
        return found

    @property
    def classifier_weight(self) -> Tensor:
        """[C, d], the weight of the run's own classifier at its end."""
        weights, metadata = self._final
        names = json.loads(metadata.get("classifier", "null"))
        return weights[names[0] if names else CLASSIFIER[0].partition("/")[2]]

    @cached_property
    def model(self) -> Tensors:
        """The final weights, as the client side loads them."""
        return self.weights_for(self.side.network)

    @cached_property
    def calibrated(self) -> dict[str, Tensors]:
        """The calibrated classifiers' tensors by name."""
        return {name: read_calibration(self.path, name) for name in self.result.calibrations}

    @property
    def classes(self) -> list[str]:
        """The classes' names."""
        return list(self.info.classes)

    @property
    def engine(self) -> Engine:
        """The engine that retrains local models."""
        if self._engine is None:
            self._engine = self.opened(checkpoints.open_memories(self.path) if self.remembered else None)
        return self._engine

    @property
    def remembered(self) -> bool:
        """Whether the clients' saved states are available."""
        return bool(self.algorithm.remember) and (self.path / checkpoints.MEMORIES).exists()

    def opened(self, memories: int | None, examples: float | None = None) -> Engine:
        """Open an engine for work on ``examples`` (None: one visit per client); no ``memories``: a temporary file."""
        prepared, config, sizes = self.prepared, self.prepared.config, self.prepared.population.sizes.tolist()
        steps = (examples or config.epochs * sum(sizes)) / config.batch
        if config.steps is not None and examples is None:
            steps = config.steps * len(sizes)
        name, workers = choose_engine(prepared, sizes, steps)
        setup = engines.EngineSetup(prepared.blueprint, prepared.data, workers, memories, prepared.side)
        return prepared.nodes.open_engine(setup) if prepared.nodes else engines.open_engine(name, setup)

    @cached_property
    def outputs(self) -> Outputs:
        """Features and predictions on all test images, by the run's own classifier and each calibrated one."""
        side, predicted, features = self.side, dict[str, list[Tensor]](), []
        if not len(side.test.labels):
            raise Missing("the test images are at the nodes of the federation")
        side.load(self.model, training=False)
        pairs: dict[str, tuple[nn.Module, nn.Module]] = {"": (side.network.encoder, side.network.classifier)}
        for name, values in self.calibrated.items():
            encoder, classifier = calibrated_parts(self.path, name, values, side.network)
            pairs[name] = encoder, classifier.cpu()
        count = len(side.test.labels)
        with torch.no_grad():
            for batch in torch.split(torch.arange(count), IMAGES_AT_ONCE):
                self.say("classifying the test images", int(batch[0]), count)
                images = side.test.batch(batch)[0]
                encoded = InParts(side.network.encoder)(images)
                features.append(encoded.cpu())
                for name, (encoder, classifier) in pairs.items():
                    inputs = encoded if encoder is side.network.encoder else InParts(encoder)(images)
                    logits = classifier(inputs.cpu() if name else inputs)  # calibrated classifiers are on the CPU
                    predicted.setdefault(name, []).append(logits.argmax(1).cpu())
        joined = {name: torch.cat(batches) for name, batches in predicted.items()}
        return Outputs(torch.cat(features), side.test.labels.cpu(), joined)

    def state(self, number: int | None = None) -> ServerState:
        """The server's state after that round (None: the last, 0: before the first), read or retrained."""
        rounds, last = self.result.rounds, self.result.final_round
        number = last if number is None else number
        if not 0 <= number <= rounds:
            raise UserError(f"round {number}: the run has rounds 1 to {rounds}; 0 means before the first, -1 the last")
        if number not in self._states:
            state = (_final_state(self) if number == last else None) or _saved_state(self, number)
            if state is None and number == last and not self.algorithm.statistics and self.algorithm.head is None:
                state = ServerState(last, self.model, {})
            self._states[number] = state or replay(self, number, lambda engine, state: replace(state, clients={}))
        return self._states[number]

    def local_models(self, number: int | None = None, most: int = 10) -> dict[int, Tensors]:
        """The local models of the round after that one, by client; at most ``most`` clients."""
        number = self.result.final_round if number is None else number
        if most < 1:
            raise UserError(f"clients={most}: give at least 1")
        if (number, most) in self._local:
            return self._local[number, most]
        if self.algorithm.remember and 0 < number != self.result.final_round:  # retraining restores the memories
            local = replay(self, number, lambda engine, state: _train_locally(self, engine, state, most))
        else:
            state = self.state(number)
            if self.algorithm.remember and number and not (self.remembered and state.clients):
                reason = "because the clients' states of that round were not saved"
                self.notes.append(f"local models were trained as on a first visit, {reason}")
                state = replace(state, clients={})
            local = _train_locally(self, self.engine, state, most)
        self._local[number, most] = local
        return local

    def number(self, round: int) -> int:
        """The round that a knob means: −1 is the round whose model is the result (with --patience the best)."""
        return self.result.final_round if round == -1 else round
