"""Before the first round: read the images, draw the partition, fill in defaults, reject impossible settings."""

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from unskew import engines, methods, models
from unskew.calibration.federated import check, named, protections
from unskew.calibration.finisher import RealFeatures
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.files import cache_folder
from unskew.core.key import Key
from unskew.core.language import parse_calls
from unskew.core.machine import physical_memory, resolve_device
from unskew.core.plugins import require_extra, unknown_plugins
from unskew.core.types import EVERYONE, Engine, Examples, ImageSet, Local, ServerState, Tensors, Visit
from unskew.core.units import counted, format_bytes
from unskew.data.augment import DATA, HALF, set_normalisation
from unskew.data.batches import RESIZED_CROP, SHIFT, check_visit, choose_augmentation, examples_for
from unskew.data.partition import partition_examples
from unskew.data.photographs import Say, silent
from unskew.data.population import Clients, Ints, Partition, Population, emd, split_validation
from unskew.data.sources import find_moved, load, load_examples
from unskew.data.store import Cache, cache_of
from unskew.engines import EngineSetup, Processes
from unskew.engines.blueprint import CANNOT_CROSS, FROZEN, Blueprint, build, dataset
from unskew.engines.features import FrozenPart, images_sha256, stored_bytes
from unskew.models import pretrained
from unskew.models.finetune import find_cut, last_layers, parse_train
from unskew.models.networks import Network
from unskew.privacy.masking import MIN_CLIENTS
from unskew.privacy.noise import PrivateUpdates
from unskew.privacy.secure_sum import MOST_MEMBERS, SecureUpdates
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.round.evaluation import Evaluation
from unskew.round.local_optimizers import check_rounds
from unskew.round.sampling import draw, uniform
from unskew.runs import config as configs
from unskew.runs.config import FROM_PYTHON, OPTIONS, SHA256, Config, from_python
from unskew.runs.python_values import Nodes, PythonValues, parse_method_value, require_values
from unskew.runs.recording import OF_CLIENTS, Recorded, parse_recording
from unskew.runs.result import ByClient, Result, measure_clients, read_result, test_owners

DEFAULT_CLIENTS = 10
MEMORY_SHARE = 3  # stored features may take 1/MEMORY_SHARE of the memory
PROCESS_BYTES = 260 * 2**20  # memory of a process that has imported PyTorch, measured


@dataclass(frozen=True)
class Prepared:
    """A federation ready to start. ``partition`` includes the validation part, ``population`` does not."""

    config: Config
    images: ImageSet  # normalised as the network expects
    partition: Partition
    population: Population
    blueprint: Blueprint
    algorithm: Algorithm
    data_sha256: str
    baseline: Result | None
    pretrained: Tensors  # what the network uses of --pretrained, by the names of ``tensors.of_module``
    model_notes: tuple[str, ...] = ()  # where the weights come from, what is frozen
    recordings: tuple[Recorded, ...] = ()
    start: Algorithm | None = None  # the calibration that makes the initial classifier
    finished: Tensors | None = None  # a finished run's weights of the whole network, by their plain names
    say: Say = silent  # reports progress
    nodes: Nodes | None = None  # where the training images are; None: in this process

    @cached_property
    def first(self) -> Tensors:
        """The whole network's initial weights: from the pretrained file where it has them, otherwise from the seed."""
        network, file = self.blueprint.whole(), self.pretrained
        if self.finished is not None and self.config.pretrained is not None:
            config, values = _read_pretrained(self.config)
            file, _ = _fit_pretrained(network, values, config)
        models.initialise(network, Key(self.config.seed).fold("model"))
        tensors.overwrite_some(network, file)
        return tensors.copy(tensors.of_module(network))

    @cached_property
    def frozen(self) -> Tensors:
        """The weights that are not trained, by the names of ``tensors.of_module``."""
        if self.blueprint.layers is None:
            return {}
        trained = tensors.of_module(self.blueprint.network())
        if self.finished is None:
            return {name: value for name, value in self.first.items() if name not in trained}
        names = [name for name in tensors.of_module(self.blueprint.whole()) if name not in trained]
        try:
            return {name: self.finished[name.partition("/")[2]] for name in names}
        except KeyError as error:
            problem = f"the run's weights do not fit {self.config.model}; use the network that it was trained with"
            raise UserError(problem) from error

    def whole(self, model: Tensors) -> Tensors:
        """The whole network's weights: the trained ones from ``model``, the others frozen."""
        if self.blueprint.layers is None:
            return model
        names = tensors.of_module(self.blueprint.whole())
        return {name: model[name] if name in model else self.frozen[name] for name in names}

    @cached_property
    def data(self) -> Tensors:
        """The clients' data: images, or the output of a frozen part, which is computed once."""
        images = self.images
        if self.blueprint.stored:
            views = self.config.views or 0
            part = FrozenPart(self.blueprint, self.frozen, images, self.population, self.data_sha256, views)
            images = part.output(cache_folder(self.config.cache_dir), self.say)
        return dataset(images, self.population) | tensors.prefixed(self.frozen, FROZEN)

    @cached_property
    def side(self) -> ClientSide:
        """A network to work with, and all images; its weights are scratch."""
        return build(self.blueprint, self.data)

    def run_rounds(
        self, engine: Engine, state: ServerState, key: Key, **watching: Any
    ) -> Iterator[tuple[ServerState, driver.Metrics]]:
        """Train the rounds after ``state``; ``watching`` as in ``driver.run``."""
        watching |= {"rounds": self.config.rounds, "per_round": self.config.per_round or 0}
        skip = self.config.on_failure == "skip"
        return driver.run(self.side.algorithm, engine, state, key, skip_failures=skip, **watching)

    @cached_property
    def emd(self) -> float | None:
        """The partition's EMD; None if the labels are at the nodes."""
        if self.nodes is not None:
            return None
        return emd(self.partition.client, self.images.train.labels, len(self.images.classes))

    @cached_property
    def test_owners(self) -> Clients | None:
        """[n], the client that each test image belongs to; None if unknown."""
        return test_owners(self.partition, self.images)

    def measure_clients(self, score: Evaluation) -> ByClient:
        """The accuracy of each client."""
        return measure_clients(self.partition, self.images.train.labels, self.test_owners, score)

    @cached_property
    def first_visits(self) -> list[Visit]:
        """The visits of a first round, for estimates; if the sampler draws nobody, those of a uniform one."""
        key, roster = Key(self.config.seed).fold("round", 1, "sample"), self.population.roster
        per_round = self.config.per_round or (1 if self.nodes is None else len(roster.inhabited))
        return self.algorithm.sampler(key, roster, per_round) or uniform(key, roster, per_round)

    @property
    def first_sizes(self) -> list[int]:
        """How many examples each of the first visits trains on."""
        return [visit.take or self.population.roster.size(visit.client) for visit in self.first_visits]


def prepare(
    config: Config,
    saved: str | None = None,
    values: PythonValues | None = None,
    finished: Tensors | None = None,
    say: Say = silent,
) -> Prepared:
    """Read the images, draw the partition (or read the ``saved`` one) and fill in what the data decides."""
    values = values or PythonValues()
    require_values(values, config, ("data", "model", "method", *(() if saved else ("partition",))))
    if not values.crosses and config.engine not in ("auto", "loop"):
        name = "model" if values.model is not None else "method"
        text = getattr(config, name).removeprefix(FROM_PYTHON)
        raise UserError(f"--engine {config.engine} with {name} {text}: {CANNOT_CROSS}")
    if config.patience is None and config.monitor != OPTIONS["monitor"].default:
        raise UserError(f"--monitor {config.monitor} needs --patience; add --patience N, or leave --monitor out")
    resolve_device(config.device)
    method, algorithm_for = parse_method_value(values, config.method)
    recordings = parse_recording(config.during) if config.during else ()
    images = values.data or read_data(config, say, values.model)
    if algorithm_for(config.local()).released:  # the mean of the data would reveal something of single examples
        if config.normalise == DATA:
            problem = "--normalise data with release=true would publish the clients' pixel statistics without noise"
            raise UserError(f"{problem}; give --normalise half, or leave it out")
        config = replace(config, normalise=config.normalise or _expected_normalisation(config, HALF))
    config, images, blueprint, weights, notes = _plan_model(config, images, values, finished)
    partition = values.nodes.partition if values.nodes else make_partition(config, images.examples, saved, values)
    per_round = config.per_round
    if not values.nodes:  # in a federation all nodes take part, even those that join late
        per_round = per_round or partition.clients
        if per_round > partition.clients:
            raise UserError(f"--per-round {per_round}: there are only {partition.clients} clients; give at most that")
    augmented = config.augment and choose_augmentation(config.augmentation, images) != SHIFT
    config = replace(
        config,
        method=method,
        partition=config.partition if saved else partition.scheme,
        clients=partition.clients,
        per_round=per_round,
        augmentation=RESIZED_CROP if augmented else config.augmentation,  # "auto" may stay: it is in fingerprints
        during=" + ".join(map(str, parse_calls(config.during, "recording"))) if config.during else None,
    )
    if blueprint.layers == 1 and values.method is None:
        methods.refuse_on_frozen_features(method)
    algorithm = algorithm_for(config.local())
    check_rounds(algorithm.local, config.rounds)
    masked = algorithm.secure is not None and algorithm.exchange is None
    if not algorithm.finish and (algorithm.withhold or masked or algorithm.private):
        raise UserError(f"{method}: there is no calibration whose statistics could be protected; add ccvr or lda")
    start = parse_start(config.start, algorithm) if config.start else None
    config = replace(config, start=named(start.finish[0], start) if start else None)
    blueprint = replace(blueprint, method=method, local=config.local(), parsed=algorithm, factory=values.model)
    network = blueprint.network()
    driver.start(algorithm, tensors.of_module(network), network.classifier_names)
    sha256 = images_sha256(images)
    training = partition
    if config.validation:
        images, training = split_validation(images, partition, config.validation, config.data_key.fold("validation"))
    return Prepared(
        config=config,
        images=images,
        partition=partition,
        population=Population.from_partition(training),
        blueprint=blueprint,
        algorithm=algorithm,
        data_sha256=sha256,
        baseline=_read_baseline(config, sha256) if config.baseline else None,
        pretrained=weights,
        model_notes=notes,
        recordings=recordings,
        start=start,
        finished=finished,
        say=say,
        nodes=values.nodes,
    )


def _read_baseline(config: Config, sha256: str) -> Result:
    path = Path(config.baseline or "")
    result = read_result(path)
    same_part = result.settings.get("validation", 0.0) == config.validation
    if result.data_sha256 not in (sha256, None) or not same_part or not result.accuracy > 0:
        needed = f"a run on the same data, with --validation {config.validation:g} and an accuracy above 0"
        raise UserError(f"--baseline {path} is not comparable; give {needed}")
    return result


def read_data(config: Config, say: Say = silent, model: Any = None) -> ImageSet:
    """The data set that a configuration names, scaled to the input size of ``model`` if that comes from Python."""
    folder = Path(config.data_dir) if config.data_dir else None
    side = config.resize or models.input_size(model or config.model)
    images = load(current := find_moved(config.data, folder), folder, cache_settings(config), say, side)
    if len(np.unique(images.train.labels)) < 2:
        raise UserError(f"{config.data}: all training examples have the same label; a classifier needs two or more")
    note = () if current == config.data else (f"{config.data} no longer exists; reading it from {folder}",)
    return replace(images, name=config.data if note else images.name, notes=(*images.notes, *note))


def read_examples(config: Config, say: Say = silent) -> Examples:
    """The training examples of the data set; photographs are read only if necessary."""
    return load_examples(config.data, Path(config.data_dir) if config.data_dir else None, cache_settings(config), say)


def cache_settings(config: Config) -> Cache:
    """Where decoded photographs are cached, and how much space they may use."""
    return cache_of(config.cache_dir, config.cache_disk, config.cache_memory)


def make_partition(
    config: Config, examples: Examples, saved: str | None = None, values: PythonValues | None = None
) -> Partition:
    """The saved partition, the one passed from Python, or the one that the configuration names."""
    if values is not None and values.partition is not None and not saved:
        return _partition_from(values.partition, config, len(examples.labels))
    decides_clients = saved or config.partition.strip().startswith(("file:", "users", "geo"))
    return partition_examples(
        saved or config.partition,
        examples.labels,
        clients=config.clients or (None if decides_clients else DEFAULT_CLIENTS),
        key=config.data_key,
        users=examples.users,
        places=examples.places,
        classes=len(examples.classes),
    )


def _partition_from(value: Partition | Ints, config: Config, examples: int) -> Partition:
    if not isinstance(value, Partition):
        clients = config.clients or int(value.max(initial=-1)) + 1
        value = Partition(value.astype(np.int32), clients, config.partition, config.data_key.seed)
    used = int(value.client.max(initial=-1)) + 1
    if len(value.client) != examples or value.client.min(initial=0) < -1 or not used:
        each = f"for each of the {examples:,} examples"
        raise UserError(f"partition: give a client number from 0 on {each}, or -1 for no client")
    if used > value.clients or config.clients not in (None, value.clients):
        raise UserError(f"--clients {config.clients}: the partition has {used:,} clients; leave --clients out")
    return replace(value, scheme=config.partition)


def _plan_model(
    config: Config, images: ImageSet, values: PythonValues, finished: Tensors | None
) -> tuple[Config, ImageSet, Blueprint, Tensors, tuple[str, ...]]:
    """Read the pretrained weights and fill in the options that depend on them."""
    channels, height, width = images.shape
    shape = (channels, config.resize or height, config.resize or width)
    config = replace(config, model=config.model or models.choose_model(shape))
    layers, classes = parse_train(config.train), len(images.classes)
    model: Any = values.model or config.model
    file, notes = finished or {}, list[str]()
    if config.pretrained is not None:
        if finished is None:
            config, file = _read_pretrained(config)
        if channels == 1:
            parts = models.build(model, shape, classes).named_modules()
            first = next((name for name, part in parts if isinstance(part, nn.Conv2d)), None)
            ends = [value for name, value in file.items() if name.endswith(f"{first}.weight")]  # after wrappers' names
            if any(weight.dim() == 4 and weight.shape[1] == 3 for weight in ends):
                shape = (3, *shape[1:])
                notes.append("gray images are repeated in three channels, as the pretrained network expects")
    config = replace(config, normalise=config.normalise or _expected_normalisation(config))
    images = set_normalisation(images, config.normalise or DATA, shape[0])
    if config.views is not None and (layers is None or config.augment is False):
        problem = f"--views {config.views}: views are augmented images behind a frozen part"
        raise UserError(f"{problem}; add --train, and leave out --no-augment")
    if config.augment is None:  # a frozen part's output is stored once, or once for each view
        config = replace(config, augment=config.views is not None or (images.augment and layers is None))
    weights, stored = dict[str, Tensor](), False
    if config.pretrained is not None or layers is not None:
        network = models.build(model, shape, classes)
    if config.pretrained is not None and finished is None:
        weights, note = _fit_pretrained(network, file, config)
        notes.append(note)
    if layers is not None:
        trained = {id(value) for part in last_layers(network, shape, layers)[0] for value in part.parameters()}
        free = sum(value.numel() for value in network.parameters() if id(value) in trained)
        total = counted(sum(value.numel() for value in network.parameters()), "parameter")
        notes.append(f"--train {config.train}: {free:,} of {total} are trained and sent; the others are frozen")
        unstored = _why_unstored(config, images, network, shape, layers)
        stored = unstored is None
        notes += [] if unstored is None else [unstored]
    if (height, width) != shape[1:]:
        notes.append(f"images are scaled from {width}x{height} to {shape[2]}x{shape[1]} pixels")
    about: dict[str, Any] = {"device": config.device, "crosses": values.crosses, "layers": layers, "stored": stored}
    blueprint = Blueprint(config.method, config.model or "", shape, classes, config.local(), **about)
    return config, images, blueprint, weights, tuple(notes)


def _read_pretrained(config: Config) -> tuple[Config, Tensors]:
    """The configuration with the hash of the pretrained weights, and the weights; an earlier hash must match."""
    where, _, known = (config.pretrained or "").partition(SHA256)
    path = Path(where)
    if where == pretrained.IMAGENET and not from_python(config.model):
        path = pretrained.imagenet_file(config.model or "")
    values = pretrained.read_weights(path)
    sha256 = tensors.sha256(values)[:16]  # independent of the file format
    if known and known != sha256:
        raise UserError(f"--pretrained {where} is not the file that the run was started with; restore the original")
    return replace(config, pretrained=f"{where}{SHA256}{sha256}"), values


def _fit_pretrained(network: Network, file: Tensors, config: Config) -> tuple[Tensors, str]:
    """The weights that the network uses from the file, and a note on the others."""
    where, _, sha256 = (config.pretrained or "").partition(SHA256)
    fit = pretrained.fit(network, file, where, config.model or "")
    note = f"starts from {where} (sha256 {sha256}), pixels normalised as --normalise {config.normalise}"
    if fit.left_out:
        counts = "" if fit.classes is None else f" ({fit.classes:,} classes in the file)"
        note += f"; initialized from the seed: {', '.join(fit.left_out)}{counts}"
    if fit.norms:
        note += f"; running statistics of {counted(fit.norms, 'BatchNorm layer')} are ignored: the network has none"
    return fit.values, note


def _expected_normalisation(config: Config, otherwise: str | None = None) -> str | None:
    if config.pretrained is None:
        return otherwise
    where, name = config.pretrained.partition(SHA256)[0], (config.model or "").partition("(")[0]
    if where != pretrained.IMAGENET and (Path(where).parent / configs.CONFIG).is_file():  # from a run directory
        return configs.read_run(Path(where).parent).normalise or DATA
    return "lite" if name == pretrained.IMAGENET_FOR else "imagenet" if name in models.PUBLIC else DATA


def _why_unstored(
    config: Config, images: ImageSet, network: Network, shape: tuple[int, int, int], layers: int
) -> str | None:
    again = "the frozen part runs again at every step"
    if config.augment and config.views is None:
        return f"images are augmented at every step, so {again}; --views 4 stores four views of each image instead"
    cut = find_cut(network, shape, layers)
    if cut is None:
        return f"this network cannot be split into a frozen and a trained part, so {again}"
    size = stored_bytes(images, cut.shape, config.views or 0)
    if size > physical_memory() / MEMORY_SHARE:
        return f"the frozen part's output for all images would need {format_bytes(size)} of memory, so {again}"
    return None


def parse_start(source: str, algorithm: Algorithm) -> Algorithm:
    """Parse the calibration of ``--start`` and its protections; ``algorithm`` is the run's."""
    start = methods.parse_calibrations(source)
    finisher, needs = start.finish[0], start.finish[0].needs
    plain = not isinstance(needs, RealFeatures) and needs.layers == 1 and not needs.expand and not finisher.bends
    if len(start.finish) > 1 or not plain or start.private is not None or algorithm.head is not None:
        possible = "lda, ridge or ccvr without layers, expand, relu, tukey or private, and a method without clsnorm"
        raise UserError(f"--start {source} cannot become the network's classifier; give {possible}")
    if missing := " + ".join(name for name in protections(algorithm) if name not in protections(start)):
        needed = f'"{source} + {missing}"'
        problem = f"--start {source} would send statistics without {missing}, which the method uses"
        raise UserError(f"{problem}; give --start {needed}")
    return start


def rehearse(prepared: Prepared) -> None:
    """Build everything and draw the first visits, so that bad settings are refused before the directory is created."""
    check_protections(prepared)
    side, config = prepared.side, prepared.config
    if prepared.nodes is not None and any(visit.client == EVERYONE for visit in prepared.first_visits):
        raise UserError(f"{config.method} needs all examples in one place; choose a federated method")
    tensors.overwrite(side.network, prepared.first)
    for size in set(prepared.first_sizes):
        check_visit(size, side.algorithm.local, prepared.blueprint.shape)
    draw(side.algorithm, Key(config.seed), 1, prepared.population.roster, config.per_round or 1)
    engines.rehearse(config.engine, EngineSetup(prepared.blueprint, prepared.data))
    if prepared.start is not None and side.network.classifier.bias is None:
        name = prepared.start.finish[0].text
        raise UserError(f"--start {name} makes a classifier with a bias, but the network's has none; add one to it")
    for algorithm in (prepared.start or Algorithm(), side.algorithm):
        for finisher in algorithm.finish:
            check(finisher, algorithm, side)


def check_protections(prepared: Prepared) -> None:
    """Refuse settings that the protections do not cover, and too few or too many clients for them."""
    algorithm, config = prepared.algorithm, prepared.config
    clients = len(prepared.population.roster.inhabited)
    drawn = min(config.per_round or clients, clients)
    masked, private = isinstance(algorithm.exchange, SecureUpdates), algorithm.mechanism is not None
    recorded = [recording.name for recording in prepared.recordings if recording.name in OF_CLIENTS]
    if recorded and (masked or private or algorithm.released):
        raise UserError(f"--during {recorded[0]} records single clients, which the method hides; leave it out")
    if masked:
        require_extra("cryptography")
        if not MIN_CLIENTS <= drawn <= MOST_MEMBERS:
            few = f"{drawn:,} of {clients:,} clients take part in a round"
            raise UserError(f"secure(updates=true): {few}; give --per-round {MIN_CLIENTS} to {MOST_MEMBERS:,}")
        sampled = drawn < clients or algorithm.available is not None or algorithm.arrive is not None
        if sampled and (steady := [statistic.name for statistic in algorithm.statistics if statistic.steady]):
            reason = "what a client sends for it hardly changes, so sums over different clients would reveal it"
            warning = f"secure(updates=true) and {steady[0]}: {reason}"
            if prepared.nodes:
                raise UserError(f"{warning}; let every client take part in every round, or leave one of them out")
            warnings.warn(warning, stacklevel=2)
    if algorithm.released:
        noisy = algorithm.private is not None and algorithm.private.release
        exact = [finisher for finisher in algorithm.finish if isinstance(finisher.needs, RealFeatures) or not noisy]
        if published := [*(["--validation"] if config.validation else []), *(finisher.text for finisher in exact)]:
            problem = f"{published[0]} with release=true would publish results without noise; leave it out"
            raise UserError(problem if config.validation else f"{problem}, or add private(release=true)")
    if private:
        require_extra("dp_accounting")
        if prepared.start is not None:
            raise UserError("the private-updates guarantee does not cover --start; leave out one or the other")
        if buffer := next((name for name, _ in prepared.blueprint.network().named_buffers()), None):
            raise UserError(f"private-updates adds no noise to running statistics ({buffer}); use GroupNorm instead")
        poisson = isinstance(algorithm.mechanism, PrivateUpdates) and algorithm.mechanism.poisson
        if poisson and drawn < clients and masked:
            raise UserError(
                "secure(updates=true) and private-updates(sampling=poisson): a round with fewer clients than a secure "
                "sum needs would show who was drawn; give sampling=fixed, or let every client take part in every round"
            )


# Additional memory of a federation's server, fitted to measurements (docs/how-to/federation.md)
FLOWER_BYTES = 70 * 2**20
SERVER_COPIES, REPLY_COPIES = 6, 4  # copies of the model per run, and per reply in a round


@dataclass(frozen=True)
class Overview:
    """The facts about a run before its first round."""

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
    visits: tuple[Visit, ...]  # of a first round, as an estimate
    data_bytes: int
    memory_bytes: int
    disk_bytes: int
    algorithm: Algorithm
    baseline: Result | None = None
    unlike_baseline: tuple[str, ...] = ()  # the baseline's settings that differ
    model_notes: tuple[str, ...] = ()  # where its weights come from, what is frozen
    batch_norm: str = ""  # how BatchNorm's running statistics are handled; empty if the network has none


def overview(prepared: Prepared, path: Path, state: ServerState, engine: str, processes: Processes) -> Overview:
    """Describe the run; its memory and disk space are estimates."""
    config, algorithm, visits = prepared.config, prepared.algorithm, prepared.first_visits
    model = tensors.count_bytes(state.tensors)
    images = [split.images for split in (prepared.images.train, prepared.images.test)]
    read_lazily = sum(split.nbytes for split in images if not isinstance(split, np.ndarray))
    data = tensors.count_bytes(prepared.data) + min(read_lazily, cache_settings(config).memory)
    plans = 11 * examples_for(max(prepared.first_sizes, default=0), algorithm.local)
    memories = sum(tensors.count_bytes(memory.blank(state.tensors)) for memory in algorithm.remember)
    visited = min(len(prepared.population.roster.inhabited), config.rounds * len(visits))
    memory = PROCESS_BYTES * processes.count + data * processes.copies + (model * 8 + plans) * processes.working
    if prepared.nodes is not None:
        memory += FLOWER_BYTES + (SERVER_COPIES + REPLY_COPIES * len(visits)) * model
    disk = 3 * model + 2 * tensors.count_bytes(state.memory | state.sent) + memories * (2 * visited + len(visits))
    names = ("config", "images", "partition", "population", "emd", "algorithm", "model_notes", "baseline")
    return Overview(
        path=path,
        engine=engine,
        processes=processes,
        parameters=sum(v.numel() for name, v in state.tensors.items() if name.startswith("params/")),
        first_round=state.round + 1,
        local=algorithm.local,
        visits=tuple(visits),
        unlike_baseline=_differences(prepared) if prepared.baseline else (),
        batch_norm=models.batch_norm_policy(prepared.blueprint.network()),
        data_bytes=data,
        memory_bytes=memory,
        disk_bytes=disk + 300 * config.rounds + 4 * len(prepared.images.train),
        **{name: getattr(prepared, name) for name in names},
    )


def _differences(prepared: Prepared) -> tuple[str, ...]:
    """The baseline's settings that differ; relative accuracy is most meaningful if only the method does."""
    baseline, own = configs.read_run(Path(prepared.config.baseline or "")), prepared.config
    values = [(key, getattr(baseline, key), getattr(own, key)) for key in ("model", "augment", "rounds", "seed")]
    if not from_python(baseline.method) and not unknown_plugins(baseline.method):
        local = methods.parse_method(baseline.method, baseline.local()).local  # fedvc sets the epochs
        keys = [key for key in asdict(local) if key not in ("augment", "augmentation")]
        values += [(key, getattr(local, key), getattr(prepared.algorithm.local, key)) for key in keys]
    return tuple(f"{key.replace('_', ' ')} {theirs} there" for key, theirs, ours in values if theirs != ours)
