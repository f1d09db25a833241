"""Before the first round: read the images, make the partition, fill in what the data decides, estimate the costs."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unskew import methods, models
from unskew.calibration.feasible import named
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import resolve_device
from unskew.core.types import Examples, ImageSet, Local, ServerState, Tensors, Visit
from unskew.data.batches import RESIZED_CROP, SHIFT, suited
from unskew.data.partition import partition
from unskew.data.population import Ints, Partition, Population, with_validation
from unskew.data.scan import Say
from unskew.data.tables import silent
from unskew.engines import Processes
from unskew.engines.blueprint import CANNOT_CROSS, Blueprint, Values
from unskew.engines.features import images_sha256
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.round.local_optimizers import check_rounds
from unskew.round.sampling import uniform
from unskew.runs import config as configs
from unskew.runs.config import FROM_PYTHON, Config, from_python
from unskew.runs.first_model import first_model
from unskew.runs.given import Given, parse_given
from unskew.runs.options import OPTIONS
from unskew.runs.prepared import Prepared as Prepared
from unskew.runs.read_data import cache_settings, read_data
from unskew.runs.recording import parse_recording, plain_spelling
from unskew.runs.result import Result, read_result
from unskew.runs.start import parse_start

DEFAULT_CLIENTS = 10
PROCESS_BYTES = 260 * 2**20  # what PyTorch itself takes in a process, measured


@dataclass(frozen=True)
class Overview:
    """What a run will be, known before its first round."""

    path: Path
    config: Config
    images: ImageSet
    partition: Partition
    population: Population
    emd: float | None  # None: the labels are at the nodes
    engine: str
    processes: Processes
    parameters: int
    first_round: int
    local: Local
    visits: tuple[Visit, ...]  # of a first round: how many there are and how much each takes
    data_bytes: int
    memory_bytes: int
    disk_bytes: int
    algorithm: Algorithm
    baseline: Result | None = None
    unlike_baseline: tuple[str, ...] = ()
    model_notes: tuple[str, ...] = ()  # where its weights come from, what is frozen
    batch_norm: str = ""  # what becomes of BatchNorm's running statistics; empty where the network has none


def prepare(
    config: Config, kept: str | None = None, given: Given | None = None, finished: Tensors | None = None,
    say: Say = silent,
) -> Prepared:  # fmt: skip
    """Read the images, make the partition (or take the ``kept`` one), fill in what the data decides.

    ``given`` has the values that the configuration only describes, ``finished`` the whole network's weights where the
    run is over: no pretrained weights are read then. ``say`` is told how far the images are read.
    """
    given = given or Given()
    _check_given(config, given, kept)
    if config.patience is None and config.monitor != OPTIONS["monitor"].default:
        raise UserError(f"--monitor {config.monitor}: nothing watches it; give --patience N too, or leave it out")
    resolve_device(config.device)
    method, algorithm_for = parse_given(given, config.method)
    recordings = parse_recording(config.during) if config.during else ()
    images = given.data or read_data(config, say)
    model = first_model(config, images, given.model, finished)
    config, images = model.config, model.images
    parts = given.nodes.partition if given.nodes else split(config, images.examples, kept, given)
    per_round = config.per_round or (config.clients if given.nodes else None) or parts.clients
    if per_round > parts.clients and not given.nodes:
        raise UserError(f"--per-round {per_round}: there are only {parts.clients} clients")
    filled = replace(
        config,
        method=method,
        partition=config.partition if kept else parts.scheme,
        clients=parts.clients,
        per_round=per_round,
        augmentation=_augmentation(config.augmentation, images) if config.augment else config.augmentation,
        during=plain_spelling(config.during) if config.during else None,
    )
    if model.layers == 1 and given.method is None:
        methods.refuse_on_frozen_features(method)
    algorithm = algorithm_for(filled.local())
    check_rounds(algorithm.local, filled.rounds)
    masked = algorithm.secure is not None and algorithm.exchange is None
    if not algorithm.finish and (algorithm.withhold or masked or algorithm.private):
        raise UserError(f"{method}: there is nothing to protect, as no calibration sends statistics; add ccvr or lda")
    start = parse_start(filled.start, algorithm) if filled.start else None
    if start is not None:
        filled = replace(filled, start=named(start.finish[0], start))
    blueprint = Blueprint(
        method, filled.model or "", model.shape, len(images.classes), filled.local(), device=filled.device,
        crosses=given.crosses, values=Values(algorithm, given.model), layers=model.layers, stored=model.stored,
    )  # fmt: skip
    network = blueprint.network()
    driver.start(algorithm, tensors.of_module(network), network.classifier_names)
    sha256 = images_sha256(images)
    baseline = _baseline(config, sha256) if config.baseline else None
    held = parts
    if filled.validation:
        images, held = with_validation(images, parts, filled.validation, Key(config.seed).fold("validation"))
    population = Population.from_partition(held)
    return Prepared(
        filled, images, parts, population, blueprint, algorithm, sha256, baseline, model, recordings, start, finished,
        say, given.nodes,
    )  # fmt: skip


def first_visits(prepared: Prepared) -> list[Visit]:
    """The visits of a first round, for estimates; where a sampler draws nobody, those of a plain one."""
    drawing = Key(prepared.config.seed).fold("round", 1, "sample"), prepared.population.roster
    per_round = prepared.config.per_round or 1
    return prepared.algorithm.sampler(*drawing, per_round) or uniform(*drawing, per_round)


def split(config: Config, examples: Examples, kept: str | None = None, given: Given | None = None) -> Partition:
    """The partition that a configuration asks for, or the one that was given."""
    if given is not None and given.partition is not None and not kept:
        return _given_partition(given.partition, config, len(examples.labels))
    return partition(
        kept or config.partition,
        examples.labels,
        clients=config.clients or (None if _says_clients(config.partition) or kept else DEFAULT_CLIENTS),
        key=Key(config.seed),
        users=examples.users,
        places=examples.places,
        classes=len(examples.classes),
    )


def overview(
    prepared: Prepared, path: Path, state: ServerState, data: Tensors, engine: str, processes: Processes
) -> Overview:
    """What the run will be; its memory is an estimate."""
    model = tensors.count_bytes(state.tensors)
    memory = tensors.count_bytes(state.memory | state.sent)
    kept = sum(tensors.count_bytes(each.blank(state.tensors)) for each in prepared.algorithm.remember)
    own = tensors.count_bytes(data) + _kept_in_memory(prepared)
    policy = getattr(models, "batch_norm_policy", None)
    visits = first_visits(prepared)
    held = [visit.take or prepared.population.roster.size(visit.client) for visit in visits]
    plans = 11 * prepared.algorithm.local.epochs * max(held, default=0)
    return Overview(
        path=path,
        config=prepared.config,
        images=prepared.images,
        partition=prepared.partition,
        population=prepared.population,
        emd=prepared.emd,
        engine=engine,
        processes=processes,
        parameters=sum(v.numel() for name, v in state.tensors.items() if name.startswith("params/")),
        first_round=state.round + 1,
        local=prepared.algorithm.local,
        visits=tuple(visits),
        algorithm=prepared.algorithm,
        batch_norm=policy(prepared.blueprint.network()) if policy else "",
        model_notes=prepared.first_model.notes,
        baseline=prepared.baseline,
        unlike_baseline=_differences(prepared) if prepared.baseline else (),
        data_bytes=own,
        memory_bytes=PROCESS_BYTES * processes.count + own * processes.copies + (model * 8 + plans) * processes.working,
        disk_bytes=2 * (model + memory)
        + model
        + 300 * prepared.config.rounds
        + 4 * len(prepared.images.train)
        + kept
        * (
            2 * min(len(prepared.population.roster.inhabited), prepared.config.rounds * len(visits)) + len(visits)
        ),  # a checkpoint's, the latest, those under way
    )


def _kept_in_memory(prepared: Prepared) -> int:
    """What images that are read when asked for may take in memory, at most."""
    parts = [split.images for split in (prepared.images.train, prepared.images.test)]
    stored = sum(each.nbytes for each in parts if not isinstance(each, np.ndarray))
    return min(stored, cache_settings(prepared.config).memory)


def _augmentation(text: str, images: ImageSet) -> str:
    """What is drawn; auto stays where it means the shifts of before, so that older runs keep their fingerprint."""
    return text if suited(text, images) == SHIFT else RESIZED_CROP


def _check_given(config: Config, given: Given, kept: str | None) -> None:
    """Refuse descriptions whose values are missing, and values that cannot go where the engine would send them."""
    for name in ("data", "model", "method", *(() if kept else ("partition",))):
        if from_python(getattr(config, name)) and getattr(given, name) is None:
            raise UserError(
                f"{name} is {getattr(config, name).removeprefix(FROM_PYTHON)!r}, a value that was given from Python; "
                f"give it again, from Python, as {name}=…"
            )
    if not given.crosses and config.engine not in ("auto", "loop"):
        name = "model" if given.model is not None else "method"
        what = getattr(config, name).removeprefix(FROM_PYTHON)
        raise UserError(f"--engine {config.engine} with {name} {what}: {CANNOT_CROSS}")


def _given_partition(value: Partition | Ints, config: Config, examples: int) -> Partition:
    """The partition that was given as a value, if it fits the training examples and ``--clients``."""
    client = value.client if isinstance(value, Partition) else value
    if len(client) != examples:
        raise UserError(
            f"partition: {len(client):,} client numbers for {examples:,} training examples; give one for each"
        )
    if client.min(initial=0) < -1 or client.max(initial=-1) < 0:
        raise UserError("partition: give client numbers from 0 on, -1 where no client holds the example")
    clients = value.clients if isinstance(value, Partition) else config.clients or int(client.max()) + 1
    if client.max() >= clients or (config.clients or clients) != clients:
        raise UserError(
            f"--clients {config.clients}: the partition has {int(client.max()) + 1:,} clients; leave it out"
        )
    if isinstance(value, Partition):
        return replace(value, scheme=config.partition)
    return Partition(client.astype(np.int32), clients, config.partition, config.seed)


def _baseline(config: Config, sha256: str) -> Result:
    """The finished run that accuracy is compared with; one on other data would compare nothing."""
    path = config.baseline or ""
    try:
        result = read_result(Path(path))
        configs.read_run(Path(path))
    except UserError as error:
        raise UserError(
            f"--baseline: {error}; if the baseline was moved, give its new folder with --baseline"
        ) from error
    if result.data_sha256 != sha256:
        raise UserError(f"--baseline {path} was trained on other data ({result.data}); give a run on the same data")
    if result.settings.get("validation", 0.0) != config.validation:
        raise UserError(
            f"--baseline {path} was evaluated on {result.measured_on}, with another --validation than this run's; give "
            f"a baseline with --validation {config.validation:g}"
        )
    if not result.accuracy > 0:
        raise UserError(f"--baseline {path} has an accuracy of {result.accuracy}; nothing can be relative to that")
    return result


def _differences(prepared: Prepared) -> tuple[str, ...]:
    """The baseline's settings that differ: relative accuracy means most where only the method does."""
    there, here = configs.read_run(Path(prepared.config.baseline or "")), prepared.config
    others = [(key, getattr(there, key), getattr(here, key)) for key in ("model", "augment", "rounds", "seed")]
    if from_python(there.method):
        return tuple(f"{key} {theirs} there" for key, theirs, ours in others if theirs != ours)
    local = methods.parse_method(there.method, there.local()).local  # as the methods use it: fedvc sets the epochs
    for key in ("epochs", "batch", "lr", "momentum", "weight_decay", "schedule", "optimizer", "clip", "decay"):
        others.append((key, getattr(local, key), getattr(prepared.algorithm.local, key)))
    return tuple(f"{key.replace('_', ' ')} {theirs} there" for key, theirs, ours in others if theirs != ours)


def _says_clients(scheme: str) -> bool:
    """Whether the partition itself tells how many clients there are."""
    return scheme.strip().startswith(("file:", "users", "geo"))
