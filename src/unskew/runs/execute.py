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
from unskew.calibration.federated import Calibrator, Forecasted, Gathering, Known, named, protections
from unskew.calibration.finisher import Finisher, RealFeatures
from unskew.calibration.jobs import EvaluateCalibrated
from unskew.core import tensors
from unskew.core.errors import LostMemory, UserError
from unskew.core.files import read_content, write_whole
from unskew.core.key import Key, system_key
from unskew.core.machine import default_workers
from unskew.core.types import ServerState, Tensors
from unskew.core.units import counted
from unskew.data.batches import steps_for
from unskew.privacy.ledger import REPLACED_CLIENT, PrivateRounds, Spent, add_release, add_up
from unskew.privacy.noise import PrivateUpdates
from unskew.round import driver
from unskew.round.driver import Metrics
from unskew.round.evaluation import Evaluation, evaluate
from unskew.runs import checkpoint as checkpoints
from unskew.runs import config as configs
from unskew.runs import folder as folders
from unskew.runs import recording
from unskew.runs import result as records
from unskew.runs.journal import DURING, METRICS, LineFile, Mark, leave_out, metrics_row
from unskew.runs.prepare import Overview, Prepared, overview
from unskew.runs.result import AT_NODES, MODEL_INFO, OWN, RESULT, TEST, VALIDATION, Calibration, ModelInfo, Result

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
        mechanism = self.algorithm.mechanism
        self.releases = mechanism is not None and mechanism.release
        if self.releases:
            self.key = Key(system_key().number() % 2**63)  # the seed of a release's private updates must be secret
        self.by_image = prepared.test_owners is not None
        self.score: tuple[int, Evaluation] | None = None  # the latest usable evaluation, and its round
        tensors.overwrite(side.network, prepared.first)
        state, self.progress = load_or_start(prepared, path)

        rounds, sizes = config.rounds - state.round, prepared.first_sizes
        steps = rounds * sum(steps_for(size, self.algorithm.local) for size in sizes)
        if not config.rounds:  # statistics and evaluation: one pass over all images, without gradients
            steps = prepared.population.roster.examples // self.algorithm.local.batch // 3
        self.engine_name, workers = choose_engine(prepared, sizes, steps)
        observe(overview(prepared, path, state, self.engine_name, engines.processes(self.engine_name, workers)))

        self.metrics = LineFile(path / METRICS, self.progress.metrics)
        self.during = LineFile(path / DURING, self.progress.during)
        resources.callback(self.metrics.close)
        resources.callback(self.during.close)
        self.position = RunPosition(state, self.metrics.mark, self.during.mark)
        begun = read_content(path / checkpoints.BEGUN) or b""
        self.begun = max(state.round, int(begun) if begun.isdigit() else 0)  # rounds that a release has begun

        self.best: ServerState | None = None  # after the best round so far, whose measure is best_value
        self.best_value = 0.0
        self.kept: set[int] = set()  # rounds whose state is on disk because they were the best
        rows = self.metrics.rows() if config.patience else []
        if (row := best_row(rows, config.monitor)) is not None:
            self.best, self.best_value = state, row[config.monitor]
            if (number := row["round"]) != state.round:
                instead = f", or delete {path / checkpoints.CHECKPOINT} to start the run from the beginning"
                own = ("", "", self.progress.config_sha256) if self.algorithm.released else self.progress.run
                self.best, _ = checkpoints.load_state(checkpoints.state_file(path, number), (number, own), instead)
                self.kept.add(number)
        self.over = self._out_of_patience(rows[-1].get(config.monitor) if rows else None)

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
            model = self.position.state.tensors
            calibrator = Calibrator(self.engine, self.side, model, start, self.key, self.observe, {})
            model, sent, seconds, notes = calibrate_start(calibrator)
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
        if self.over:
            return
        rounds = self.prepared.run_rounds(
            self.engine, self.position.state, self.key, watch=self.recorder.watched, record=self.recorder.record
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
                self._keep_state(state, self.progress)
            self.position = RunPosition(state, self.metrics.append(metrics_row(row)), self.during.mark)
            if config.patience and (measured := getattr(row, config.monitor)) is not None:
                if self.best is None or is_better(measured, self.best_value, config.monitor):
                    self.best, self.best_value = state, measured
                last = last or self._out_of_patience(measured)
            self.observe(row)
            if last or time.monotonic() - self.saved >= config.checkpoint_seconds:
                self.save()
            if last:
                break

    def _counted(self, rounds: Iterator[tuple[ServerState, Metrics]]) -> Iterator[tuple[ServerState, Metrics]]:
        """The rounds as they end. A release counts each before it begins: retrained after a crash it costs ε twice."""
        mechanism, config = self.algorithm.mechanism, self.prepared.config
        while self.position.state.round < config.rounds:
            if self.releases:
                self.begun += 1
                write_whole(self.path / checkpoints.BEGUN, str(self.begun).encode())
            state, row = next(rounds)
            if self.algorithm.released:
                row = leave_out(row)
            if self.releases and mechanism is not None and row.epsilon is not None:
                clients = len(self.engine.roster.inhabited)
                drawn = min(config.per_round or clients, clients)
                row = replace(row, epsilon=mechanism.epsilon(self.begun, drawn, clients))
            yield state, row

    def _out_of_patience(self, measured: float | None) -> bool:
        """Whether the last round was evaluated ``patience`` rounds after the best; follows from metrics.jsonl."""
        if self.best is None or measured is None:
            return False
        return self.position.state.round - self.best.round >= (self.prepared.config.patience or 0)

    def _keep_state(self, state: ServerState, progress: checkpoints.CheckpointRecord) -> None:
        """Save a round's state; that of a release is without the clients that took part and the hashes of the data."""
        if self.algorithm.released:
            state, progress = replace(state, clients={}), replace(progress, data_sha256="", partition_hash="")
        checkpoints.save_state(checkpoints.state_file(self.path, state.round), state, progress)

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
        best = set() if self.best is None else {self.best.round}
        if self.best is not None and not best <= {position.state.round, *self.kept}:
            self._keep_state(self.best, progress)
            self.kept |= best
        checkpoints.save_checkpoint(self.path, position.state, progress)
        if self.prepared.nodes is not None:  # the rounds of a federation cannot be repeated
            checkpoints.keep_checkpoint(self.path, position.state.round)
        for number in self.kept - best:
            if "model" not in self.recorder.due(number):
                checkpoints.state_file(self.path, number).unlink(missing_ok=True)
        self.kept &= best
        if self.memory is not None:
            self.memory.pin(position.state.clients.values())
        self.saved = time.monotonic()

    def finish(self) -> Result:
        """Calibrate the final model and write the result, even if a calibration fails."""
        final = self.position.state if self.best is None else self.best
        model = driver.as_used(self.algorithm, final.tensors, self.side.classifier)
        if self.score is None or self.score[0] != final.round:  # resumed after the last round, or an earlier is best
            self.score = final.round, self._evaluate(final, by_image=self.by_image, confidence=True)
        score, seconds = self.score[1], time.monotonic() - self.began  # calibrations report their own
        calibrated: list[Calibrated] = []
        calibrator = Calibrator(self.engine, self.side, model, self.algorithm, self.key, self.observe, {})
        try:
            for event in finish(calibrator, by_image=self.by_image, untrained=untrained_model(self.prepared)):
                calibrated.append(event)
                self.observe(event)
        except UserError as error:
            self._conclude(model, score, calibrated, seconds)
            later = f"add another with: unskew calibrate {self.path} METHOD"
            if self.prepared.nodes is not None:  # a node was probably disconnected
                later = "to add it, resume the run once all nodes are connected"
            raise UserError(f"{error}; the run finished without this calibration; {later}") from error
        return self._conclude(model, score, calibrated, seconds)

    def _evaluate(self, state: ServerState, *, by_image: bool = False, confidence: bool = False) -> Evaluation:
        about: dict[str, Any] = {"by_image": by_image, "confidence": confidence, "exchange": self.algorithm.exchange}
        return evaluate(self.engine, state.tensors, len(self.prepared.images.test), self.key, **about)

    def _conclude(self, model: Tensors, score: Evaluation, calibrated: Sequence[Calibrated], seconds: float) -> Result:
        """Write the model, the calibrations and, last, the result, sealed with the metrics."""
        prepared, path, config, released = self.prepared, self.path, self.prepared.config, self.algorithm.released
        images, classifier, model = prepared.images, self.side.classifier, prepared.whole(model)
        rows, start = self.metrics.rows(), self.progress.start
        scores = {OWN: score} | {event.result.name: event.score for event in calibrated}
        info = ModelInfo(images.classes, images.shape, prepared.blueprint.shape, images.mean, images.std)
        notes = [*prepared.model_notes, *notes_on_protections(prepared)]
        spreads, by_client, exact = {}, dict[str, Any](), dict[str, Any](failures=None, released=True)
        if not released:  # a release leaves out exact numbers about data and participation
            for name, evaluation in scores.items():
                info = info.with_score(name, evaluation)
                if missing := sorted(str(failure.client) for failure in evaluation.failures):
                    clients = len(self.engine.roster.inhabited)
                    covered = f"{clients - len(missing)} of {counted(clients, 'client')}"
                    silent = f"client {', '.join(missing[:10])} did not reply"
                    notes.append(f"the accuracy of {name or 'the trained model'} covers {covered}; {silent}")
                if not prepared.nodes:
                    measured = prepared.measure_clients(evaluation)
                    spreads[name] = records.summarise_clients(measured)
                    by_client = records.with_classifier(by_client, name, measured)
            examples = sum(row["examples"] for row in rows)
            exact = {
                "emd": prepared.emd,
                "examples": examples,
                "examples_per_second": examples / max(sum(row["seconds"] for row in rows), 1e-9),
                "bytes_up": sum(row["bytes_up"] for row in rows) or (0 if start is None else start.bytes_up),
                "bytes_down": sum(row["bytes_down"] for row in rows),
                "partition_hash": prepared.partition.hash,
                "data_sha256": prepared.data_sha256,
                "failures": sum(len(row.get("failures", ())) for row in rows),
            }
        spent = spent_in_rounds(prepared, max(self.begun, len(rows)))
        for event in calibrated:
            spent = add_release(spent, event.classifier.report.release)
        if prepared.baseline is not None:
            reference = prepared.baseline.accuracy
            exact |= {"baseline_accuracy": reference, "relative_accuracy": score.accuracy / reference}
        if score.confidence is not None:
            exact |= asdict(score.confidence)
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
            notes=notes,
            best_round=None if self.best is None else self.best.round,
            stopped_at=len(rows) if len(rows) < config.rounds else None,
            evaluated_on=VALIDATION if config.validation else TEST if len(images.test) else AT_NODES,
            start=start,
            weights_seal=folders.seal(folders.plain_names(model), folders.classifier_metadata(classifier)),
            baseline=config.baseline,
            **exact,
        )
        files = {folders.MODEL: folders.model_bytes(model, classifier), MODEL_INFO: info.to_bytes()}
        if by_client:
            files[records.CLIENTS] = folders.arrays_bytes(by_client)
        if not rows:
            files[METRICS] = b""  # a run without rounds has the file too
        for event in calibrated:
            name = event.result.name
            files[folders.calibration_file(path, name).name] = folders.calibration_bytes(name, event.classifier)
        memories = path / checkpoints.MEMORIES  # measures of local models use them
        if memories.exists() and memories.stat().st_size > checkpoints.MAX_MEMORY_BYTES_KEPT:
            memories.unlink()  # before the result: a finished run is never resumed
        grown = {METRICS: self.metrics.mark.sha256}
        if self.during.mark.bytes:
            grown[DURING] = self.during.mark.sha256
        folders.write_sealed(path, {**files, RESULT: folders.json_bytes(records.to_json(result))}, grown=grown)
        if released:
            remove_private_files(path)
        return result


def remove_private_files(path: Path) -> None:
    """Remove the files that only an unfinished release needs: partition, checkpoints, saved states."""
    private = [path / name for name in (checkpoints.CHECKPOINT, checkpoints.MEMORIES, checkpoints.BEGUN)]
    for file in (*private, *checkpoints.earlier_checkpoints(path).values()):
        file.unlink(missing_ok=True)
    folders.remove_sealed(path, folders.PARTITION)


def best_row(rows: Iterable[Mapping[str, Any]], monitor: str) -> Mapping[str, Any] | None:
    """The first evaluated round with the best measure; None if no round was evaluated."""
    evaluated = (row for row in rows if row.get(monitor) is not None)
    return (max if monitor == "accuracy" else min)(evaluated, key=lambda row: row[monitor], default=None)


def is_better(value: float, other: float, monitor: str) -> bool:
    """Whether a measure is better than another: a higher accuracy, a lower loss; NaN is never better."""
    return value > other if monitor == "accuracy" else value < other


def load_or_start(prepared: Prepared, path: Path) -> tuple[ServerState, checkpoints.CheckpointRecord]:
    """The state of the checkpoint, which must belong to this data and partition, or the initial state."""
    expected = prepared.data_sha256, prepared.partition.hash, configs.fingerprint(prepared.config)
    checkpoint = checkpoints.load_checkpoint(path)
    if checkpoint is None:
        side = prepared.side
        state = driver.start(side.algorithm, tensors.of_module(side.network), side.classifier)
        return state, checkpoints.CheckpointRecord(0, 0.0, *expected)
    names = f"the data set {prepared.config.data}", folders.PARTITION, configs.CONFIG
    pairs = zip(names, checkpoint[1].run, expected, strict=True)
    if changed := " and ".join(name for name, before, now in pairs if before != now):
        raise UserError(f"{changed} changed after {path} was started; restore the original, or start another run")
    return checkpoint


def choose_engine(prepared: Prepared, sizes: Sequence[int], steps: float) -> tuple[str, int]:
    """The engine and its workers; ``auto`` weighs the start-up time of a pool against the work of ``steps``."""
    config, work = prepared.config, 0.0
    workers = min(config.workers or default_workers(config.device), len(sizes))
    if prepared.nodes is not None:
        return "flower", workers
    if not prepared.blueprint.crosses:
        return "loop", workers
    if config.engine == "auto":
        work = steps * engines.seconds_per_step(prepared.side, min(config.batch, max(1, sum(sizes) // len(sizes))))
    return engines.choose(config.engine, workers, work, len(sizes)), workers


# Calibrations, and the privacy spent


def _calibrate(calibrator: Calibrator, finisher: Finisher) -> tuple[CalibratedClassifier, int, float, tuple[str, ...]]:
    """A calibrated classifier, its bytes up and seconds, and notes."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        classifier, sent, seconds = calibrator.calibrate(finisher)
    notes = dict.fromkeys([*(str(warning.message) for warning in warned), *classifier.report.notes()])
    return classifier, sent, seconds + classifier.report.seconds, tuple(notes)


def calibrate_start(calibrator: Calibrator) -> tuple[Tensors, int, float, tuple[str, ...]]:
    """The model with the calibration's classifier, its bytes up and seconds, and notes."""
    classifier, sent, seconds, notes = _calibrate(calibrator, calibrator.algorithm.finish[0])
    linear, names = classifier.linear(), calibrator.side.classifier
    new = dict(zip(names, (linear.weight.detach(), linear.bias.detach()), strict=True))
    changed = {name: new[name].to(value) if name in new else value for name, value in calibrator.model.items()}
    return changed, sent, seconds, notes


def finish(
    calibrator: Calibrator, *, by_image: bool = False, untrained: tuple[Tensors, Known] | None = None
) -> Iterator[Calibrated]:
    """Make and evaluate each calibration; one that is more accurate on the ``untrained`` model gets a note."""
    algorithm, rival = calibrator.algorithm, None
    if untrained is not None:
        rival = replace(calibrator, model=untrained[0], observe=lambda event: None, known=untrained[1])

    def measure(made: Calibrator, classifier: CalibratedClassifier, **settings: Any) -> Evaluation:
        shared = made.model | tensors.prefixed(classifier.tensors(), "calibrated/")
        settings |= {"job": EvaluateCalibrated, "exchange": algorithm.exchange}
        return evaluate(made.engine, shared, len(made.side.test.labels), made.key, **settings)

    for finisher in algorithm.finish:
        classifier, sent, seconds, notes = _calibrate(calibrator, finisher)
        score = measure(calibrator, classifier, by_image=by_image, confidence=True)
        if rival is not None and not isinstance(finisher.needs, RealFeatures):
            before = measure(rival, _calibrate(rival, finisher)[0]).accuracy
            if before > score.accuracy:
                better = f"on the pretrained network without training, its accuracy is {before:.2%}"
                notes = (*notes, f"{better}: train fewer layers, with a lower rate, or not at all (--rounds 0)")
        numbers = score.accuracy, score.loss, sent, seconds
        confidence = {} if score.confidence is None else asdict(score.confidence)
        yield Calibrated(Calibration(named(finisher, algorithm), *numbers, **confidence), classifier, notes, score)


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
    unit = mechanism.unit(drawn, clients)
    updates = PrivateRounds(
        epsilon=mechanism.epsilon(rounds, drawn, clients) or 0.0,
        delta=mechanism.delta,
        rounds=rounds,
        clip=mechanism.clip,
        noise=mechanism.noise,
        sampling=mechanism.sampling(drawn, clients),
        replaced=unit == REPLACED_CLIENT,
        example_epsilon=mechanism.epsilon(rounds, drawn, clients, replaced=True) or 0.0,
        unit=unit,
        released=mechanism.release,
        in_masks=mechanism.in_masks,
    )
    return add_up((), updates)


def notes_on_protections(prepared: Prepared) -> list[str]:
    """Notes on what (ε, δ) does not cover."""
    algorithm, config, notes = prepared.algorithm, prepared.config, []
    uncovered = "which (ε, δ) does not cover"
    if algorithm.released and prepared.nodes is not None and not len(prepared.images.test):
        notes.append(f"accuracy is measured on the nodes' own test images, {uncovered}")
    if algorithm.mechanism is None and algorithm.released and config.rounds:
        notes.append("(ε, δ) covers the statistics of calibrations, not the trained model")
    if algorithm.mechanism is not None and algorithm.private is None:
        plain = [finisher.text for finisher in algorithm.finish if not isinstance(finisher.needs, RealFeatures)]
        notes += [f"{text}: its statistics have no noise, so (ε, δ) does not cover it" for text in plain]
    if algorithm.mechanism is not None and config.validation:
        notes.append(f"accuracy is measured on clients' own examples, {uncovered}")
    return notes
