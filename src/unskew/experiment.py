"""From a configuration to a result: prepare the federation, run its rounds, keep the run folder."""

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unskew import config as configs
from unskew import engines, methods, models, runs, tensors
from unskew.config import Config
from unskew.data import partition_files
from unskew.data.batches import steps_for
from unskew.data.partition import partition
from unskew.data.population import Partition, Population, emd
from unskew.data.sources import load
from unskew.engines.blueprint import Blueprint, build, dataset
from unskew.errors import UserError
from unskew.key import Key
from unskew.results import Result, to_json
from unskew.round import driver
from unskew.round.client import Bench
from unskew.round.driver import Metrics
from unskew.types import ImageSet, ServerState, Tensors

DEFAULT_CLIENTS = 10
WORKER_BYTES = 260 * 2**20  # what PyTorch itself takes in a process, measured


@dataclass(frozen=True)
class Overview:
    """What a run will be, known before its first round."""

    path: Path
    config: Config
    images: ImageSet
    partition: Partition
    population: Population
    emd: float
    engine: str
    workers: int
    parameters: int
    first_round: int
    data_bytes: int
    memory_bytes: int
    disk_bytes: int


Observer = Callable[[Overview | Metrics], None]


@dataclass(frozen=True)
class Prepared:
    """A federation ready to start."""

    config: Config
    images: ImageSet
    partition: Partition
    population: Population
    blueprint: Blueprint
    data_sha256: str


def run(
    observe: Observer | None = None, *, out: str | Path | None = None, recipe: Path | None = None, **options: Any
) -> Result:
    """Train, evaluate, write the run folder. The options are those of ``unskew run``, with underscores.

    ``observe`` is called with an Overview before the first round and with the Metrics of each round.
    """
    base = configs.read(recipe) if recipe else Config()
    config = configs.checked(configs.with_values(base, options, "run"))
    prepared = prepare(config)
    path = Path(out) if out else runs.unused(Path("runs"), _slug(config))
    runs.create(path)
    with runs.locked(path):
        runs.write_whole(path / "config.toml", configs.to_toml(prepared.config).encode())
        _write_partition(path / "partition.npz", prepared.partition, prepared.images)
        return _execute(prepared, path, observe or _ignore)


def resume(path: str | Path, observe: Observer | None = None, *, on_failure: str | None = None) -> Result:
    """Go on where a run stopped; the result equals that of a run never stopped."""
    path = Path(path)
    if not (path / "config.toml").is_file():
        raise UserError(f"{path} is no run folder: it has no config.toml")
    with runs.locked(path):
        if (path / "result.json").exists():
            raise UserError(
                f"{path} is finished: its result.json says so; start another with: unskew run {path / 'config.toml'}"
            )
        config = configs.read(path / "config.toml")
        if on_failure:
            config = replace(config, on_failure=on_failure)
        config = configs.checked(config)
        kept = path / "partition.npz"
        prepared = prepare(config, f"file:{kept}" if kept.exists() else None)
        if not kept.exists():
            _write_partition(kept, prepared.partition, prepared.images)
        return _execute(prepared, path, observe or _ignore)


def prepare(config: Config, kept: str | None = None) -> Prepared:
    """Read the images, make the partition (or take the ``kept`` one), fill in what the data decides."""
    images = load(config.data, Path(config.data_dir) if config.data_dir else None)
    classes = len(images.classes)
    found = split(config, images, kept)
    per_round = config.per_round or found.clients
    if per_round > found.clients:
        raise UserError(f"--per-round {per_round}: there are only {found.clients} clients")
    filled = replace(
        config,
        partition=config.partition if kept else found.scheme,
        clients=found.clients,
        per_round=per_round,
        model=config.model or models.suited(images.shape),
        augment=images.augment if config.augment is None else config.augment,
    )
    blueprint = Blueprint(filled.method, filled.model or "", images.shape, classes, filled.local())
    methods.parse(blueprint.method, blueprint.local)  # whatever is wrong shows now, before a folder is made
    models.build(blueprint.model, blueprint.shape, blueprint.classes)
    return Prepared(filled, images, found, Population.from_partition(found), blueprint, _fingerprint(images))


def split(config: Config, images: ImageSet, kept: str | None = None) -> Partition:
    """The partition that a configuration asks for."""
    return partition(
        kept or config.partition,
        images.train.labels,
        clients=config.clients or (None if _says_clients(config.partition) or kept else DEFAULT_CLIENTS),
        key=Key(config.seed),
        users=images.users,
        classes=len(images.classes),
    )


def _execute(prepared: Prepared, path: Path, observe: Observer) -> Result:
    config, key = prepared.config, Key(prepared.config.seed)
    data = dataset(prepared.images, prepared.population)
    bench = build(prepared.blueprint, data)
    models.initialise(bench.network, key.fold("model"))
    first, progress = _beginning(prepared, bench, path)
    workers = min(config.workers or engines.cores(), config.per_round or 1)
    chosen = _choose(prepared, bench, workers, config.rounds - first.round)
    observe(_overview(prepared, path, first, data, chosen, workers if chosen == "pool" else 0))
    engine = engines.open_engine(chosen, prepared.blueprint, data, workers)
    metrics = runs.MetricsFile(path / "metrics.jsonl", progress.metrics_bytes)
    done = (first, progress.metrics_bytes)  # a state and how much of metrics.jsonl belongs to it, always changed as one
    saved, began = time.monotonic(), time.monotonic() - progress.seconds

    def save() -> None:
        metrics.sync()
        so_far = replace(progress, metrics_bytes=done[1], seconds=time.monotonic() - began)
        runs.save_checkpoint(path, done[0], so_far)

    try:
        for state, row in driver.run(
            bench.algorithm, engine, first, key, rounds=config.rounds, per_round=config.per_round or 0,
            skip_failures=config.on_failure == "skip",
        ):  # fmt: skip
            last = state.round == config.rounds
            if last or state.round % config.evaluate_every == 0:
                found = driver.evaluate(engine, state.tensors, len(prepared.images.test), key)
                row = replace(row, accuracy=found.accuracy, loss=found.loss)
            done = (state, metrics.append(row))
            observe(row)
            if last or time.monotonic() - saved >= config.checkpoint_seconds:
                save()
                saved = time.monotonic()
        return _finish(prepared, path, done[0], chosen, time.monotonic() - began)
    except BaseException:
        if done[0].round:
            save()
        raise
    finally:
        metrics.close()
        engine.close()


def _beginning(prepared: Prepared, bench: Bench, path: Path) -> tuple[ServerState, runs.Progress]:
    """The checkpoint's state, if it belongs to this data and partition, or the state before the first round."""
    found = runs.load_checkpoint(path)
    if found is None:
        start = driver.start(bench.algorithm, tensors.of_module(bench.network))
        return start, runs.Progress(0, 0.0, prepared.data_sha256, prepared.partition.hash)
    state, progress = found
    if progress.data_sha256 != prepared.data_sha256:
        raise UserError(f"the data set {prepared.config.data} is not the one that {path} was started with")
    if progress.partition_hash != prepared.partition.hash:
        raise UserError(f"{path / 'partition.npz'} is not the partition that the checkpoint was made with")
    return state, progress


def _choose(prepared: Prepared, bench: Bench, workers: int, rounds: int) -> str:
    config = prepared.config
    if config.engine != "auto":
        return engines.choose(config.engine, workers, 0.0, 0)
    held = len(prepared.population.order) / max(prepared.population.clients, 1)
    steps = rounds * (config.per_round or 1) * steps_for(max(1, int(held)), bench.algorithm.local)
    work = steps * engines.seconds_per_step(bench, min(config.batch, max(1, int(held))))
    return engines.choose("auto", workers, work, config.per_round or 1)


def _finish(prepared: Prepared, path: Path, state: ServerState, engine: str, seconds: float) -> Result:
    config, rows = prepared.config, runs.read_metrics(path)
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
        emd=_emd(prepared.partition, prepared.images),
        examples=examples,
        seconds=seconds,
        examples_per_second=examples / max(working, 1e-9),
        bytes_up=sum(row["bytes_up"] for row in rows),
        bytes_down=sum(row["bytes_down"] for row in rows),
        weights_sha256=tensors.sha256(state.tensors),
        model=config.model or "",
        partition_hash=prepared.partition.hash,
        data_sha256=prepared.data_sha256,
        failures=sum(len(row.get("failures", ())) for row in rows),
    )
    runs.write_model(path / "model.safetensors", state.tensors)
    runs.write_json(path / "result.json", to_json(result))
    return result


def _overview(prepared: Prepared, path: Path, state: ServerState, data: Tensors, engine: str, workers: int) -> Overview:
    model = tensors.count_bytes(state.tensors)
    memory = tensors.count_bytes(state.memory)
    own = tensors.count_bytes(data)
    plans = 11 * prepared.config.epochs * int(prepared.population.sizes.max(initial=0))
    return Overview(
        path=path,
        config=prepared.config,
        images=prepared.images,
        partition=prepared.partition,
        population=prepared.population,
        emd=_emd(prepared.partition, prepared.images),
        engine=engine,
        workers=workers,
        parameters=sum(v.numel() for name, v in state.tensors.items() if name.startswith("params/")),
        first_round=state.round + 1,
        data_bytes=own,
        memory_bytes=WORKER_BYTES * (1 + workers) + own * (2 if workers else 1) + (model * 6 + plans) * max(1, workers),
        disk_bytes=2 * (model + memory) + model + 300 * prepared.config.rounds + 4 * len(prepared.images.train),
    )


def _emd(found: Partition, images: ImageSet) -> float:
    return emd(found.client, images.train.labels, len(images.classes))


def _write_partition(path: Path, found: Partition, images: ImageSet) -> None:
    runs.write_arrays(path, partition_files.to_arrays(found, images.train.labels, len(images.classes)))


def _fingerprint(images: ImageSet) -> str:
    """SHA-256 over train and test, images and labels."""
    digest = hashlib.sha256()
    for part in (images.train, images.test):
        digest.update(repr(part.images.shape).encode())
        digest.update(np.ascontiguousarray(part.images).data)
        digest.update(np.ascontiguousarray(part.labels).data)
    return digest.hexdigest()


def _says_clients(scheme: str) -> bool:
    """Whether the partition itself tells how many clients there are."""
    return scheme.startswith(("file:", "users"))


def _slug(config: Config) -> str:
    words = re.sub(r"[^a-z0-9.]+", "-", f"{Path(config.data).stem}-{config.method}-seed{config.seed}".lower())
    return words.strip("-")[:80]


def _ignore(_: Overview | Metrics) -> None:
    return
