"""What a job is for, the masks that a run agreed on, and a node's policy: what its owner allows.

Server and node agree on the method before the first round. The node then refuses a server that asks for the same
numbers without masks, or with masks that fewer clients could remove, and whatever else its policy does not allow.
The owner writes it as TOML; ``commented`` renders the defaults with an explanation of each key. A node checks a run
before it agrees to it, without importing or allocating anything, and checks every job before it starts.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from unskew import methods, models
from unskew.calibration import CALIBRATIONS
from unskew.calibration.federated import protected_request
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.jobs import EvaluateCalibrated, FixedPointMoments, Moments
from unskew.core import language
from unskew.core.errors import UserError, brief, nearest
from unskew.core.files import record_from, toml_record
from unskew.core.plugins import find_plugins, parse_plugin, plugin_sha256
from unskew.core.types import Job, Tensors, Visit
from unskew.core.units import counted, format_bytes
from unskew.data.batches import examples_for
from unskew.engines.blueprint import Blueprint
from unskew.engines.flower.messages import BadMessage
from unskew.models.any_module import bind_factory
from unskew.privacy.masking import MIN_CLIENTS, shares_needed
from unskew.privacy.secure_sum import MaskKeys, SecureJob, SecureUpdates
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide, Survey, Train
from unskew.round.evaluation import Evaluate


@dataclass(frozen=True)
class Purpose:
    """The work inside a job and, for a secure sum, how many clients must stay to the end."""

    work: Job
    threshold: int = 0
    under_way: bool = False  # whether a secure sum already has its members

    @staticmethod
    def of(job: Job) -> "Purpose":
        """Unwrap masking and rounding."""
        work = job
        while (inner := getattr(work, "inner", None)) is not None:
            work = inner
        if not isinstance(job, SecureJob):
            return Purpose(work)
        return Purpose(work, max(job.threshold, MIN_CLIENTS), not isinstance(job, MaskKeys))

    @property
    def trains(self) -> bool:
        """Whether it belongs to a training round."""
        return isinstance(self.work, Train)

    @property
    def statistics(self) -> bool:
        """Whether it measures class statistics for a calibration."""
        return isinstance(self.work, Moments | FixedPointMoments)

    @property
    def round(self) -> int:
        """The round number; 0 outside training."""
        return self.work.round if isinstance(self.work, Train) else 0

    @property
    def may_miss(self) -> bool:
        """Whether clients may be missing: in training and evaluation, but not in surveys and statistics."""
        return isinstance(self.work, Train | Evaluate | EvaluateCalibrated)


def name_of(job: Job) -> str:
    """A job's name in messages and logs."""
    return str(type(Purpose.of(job).work).__struct_config__.tag)  # type: ignore[attr-defined]


def check_masked(job: Job, algorithm: Algorithm) -> None:
    """Refuse a job without the agreed masks, or with masks that too few clients could remove."""
    masked = isinstance(algorithm.exchange, SecureUpdates) or (algorithm.secure and Purpose.of(job).statistics)
    if isinstance(job, SecureJob):
        if algorithm.secure is None:
            return
        count = len(job.members)
        if job.threshold < (needed := shares_needed(algorithm.secure.threshold, count)):
            raise BadMessage(f"it lets {job.threshold} of {count} clients remove the masks; {needed} were agreed on")
    elif masked:
        raise BadMessage(f"it asks for {name_of(job)} without masks, but {algorithm.secure} was agreed on")


def subject_of(job: Job, shared: bytes, key: bytes, algorithm: Algorithm) -> str:
    """What a secure sum is about, starting with its kind. Sums about the same subject must have the same members.

    Statistics, surveys and whatever a method measures identically in every round have one set of clients for the whole
    run. Everything else is asked once per set of shared tensors, with digest ``shared``. Training also depends on its
    key: another key gives another update.
    """
    purpose, kind = Purpose.of(job), name_of(job)
    if purpose.statistics:
        return "statistics"
    steady = purpose.trains and any(statistic.steady for statistic in algorithm.statistics)
    if steady or isinstance(purpose.work, Survey):
        return kind
    return f"{kind} {shared.hex()} {key.hex()}" if purpose.trains else f"{kind} {shared.hex()}"


POLICY = "policy.toml"
PROTECTIONS = ("secure", "private", "private-updates", "withhold")  # always allowed: they only reduce what leaves
TRAINING = tuple(name for name in methods.METHODS if name not in (*CALIBRATIONS, *PROTECTIONS, "centralised"))
NETWORKS = (*models.NETWORKS, *models.PUBLIC)
JOBS = ("train", "survey", "evaluate", "moments", "evaluate-calibrated")
MEGABYTE = 10**6
MAX_SIDE = 2048  # pixels, of a network's input

UNPROTECTED = 5  # the fewest examples of a class in statistics without masks
EXAMPLES = {"max_epsilon": "8.0", "min_class": "5"}  # for keys that are not set by default

COMMENTS = {
    "methods": "Training methods. Protections (secure, private, private-updates, withhold) are always allowed.",
    "calibrations": "Calibrations after the last round.",
    "networks": "Networks.",
    "jobs": "What clients do: train; survey, once before the first round; evaluate, on the node's own test images;\n"
    "moments, the class statistics for a calibration; evaluate-calibrated.",
    "secure": 'What must be masked: "statistics" for calibrations; "updates", which covers everything else in a round.',
    "private": 'What must get noise for differential privacy, with release=true: "statistics", "updates".\n'
    "If secure masks a sum, each client adds its share of the noise. Otherwise the server adds it, and sees what\n"
    "it receives without noise. max_epsilon decides how much noise is enough.",
    "max_epsilon": "The total ε that all runs may spend. If set, updates and statistics need noise. Not set: no limit.",
    "min_clients": "The fewest clients in a masked sum.",
    "min_class": "The fewest examples of a class in statistics: runs need withhold(N) with at least this N.\n"
    "The mean of a single example is its features, from which the image can be reconstructed. Not set:\n"
    f"{UNPROTECTED} if statistics are not masked, 1 if secure masks them. Masked noise\n"
    "(secure + private(release=true)) is enough by itself.",
    "min_part": "The same for parts of a class, as with ccvr(components=2).",
    "min_update": "The fewest examples behind an update, if the server asks for only some of a client's.",
    "max_components": "The maximum number of parts per class in statistics.",
    "max_layers": "The maximum number of linear layers behind the features of statistics.",
    "max_expand": "The maximum number of random features in statistics.",
    "max_statistics": "The maximum size of a client's statistics, in MB.",
    "max_message": "The maximum size of a message, in MB.",
    "max_model": "The maximum size of a network, in MB.",
    "max_disk": "The disk quota for all runs in the node's folder, in MB.",
    "max_runs": "The maximum number of unfinished runs.",
    "plugins": 'Code from outside unskew, with the SHA-256 of its file, or "" to allow any content:\n'
    '"package.module:function" = "9f86d0…"',
}

Covered = Literal["statistics", "updates"]
Size = Annotated[int, Meta(ge=1, le=10**7)]  # in megabytes
Least = Annotated[int, Meta(ge=1, le=10**9)]


@dataclass(frozen=True)
class Policy:
    """What a node takes part in; ``COMMENTS`` explains each key."""

    methods: tuple[str, ...] = TRAINING
    calibrations: tuple[str, ...] = tuple(name for name in CALIBRATIONS if name != "oracle")
    networks: tuple[str, ...] = NETWORKS
    jobs: tuple[str, ...] = JOBS
    secure: tuple[Covered, ...] = ()
    private: tuple[Covered, ...] = ()
    max_epsilon: Annotated[float, Meta(gt=0)] | None = None
    min_clients: Annotated[int, Meta(ge=MIN_CLIENTS)] = MIN_CLIENTS
    min_class: Least | None = None
    min_part: Least = 5
    min_update: Least = 16
    max_components: Least = 8
    max_layers: Least = 3
    max_expand: Annotated[int, Meta(ge=0)] = 4096
    max_statistics: Size = 1000
    max_message: Size = 1000
    max_model: Size = 1000
    max_disk: Size = 20_000
    max_runs: Least = 64
    plugins: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        for key, known in (
            ("methods", TRAINING), ("calibrations", CALIBRATIONS), ("networks", NETWORKS), ("jobs", (*JOBS, "call")),
        ):  # fmt: skip
            if unknown := [name for name in getattr(self, key) if name not in known]:
                raise UserError(f"{key}: {brief(unknown[0])} is unknown; {nearest(unknown[0], known)}")
        for name, digest in self.plugins.items():
            parse_plugin(name)
            if digest and not (len(digest) == 64 and set(digest) <= set("0123456789abcdef")):
                raise UserError(f'plugins: {name} needs the SHA-256 of its file, 64 hexadecimal digits, or ""')

    # Before the node agrees to a run

    def check_plugin(self, plugin: str) -> None:
        """Refuse code that the owner has not allowed, or that has changed since."""
        allowed = self.plugins.get(plugin)
        if allowed is None or (allowed and plugin_sha256(plugin) != allowed):
            raise BadMessage(
                f"{plugin} is code that this node has not allowed, or its file has changed; see plugins in policy.toml",
                "it names code that this node has not allowed",
            )

    def check_texts(self, blueprint: Blueprint) -> None:
        """Refuse methods, calibrations, networks and code that the owner has not allowed. Imports nothing."""
        local = blueprint.local
        for source in (blueprint.method, blueprint.model, local.schedule, local.optimizer):
            if len(source) > language.MAX_TEXT:
                raise BadMessage("a text in its blueprint is too long")
            for plugin in find_plugins(source):
                self.check_plugin(plugin)
        names = [language.parse_calls(blueprint.model, "model")[0].name]
        for call in language.parse_calls(blueprint.method, "method"):
            names.append(call.name)
            if call.name == "available" and (call.values or "file" in call.knobs):
                raise BadMessage("available reads a file, but a server may not choose files on a node")
        for name in names:
            if ":" not in name and name not in (*self.methods, *PROTECTIONS, *self.calibrations, *self.networks):
                raise BadMessage(
                    f"{brief(name)} is not allowed on this node; its owner can add it to policy.toml",
                    "it names a method, calibration or network that this node does not allow",
                )

    def check_size(self, blueprint: Blueprint, images: tuple[int, int, int]) -> None:
        """Refuse a network that is too large, before it is built."""
        channels, *sides = blueprint.shape
        if channels not in (images[0], 3 * images[0]) or max(sides) > max(MAX_SIDE, *images[1:]):
            raise BadMessage(f"its network takes images of {list(blueprint.shape)}, but this node's are {list(images)}")
        if ":" in blueprint.model:
            return  # code that the owner allows
        call, size = language.parse_calls(blueprint.model, "model")[0], (blueprint.shape, blueprint.classes)
        with torch.device("meta"):  # shapes without memory
            if call.name in models.NETWORKS:
                network: torch.nn.Module = models.NETWORKS[call.name](*size)
            else:
                network = language.apply(call, bind_factory(models.PUBLIC[call.name], *size), "model")
        takes = sum(value.nbytes for value in network.state_dict().values())
        if takes > self.max_model * MEGABYTE:
            raise BadMessage(f"its network takes {format_bytes(takes)}; the limit here is {self.max_model:,} MB")

    def check_protection(self, algorithm: Algorithm) -> None:
        """Refuse a method without the protection that the owner requires."""
        noise, finishes = algorithm.mechanism, bool(algorithm.finish)
        noisy = noise is not None and noise.release and noise.epsilon(1, 1, 1) is not None
        for missing, remedy in (
            ("updates" in self.secure and not isinstance(algorithm.exchange, SecureUpdates), "secure(updates=true)"),
            ("updates" in self.private and not noisy, "private-updates(release=true), with noise above 0,"),
            (finishes and "statistics" in self.secure and algorithm.secure is None, "secure"),
            (finishes and self._lacks_noise(algorithm), "private(release=true)"),
        ):
            if missing:
                raise BadMessage(f"this node takes part only with protection; add {remedy} to the method")
        for finisher in algorithm.finish:
            if isinstance(finisher.needs, StatisticsRequest):
                self._check_request(finisher.needs, algorithm.withhold, algorithm)

    def _lacks_noise(self, algorithm: Algorithm) -> bool:
        """Whether statistics need noise and the method adds none."""
        return "statistics" in self.private and not (algorithm.private and algorithm.private.release)

    # Before a job starts

    def check_job(self, job: Job, algorithm: Algorithm, visits: Iterable[Visit], sizes: Mapping[int, int]) -> None:
        """Refuse a job that the owner does not allow, or without the required protection."""
        purpose, name = Purpose.of(job), name_of(job)
        if name.removeprefix("fixed-point-") not in (*self.jobs, *(("call",) if self.plugins else ())):
            raise BadMessage(f"the job {name} is not allowed on this node")
        masked = isinstance(job, SecureJob) or ("statistics" if purpose.statistics else "updates") not in self.secure
        if not masked or (purpose.statistics and self._lacks_noise(algorithm)):
            raise BadMessage(f"it asks for {name} without the masks or the noise that this node requires")
        if isinstance(job, SecureJob):
            flags = getattr(job, "answered", None) or getattr(job, "sharing", None) or [True] * len(job.members)
            clients = {client for (client, _), flag in zip(job.members, flags, strict=False) if flag}
            if len(clients) < self.min_clients > MIN_CLIENTS:  # secure sums refuse fewer themselves
                few = f"it asks for a sum over {counted(len(clients), 'client')}"
                raise BadMessage(f"{few}; the minimum here is {self.min_clients}")
        for visit in visits if purpose.trains else ():
            size = sizes[visit.client] if visit.take is None else visit.take
            used = min(size, examples_for(size, algorithm.local))  # a few small batches do not cover all of them
            if used < min(self.min_update, sizes[visit.client]):
                few = f"it asks for an update of {counted(used, 'example')}"
                raise BadMessage(f"{few}; the minimum here is {self.min_update}")

    def check_statistics(self, job: Job, side: ClientSide, shared: Tensors) -> None:
        """Refuse statistics that are larger or more detailed than allowed or agreed on."""
        work = Purpose.of(job).work
        if not isinstance(work, Moments | FixedPointMoments):
            return
        request = read_request(work.request)
        self._check_request(request, request.min_count, side.algorithm)
        agreed = [finisher.needs for finisher in side.algorithm.finish if isinstance(finisher.needs, StatisticsRequest)]
        if request.components > max((needs.components for needs in agreed), default=1):
            raise BadMessage(f"it asks for {request.components} parts of each class, which was not agreed on")
        side.load(shared, training=False)
        width, classes = request.encoder(side.network, side.train.shape)[1], side.network.classifier.out_features
        # the difference of two sums that leave out different examples can be a single example
        protected = protected_request(request, side.algorithm, classes, width)
        if (request.min_count, request.clip) != (protected.min_count, protected.clip):
            raise BadMessage("it leaves out other classes, or clips features to another length, than was agreed on")
        parts = request.components
        size = 8 * (parts * classes + sum(map(math.prod, request.form.shapes(parts * classes, width).values())))
        if size > self.max_statistics * MEGABYTE:
            raise BadMessage(f"its statistics take {format_bytes(size)}; the limit here is {self.max_statistics:,} MB")
        centres = shared.get("centres")
        fits = parts == 1 if centres is None else parts > 1 and centres.shape == (classes, parts, width)
        if isinstance(work, FixedPointMoments):
            fits = fits and (work.classes, work.width) == (classes * parts, width)
        if not fits:
            raise BadMessage("its centres or its layout do not match the network's classes, parts or features")

    def _check_request(self, request: StatisticsRequest, withhold: int, algorithm: Algorithm) -> None:
        for name in ("components", "layers", "expand"):
            if getattr(request, name) > (limit := getattr(self, f"max_{name}")):
                raise BadMessage(f"its statistics have {getattr(request, name):,} {name}; the limit here is {limit:,}")
        masked = algorithm.secure is not None
        if masked and algorithm.private is not None and algorithm.private.release:
            return  # clients add noise before masking, which hides every example
        least = self.min_part if request.components > 1 else self.min_class or (1 if masked else UNPROTECTED)
        if withhold < least != 1:
            remedy = "secure" if algorithm.private else f"withhold({least})"
            remedy += "" if self.min_class or request.components > 1 or algorithm.private else " or secure"
            raise BadMessage(f"this node sends statistics only of {least} or more examples; add {remedy} to the method")


@dataclass(frozen=True)
class _PlainRequest:
    """A ``StatisticsRequest`` as a job carries it, with each field's limits."""

    form: Annotated[str, Meta(max_length=100)]
    layers: Annotated[int, Meta(ge=1, le=1000)]
    expand: Annotated[int, Meta(ge=0, le=10**6)]
    components: Annotated[int, Meta(ge=1, le=10**6)]
    min_count: Annotated[int, Meta(ge=0, le=10**9)]
    clip: Annotated[float, Meta(ge=0, le=1e38)]


def read_request(values: Any) -> StatisticsRequest:
    """A job's request for statistics, checked."""
    try:
        return StatisticsRequest.from_plain(vars(record_from(_PlainRequest, values)))
    except (ValueError, UserError) as error:
        raise BadMessage(f"its request cannot be read: {error}", "its request cannot be read") from error


def read_policy(file: Path) -> Policy:
    """Read a policy file."""
    return toml_record(file, Policy, f"there is no policy {file}; unskew federation node DIR --write-policy writes one")


def commented() -> str:
    """The default policy as TOML, with a comment for each key."""
    lines = ["# What this node takes part in, whatever the server asks. Missing keys have their defaults."]
    for item in fields(Policy):
        lines += ["", *(f"# {line}" for line in COMMENTS[item.name].split("\n"))]
        value = getattr(Policy(), item.name)
        if item.name == "plugins":
            lines.append("[plugins]")
        elif value is None:
            lines.append(f"# {item.name} = {EXAMPLES[item.name]}")
        else:
            written = msgspec.json.encode(value).decode().replace('","', '", "')
            lines.append("\n    ".join(textwrap.wrap(f"{item.name} = {written}", 110, break_on_hyphens=False)))
    return "\n".join(lines) + "\n"
