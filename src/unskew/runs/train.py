"""From a configuration to a result: prepare the federation, run its rounds, keep the run folder."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from unskew import engines, models
from unskew.calibration.feasible import check
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.key import Key
from unskew.core.machine import default_workers
from unskew.core.types import ImageSet, ServerState, Tensors
from unskew.data import partition_files
from unskew.data.batches import steps_for
from unskew.data.population import Partition
from unskew.engines.blueprint import build, dataset
from unskew.round import driver
from unskew.round.client import ClientSide
from unskew.round.driver import Metrics
from unskew.round.evaluation import evaluate
from unskew.runs import config as configs
from unskew.runs import recorded, recording
from unskew.runs.checkpoint import (
    Progress,
    drop_memories,
    kept_state,
    load_checkpoint,
    open_memories,
    save_checkpoint,
    save_state,
)
from unskew.runs.config import Config
from unskew.runs.finish import Calibrated, Event, finish
from unskew.runs.folder import (
    create_run_folder,
    locked_folder,
    unused_path,
    write_arrays,
    write_calibration,
    write_json,
    write_model,
)
from unskew.runs.given import take_same, take_values
from unskew.runs.metrics import MetricsFile, read_metrics
from unskew.runs.prepare import Overview, Prepared, first_visits, overview, prepare, skew
from unskew.runs.result import Result, to_json
from unskew.runs.stop import STOP, StopRun

Observer = Callable[[Overview | Metrics | Event], Any]  # STOP as an answer ends the run after the round


def run(
    recipe: str | Path | None = None, *, out: str | Path | None = None, observe: Observer | None = None, **options: Any
) -> Result:
    """Train, evaluate, write the run folder. ``unskew.run`` is this function with every option spelled out.

    Whatever is refused is refused before the run folder is made.
    """
    base = configs.read(Path(recipe)) if recipe else Config()
    texts, given = take_values(options)
    config = configs.checked(configs.with_values(base, texts, "run"))
    prepared = prepare(config, given=given)
    _rehearse(prepared)
    path = Path(out) if out else unused_path(Path("runs"), _slug(prepared.config))
    create_run_folder(path)
    with locked_folder(path):
        write_whole(path / "config.toml", configs.to_toml(prepared.config).encode())
        _write_partition(path / "partition.npz", prepared.partition, prepared.images)
        return _execute(prepared, path, _stopping(observe, path, prepared.config))


def resume(
    path: str | Path, *, observe: Observer | None = None, on_failure: str | None = None, device: str | None = None,
    **values: Any,
) -> Result:  # fmt: skip
    """Continue where a run stopped; the result equals that of a run that never stopped.

    ``values`` are the data, model and method of a run that was given them from Python.
    """
    path = Path(path)
    if not (path / "config.toml").is_file():
        raise UserError(f"{path} is not a run folder: it has no config.toml")
    with locked_folder(path):
        if (path / "result.json").exists():
            raise UserError(
                f"{path} is finished: it has a result.json; start another run with: unskew run {path / 'config.toml'}"
            )
        config = configs.read(path / "config.toml")
        config = replace(config, on_failure=on_failure or config.on_failure, device=device or config.device)
        given = take_same(values, config)
        kept = (path / "partition.npz").absolute()
        prepared = prepare(configs.checked(config), f"file:{kept}" if kept.exists() else None, given)
        if not kept.exists():
            _write_partition(kept, prepared.partition, prepared.images)
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
    first_visits(prepared)
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
    with ExitStack() as stack:
        metrics = MetricsFile(path / "metrics.jsonl", progress.metrics_bytes)
        stack.callback(metrics.close)
        memories = open_memories(path) if side.algorithm.remember else None
        recorder = recording.Recorder(prepared.recordings, config.rounds, side, key)
        recorded.start(path, first.round)
        engine = recording.RecordingEngine(
            engines.open_engine(chosen, engines.EngineSetup(prepared.blueprint, data, workers, memories)),
            recorder.watched,
        )
        stack.callback(engine.close)
        if first.round < config.rounds:
            engine.pin(first.clients.values())
        done = (first, progress.metrics_bytes)  # a state and how much of metrics.jsonl belongs to it, changed as one
        saved, began = time.monotonic(), time.monotonic() - progress.seconds

        def save() -> None:
            metrics.sync()
            engine.sync()
            so_far = replace(progress, metrics_bytes=done[1], seconds=time.monotonic() - began)
            save_checkpoint(path, done[0], so_far)
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
                    recorded.write(path, line)
                if "model" in recorder.due(state.round):
                    save_state(kept_state(path, state.round), state, progress)
                done = (state, metrics.append(row))
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
                _finish(prepared, path, model, side.classifier, calibrated, chosen, trained)
                again = f"the run is finished without it; another: unskew calibrate {path} METHOD"
                raise UserError(f"{error}; {again}") from error
            return _finish(prepared, path, model, side.classifier, calibrated, chosen, trained)
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
        raise UserError(f"{path / 'config.toml'} was changed since the run was started; start another with: unskew run")
    return state, progress


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


def _finish(
    prepared: Prepared, path: Path, model: Tensors, classifier: Sequence[str], calibrated: Sequence[Calibrated],
    engine: str, seconds: float,
) -> Result:  # fmt: skip
    config, rows = prepared.config, read_metrics(path)
    examples = sum(row["examples"] for row in rows)
    working = sum(row["seconds"] for row in rows)
    result = Result(
        path=path,
        method=config.method,
        data=config.data,
        partition=config.partition,
        clients=prepared.partition.clients,
        per_round=config.per_round or 0,
        rounds=config.rounds,
        seed=config.seed,
        engine=engine,
        accuracy=rows[-1]["accuracy"],
        loss=rows[-1]["loss"],
        emd=skew(prepared.partition, prepared.images),
        examples=examples,
        seconds=seconds,
        examples_per_second=examples / max(working, 1e-9),
        bytes_up=sum(row["bytes_up"] for row in rows),
        bytes_down=sum(row["bytes_down"] for row in rows),
        weights_sha256=tensors.sha256(model),
        model=config.model or "",
        partition_hash=prepared.partition.hash,
        data_sha256=prepared.data_sha256,
        failures=sum(len(row.get("failures", ())) for row in rows),
        calibrations={each.result.name: each.result for each in calibrated},
        settings=configs.deciding(config),
    )
    if prepared.baseline is not None:
        reference = prepared.baseline.accuracy
        result = replace(
            result, baseline=config.baseline, baseline_accuracy=reference, relative_accuracy=result.accuracy / reference
        )
    write_model(path / "model.safetensors", model, classifier)
    for each in calibrated:
        write_calibration(path, each.result.name, each.classifier)
    drop_memories(path)  # before the result, which says that nothing is left to do
    write_json(path / "result.json", to_json(result))
    return result


def _write_partition(path: Path, partition: Partition, images: ImageSet) -> None:
    write_arrays(path, partition_files.to_arrays(partition, images.train.labels, len(images.classes)))


def _slug(config: Config) -> str:
    data = config.data.removeprefix(configs.FROM_PYTHON).partition(",")[0]
    method = "method-from-python" if configs.from_python(config.method) else config.method
    words = re.sub(r"[^a-z0-9.]+", "-", f"{Path(data).stem}-{method}-seed{config.seed}".lower())
    return words.strip("-")[:80]
