"""Before the first round: read the images, make the partition, fill in what the data decides, reject bad settings."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from unskew import methods, models
from unskew.calibration.classifier import CalibratedClassifier
from unskew.calibration.feasible import check, named, protections
from unskew.calibration.federated import Federation, Forecasted, Gathering
from unskew.calibration.finisher import RealFeatures
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.limits import cache_folder
from unskew.core.machine import physical_memory, resolve_device
from unskew.core.plugins import require_extra
from unskew.core.types import Engine, Examples, ImageSet, Local, ServerState, Tensors, Visit
from unskew.core.units import counted, format_bytes
from unskew.data.augment import DATA, normalised
from unskew.data.batches import RESIZED_CROP, SHIFT, suited
from unskew.data.partition import partition_examples
from unskew.data.photographs import Say, silent
from unskew.data.population import Clients, Ints, Partition, Population, emd, with_validation
from unskew.data.sources import find_moved, load, load_examples
from unskew.data.store import Cache, cache_of
from unskew.engines import Processes
from unskew.engines.blueprint import CANNOT_CROSS, FROZEN, Blueprint, Values, dataset, pixels
from unskew.engines.features import Frozen, images_sha256, stored_bytes, stored_features
from unskew.methods import parse_calibrations
from unskew.models import pretrained
from unskew.models.finetune import find_cut, last_layers, parse_train
from unskew.models.layers import Network
from unskew.privacy.agreement import MIN_CLIENTS
from unskew.privacy.ledger import PrivateRounds, Spent, spent_on
from unskew.privacy.private_updates import PrivateUpdates
from unskew.privacy.questions import MOST_MEMBERS
from unskew.privacy.secure_updates import SecureUpdates
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.round.evaluation import evaluate
from unskew.round.local_optimizers import check_rounds
from unskew.round.sampling import uniform
from unskew.runs import config as configs
from unskew.runs.client_accuracy import test_owners
from unskew.runs.config import FROM_PYTHON, OPTIONS, SHA256, Config, from_python
from unskew.runs.given import Given, Nodes, parse_given
from unskew.runs.recording import Recorded, parse_recording, plain_spelling
from unskew.runs.result import Calibration, Result, read_result

MEMORY_SHARE = 3  # stored features may take one part in so many of the memory


@dataclass(frozen=True)
class FirstModel:
    """A run's start: the configuration and images as it uses them, the network's shape, the weights of the file."""

    config: Config
    images: ImageSet  # normalised as the network expects
    shape: tuple[int, int, int]  # of the images that the network takes
    layers: int | None  # how many at the end are trained; None: all
    stored: bool  # whether the frozen part's output is stored
    file: Tensors  # what the network takes from the file, by the names of ``tensors.of_module``
    notes: tuple[str, ...] = ()


def first_model(config: Config, images: ImageSet, model: Any, finished: Tensors | None) -> FirstModel:
    """Read the pretrained weights, fill in what follows from them. ``model`` is the network's name, or its factory.

    ``finished`` are the whole network's weights at the end of a run, by their plain names: then no file is read.
    """
    channels, height, width = images.shape
    side = config.resize
    shape = (channels, side or height, side or width)
    name = config.model or models.suited(shape)
    config = replace(config, model=name)
    layers = parse_train(config.train)
    file, notes = finished or {}, list[str]()
    if config.pretrained is not None and finished is None:
        config, file = _read(config)
    if config.pretrained is not None and channels == 1 and _takes_colour(model or name, shape, images, file):
        shape = (3, *shape[1:])
        notes.append("grey images are repeated as three channels, which the pretrained network takes")
    config = replace(config, normalise=config.normalise or _expected(config))
    images = normalised(images, config.normalise or DATA, shape[0])
    config = _augmented(config, images, layers)
    fitted, stored = dict[str, Tensor](), False
    if config.pretrained is not None or layers is not None:
        network = models.build(model or name, shape, len(images.classes))
    if config.pretrained is not None and finished is None:
        fitted, said = _fitted(network, file, config)
        notes += said
    if layers is not None:
        stored, said = _stored(config, images, network, shape, layers)
        notes += [_trained_words(config.train, network, layers, shape), *said]
    if side and (height, width) != (side, side):
        notes.append(f"images are scaled from {width}x{height} to {side}x{side} pixels")
    return FirstModel(config, images, shape, layers, stored, fitted, tuple(notes))


def _read(config: Config) -> tuple[Config, Tensors]:
    """The file's tensors, and the configuration with their hash, which they must have where it is there already."""
    where, _, known = (config.pretrained or "").partition(SHA256)
    if configs.from_python(config.model):
        path = Path(where)
    else:
        path = pretrained.imagenet_file(config.model or "") if where == pretrained.IMAGENET else Path(where)
    values = pretrained.read_weights(path)
    found = pretrained.sha256(values)
    if known and known != found:
        raise UserError(
            f"--pretrained {where} has other weights (sha256 {found}…) than the run was started with ({known}…); give "
            "that file, or start another run"
        )
    return replace(config, pretrained=f"{where}{SHA256}{found}"), values


def _fitted(network: Network, file: Tensors, config: Config) -> tuple[Tensors, list[str]]:
    where, _, sha256 = (config.pretrained or "").partition(SHA256)
    fit = pretrained.fit(network, file, where, config.model or "")
    words = f"starts from {where} (sha256 {sha256}), pixels normalised as --normalise {config.normalise}"
    if fit.left_out:
        reasons = dict.fromkeys(fit.left_out, "not in the file")
        if fit.classes is not None:  # the last of them is the classifier
            here = network.classifier.out_features
            counts = f"{fit.classes:,} classes in the file, {here:,} here"
            reasons[fit.left_out[-1]] = counts if fit.classes != here else "of another shape in the file"
        layers = " and ".join(f"{layer} ({reason})" for layer, reason in reasons.items())
        words += f"; {layers} {'starts' if len(reasons) == 1 else 'start'} as drawn from the seed"
    return fit.values, [words]


def _expected(config: Config) -> str | None:
    """How the pretrained network's pixels were normalised; None without one: as the data set says."""
    if config.pretrained is None:
        return None
    where, name = config.pretrained.partition(SHA256)[0], (config.model or "").partition("(")[0]
    if name == pretrained.IMAGENET_FOR and where == pretrained.IMAGENET:
        return "lite"
    if (Path(where).parent / configs.CONFIG).is_file():  # of a run of ours
        return configs.read_run(Path(where).parent).normalise or DATA
    if name == pretrained.IMAGENET_FOR:
        return "lite"
    return "imagenet" if name in models.PUBLIC else DATA


def _takes_colour(model: Any, shape: tuple[int, int, int], images: ImageSet, file: Tensors) -> bool:
    """Whether the file's first convolution takes three channels where the network for these images takes one."""
    network = models.build(model, shape, len(images.classes))
    first = next((name for name, part in network.named_modules() if isinstance(part, nn.Conv2d)), None)
    weights = [value for name, value in file.items() if name.endswith(f"{first}.weight")]  # wrappers may be before it
    return any(weight.dim() == 4 and weight.shape[1] == 3 for weight in weights)


def _augmented(config: Config, images: ImageSet, layers: int | None) -> Config:
    """Augmentation as suits the data; a frozen part's output is stored once, so there only where it is asked for."""
    if config.views is not None:
        if layers is None:
            raise UserError(f"--views {config.views}: only a frozen part's output is stored; give --train too")
        if config.augment is False:
            raise UserError(f"--views {config.views}: views are of augmented images; leave --no-augment out")
        return replace(config, augment=True)
    if config.augment is None:
        return replace(config, augment=images.augment and layers is None)
    return config


def _stored(
    config: Config, images: ImageSet, network: Network, shape: tuple[int, int, int], layers: int
) -> tuple[bool, list[str]]:
    """Whether the frozen part's output is stored, and a note where it is not."""
    again = "the frozen part runs again at every step"
    if config.augment and config.views is None:
        return False, [f"every step augments its images, so {again}; --views 4 stores four views of each image instead"]
    cut = find_cut(network, shape, layers)
    if cut is None:
        return False, [f"no place was found where this network can be cut in two, so {again}"]
    size = stored_bytes(images, cut.shape, config.views or 0)
    if size > (most := physical_memory() / MEMORY_SHARE):
        return False, [
            f"its output for all images would take {format_bytes(size)}, and {format_bytes(most)} is the limit, so "
            f"{again}"
        ]
    return True, []


def _trained_words(train: str, network: Network, layers: int, shape: tuple[int, int, int]) -> str:
    trained = {id(v) for part in last_layers(network, shape, layers)[0] for v in part.parameters()}
    counts = [(id(value) in trained, value.numel()) for value in network.parameters()]
    some, total = sum(n for mine, n in counts if mine), sum(n for _, n in counts)
    return f"--train {train}: {some:,} of {counted(total, 'parameter')} are trained and sent, the others are frozen"


def first_weights(network: Network, file: Tensors, key: Any) -> Tensors:
    """The whole network's weights before the first round: drawn from the key, those of the file over them."""
    models.initialise(network, key)
    tensors.overwrite_some(network, file)
    return tensors.copy(tensors.of_module(network))


@dataclass(frozen=True)
class Prepared:
    """A federation ready to start.

    With a validation part, ``images.test`` is that part, and ``population`` does not have it; ``partition`` is whole.
    """

    config: Config
    images: ImageSet
    partition: Partition
    population: Population
    blueprint: Blueprint
    algorithm: Algorithm
    data_sha256: str
    baseline: Result | None
    first_model: FirstModel
    recordings: tuple[Recorded, ...] = ()
    start: Algorithm | None = None  # the calibration that makes the initial classifier
    finished: Tensors | None = None  # the whole network's weights at a run's end, by their plain names
    say: Say = silent  # progress of what takes long
    nodes: Nodes | None = None  # where the training images are; None: here

    @cached_property
    def first(self) -> Tensors:
        """The whole network's weights before the first round."""
        file = self.first_model.file
        if self.finished is not None and self.config.pretrained is not None:
            file = first_model(self.config, self.images, self.blueprint.values.network, None).file
        return first_weights(self.blueprint.whole(), file, Key(self.config.seed).fold("model"))

    @cached_property
    def frozen(self) -> Tensors:
        """The weights that nobody trains, by the names of ``tensors.of_module``; none where all are trained."""
        if self.blueprint.layers is None:
            return {}
        trained = tensors.of_module(self.blueprint.network())
        if self.finished is None:
            return {name: value for name, value in self.first.items() if name not in trained}
        names = [name for name in tensors.of_module(self.blueprint.whole()) if name not in trained]
        if missing := [name for name in names if name.partition("/")[2] not in self.finished]:
            raise UserError(
                f"the run's weights do not fit its network {self.config.model}: {missing[0]} is not among them; was "
                "the network changed since?"
            )
        return {name: self.finished[name.partition("/")[2]] for name in names}

    def whole(self, model: Tensors) -> Tensors:
        """The whole network's weights with those that were trained in their places."""
        if self.blueprint.layers is None:
            return model
        names = tensors.of_module(self.blueprint.whole())
        return {name: model[name] if name in model else self.frozen[name] for name in names}

    def initialise(self, network: Network) -> None:
        """Give what is trained the weights that it has before the first round."""
        tensors.overwrite(network, self.first)

    @cached_property
    def data(self) -> Tensors:
        """All that the clients hold: images, or what a frozen part makes of them, which is computed once."""
        images = self.images
        if self.blueprint.stored:
            network = self.blueprint.whole()
            tensors.overwrite_some(network, self.frozen)
            parts = pixels(self.blueprint, dataset(images, self.population))
            frozen = Frozen(self.blueprint, network, parts, self.data_sha256, self.config.views or 0)
            images = stored_features(frozen, images, cache_folder(self.config.cache_dir), self.say)
        return dataset(images, self.population) | tensors.prefixed(self.frozen, FROZEN)

    @cached_property
    def emd(self) -> float | None:
        """The partition's EMD; None where the labels are at the nodes."""
        if self.nodes is not None:
            return None
        return emd(self.partition.client, self.images.train.labels, len(self.images.classes))

    @cached_property
    def test_owners(self) -> Clients | None:
        """[n], the client that each test image belongs to; None where that is not known."""
        users = self.images.test_users
        known = users is not None and len(users) == len(self.images.test)
        return test_owners(self.partition.names, users) if known else None


def read_data(config: Config, say: Say = silent) -> ImageSet:
    """The data set that a configuration names."""
    folder = Path(config.data_dir) if config.data_dir else None
    images = load(found := find_moved(config.data, folder), folder, cache_settings(config), say)
    if found == config.data:
        return images
    note = f"{config.data.partition(':')[2]} does not exist any more, and is read from {folder}"
    return replace(images, name=config.data, notes=(*images.notes, note))


def read_examples(config: Config, say: Say = silent) -> Examples:
    """The training examples of that data set: photographs are not read unless that is needed."""
    return load_examples(config.data, Path(config.data_dir) if config.data_dir else None, cache_settings(config), say)


def cache_settings(config: Config) -> Cache:
    """Where decoded photographs are kept, and what they may take."""
    return cache_of(config.cache_dir, config.cache_disk, config.cache_memory)


@dataclass(frozen=True)
class InitialModel:
    """The model before the first round: how well it does, and the calibration that made its classifier, if one did."""

    accuracy: float
    loss: float
    start: Calibration | None = None
    notes: tuple[str, ...] = ()


def parse_start(source: str, algorithm: Algorithm) -> Algorithm:
    """The one calibration of ``--start``, with what protects it; refused where its classifier cannot be trained on.

    ``algorithm`` is what the run trains with.
    """
    start = parse_calibrations(source)
    if len(start.finish) > 1:
        names = " and ".join(each.text for each in start.finish)
        raise UserError(f"--start {source}: training starts from one classifier, these are {names}; name one")
    finisher, needs = start.finish[0], start.finish[0].needs
    because, instead = "", "give lda, ridge or ccvr"
    if isinstance(needs, RealFeatures):
        because = "it pools real features, which no federation could do"
    elif needs.layers > 1:
        because = f"it replaces {needs.layers} layers by others (layers)"
    elif needs.expand:
        because = "it sees random features beside the network's own (expand)"
    elif finisher.bends:
        because = "features pass a transformation first (relu, tukey)"
    elif start.private is not None:
        because, instead = "features are clipped first (private)", "leave private out of it"
    elif algorithm.head is not None:
        because = "the method uses the classifier's rows scaled to length 1 (clsnorm)"
        instead = "leave --start out, or clsnorm"
    if because:
        raise UserError(f"--start {source} cannot become the network's classifier: {because}; {instead}")
    if lacking := [each for each in protections(algorithm) if each not in protections(start)]:
        added = " + ".join([source, *lacking])
        raise UserError(
            f"--start {source} would send statistics without {' + '.join(lacking)}, which the method has; give --start "
            f'"{added}"'
        )
    return start


def check_start(start: Algorithm, side: ClientSide) -> None:
    """Refuse a start that this network or its clients cannot have."""
    finisher = start.finish[0]
    if side.network.classifier.bias is None:
        raise UserError(f"--start {finisher.text}: its classifier has a bias, the network's has none; give it one")
    check(finisher, start, side)


def calibrate_start(
    model: Tensors, start: Algorithm, side: ClientSide, engine: Engine, key: Key,
    observe: Callable[[Gathering | Forecasted], None],
) -> tuple[Tensors, CalibratedClassifier, int, float]:  # fmt: skip
    """The model with the calibration's classifier; the calibration itself, the bytes and seconds that it took."""
    federation = Federation(engine, side, model, start, key, observe, {})
    classifier, sent, seconds = federation.calibrated(start.finish[0])
    linear = classifier.linear()
    new = dict(zip(side.classifier, (linear.weight.detach(), linear.bias.detach()), strict=True))
    changed = {name: new[name].to(value) if name in new else value for name, value in model.items()}
    return changed, classifier, sent, seconds + classifier.report.seconds


def begin(
    model: Tensors, start: Algorithm, side: ClientSide, engine: Engine, key: Key, observe: Callable[[Any], Any]
) -> tuple[ServerState, InitialModel]:
    """The state before the first round, and how well its model does.

    What the methods send and what the server keeps is made of the model that has the new classifier.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, classifier, sent, seconds = calibrate_start(model, start, side, engine, key, observe)
    state = driver.start(side.algorithm, model, side.classifier)
    score = evaluate_start(state, side, engine, key)
    made = Calibration(named(start.finish[0], start), score.accuracy, score.loss, sent, seconds)
    notes = dict.fromkeys([*(str(warning.message) for warning in warned), *classifier.report.notes()])
    return state, replace(score, start=made, notes=tuple(notes))


def evaluate_start(state: ServerState, side: ClientSide, engine: Engine, key: Key) -> InitialModel:
    """How well the model before the first round does."""
    score = evaluate(engine, state.tensors, len(side.test.labels), key, exchange=side.algorithm.exchange)
    return InitialModel(score.accuracy, score.loss)


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
    parts = given.nodes.partition if given.nodes else make_partition(config, images.examples, kept, given)
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


def make_partition(
    config: Config, examples: Examples, kept: str | None = None, given: Given | None = None
) -> Partition:
    """The partition that a configuration asks for, or the one that was given."""
    if given is not None and given.partition is not None and not kept:
        return _given_partition(given.partition, config, len(examples.labels))
    return partition_examples(
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


OF_SINGLE_CLIENTS = ("norms", "drift")  # recordings that look at one client's model


def check_protections(prepared: "Prepared") -> None:
    """Refuse what the run's protections cannot cover, or cannot do with so few clients."""
    algorithm, config = prepared.algorithm, prepared.config
    clients = len(prepared.population.roster.inhabited)
    drawn = min(config.per_round or clients, clients)
    if isinstance(algorithm.exchange, SecureUpdates):
        require_extra("cryptography")
        _refuse_recordings("secure(updates=true)", prepared.recordings)
        if drawn < MIN_CLIENTS:
            given = f"{drawn} of {clients} clients come to a round"
            raise UserError(f"secure(updates=true): {given}, and a secure sum needs {MIN_CLIENTS}; give --per-round")
        if drawn > MOST_MEMBERS:
            raise UserError(f"secure(updates=true): {drawn:,} clients come to a round; give --per-round {MOST_MEMBERS}")
    if algorithm.mechanism is not None:
        require_extra("dp_accounting")
        _refuse_recordings("private-updates", prepared.recordings)
        if prepared.start is not None:
            raise UserError(
                f"private-updates with --start {config.start}: the model would begin with statistics of the clients "
                "that the updates' noise does not cover; leave one of them out"
            )
        network = prepared.blueprint.network()
        if buffers := [name for name, _ in network.named_buffers()]:
            raise UserError(
                f"private-updates: the network {config.model} has running statistics ({buffers[0]}), which clients "
                "would send without noise; take one with GroupNorm"
            )
        poisson = isinstance(algorithm.mechanism, PrivateUpdates) and algorithm.mechanism.poisson
        if poisson and drawn < clients and isinstance(algorithm.exchange, SecureUpdates):
            raise UserError(
                "secure(updates=true) and private-updates(sampling=poisson): a round with fewer clients than a secure "
                "sum needs would show who was drawn; give sampling=fixed, or let every client come to every round"
            )


def spent_in_rounds(prepared: "Prepared", rounds: int) -> Spent | None:
    """What so many rounds of private updates promise; None where they are not private or have no noise."""
    mechanism = prepared.algorithm.mechanism
    if not isinstance(mechanism, PrivateUpdates) or not mechanism.noise or not rounds:
        return None
    clients = len(prepared.population.roster.inhabited)
    return spent_on((), _private_rounds(mechanism, rounds, min(prepared.config.per_round or clients, clients), clients))


def notes_on_protections(algorithm: Algorithm, validation: bool) -> list[str]:
    """What the noise of private updates does not cover."""
    if algorithm.mechanism is None:
        return []
    notes = []
    if algorithm.private is None:
        open_ones = [each.text for each in algorithm.finish if not isinstance(each.needs, RealFeatures)]
        notes += [f"{text}: its statistics have no noise, (ε, δ) does not cover it" for text in open_ones]
    if validation:
        notes.append("accuracy is measured on clients' own examples, which (ε, δ) does not cover")
    return notes


def _private_rounds(mechanism: PrivateUpdates, rounds: int, drawn: int, clients: int) -> PrivateRounds:
    drawing = mechanism.drawing(drawn, clients)
    sampling = "everyone" if drawing.everyone else "poisson" if drawing.poisson else "fixed"
    return PrivateRounds(
        epsilon=mechanism.epsilon(rounds, drawn, clients) or 0.0, delta=mechanism.delta, rounds=rounds,
        clip=mechanism.clip, noise=mechanism.noise, sampling=sampling, replaced=drawing.replaces,
        example_epsilon=mechanism.epsilon(rounds, drawn, clients, replaced=True) or 0.0,
    )  # fmt: skip


def _refuse_recordings(method: str, recordings: Sequence[Recorded]) -> None:
    for each in recordings:
        if each.name in OF_SINGLE_CLIENTS:
            raise UserError(
                f"{method} and --during {each.name}: it would record single clients, which the method keeps from the "
                "server; leave it out (silhouette and model look at the server's model alone)"
            )
