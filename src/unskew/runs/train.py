"""From a configuration to a result: prepare the federation, run its rounds, keep the run folder."""

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from unskew import engines, models
from unskew.calibration.feasible import check
from unskew.core import tensors
from unskew.core.context import neutral
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.limits import usable_path
from unskew.core.machine import default_workers
from unskew.core.types import ServerState
from unskew.data import partition_files
from unskew.data.batches import check_visit, steps_for
from unskew.engines.blueprint import build, dataset
from unskew.round import driver
from unskew.round.client import ClientSide
from unskew.round.driver import Metrics
from unskew.round.evaluation import evaluate
from unskew.runs import config as configs
from unskew.runs import recorded, recording
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
from unskew.runs.config import CONFIG, Config
from unskew.runs.finish import Calibrated, Event, finish
from unskew.runs.folder import (
    arrays_bytes,
    create_run_folder,
    is_blank,
    locked_folder,
    unused_path,
)
from unskew.runs.given import take_same, take_values
from unskew.runs.lines import LineFile, Mark
from unskew.runs.manifest import read_sealed, require_sealed, start_manifest, write_sealed
from unskew.runs.metrics import METRICS, metrics_row
from unskew.runs.prepare import Overview, Prepared, first_visits, overview, prepare
from unskew.runs.recorded import DURING
from unskew.runs.result import RESULT, Result
from unskew.runs.stop import STOP, StopRun

PARTITION = "partition.npz"

Observer = Callable[[Overview | Metrics | Event], Any]  # STOP as an answer ends the run after the round


@neutral()
def run(
    recipe: str | Path | None = None, *, out: str | Path | None = None, observe: Observer | None = None,
    home: Path = Path(), **options: Any,
) -> Result:  # fmt: skip
    """Train, evaluate, write the run folder. ``unskew.run`` is this function with every option spelled out.

    Whatever is refused is refused before the run folder is made. ``home`` is what a relative ``out`` is below: with an
    absolute one the run goes on where it is, even if the observer changes the working directory.
    """
    base = configs.read(Path(recipe)) if recipe else Config()
    place = usable_path(out) if out else None
    texts, given = take_values(options)
    config = configs.checked(configs.with_values(base, texts, "run"))
    prepared = prepare(config, given=given)
    _rehearse(prepared)
    path = home / place if place else unused_path(home / "runs", _slug(prepared.config))
    create_run_folder(path)
    with locked_folder(path):
        if (path / CONFIG).exists():
            raise UserError(f"{path} has a run that another process has begun meanwhile; choose another --out")
        config_text = configs.to_toml(prepared.config).encode()
        start_manifest(path, {CONFIG: config_text, PARTITION: _partition_bytes(prepared)})
        return _execute(prepared, path, _stopping(observe, path, prepared.config))


@neutral()
def resume(
    path: str | Path, *, observe: Observer | None = None, on_failure: str | None = None, device: str | None = None,
    engine: str | None = None, workers: int | None = None, data_dir: str | Path | None = None,
    baseline: str | Path | None = None, **values: Any,
) -> Result:  # fmt: skip
    """Continue where a run stopped; the result equals that of a run that never stopped.

    ``values`` are the data, model and method of a run that was given them from Python.
    """
    path = usable_path(path)
    if path.is_dir() and not (path / CONFIG).exists() and is_blank(path):
        raise UserError(
            f"{path} has nothing to resume: no run was begun there; start one with: unskew run --out {path}"
        )
    if not (path / CONFIG).is_file():
        require_sealed(path, CONFIG)
        raise UserError(f"{path} is not a run folder: it has no {CONFIG}")
    with locked_folder(path):
        if read_sealed(path, RESULT) is not None:
            raise UserError(
                f"{path} is finished: it has a result.json; start another run with: unskew run {path / CONFIG}"
            )
        config = configs.read_run(path)
        config = replace(
            config,
            on_failure=on_failure or config.on_failure,
            device=device or config.device,
            engine=engine or config.engine,
            workers=config.workers if workers is None else workers,
            data_dir=str(data_dir) if data_dir else config.data_dir,
            baseline=str(baseline) if baseline else config.baseline,
        )
        given = take_same(values, config)
        require_sealed(path, PARTITION)
        kept = (path / PARTITION).absolute()
        prepared = prepare(configs.checked(config), f"file:{kept}" if kept.exists() else None, given)
        if not kept.exists():
            write_sealed(path, {PARTITION: _partition_bytes(prepared)})
        _rehearse(prepared)
        return _execute(prepared, path, _stopping(observe, path, prepared.config))


def _stopping(observe: Observer | None, path: Path, config: Config) -> Callable[[Overview | Metrics | Event], None]:
    """The observer, whose answer STOP or StopRun ends the run in a way that can be resumed."""
    again = [name for name in configs.values_described(config) if name != "partition"]  # partition.npz has that

    def watch(event: Overview | Metrics | Event) -> None:
        try:
            stop = observe is not None and observe(event) is STOP
        except StopRun as error:
            raise StopRun(str(path), getattr(event, "round", None), again) from error
        if stop:
            raise StopRun(str(path), getattr(event, "round", None), again)

    return watch


def _rehearse(prepared: Prepared) -> None:
    """Build what the run needs and draw its first visits, so that it is refused now and not after a folder is made."""
    data = dataset(prepared.images, prepared.population)
    side = build(prepared.blueprint, data)
    models.initialise(side.network, Key(prepared.config.seed).fold("model"))
    for size in {visit.take or prepared.population.roster.size(visit.client) for visit in first_visits(prepared)}:
        check_visit(size, side.algorithm.local, prepared.images.shape)
    engines.rehearse(prepared.config.engine, engines.EngineSetup(prepared.blueprint, data))
    for finisher in side.algorithm.finish:
        check(finisher, side.algorithm, side)


def _execute(prepared: Prepared, path: Path, observe: Observer) -> Result:
    config, key = prepared.config, Key(prepared.config.seed)
    data = dataset(prepared.images, prepared.population)
    side = build(prepared.blueprint, data)
    models.initialise(side.network, key.fold("model"))
    first, progress = _beginning(prepared, side, path)
    workers = min(config.workers or default_workers(config.device), len(first_visits(prepared)))
    chosen = _choose(prepared, side, workers, config.rounds - first.round)
    observe(overview(prepared, path, first, data, chosen, workers if chosen == "pool" else 0))
    with ExitStack() as stack, memories_named(path):
        metrics, during = _growing(path, first, progress)
        stack.callback(metrics.close)
        stack.callback(during.close)
        memories = open_memories(path) if side.algorithm.remember else None
        recorder = recording.Recorder(prepared.recordings, config.rounds, side, key)
        engine = recording.RecordingEngine(
            engines.open_engine(chosen, engines.EngineSetup(prepared.blueprint, data, workers, memories)),
            recorder.watched,
        )
        stack.callback(engine.close)
        if first.round < config.rounds:
            engine.pin(first.clients.values())
        done = (first, metrics.mark, during.mark)  # a state and how much of each file belongs to it, changed as one
        saved, began = time.monotonic(), time.monotonic() - progress.seconds

        def save() -> None:
            metrics.sync()
            during.sync()
            engine.sync()
            save_checkpoint(path, done[0], _marked(progress, *done[1:], time.monotonic() - began))
            engine.pin(done[0].clients.values())

        try:
            for state, row in driver.run(
                side.algorithm, engine, first, key, rounds=config.rounds, per_round=config.per_round or 0,
                skip_failures=config.on_failure == "skip",
            ):  # fmt: skip
                last = state.round == config.rounds
                if last or state.round % config.evaluate_every == 0:
                    score = evaluate(engine, state.tensors, len(prepared.images.test), key)
                    row = replace(row, accuracy=score.accuracy, loss=score.loss)
                if (line := recorder.line(state, engine)) is not None:
                    during.append(line)
                if "model" in recorder.due(state.round):
                    save_state(kept_state(path, state.round), state, progress)
                done = (state, metrics.append(metrics_row(row)), during.mark)
                observe(row)
                if last or time.monotonic() - saved >= config.checkpoint_seconds:
                    save()
                    saved = time.monotonic()
            model, calibrated = driver.as_used(side.algorithm, done[0].tensors, side.classifier), list[Calibrated]()
            trained = time.monotonic() - began  # calibrations tell their own seconds, whenever they are made

            def keep(event: Event) -> None:
                if isinstance(event, Calibrated):
                    calibrated.append(event)
                observe(event)

            try:
                finish(engine, side, model, side.algorithm, key, keep)
            except UserError as error:  # resuming would fail in the same way: what was trained is written now
                conclude(prepared, path, model, side.classifier, calibrated, chosen, trained, metrics, during)
                again = f"the run is finished without it; another: unskew calibrate {path} METHOD"
                raise UserError(f"{error}; {again}") from error
            return conclude(prepared, path, model, side.classifier, calibrated, chosen, trained, metrics, during)
        except BaseException:
            if done[0].round:
                save()
            raise


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
    during = LineFile(path / DURING, progress.during or recorded.mark_after(path, first.round))
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


def _choose(prepared: Prepared, side: ClientSide, workers: int, rounds: int) -> str:
    config = prepared.config
    if not prepared.blueprint.crosses:
        return "loop"
    if config.engine != "auto":
        return engines.choose(config.engine, workers, 0.0, 0)
    visits = first_visits(prepared)
    held = [visit.take or prepared.population.roster.size(visit.client) for visit in visits]
    steps = rounds * sum(steps_for(size, side.algorithm.local) for size in held)
    work = steps * engines.seconds_per_step(side, min(config.batch, max(1, sum(held) // len(held))))
    return engines.choose("auto", workers, work, len(visits))


def _partition_bytes(prepared: Prepared) -> bytes:
    labels, classes = prepared.images.train.labels, len(prepared.images.classes)
    return arrays_bytes(partition_files.to_arrays(prepared.partition, labels, classes))


def _slug(config: Config) -> str:
    data = config.data.removeprefix(configs.FROM_PYTHON).partition(",")[0]
    method = "method-from-python" if configs.from_python(config.method) else config.method
    words = re.sub(r"[^a-z0-9.]+", "-", f"{Path(data).stem}-{method}-seed{config.seed}".lower())
    return words.strip("-")[:80]
