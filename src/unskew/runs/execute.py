"""A prepared run from its first round to its result: train, evaluate, checkpoint, stop early, calibrate, conclude."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unskew import engines
from unskew.calibration.classifier import CalibratedClassifier
from unskew.calibration.feasible import named, protections
from unskew.calibration.federated import Calibrator, Forecasted, Gathering, Known
from unskew.calibration.finisher import Finisher, RealFeatures
from unskew.calibration.jobs import EvaluateCalibrated
from unskew.core import tensors
from unskew.core.errors import LostMemory, UserError
from unskew.core.files import read_content, write_whole
from unskew.core.key import Key, system_key
from unskew.core.machine import default_workers
from unskew.core.types import Engine, ServerState, Tensors
from unskew.core.units import counted
from unskew.data.batches import steps_for
from unskew.privacy.ledger import REPLACED_CLIENT, PrivateRounds, Spent, add_release, add_up
from unskew.privacy.noise import PrivateUpdates
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.round.driver import Metrics
from unskew.round.evaluation import Evaluation, evaluate
from unskew.runs import checkpoint as checkpoints
from unskew.runs import config as configs
from unskew.runs import folder as folders
from unskew.runs import recording
from unskew.runs.client_accuracy import CLIENTS, OWN, measure_clients, summarise_clients, to_arrays
from unskew.runs.config import CONFIG
from unskew.runs.journal import DURING, METRICS, LineFile, Mark, leave_out, metrics_row
from unskew.runs.prepare import Overview, Prepared, overview
from unskew.runs.result import AT_NODES, MODEL_INFO, RESULT, TEST, VALIDATION, Calibration, ModelInfo, Result, to_json

# The events of an observer, in addition to the Overview and each round's Metrics


@dataclass(frozen=True)
class InitialModel:
    """The evaluation of the initial model, and the calibration that made its classifier, if any."""

    accuracy: float
    loss: float
    start: Calibration | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibrated:
    """A calibrated classifier, its result, and notes on it."""

    result: Calibration
    classifier: CalibratedClassifier
    notes: tuple[str, ...]
    score: Evaluation


@dataclass(frozen=True)
class Stage:
    """Progress of work that is neither a round nor a calibration."""

    activity: str
    done: int
    total: int


Event = Gathering | Forecasted | Calibrated | Stage | InitialModel
Observer = Callable[[Overview | Metrics | Event], Any]  # returning STOP ends the run after the round


# The run


@dataclass(frozen=True)
class RunPosition:
    """How far a run has come: the server's state, and how much of each growing file belongs to it."""

    state: ServerState
    metrics: Mark
    during: Mark


def execute(prepared: Prepared, path: Path, observe: Observer) -> Result:
    """Train the remaining rounds, calibrate, and write the result; the run can be resumed after any interruption."""
    try:
        with ExitStack() as resources:
            run = Execution(prepared, path, observe, resources)
            try:
                run.begin()
                run.train()
                return run.finish()
            except BaseException:
                if run.position.state.round:
                    run.save()
                raise
    except LostMemory as error:
        raise LostMemory(f"{path / checkpoints.MEMORIES}: {error}") from error


class Execution:
    """A run in progress. ``position`` is replaced as a whole, so an interrupt always finds it consistent."""

    def __init__(self, prepared: Prepared, path: Path, observe: Observer, resources: ExitStack) -> None:
        config, side = prepared.config, prepared.side
        self.prepared, self.path, self.observe = prepared, path, observe
        self.side, self.algorithm, self.key = side, side.algorithm, Key(config.seed)
        if self.algorithm.mechanism is not None and not self.algorithm.mechanism.repeatable:
            self.key = Key(system_key().number() % 2**63)  # the seed of a release's private updates must be secret
        self.by_image = prepared.test_owners is not None
        self.score: tuple[int, Evaluation] | None = None  # the latest usable evaluation, and its round
        tensors.overwrite(side.network, prepared.first)
        state, self.progress = load_or_start(prepared, path)

        workers = min(config.workers or default_workers(config.device), len(prepared.first_visits))
        self.engine_name = choose_engine(prepared, workers, config.rounds - state.round)
        observe(overview(prepared, path, state, self.engine_name, engines.processes(self.engine_name, workers)))

        self.metrics = LineFile(path / METRICS, self.progress.metrics)
        self.during = LineFile(path / DURING, self.progress.during)
        resources.callback(self.metrics.close)
        resources.callback(self.during.close)
        if (rounds := [row.get("round") for row in self.metrics.rows()]) != list(range(1, state.round + 1)):
            raise UserError(
                f"{path / METRICS} has {len(rounds)} rounds, but the checkpoint was written after round {state.round}; "
                f"restore it from a copy, or delete {path / 'checkpoint'} to start the run from the beginning"
            )
        self.position = RunPosition(state, self.metrics.mark, self.during.mark)
        begun = read_content(path / checkpoints.BEGUN) or b""
        self.begun = max(state.round, int(begun) if begun.isdigit() else 0)  # rounds that a release has begun
        self.best: BestRound | None = None
        if config.patience:
            rows, released = self.metrics.rows(), side.algorithm.released
            self.best = BestRound(path, config.monitor, config.patience, rows, state, self.progress, released)

        memories = checkpoints.open_memories(path) if self.algorithm.remember and prepared.nodes is None else None
        setup = engines.EngineSetup(prepared.blueprint, prepared.data, workers, memories, side)
        engine = prepared.nodes.open_engine(setup) if prepared.nodes else engines.open_engine(self.engine_name, setup)
        self.recorder = recording.Recorder(prepared.recordings, config.rounds, side, self.key)
        self.engine, self.memory = engine, engine.memory
        resources.callback(self.engine.close)
        if state.round < config.rounds and self.memory is not None:
            self.memory.pin(state.clients.values())
        self.saved = time.monotonic()
        self.began = time.monotonic() - self.progress.seconds

    def begin(self) -> None:
        """Make the classifier of --start; evaluate a model that no round will train."""
        start = self.prepared.start
        if start is not None and self.progress.start is None:
            model, sent, seconds, notes = calibrate_start(
                self.position.state.tensors, start, self.side, self.engine, self.key, self.observe
            )
            state = driver.start(self.algorithm, model, self.side.classifier)
            score = self._evaluate(state)
            calibration = Calibration(named(start.finish[0], start), score.accuracy, score.loss, sent, seconds)
            self.progress = replace(self.progress, start=calibration)
            self.position = replace(self.position, state=state)
            self.save()
            self.observe(InitialModel(score.accuracy, score.loss, calibration, notes))
        elif self.prepared.config.rounds == 0:
            score = self._evaluate(self.position.state)
            self.observe(InitialModel(score.accuracy, score.loss, self.progress.start))

    def train(self) -> None:
        """Train the remaining rounds, until the last one or until --patience runs out."""
        config = self.prepared.config
        if self.best is not None and self.best.over:
            return
        rounds = driver.run(
            self.algorithm,
            self.engine,
            self.position.state,
            self.key,
            rounds=config.rounds,
            per_round=config.per_round or 0,
            skip_failures=config.on_failure == "skip",
            watch=self.recorder.watched,
            record=self.recorder.record,
        )
        for state, row in self._counted(rounds):
            last = state.round == config.rounds
            if last or state.round % config.evaluate_every == 0:
                score = self._evaluate(state, by_image=self.by_image and last, confidence=last)
                self.score = (state.round, score) if last or not self.by_image else None
                failures = () if self.algorithm.released else (*row.failures, *score.failures)
                row = replace(row, accuracy=score.accuracy, loss=score.loss, failures=failures)
            if state.round == 1 and self.progress.start is not None:  # --start counts as part of the first round
                row = replace(row, bytes_up=(row.bytes_up or 0) + self.progress.start.bytes_up)
            if (line := self.recorder.line(state)) is not None:
                self.during.append(line)
            if "model" in self.recorder.due(state.round):
                saved = without_private(state, self.progress) if self.algorithm.released else (state, self.progress)
                checkpoints.save_state(checkpoints.state_file(self.path, state.round), *saved)
            self.position = RunPosition(state, self.metrics.append(metrics_row(row)), self.during.mark)
            if self.best is not None:
                self.best.update(state, getattr(row, config.monitor))
                last = last or self.best.over
            self.observe(row)
            if last or time.monotonic() - self.saved >= config.checkpoint_seconds:
                self.save()
            if last:
                break

    def _counted(self, rounds: Iterator[tuple[ServerState, Metrics]]) -> Iterator[tuple[ServerState, Metrics]]:
        """The rounds as they end. A release counts each one durably before it begins: a round lost in a crash is
        retrained with other clients and other noise, so it costs ε twice.
        """
        mechanism, config = self.algorithm.mechanism, self.prepared.config
        counting = mechanism is not None and not mechanism.repeatable
        while self.position.state.round < config.rounds:
            if counting:
                self.begun += 1
                write_whole(self.path / checkpoints.BEGUN, str(self.begun).encode())
            state, row = next(rounds)
            if self.algorithm.released:
                row = leave_out(row)
            if counting and mechanism is not None and row.epsilon is not None:
                clients = len(self.engine.roster.inhabited)
                drawn = min(config.per_round or clients, clients)
                row = replace(row, epsilon=mechanism.epsilon(self.begun, drawn, clients))
            yield state, row

    def save(self) -> None:
        """Write a checkpoint of the current position, after everything that it refers to is durable."""
        position = self.position
        self.metrics.sync()
        self.during.sync()
        if self.memory is not None:
            self.memory.sync()
        progress = replace(
            self.progress,
            metrics_bytes=position.metrics.bytes,
            metrics_sha256=position.metrics.sha256,
            during_bytes=position.during.bytes,
            during_sha256=position.during.sha256,
            seconds=time.monotonic() - self.began,
        )
        if self.best is not None:
            self.best.save(position.state, progress)
        checkpoints.save_checkpoint(self.path, position.state, progress)
        if self.prepared.nodes is not None:  # the rounds of a federation cannot be repeated
            checkpoints.keep_checkpoint(self.path, position.state.round)
        if self.best is not None:
            self.best.clear(lambda number: "model" in self.recorder.due(number))
        if self.memory is not None:
            self.memory.pin(position.state.clients.values())
        self.saved = time.monotonic()

    def finish(self) -> Result:
        """Calibrate the final model and write the result, even if a calibration fails."""
        final = self.position.state if self.best is None or self.best.best is None else self.best.best.state
        model = driver.as_used(self.algorithm, final.tensors, self.side.classifier)
        if self.score is None or self.score[0] != final.round:  # resumed after the last round, or an earlier is best
            self.score = final.round, self._evaluate(final, by_image=self.by_image, confidence=True)
        seconds = time.monotonic() - self.began  # calibrations report their own
        calibrated: list[Calibrated] = []

        def keep(event: Event) -> None:
            if isinstance(event, Calibrated):
                calibrated.append(event)
            self.observe(event)

        try:
            compared: dict[str, Any] = {"by_image": self.by_image, "untrained": untrained_model(self.prepared)}
            finish(self.engine, self.side, model, self.algorithm, self.key, keep, **compared)
        except UserError as error:
            self._conclude(model, calibrated, seconds)
            later = f"add another with: unskew calibrate {self.path} METHOD"
            if self.prepared.nodes is not None:  # a node was probably disconnected
                later = "to add it, resume the run once all nodes are connected"
            raise UserError(f"{error}; the run is finished without this calibration; {later}") from error
        return self._conclude(model, calibrated, seconds)

    def _evaluate(self, state: ServerState, *, by_image: bool = False, confidence: bool = False) -> Evaluation:
        count, exchange = len(self.prepared.images.test), self.algorithm.exchange
        return evaluate(
            self.engine, state.tensors, count, self.key, by_image=by_image, confidence=confidence, exchange=exchange
        )

    def _conclude(self, model: Tensors, calibrated: Sequence[Calibrated], seconds: float) -> Result:
        """Write the model, the calibrations and, last, the result, sealed with the metrics."""
        assert self.score is not None
        prepared, path, config = self.prepared, self.path, self.prepared.config
        classifier, model, rows = self.side.classifier, prepared.whole(model), self.metrics.rows()
        score, start = self.score[1], self.progress.start
        scores = {OWN: score} | {event.result.name: event.score for event in calibrated}
        by_client = {}
        if not prepared.nodes and not self.algorithm.released:
            holdings = prepared.partition, prepared.images.train.labels, prepared.test_owners
            by_client = {name: measure_clients(*holdings, evaluation) for name, evaluation in scores.items()}
        spreads = {name: summarise_clients(*measured) for name, measured in by_client.items()}
        spent = spent_in_rounds(prepared, max(self.begun, len(rows)))
        for event in calibrated:
            spent = add_release(spent, event.classifier.report.release)
        best = best_row(rows, config.monitor) if config.patience else None
        reference = None if prepared.baseline is None else prepared.baseline.accuracy
        result = Result(
            path=path,
            method=config.method,
            data=config.data,
            partition=config.partition,
            clients=prepared.partition.clients,
            per_round=config.per_round or prepared.partition.clients,
            rounds=len(rows),
            seed=config.seed,
            engine=self.engine_name,
            accuracy=score.accuracy,
            loss=score.loss,
            seconds=seconds,
            weights_sha256=tensors.sha256(model),
            model=config.model or "",
            calibrations={
                event.result.name: replace(event.result, clients_accuracy=spreads.get(event.result.name))
                for event in calibrated
            },
            clients_accuracy=spreads.get(OWN),
            settings=configs.deciding(config),
            privacy=spent,
            notes=[*prepared.model_notes, *notes_on_protections(prepared), *self._coverage(scores)],
            best_round=best["round"] if best else None,
            stopped_at=len(rows) if len(rows) < config.rounds else None,
            evaluated_on=VALIDATION if config.validation else TEST if len(prepared.images.test) else AT_NODES,
            start=start,
            weights_seal=folders.seal(folders.plain_names(model), folders.classifier_metadata(classifier)),
            baseline=config.baseline,
            baseline_accuracy=reference,
            relative_accuracy=None if reference is None else score.accuracy / reference,
            **({} if score.confidence is None else asdict(score.confidence)),
            **({"failures": None, "released": True} if self.algorithm.released else self._exact(rows)),
        )
        images = prepared.images
        info = ModelInfo(images.classes, images.shape, prepared.blueprint.shape, images.mean, images.std)
        if not self.algorithm.released:
            for name, evaluation in scores.items():
                info = info.with_score(name, evaluation)
        files = {folders.MODEL: folders.model_bytes(model, classifier), MODEL_INFO: info.to_bytes()}
        if by_client:
            files[CLIENTS] = folders.arrays_bytes(to_arrays(by_client))
        if not rows:
            files[METRICS] = b""  # a run without rounds has the file too
        for event in calibrated:
            name = event.result.name
            files[folders.calibration_file(path, name).name] = folders.calibration_bytes(name, event.classifier)
        checkpoints.drop_memories(path)  # before the result: a finished run is never resumed
        grown = {METRICS: self.metrics.mark.sha256}
        if self.during.mark.bytes:
            grown[DURING] = self.during.mark.sha256
        folders.write_sealed(path, {**files, RESULT: folders.json_bytes(to_json(result))}, grown=grown)
        if self.algorithm.released:
            remove_private_files(path)
        return result

    def _coverage(self, scores: Mapping[str, Evaluation]) -> list[str]:
        """Notes on accuracies that do not cover every client because some did not reply."""
        notes, clients = [], len(self.engine.roster.inhabited)
        for name, score in scores.items():
            if score.failures and not self.algorithm.released:  # a release does not reveal who took part
                missing = sorted(str(failure.client) for failure in score.failures)
                model = "the trained model" if name == OWN else name
                notes.append(
                    f"the accuracy of {model} covers {clients - len(missing)} of {counted(clients, 'client')}; client "
                    f"{', '.join(missing[:10])} did not reply"
                )
        return notes

    def _exact(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The exact numbers about data and participation, which a release leaves out."""
        prepared, start = self.prepared, self.progress.start
        examples = sum(row["examples"] for row in rows)
        return {
            "emd": prepared.emd,
            "examples": examples,
            "examples_per_second": examples / max(sum(row["seconds"] for row in rows), 1e-9),
            "bytes_up": sum(row["bytes_up"] for row in rows) or (0 if start is None else start.bytes_up),
            "bytes_down": sum(row["bytes_down"] for row in rows),
            "partition_hash": prepared.partition.hash,
            "data_sha256": prepared.data_sha256,
            "failures": sum(len(row.get("failures", ())) for row in rows),
        }


# Releases: what must not remain in the run directory


def without_private(
    state: ServerState, progress: checkpoints.CheckpointRecord
) -> tuple[ServerState, checkpoints.CheckpointRecord]:
    """A state to keep, without the clients that took part and the hashes of the data."""
    return replace(state, clients={}), replace(progress, data_sha256="", partition_hash="")


def remove_private_files(path: Path) -> None:
    """Remove the files that only an unfinished release needs: partition, checkpoints, saved states."""
    private = [path / name for name in (checkpoints.CHECKPOINT, checkpoints.MEMORIES, checkpoints.BEGUN)]
    for file in (*private, *checkpoints.earlier_checkpoints(path).values()):
        file.unlink(missing_ok=True)
    folders.remove_sealed(path, [folders.PARTITION])


# The start


def load_or_start(prepared: Prepared, path: Path) -> tuple[ServerState, checkpoints.CheckpointRecord]:
    """The state of the checkpoint, which must belong to this data and partition, or the initial state."""
    checkpoint, fingerprint = checkpoints.load_checkpoint(path), configs.fingerprint(prepared.config)
    if checkpoint is None:
        side = prepared.side
        state = driver.start(side.algorithm, tensors.of_module(side.network), side.classifier)
        return state, checkpoints.CheckpointRecord(0, 0.0, prepared.data_sha256, prepared.partition.hash, fingerprint)
    state, progress = checkpoint
    if progress.data_sha256 != prepared.data_sha256:
        raise UserError(
            f"the data set {prepared.config.data} is not the one that {path} was started with; restore the original"
        )
    if progress.partition_hash != prepared.partition.hash:
        raise UserError(
            f"{path / 'partition.npz'} does not belong to the checkpoint; restore it from a copy, or start another run"
        )
    if progress.config_sha256 != fingerprint:
        raise UserError(
            f"{path / checkpoints.CHECKPOINT} and {path / CONFIG} belong to different runs; restore the one that "
            "changed, or start another run"
        )
    return state, progress


def choose_engine(prepared: Prepared, workers: int, rounds: int) -> str:
    """The name of the engine; ``auto`` weighs the start-up time of a pool against the work of ``rounds`` rounds."""
    config, local = prepared.config, prepared.side.algorithm.local
    if prepared.nodes is not None:
        return prepared.nodes.name
    if not prepared.blueprint.crosses:
        return "loop"
    if config.engine != "auto":
        return engines.choose(config.engine, workers, 0.0, 0)
    sizes = prepared.first_sizes
    steps = rounds * sum(steps_for(size, local) for size in sizes)
    if not config.rounds:  # statistics and evaluation: one pass over all images, without gradients
        steps = prepared.population.roster.examples // local.batch // 3
    work = steps * engines.seconds_per_step(prepared.side, min(config.batch, max(1, sum(sizes) // len(sizes))))
    return engines.choose("auto", workers, work, len(sizes))


def calibrate_start(
    model: Tensors, start: Algorithm, side: ClientSide, engine: Engine, key: Key, observe: Callable[[Any], Any]
) -> tuple[Tensors, int, float, tuple[str, ...]]:
    """The model with the calibration's classifier, its bytes up and seconds, and notes."""
    calibrator = Calibrator(engine, side, model, start, key, observe, {})
    classifier, sent, seconds, notes = _calibrate(calibrator, start.finish[0])
    linear = classifier.linear()
    new = dict(zip(side.classifier, (linear.weight.detach(), linear.bias.detach()), strict=True))
    changed = {name: new[name].to(value) if name in new else value for name, value in model.items()}
    return changed, sent, seconds, notes


def _calibrate(calibrator: Calibrator, finisher: Finisher) -> tuple[CalibratedClassifier, int, float, tuple[str, ...]]:
    """A calibrated classifier, its bytes up and seconds, and notes."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        classifier, sent, seconds = calibrator.calibrate(finisher)
    notes = dict.fromkeys([*(str(warning.message) for warning in warned), *classifier.report.notes()])
    return classifier, sent, seconds + classifier.report.seconds, tuple(notes)


# Early stopping: the first of equally good rounds is the best. It follows from metrics.jsonl, so a resumed run stops
# after the same round.


@dataclass(frozen=True)
class Best:
    """The best round so far: its number, its measure, the server's state after it."""

    round: int
    value: float
    state: ServerState


def best_row(rows: Iterable[Mapping[str, Any]], monitor: str) -> Mapping[str, Any] | None:
    """The first evaluated round with the best measure; None if no round was evaluated."""
    best: Mapping[str, Any] | None = None
    for row in rows:
        value = row.get(monitor)
        if value is not None and (best is None or is_better(value, best[monitor], monitor)):
            best = row
    return best


def is_better(value: float, other: float, monitor: str) -> bool:
    """Whether a measure is better than another: a higher accuracy, a lower loss; NaN is never better."""
    return value > other if monitor == "accuracy" else value < other


class BestRound:
    """Tracks the best round; its state is in memory, and on disk when a checkpoint is written."""

    def __init__(
        self,
        path: Path,
        monitor: str,
        patience: int,
        rows: Sequence[Mapping[str, Any]],
        now: ServerState,
        progress: checkpoints.CheckpointRecord,
        released: bool = False,
    ) -> None:
        """Continue after the rounds of ``rows``; ``now`` is the state after the last of them."""
        self._path, self._monitor, self._patience, self._released = path, monitor, patience, released
        self._run = without_private(now, progress)[1].run if released else progress.run
        self._written: set[int] = set()
        self.best: Best | None = None
        self.over = False  # whether the last evaluation was ``patience`` rounds after the best, or more
        if (row := best_row(rows, monitor)) is not None:
            number = row["round"]
            self.best = Best(number, row[monitor], now if number == now.round else self._read(number))
            self.over = rows[-1].get(monitor) is not None and now.round - number >= patience

    def update(self, state: ServerState, measured: float | None) -> None:
        """Record a finished round; ``measured`` is None if it was not evaluated."""
        if measured is None:
            return
        if self.best is None or is_better(measured, self.best.value, self._monitor):
            self.best = Best(state.round, measured, state)
        self.over = state.round - self.best.round >= self._patience

    def save(self, now: ServerState, progress: checkpoints.CheckpointRecord) -> None:
        """Write the best state, before a checkpoint of ``now`` is written."""
        if self.best is not None and self.best.round not in {now.round, *self._written}:
            saved = without_private(self.best.state, progress) if self._released else (self.best.state, progress)
            checkpoints.save_state(checkpoints.state_file(self._path, self.best.round), *saved)
            self._written.add(self.best.round)

    def clear(self, keep: Callable[[int], bool]) -> None:
        """Remove states that are no longer the best, except those to ``keep``, after the checkpoint was written."""
        for number in self._written - ({self.best.round} if self.best else set()):
            if not keep(number):
                checkpoints.state_file(self._path, number).unlink(missing_ok=True)
            self._written.discard(number)

    def _read(self, number: int) -> ServerState:
        file = checkpoints.state_file(self._path, number)
        if not file.exists():
            raise UserError(
                f"{file}, the state after the best round so far, is missing; restore it from a copy, or delete "
                f"{self._path / checkpoints.CHECKPOINT} to start the run from the beginning"
            )
        state, progress = checkpoints.load_state(file)
        if state.round != number:
            raise UserError(f"{file} is the state after round {state.round}, not {number}; restore it from a copy")
        if progress.run != self._run:
            raise UserError(f"{file} is from another run; restore it from a copy")
        self._written.add(number)
        return state


# Calibrations, and the privacy spent


def finish(
    engine: Engine,
    side: ClientSide,
    model: Tensors,
    algorithm: Algorithm,
    key: Key,
    observe: Callable[[Event], None],
    known: Known | None = None,
    *,
    by_image: bool = False,
    untrained: tuple[Tensors, Known] | None = None,
) -> None:
    """Make and evaluate each of the algorithm's calibrations in turn.

    Statistics that are already ``known`` are not gathered again. With ``by_image`` the scores include which test images
    are classified correctly. A calibration that is more accurate on the ``untrained`` model gets a note.
    """
    calibrator = Calibrator(engine, side, model, algorithm, key, observe, {} if known is None else known)
    rival = None
    if untrained is not None:
        rival = Calibrator(engine, side, untrained[0], algorithm, key, lambda event: None, untrained[1])
    count, exchange = len(side.test.labels), algorithm.exchange
    for finisher in algorithm.finish:
        classifier, sent, seconds, notes = _calibrate(calibrator, finisher)
        shared = model | tensors.prefixed(classifier.tensors(), "calibrated/")
        score = evaluate(
            engine, shared, count, key, job=EvaluateCalibrated, by_image=by_image, confidence=True, exchange=exchange
        )
        if rival is not None and not isinstance(finisher.needs, RealFeatures):
            shared = rival.model | tensors.prefixed(_calibrate(rival, finisher)[0].tensors(), "calibrated/")
            before = evaluate(engine, shared, count, key, job=EvaluateCalibrated, exchange=exchange).accuracy
            if before > score.accuracy:
                better = f"on the pretrained network without training, its accuracy is {before:.2%}"
                notes = (*notes, f"{better}: train fewer layers, with a lower rate, or not at all (--rounds 0)")
        numbers = score.accuracy, score.loss, sent, seconds
        confidence = {} if score.confidence is None else asdict(score.confidence)
        result = Calibration(named(finisher, algorithm), *numbers, **confidence)
        observe(Calibrated(result, classifier, notes, score))


def untrained_model(prepared: Prepared) -> tuple[Tensors, Known] | None:
    """The pretrained model before training, to compare calibrations with; only in a simulation without protections."""
    algorithm, config = prepared.algorithm, prepared.config
    secret = prepared.nodes is not None or algorithm.released or protections(algorithm)
    return None if secret or not config.pretrained or not config.rounds else (prepared.first, {})


def spent_in_rounds(prepared: Prepared, rounds: int) -> Spent | None:
    """The privacy spent in ``rounds`` rounds of private updates; None without noise."""
    mechanism = prepared.algorithm.mechanism
    if not isinstance(mechanism, PrivateUpdates) or not mechanism.noise or not rounds:
        return None
    clients = len(prepared.population.roster.inhabited)
    drawn = min(prepared.config.per_round or clients, clients)
    drawing = mechanism.drawing(drawn, clients)
    updates = PrivateRounds(
        epsilon=mechanism.epsilon(rounds, drawn, clients) or 0.0,
        delta=mechanism.delta,
        rounds=rounds,
        clip=mechanism.clip,
        noise=mechanism.noise,
        sampling="everyone" if drawing.everyone else "poisson" if drawing.poisson else "fixed",
        replaced=mechanism.unit(drawn, clients) == REPLACED_CLIENT,
        example_epsilon=mechanism.epsilon(rounds, drawn, clients, replaced=True) or 0.0,
        unit=mechanism.unit(drawn, clients),
        released=mechanism.release,
        in_masks=mechanism.in_masks,
    )
    return add_up((), updates)


def notes_on_protections(prepared: Prepared) -> list[str]:
    """Notes on what (ε, δ) does not cover."""
    algorithm, notes = prepared.algorithm, []
    if algorithm.released and prepared.nodes is not None and not len(prepared.images.test):
        notes.append("accuracy is measured on the nodes' own test images, which (ε, δ) does not cover")
    if algorithm.mechanism is None:
        if algorithm.released and prepared.config.rounds:
            notes.append("(ε, δ) covers the statistics of calibrations, not the trained model")
        return notes
    if algorithm.private is None:
        plain = [finisher.text for finisher in algorithm.finish if not isinstance(finisher.needs, RealFeatures)]
        notes += [f"{text}: its statistics have no noise, so (ε, δ) does not cover it" for text in plain]
    if prepared.config.validation:
        notes.append("accuracy is measured on clients' own examples, which (ε, δ) does not cover")
    return notes
