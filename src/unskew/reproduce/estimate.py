"""How long recipes take on this machine: what a step of each network takes is measured, the rest is counted."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from unskew.core import text
from unskew.core.cache import cache_folder
from unskew.core.errors import UserError
from unskew.core.files import read_json, write_whole
from unskew.core.key import Key, seeded
from unskew.core.machine import cores, neutral
from unskew.data.builders import BUILDERS
from unskew.data.published import SOURCES
from unskew.models import build, initialise, suited
from unskew.reproduce.plan import Job
from unskew.reproduce.records import machine
from unskew.runs.config import Config
from unskew.runs.folder import json_bytes

COSTS = {"moon": 1.75, "prototypes": 1.15, "fedprox": 1.06, "feddyn": 1.06}  # of a step, beside FedAvg's: measured.md
START = 1.0  # seconds for a run to begin and to end
FORWARD = 1 / 3  # of a step: a pass without gradients
STORED = 2e-5  # seconds for an example behind a frozen part
RETRAINED = 1.5e-4  # seconds for a step of a classifier alone
SOLVED = 10.0  # seconds for a closed form on thousands of random features
TIMES, ENOUGH = 12, 1.0  # steps, or seconds: the quickest counts
QUICK, BATCH, FEW = 0.3, 64, 4  # a step of few images that takes less than this is measured with a whole batch


@dataclass(frozen=True)
class Size:
    """A data set as far as time depends on it."""

    train: int
    test: int
    classes: int
    shape: tuple[int, int, int]


POPULATION = "unskew.data.synthetic_set:population"
DRAWN = {"examples": 120_300, "test": 12_030, "classes": 1203, "size": 32}  # its knobs and their defaults
CLIENTS = {("inaturalist", "users"): 9275, ("inaturalist", "geo(max=30000)"): 11, ("inaturalist", "geo(max=3000)"): 135,
           ("inaturalist", "geo(max=1000)"): 368, ("inaturalist", "geo(max=100)"): 3606,
           ("landmarks", "users"): 1262}  # fmt: skip
PHOTOGRAPHS = {"inaturalist": (120_300, 12_030, 1203), "landmarks": (164_172, 19_526, 2028)}  # Hsu et al., Table 1


def size_of(data: str) -> Size | None:
    """The size of a data set by its name; None where only reading it would tell."""
    base, _, query = data.partition("?")
    if base in SOURCES:
        source = SOURCES[base]
        return Size(*source.sizes, len(source.classes), source.shape)
    if base in PHOTOGRAPHS:
        side = re.search(r"size=(\d+)", query)
        return Size(*PHOTOGRAPHS[base], (3, int(side[1]) if side else 224, int(side[1]) if side else 224))
    if base in BUILDERS and (built := BUILDERS[base]).sizes and built.classes and built.shape:
        return Size(*built.sizes, built.classes, built.shape)
    if data.startswith(POPULATION):
        knobs = text.parse_calls(data, "data set")[0].knobs
        train, test, classes, width = (int(knobs.get(name, usual)) for name, usual in DRAWN.items())
        return Size(train, test, classes, (3, width, width))
    return None


def clients_of(config: Config, size: Size) -> int:
    """How many clients there are, as far as it can be known without the data."""
    if config.clients:
        return config.clients
    name = config.data.partition("?")[0]
    if (name, config.partition) in CLIENTS:
        return CLIENTS[name, config.partition]
    users, cell = re.search(r"users=(\d+)", config.data), re.fullmatch(r"geo\(max=(\d+)\)", config.partition)
    if cell:
        return max(2, 2 * size.train // int(cell[1]))  # cells are about half full
    return int(users[1]) if users else 10


def examples_of(config: Config, size: Size) -> float:
    """How many examples all clients of all rounds see."""
    clients = clients_of(config, size)
    visits = min(config.per_round or clients, clients)
    virtual = re.search(r"fedvc\((?:size=)?(\d+)", config.method)
    if virtual:
        return float(config.rounds * visits * int(virtual[1]))
    return config.rounds * config.epochs * size.train * visits / clients


@dataclass
class Speeds:
    """Seconds for an example of a network on one core, measured once for this machine and kept in the cache."""

    say: Callable[[str], None]
    known: dict[str, float]
    file: Path

    @staticmethod
    def of_machine(say: Callable[[str], None]) -> "Speeds":
        """What was measured here before."""
        about = machine()
        file = cache_folder() / "speeds.json"
        with suppress(UserError):
            found = read_json(file)
            if found.get("machine") == about["machine"] and found.get("torch") == about.get("torch"):
                return Speeds(say, {str(key): float(value) for key, value in found["seconds"].items()}, file)
        return Speeds(say, {}, file)

    def seconds(self, config: Config, size: Size) -> float:
        """For one example of training, forward and back."""
        side = config.resize or size.shape[1]
        shape = (size.shape[0], side, side if config.resize else size.shape[2])
        model = config.model or suited(shape)
        key = f"{model} {'x'.join(map(str, shape))} {size.classes}"
        if key not in self.known:
            self.say(f"measuring how fast {model} trains here")
            self.known[key] = seconds_for_example(model, shape, size.classes)
            about = machine()
            values = {"machine": about["machine"], "torch": about.get("torch"), "seconds": self.known}
            with suppress(UserError):
                write_whole(self.file, json_bytes(values))
        return self.known[key]


@neutral()
def seconds_for_example(model: str, shape: tuple[int, int, int], classes: int) -> float:
    """Measured on one thread, in processor time: other work on the machine does not count."""
    network = build(model, shape, classes)
    initialise(network, Key(0))
    network.train()
    taken = _step(network, shape, classes, FEW)
    return _step(network, shape, classes, BATCH) / BATCH if taken < QUICK else taken / FEW


def _step(network: torch.nn.Module, shape: tuple[int, int, int], classes: int, count: int) -> float:
    with seeded(Key(0)):
        images = torch.rand(count, *shape, generator=Key(0).fold("images").torch())
        labels = torch.arange(count) % classes
        times = []
        for _ in range(TIMES):
            began = time.process_time()
            loss = cross_entropy(network(images), labels)
            torch.autograd.grad(loss, [each for each in network.parameters() if each.requires_grad])
            times.append(time.process_time() - began)
            if sum(times) > ENOUGH:
                break
    return min(times)


def seconds_for(job: Job, speeds: Speeds) -> float | None:
    """A run's seconds on one core; None where its data are of unknown size."""
    config, size = job.config, size_of(job.config.data)
    if size is None:
        return None
    factor = max([COSTS[name] for name in COSTS if name in config.method], default=1.0)
    each = speeds.seconds(config, size)
    evaluations = -(-config.rounds // config.evaluate_every) + len(job.calibrations)
    passes = FORWARD * (evaluations * size.test + (size.train if job.calibrations else 0))
    measured = sum(
        FORWARD * 10 * size.test + config.epochs * size.train
        for text in job.measures
        if "cka" in text or "norms" in text
    )
    made = sum(_retraining(name, size) for name in job.calibrations)
    if config.train != "all":  # what the frozen part gives is stored: seconds_to_store
        return START + STORED * examples_of(config, size) + made
    return START + each * (factor * examples_of(config, size) + passes + measured) + made


def seconds_to_store(jobs: Sequence[Job], speeds: Speeds) -> float:
    """For what frozen parts give: computed once, stored, and shared by all runs that freeze the same part."""
    frozen = {}
    for config in (job.config for job in jobs if job.config.train != "all"):
        if size := size_of(config.data):
            part = (config.data, config.model, config.pretrained, config.train, config.resize)
            frozen[part] = speeds.seconds(config, size) * FORWARD * (size.train + size.test)
    return sum(frozen.values())


def _retraining(calibration: str, size: Size) -> float:
    """What a calibration takes beside the statistics."""
    call = text.parse_calls(calibration, "calibration")[0]
    if call.name in ("lda", "ridge"):
        return SOLVED if call.knobs.get("expand") else 0.1
    usual = {"ccvr": (2000, 10), "uscc": (400, 20), "oracle": (size.train // size.classes, 50)}.get(
        call.name, (2000, 10)
    )
    features = call.knobs.get("per_class", usual[0])
    count = size.train // size.classes if features == "all" else int(features)
    return RETRAINED * count * size.classes * int(call.knobs.get("epochs", usual[1])) / BATCH


def seconds_together(jobs: Sequence[Job], speeds: Speeds) -> float | None:
    """All runs on all cores; None where one cannot be estimated."""
    each = [seconds_for(job, speeds) for job in jobs]
    known = [seconds for seconds in each if seconds is not None]
    if len(known) < len(each):
        return None
    return (sum(known) + seconds_to_store(jobs, speeds)) / cores()


def by_scale(jobs: Mapping[str, Sequence[Job]], speeds: Speeds) -> dict[str, float | None]:
    """The same for each scale."""
    return {scale: seconds_together(those, speeds) for scale, those in jobs.items()}
