"""A prepared run, round after round: engine, evaluation, recordings, checkpoints, calibrations, its conclusion."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from unskew import engines
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import default_workers
from unskew.core.types import Engine, ServerState
from unskew.data.batches import steps_for
from unskew.engines.blueprint import build
from unskew.round import driver
from unskew.round.client import ClientSide
from unskew.round.driver import Metrics
from unskew.round.evaluation import Evaluation, evaluate
from unskew.runs import config as configs
from unskew.runs import journal, recording
from unskew.runs.checkpoint import (
    CHECKPOINT,
    Progress,
    kept_state,
    load_checkpoint,
    memories_named,
    open_memories,
    save_checkpoint,
    save_state,
)
from unskew.runs.conclude import conclude
from unskew.runs.config import CONFIG
from unskew.runs.early_stopping import BestRound
from unskew.runs.finish import Calibrated, Event, finish
from unskew.runs.journal import DURING, METRICS, LineFile, Mark, metrics_row
from unskew.runs.prepare import Overview, Prepared, first_visits, overview
from unskew.runs.result import Result
from unskew.runs.start import Begun, begin, evaluated

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
        begun: Begun | None = None

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
                observe(replace(evaluated(first, side, engine, key), start=progress.start))
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
