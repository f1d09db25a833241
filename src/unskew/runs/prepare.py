"""Before the first round: images read, partition made, what the data decides filled in, what it all will take."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unskew.runs import config as configs
from unskew import methods, models
from unskew.core import tensors
from unskew.round.algorithm import Algorithm
from unskew.runs.config import Config
from unskew.data.partition import partition
from unskew.data.population import Partition, Population, emd
from unskew.data.sources import load
from unskew.engines.blueprint import Blueprint
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.runs.result import Result, read_result
from unskew.round import driver
from unskew.core.types import ImageSet, Local, ServerState, Tensors, Visit

DEFAULT_CLIENTS = 10
PROCESS_BYTES = 260 * 2**20  # what PyTorch itself takes in a process, measured


@dataclass(frozen=True)
class Prepared:
    """A federation ready to start."""

    config: Config
    images: ImageSet
    partition: Partition
    population: Population
    blueprint: Blueprint
    algorithm: Algorithm
    data_sha256: str
    baseline: Result | None


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
    local: Local
    visits: tuple[Visit, ...]  # of a first round: how many come and how much they take
    data_bytes: int
    memory_bytes: int
    disk_bytes: int
    baseline: Result | None = None
    unlike_baseline: tuple[str, ...] = ()


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
    algorithm = methods.parse_method(blueprint.method, blueprint.local)  # what is wrong shows now, before a folder is made
    if not algorithm.finish and (algorithm.withhold or algorithm.secure or algorithm.private):
        raise UserError(f"{filled.method}: nothing is protected, for no calibration sends statistics; add ccvr or lda")
    network = models.build(blueprint.model, blueprint.shape, blueprint.classes)
    driver.start(algorithm, tensors.of_module(network), network.classifier_names)
    sha256 = _fingerprint(images)
    baseline = _baseline(config.baseline, sha256) if config.baseline else None
    return Prepared(filled, images, found, Population.from_partition(found), blueprint, algorithm, sha256, baseline)


def first_visits(prepared: Prepared) -> list[Visit]:
    """Who would come to a first round."""
    per_round = prepared.config.per_round or 1
    return prepared.algorithm.sampler(
        Key(prepared.config.seed).fold("round", 1, "sample"), prepared.population, per_round
    )


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


def overview(prepared: Prepared, path: Path, state: ServerState, data: Tensors, engine: str, workers: int) -> Overview:
    """What the run will be; its memory is an estimate."""
    model = tensors.count_bytes(state.tensors)
    memory = tensors.count_bytes(state.memory | state.sent)
    kept = sum(tensors.count_bytes(each.blank(state.tensors)) for each in prepared.algorithm.remember)
    own = tensors.count_bytes(data)
    visits = first_visits(prepared)
    held = [visit.take or prepared.population.size(visit.client) for visit in visits]
    plans = 11 * prepared.algorithm.local.epochs * max(held, default=0)
    return Overview(
        path=path,
        config=prepared.config,
        images=prepared.images,
        partition=prepared.partition,
        population=prepared.population,
        emd=skew(prepared.partition, prepared.images),
        engine=engine,
        workers=workers,
        parameters=sum(v.numel() for name, v in state.tensors.items() if name.startswith("params/")),
        first_round=state.round + 1,
        local=prepared.algorithm.local,
        visits=tuple(visits),
        baseline=prepared.baseline,
        unlike_baseline=_differences(prepared) if prepared.baseline else (),
        data_bytes=own,
        memory_bytes=PROCESS_BYTES * (1 + workers)
        + own * (2 if workers else 1)
        + (model * 8 + plans) * max(1, workers),
        disk_bytes=2 * (model + memory)
        + model
        + 300 * prepared.config.rounds
        + 4 * len(prepared.images.train)
        + kept
        * (
            2 * min(len(prepared.population.inhabited), prepared.config.rounds * len(visits)) + len(visits)
        ),  # a checkpoint's, the latest, those under way
    )


def skew(found: Partition, images: ImageSet) -> float:
    """The partition's EMD."""
    return emd(found.client, images.train.labels, len(images.classes))


def asked(config: Config) -> str:
    """SHA-256 over what decides the result: neither where the data lie nor how the work is done."""
    plain = replace(
        config,
        data_dir=None,
        engine=Config.engine,
        workers=None,
        on_failure=Config.on_failure,
        checkpoint_seconds=Config.checkpoint_seconds,
        baseline=None,
        during=None,
    )
    return hashlib.sha256(configs.to_toml(plain).encode()).hexdigest()


def _fingerprint(images: ImageSet) -> str:
    """SHA-256 over train and test, images and labels."""
    digest = hashlib.sha256()
    for part in (images.train, images.test):
        digest.update(repr(part.images.shape).encode())
        digest.update(np.ascontiguousarray(part.images).data)
        digest.update(np.ascontiguousarray(part.labels).data)
    return digest.hexdigest()


def _baseline(path: str, sha256: str) -> Result:
    """The finished run that accuracy is compared with; one on other data would compare nothing."""
    try:
        found = read_result(Path(path))
        configs.read(Path(path) / "config.toml")
    except UserError as error:
        raise UserError(f"--baseline: {error}; a run whose baseline was moved finds it by its config.toml") from error
    if found.data_sha256 != sha256:
        raise UserError(f"--baseline {path} was trained on other data ({found.data}); give a run on the same set")
    if not found.accuracy > 0:
        raise UserError(f"--baseline {path} has an accuracy of {found.accuracy}; nothing can be relative to that")
    return found


def _differences(prepared: Prepared) -> tuple[str, ...]:
    """What the baseline did otherwise: relative accuracy means most where nothing but the method differs."""
    there, here = configs.read(Path(prepared.config.baseline or "") / "config.toml"), prepared.config
    others = [(key, getattr(there, key), getattr(here, key)) for key in ("model", "augment", "rounds", "seed")]
    local = methods.parse_method(there.method, there.local()).local  # as the methods use it: fedvc has epochs of its own
    for key in ("epochs", "batch", "lr", "momentum", "weight_decay"):
        others.append((key, getattr(local, key), getattr(prepared.algorithm.local, key)))
    return tuple(f"{key.replace('_', ' ')} {theirs} there" for key, theirs, ours in others if theirs != ours)


def _says_clients(scheme: str) -> bool:
    """Whether the partition itself tells how many clients there are."""
    return scheme.startswith(("file:", "users"))
