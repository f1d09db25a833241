"""A prepared run from its first round to its result: train, evaluate, checkpoint, stop early, calibrate, conclude."""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unskew import engines
from unskew.calibration.classifier import CalibratedClassifier
from unskew.calibration.feasible import named
from unskew.calibration.federated import Federation, Forecasted, Gathering, Known
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import default_workers
from unskew.core.types import Engine, ServerState, Tensors
from unskew.data.batches import steps_for
from unskew.engines.blueprint import build
from unskew.privacy.ledger import with_release
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.round.driver import Metrics
from unskew.round.evaluation import Evaluation, evaluate
from unskew.runs import config as configs
from unskew.runs import journal, recording
from unskew.runs.checkpoint import (
    CHECKPOINT,
    Progress,
    drop_memories,
    kept_state,
    load_checkpoint,
    load_state,
    memories_named,
    open_memories,
    save_checkpoint,
    save_state,
)
from unskew.runs.client_accuracy import CLIENTS, OWN, measure_clients, summarise_clients, to_arrays
from unskew.runs.config import CONFIG
from unskew.runs.folder import (
    MODEL,
    arrays_bytes,
    calibration_bytes,
    calibration_file,
    classifier_words,
    json_bytes,
    model_bytes,
    plain_names,
    seal,
    write_sealed,
)
from unskew.runs.journal import DURING, METRICS, LineFile, Mark, metrics_row
from unskew.runs.prepare import (
    InitialModel,
    Overview,
    Prepared,
    begin,
    evaluate_start,
    first_visits,
    notes_on_protections,
    overview,
    spent_in_rounds,
)
from unskew.runs.result import AT_NODES, RESULT, TEST, VALIDATION, Calibration, Result, to_json


@dataclass(frozen=True)
class Best:
    """The best round so far: its number, its measure, the server's state after it."""

    round: int
    value: float
    state: ServerState


def best_row(rows: Iterable[Mapping[str, Any]], monitor: str) -> Mapping[str, Any] | None:
    """The evaluated round with the best measure, the first of equal ones; None where no round was evaluated."""
    best: Mapping[str, Any] | None = None
    for row in rows:
        value = row.get(monitor)
        if value is not None and (best is None or is_better(value, best[monitor], monitor)):
            best = row
    return best


def is_better(value: float, other: float, monitor: str) -> bool:
    """Whether a measure is better than another: more accuracy, less loss. NaN is never better."""
    return value > other if monitor == "accuracy" else value < other


class BestRound:
    """Follows a run's rounds. Between two checkpoints the best state is in memory, at a checkpoint also on disk."""

    def __init__(
        self, path: Path, monitor: str, patience: int, rows: Sequence[Mapping[str, Any]], now: ServerState
    ) -> None:
        """Continue after the rounds of ``rows``; ``now`` is the state after the last of them."""
        self._path, self._monitor, self._patience = path, monitor, patience
        self._written: set[int] = set()
        self.best: Best | None = None
        self.over = False  # patience has run out: the last evaluation was this many rounds after the best, or more
        if (row := best_row(rows, monitor)) is not None:
            number = row["round"]
            self.best = Best(number, row[monitor], now if number == now.round else self._read(number))
            self.over = rows[-1].get(monitor) is not None and now.round - number >= patience

    def see(self, state: ServerState, measured: float | None) -> None:
        """A round has ended; ``measured`` is None where it was not evaluated."""
        if measured is None:
            return
        if self.best is None or is_better(measured, self.best.value, self._monitor):
            self.best = Best(state.round, measured, state)
        self.over = state.round - self.best.round >= self._patience

    def save(self, now: ServerState, progress: Progress) -> None:
        """Before a checkpoint of ``now`` is written: what it does not have itself."""
        if self.best is not None and self.best.round not in {now.round, *self._written}:
            save_state(kept_state(self._path, self.best.round), self.best.state, progress)
            self._written.add(self.best.round)

    def clear(self, kept: Callable[[int], bool]) -> None:
        """After the checkpoint was written: remove states that are no longer the best and not kept for another use."""
        for number in self._written - ({self.best.round} if self.best else set()):
            if not kept(number):
                kept_state(self._path, number).unlink(missing_ok=True)
            self._written.discard(number)

    def _read(self, number: int) -> ServerState:
        file = kept_state(self._path, number)
        if not file.exists():
            raise UserError(
                f"{file} is missing, the state after the best round so far; restore it from a copy, or delete "
                f"{self._path / CHECKPOINT} to start the run from the beginning"
            )
        state, _ = load_state(file)
        if state.round != number:
            raise UserError(f"{file} is the state of round {state.round}, not {number}; restore it from a copy")
        self._written.add(number)
        return state


@dataclass(frozen=True)
class Calibrated:
    """A calibrated classifier, its result, and notes on it."""

    result: Calibration
    classifier: CalibratedClassifier
    notes: tuple[str, ...]
    score: Evaluation


@dataclass(frozen=True)
class Stage:
    """How far work is that is neither a round nor a calibration."""

    words: str
    done: int
    total: int


Event = Gathering | Forecasted | Calibrated | Stage | InitialModel


def finish(
    engine: Engine, side: ClientSide, model: Tensors, algorithm: Algorithm, key: Key,
    observe: Callable[[Event], None], known: Known | None = None, *, by_image: bool = False,
) -> list[Calibrated]:  # fmt: skip
    """Each of the algorithm's calibrations in turn; statistics that are ``known`` already are not gathered twice.

    With ``by_image`` the scores say which test images are right.
    """
    federation = Federation(engine, side, model, algorithm, key, observe, {} if known is None else known)
    done = []
    for finisher in algorithm.finish:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            classifier, sent, seconds = federation.calibrated(finisher)
        values = tensors.prefixed(classifier.tensors(), "calibrated/")
        score = evaluate(
            engine, model | values, len(side.test.labels), key, job="evaluate-calibrated", by_image=by_image,
            exchange=algorithm.exchange,
        )  # fmt: skip
        seconds += classifier.report.seconds
        result = Calibration(named(finisher, algorithm), score.accuracy, score.loss, sent, seconds)
        notes = dict.fromkeys([*(str(warning.message) for warning in warned), *classifier.report.notes()])
        done.append(Calibrated(result, classifier, tuple(notes), score))
        observe(done[-1])
    return done


def conclude(
    prepared: Prepared, path: Path, model: Tensors, classifier: Sequence[str], calibrated: Sequence[Calibrated],
    engine: str, seconds: float, metrics: LineFile, during: LineFile, score: Evaluation,
    start: Calibration | None = None,
) -> Result:  # fmt: skip
    """Write the model, the calibrations and the result, sealed with the metrics; the result comes last.

    ``score`` is how well the model does, ``start`` what made its initial classifier.
    """
    config, rows, model = prepared.config, metrics.rows(), prepared.whole(model)
    spent = spent_in_rounds(prepared, len(rows))
    for each in calibrated:
        spent = with_release(spent, each.classifier.report.release)
    best = best_row(rows, config.monitor) if config.patience else None
    scores = {OWN: score} | {each.result.name: each.score for each in calibrated}
    held = prepared.partition, prepared.images.train.labels, prepared.test_owners
    seen = {} if prepared.nodes else {name: measure_clients(*held, each) for name, each in scores.items()}
    spreads = {name: summarise_clients(*each) for name, each in seen.items()}
    examples = sum(row["examples"] for row in rows)
    working = sum(row["seconds"] for row in rows)
    result = Result(
        path=path,
        method=config.method,
        data=config.data,
        partition=config.partition,
        clients=prepared.partition.clients,
        per_round=config.per_round or 0,
        rounds=len(rows),
        seed=config.seed,
        engine=engine,
        accuracy=score.accuracy,
        loss=score.loss,
        emd=prepared.emd,
        examples=examples,
        seconds=seconds,
        examples_per_second=examples / max(working, 1e-9),
        bytes_up=sum(row["bytes_up"] for row in rows) or (0 if start is None else start.bytes_up),
        bytes_down=sum(row["bytes_down"] for row in rows),
        weights_sha256=tensors.sha256(model),
        model=config.model or "",
        partition_hash=prepared.partition.hash,
        data_sha256=prepared.data_sha256,
        failures=sum(len(row.get("failures", ())) for row in rows),
        calibrations={
            each.result.name: replace(each.result, clients_accuracy=spreads.get(each.result.name))
            for each in calibrated
        },
        clients_accuracy=spreads.get(OWN),
        settings=configs.deciding(config),
        privacy=spent,
        notes=[*prepared.first_model.notes, *notes_on_protections(prepared.algorithm, bool(config.validation))],
        best_round=best["round"] if best else None,
        stopped_at=len(rows) if len(rows) < config.rounds else None,
        evaluated_on=VALIDATION if config.validation else TEST if len(prepared.images.test) else AT_NODES,
        start=start,
        weights_seal=seal(plain_names(model), classifier_words(classifier)),
    )
    if prepared.baseline is not None:
        reference = prepared.baseline.accuracy
        result = replace(
            result, baseline=config.baseline, baseline_accuracy=reference, relative_accuracy=result.accuracy / reference
        )
    files = {MODEL: model_bytes(model, classifier)}
    if seen:
        files[CLIENTS] = arrays_bytes(to_arrays(seen))
    if not metrics.mark.bytes:
        files[METRICS] = b""  # a run without rounds has the file too
    files |= {calibration_file(path, each.result.name).name: calibration_bytes(each.result.name, each.classifier)
              for each in calibrated}  # fmt: skip
    drop_memories(path)  # before the result, which says that nothing is left to do
    grown = {METRICS: metrics.mark.sha256} | ({DURING: during.mark.sha256} if during.mark.bytes else {})
    write_sealed(path, {**files, RESULT: json_bytes(to_json(result))}, grown=grown)
    return result


Observer = Callable[[Overview | Metrics | Event], Any]  # STOP as an answer ends the run after the round


def execute(prepared: Prepared, path: Path, observe: Observer) -> Result:
    """Run the rounds that are left, then the calibrations; keep the run folder on the way."""
    config, key = prepared.config, Key(prepared.config.seed)
    data = prepared.data
    side = build(prepared.blueprint, data)
    prepared.initialise(side.network)
    first, progress = _beginning(prepared, side, path)
    workers = min(config.workers or default_workers(config.device), len(first_visits(prepared)))
    chosen = _choose(prepared, side, workers, config.rounds - first.round)
    observe(overview(prepared, path, first, data, chosen, engines.processes(chosen, workers)))
    with ExitStack() as stack, memories_named(path):
        metrics, during = _growing(path, first, progress)
        stack.callback(metrics.close)
        stack.callback(during.close)
        memories = open_memories(path) if side.algorithm.remember and prepared.nodes is None else None
        recorder = recording.Recorder(prepared.recordings, config.rounds, side, key)
        engine = recording.RecordingEngine(
            _open(prepared, chosen, engines.EngineSetup(prepared.blueprint, data, workers, memories)),
            recorder.watched,
        )
        stack.callback(engine.close)
        if first.round < config.rounds:
            engine.pin(first.clients.values())
        leading = BestRound(path, config.monitor, config.patience, metrics.rows(), first) if config.patience else None
        done = (first, metrics.mark, during.mark)  # a state and how much of each file belongs to it, changed as one
        scored: tuple[int, Evaluation] | None = None  # the last evaluation, and after which round it was
        by_image = prepared.test_owners is not None
        saved, began = time.monotonic(), time.monotonic() - progress.seconds
        begun: InitialModel | None = None

        def save() -> None:
            metrics.sync()
            during.sync()
            engine.sync()
            marked = _marked(progress, *done[1:], time.monotonic() - began)
            if leading is not None:
                leading.save(done[0], marked)
            save_checkpoint(path, done[0], marked)
            if leading is not None:
                leading.clear(lambda number: "model" in recorder.due(number))
            engine.pin(done[0].clients.values())

        try:
            if prepared.start is not None and progress.start is None:
                first, begun = begin(first.tensors, prepared.start, side, engine, key, observe)
                progress, done = replace(progress, start=begun.start), (first, metrics.mark, during.mark)
                save()
                observe(begun)
            elif config.rounds == 0:
                observe(replace(evaluate_start(first, side, engine, key), start=progress.start))
            rounds = driver.run(
                side.algorithm, engine, first, key, rounds=config.rounds, per_round=config.per_round or 0,
                skip_failures=config.on_failure == "skip",
            )  # fmt: skip
            for state, row in () if leading is not None and leading.over else rounds:
                last = state.round == config.rounds
                if last or state.round % config.evaluate_every == 0:
                    score = evaluate(
                        engine, state.tensors, len(prepared.images.test), key, by_image=by_image and last,
                        exchange=side.algorithm.exchange,
                    )  # fmt: skip
                    scored = (state.round, score) if last or not by_image else None
                    row = replace(
                        row, accuracy=score.accuracy, loss=score.loss, failures=(*row.failures, *score.failures)
                    )
                if state.round == 1 and progress.start is not None:  # as what a survey asks before the first round
                    row = replace(row, bytes_up=row.bytes_up + progress.start.bytes_up)
                if (line := recorder.line(state, engine)) is not None:
                    during.append(line)
                if "model" in recorder.due(state.round):
                    save_state(kept_state(path, state.round), state, progress)
                done = (state, metrics.append(metrics_row(row)), during.mark)
                if leading is not None:
                    leading.see(state, getattr(row, config.monitor))
                    last = last or leading.over
                observe(row)
                if last or time.monotonic() - saved >= config.checkpoint_seconds:
                    save()
                    saved = time.monotonic()
                if last:
                    break
            final = done[0] if leading is None or leading.best is None else leading.best.state
            model, calibrated = driver.as_used(side.algorithm, final.tensors, side.classifier), list[Calibrated]()
            if scored is None or scored[0] != final.round:  # resumed after its last round, or an earlier one was best
                again = evaluate(
                    engine, final.tensors, len(prepared.images.test), key, by_image=by_image,
                    exchange=side.algorithm.exchange,
                )  # fmt: skip
                scored = (final.round, again)
            ending = scored[1], progress.start
            trained = time.monotonic() - began  # calibrations tell their own seconds, whenever they are made

            def keep(event: Event) -> None:
                if isinstance(event, Calibrated):
                    calibrated.append(event)
                observe(event)

            try:
                finish(engine, side, model, side.algorithm, key, keep, by_image=by_image)
            except UserError as error:  # what was trained is written now: for want of a calibration nothing is lost
                conclude(prepared, path, model, side.classifier, calibrated, chosen, trained, metrics, during, *ending)
                instead = f"the run is finished without it; {_later(prepared, path)}"
                raise UserError(f"{error}; {instead}") from error
            return conclude(
                prepared, path, model, side.classifier, calibrated, chosen, trained, metrics, during, *ending
            )
        except BaseException:
            if done[0].round:
                save()
            raise


def _later(prepared: Prepared, path: Path) -> str:
    """How a run gets a calibration that could not be made."""
    if prepared.nodes is not None:  # most likely a node was away
        return "with all nodes there, resume the run and it is made"
    return f"another: unskew calibrate {path} METHOD"


def _beginning(prepared: Prepared, side: ClientSide, path: Path) -> tuple[ServerState, Progress]:
    """The checkpoint's state, if it belongs to this data and partition, or the state before the first round."""
    checkpoint = load_checkpoint(path)
    if checkpoint is None:
        start = driver.start(side.algorithm, tensors.of_module(side.network), side.classifier)
        return start, Progress(
            0, 0.0, prepared.data_sha256, prepared.partition.hash, configs.fingerprint(prepared.config)
        )
    state, progress = checkpoint
    if progress.data_sha256 != prepared.data_sha256:
        raise UserError(f"the data set {prepared.config.data} is not the one that {path} was started with")
    if progress.partition_hash != prepared.partition.hash:
        raise UserError(f"{path / 'partition.npz'} is not the partition that the checkpoint was made with")
    if progress.config_sha256 != configs.fingerprint(prepared.config):
        raise UserError(
            f"{path / CHECKPOINT} and {path / CONFIG} are not of one run: one of them was changed or replaced since; "
            "restore it, or start another run"
        )
    return state, progress


def _growing(path: Path, first: ServerState, progress: Progress) -> tuple[LineFile, LineFile]:
    """The files that grow with the rounds, cut off after the state's own."""
    during = LineFile(path / DURING, progress.during or journal.mark_after(path, first.round))
    metrics = LineFile(path / METRICS, progress.metrics)
    if (rounds := [row.get("round") for row in metrics.rows()]) != list(range(1, first.round + 1)):
        raise UserError(
            f"{path / METRICS} has {len(rounds)} rounds up to the checkpoint's, which is after round {first.round}; "
            f"restore it from a copy, or delete {path / 'checkpoint'} to start the run from the beginning"
        )
    return metrics, during


def _marked(progress: Progress, metrics: Mark, during: Mark, seconds: float) -> Progress:
    return replace(
        progress, metrics_bytes=metrics.bytes, metrics_sha256=metrics.sha256, during_bytes=during.bytes,
        during_sha256=during.sha256, seconds=seconds,
    )  # fmt: skip


def _open(prepared: Prepared, chosen: str, setup: engines.EngineSetup) -> Engine:
    return engines.open_engine(chosen, setup) if prepared.nodes is None else prepared.nodes.open_engine(setup)


def _choose(prepared: Prepared, side: ClientSide, workers: int, rounds: int) -> str:
    config = prepared.config
    if prepared.nodes is not None:
        return prepared.nodes.name
    if not prepared.blueprint.crosses:
        return "loop"
    if config.engine != "auto":
        return engines.choose(config.engine, workers, 0.0, 0)
    visits = first_visits(prepared)
    held = [visit.take or prepared.population.roster.size(visit.client) for visit in visits]
    steps = rounds * sum(steps_for(size, side.algorithm.local) for size in held)
    if not config.rounds:  # statistics and evaluation: a pass over all images, without gradients
        steps = steps_for(prepared.population.roster.examples, replace(side.algorithm.local, epochs=1)) // 3
    work = steps * engines.seconds_per_step(side, min(config.batch, max(1, sum(held) // len(held))))
    return engines.choose("auto", workers, work, len(visits))
