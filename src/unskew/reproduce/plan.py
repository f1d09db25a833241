"""The runs that recipes need, how long they take on this machine, and doing them."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from unskew.core import text
from unskew.core.errors import UserError, brief
from unskew.core.files import read_json, write_whole
from unskew.core.key import Key, seeded
from unskew.core.limits import cache_folder
from unskew.core.machine import cores, neutral, resolve_device
from unskew.data import sources
from unskew.data.arrays import is_function
from unskew.data.builders import BUILDERS, is_built
from unskew.data.builders import locate as locate_built
from unskew.data.fetch import DOWNLOADS
from unskew.data.published import SOURCES
from unskew.models import build, initialise, suited
from unskew.report.write import write_report
from unskew.reproduce.cells import Cell, Variant, list_seeds, make_cells, name_training, select_cells
from unskew.reproduce.recipe import Recipe
from unskew.reproduce.records import RunRecord, describe_machine, make_record, read_record, run_folder, write_failure
from unskew.runs.config import Config
from unskew.runs.folder import json_bytes
from unskew.runs.result import RESULT
from unskew.sweeps.tasks import RunFailure, Task, do_tasks


@dataclass(frozen=True)
class PlannedRun:
    """A run: one training with one seed, and all that is made of it."""

    training: str
    config: Config  # with its seed
    calibrations: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    def task(self, out: Path, data_dir: str | None) -> Task:
        """The run as worker processes take it."""
        config = replace(self.config, data_dir=data_dir or self.config.data_dir)
        return Task(config, run_folder(out, self.training, self.seed), self.calibrations, self.measures)

    def state(self, out: Path) -> RunRecord | RunFailure | None:
        """Its record, where that has all that is asked for; how it diverged; None where something is left to do."""
        found = read_record(out, self.training, self.seed)
        if isinstance(found, RunRecord) and not found.has(self.calibrations, self.measures):
            return None
        return found


def plan_runs(recipes: Sequence[tuple[Recipe, Variant]]) -> list[PlannedRun]:
    """The runs of all these recipes, each once, in the order of the recipes; seed by seed: the first is done first."""
    jobs: dict[tuple[str, int], PlannedRun] = {}
    for recipe, asked in recipes:
        cells = select_cells(make_cells(recipe, asked), asked)
        for seed in (seeds := list_seeds(recipe, asked)):
            for cell in cells:
                if cell.baseline is not None:
                    _add(jobs, cell.baseline, seed)
                measured = recipe.measure_all or seed == seeds[0]
                _add(jobs, cell.config, seed, cell.after, cell.measures if measured else ())
    return list(jobs.values())


def _add(
    jobs: dict[tuple[str, int], PlannedRun], config: Config, seed: int, after: str = "", measures: Sequence[str] = ()
) -> None:
    name = name_training(config)
    job = jobs.get((name, seed)) or PlannedRun(name, replace(config, seed=seed))
    if config.during and config.during != job.config.during:  # what is recorded changes no result
        job = replace(job, config=replace(job.config, during=config.during))
    calibrations = dict.fromkeys((*job.calibrations, *([after] if after else ())))
    jobs[name, seed] = replace(
        job, calibrations=tuple(calibrations), measures=tuple(dict.fromkeys((*job.measures, *measures)))
    )


def select_part(jobs: Sequence[PlannedRun], text: str) -> list[PlannedRun]:
    """The i-th of n parts of the runs, ``"1/4"``: every n-th run, so that parts take about as long as each other."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--cells {brief(text)}: give a part of all, from 1/4 to 4/4")
    return list(jobs[int(match[1]) - 1 :: int(match[2])])


def cells_needing(cells: Sequence[Cell], job: PlannedRun) -> list[Cell]:
    """The cells that this run is for."""
    return [cell for cell in cells if cell.training == job.training]


def find_missing_data(names: Sequence[str], data_dir: str | None) -> dict[str, str]:
    """The data sets that are not here, each with the reason; nothing is read but names of files."""
    folder = data_dir or os.environ.get("UNSKEW_DATA")
    reasons = {}
    for name in dict.fromkeys(names):
        try:
            _look(name, Path(folder) if folder else None)
        except UserError as error:
            reasons[name] = str(error)
    return reasons


def _look(name: str, folder: Path | None) -> None:
    """Raise a UserError where a published set is not found; a user's own is looked at when it is read."""
    if is_built(name):
        locate_built(name.partition("?")[0], folder)
    elif ":" not in name and not is_function(name) and (source := sources.find(name)).layouts:
        sources.locate(source, folder)


def split_by_data(jobs: Sequence[PlannedRun], data_dir: str | None) -> tuple[list[PlannedRun], dict[str, str]]:
    """The runs whose data are here, and why the data of the others are not."""
    missing = find_missing_data([job.config.data for job in jobs], data_dir)
    return [job for job in jobs if job.config.data not in missing], missing


def explain_missing_data(missing: Sequence[str], again: str, stand_ins: Sequence[str]) -> str:
    """One message: what is not here, how it is got, and what can be had without it."""
    names = [name.partition("?")[0] for name in missing]
    fetched = [name for name in names if name in DOWNLOADS]
    others = [name for name in names if name not in fetched]
    ways = [f"unskew data fetch {name} --data-dir DIR" for name in fetched]
    words = f"the data are not here: {', '.join(dict.fromkeys(names))}"
    if ways:
        words += f"; download them with: {'; '.join(dict.fromkeys(ways))}; then give --data-dir DIR or set UNSKEW_DATA"
    if others:
        words += (
            f"; {', '.join(dict.fromkeys(others))} cannot be fetched by a command: docs/data.md says where to get it"
        )
    if stand_ins:
        words += f"; or see it work on other data: {' or '.join(f'{again} --data {name}' for name in stand_ins)}"
    return words


SHOWN = ("skew", "curves")  # what the report of a run shows: what costs next to nothing

Finished = Callable[
    [PlannedRun, RunFailure | None, int, int], None
]  # a run, why it has no result, how many are done, of how many
Rounds = Callable[[int, int], None]  # rounds that are done, of how many


@dataclass(frozen=True)
class Watcher:
    """Who is told of what."""

    finished: Finished | None = None
    rounds: Rounds | None = None


def do_runs(
    jobs: Sequence[PlannedRun],
    out: Path,
    *,
    data_dir: str | None = None,
    at_once: int | None = None,
    told: Watcher | None = None,
) -> dict[tuple[str, int], RunFailure]:
    """Do these runs, as many at the same time as there are cores; why some have no result, by training and seed.

    An interrupted run goes on where it stopped when this is called again.
    """
    told = told or Watcher()
    tasks = [job.task(out, data_dir) for job in jobs]
    rounds, whole = dict.fromkeys(range(len(jobs)), 0), sum(max(job.config.rounds, 1) for job in jobs)
    failures: dict[tuple[str, int], RunFailure] = {}
    done = 0

    def ended(place: int, failure: RunFailure | None) -> None:
        nonlocal done
        job, done = jobs[place], done + 1
        if failure is not None:
            failures[job.training, job.seed] = failure
        if (tasks[place].path / RESULT).exists():
            make_record(out, job.training, job.seed, job.measures, failure.reason if failure else "")
            with suppress(UserError):  # a page beside the figures; the table is made without it
                write_report(tasks[place].path, only=SHOWN)
        elif failure is not None and failure.diverged:
            write_failure(out, job.training, job.seed, failure)
        if told.finished is not None:
            told.finished(job, failure, done, len(jobs))

    def progressed(place: int, number: int) -> None:
        rounds[place] = number
        if told.rounds is not None:
            told.rounds(sum(rounds.values()), whole)

    if jobs:
        do_tasks(tasks, at_once or _at_once(jobs), ended, progressed)
    return failures


def _at_once(jobs: Sequence[PlannedRun]) -> int:
    """One for each core; on a GPU one at a time."""
    return cores() if resolve_device(jobs[0].config.device).type == "cpu" else 1


def make_out_folder(out: Path) -> None:
    """Make the folder, or refuse one that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}; choose another") from error


COSTS = {"moon": 1.75, "prototypes": 1.15, "fedprox": 1.06, "feddyn": 1.06}  # of a step, beside FedAvg's: measured.md
START = 1.0  # seconds for a run to begin and to end
FORWARD = 1 / 3  # of a step: a pass without gradients
STORED = 2e-5  # seconds for an example behind a frozen part
RETRAINED = 1.5e-4  # seconds for a step of a classifier alone
SOLVED = 10.0  # seconds for a closed form on thousands of random features
TIMES, ENOUGH = 12, 1.0  # steps, or seconds: the quickest counts
QUICK, BATCH, FEW = 0.3, 64, 4  # a step of few images that takes less than this is measured with a whole batch


@dataclass(frozen=True)
class DataSize:
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


def find_size(data: str) -> DataSize | None:
    """The size of a data set by its name; None where only reading it would tell."""
    base, _, query = data.partition("?")
    if base in SOURCES:
        source = SOURCES[base]
        return DataSize(*source.sizes, len(source.classes), source.shape)
    if base in PHOTOGRAPHS:
        side = re.search(r"size=(\d+)", query)
        return DataSize(*PHOTOGRAPHS[base], (3, int(side[1]) if side else 224, int(side[1]) if side else 224))
    if base in BUILDERS and (built := BUILDERS[base]).sizes and built.classes and built.shape:
        return DataSize(*built.sizes, built.classes, built.shape)
    if data.startswith(POPULATION):
        knobs = text.parse_calls(data, "data set")[0].knobs
        train, test, classes, width = (int(knobs.get(name, usual)) for name, usual in DRAWN.items())
        return DataSize(train, test, classes, (3, width, width))
    return None


def count_clients(config: Config, size: DataSize) -> int:
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


def count_examples(config: Config, size: DataSize) -> float:
    """How many examples all clients of all rounds see."""
    clients = count_clients(config, size)
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
        about = describe_machine()
        file = cache_folder() / "speeds.json"
        with suppress(UserError):
            found = read_json(file)
            if found.get("machine") == about["machine"] and found.get("torch") == about.get("torch"):
                return Speeds(say, {str(key): float(value) for key, value in found["seconds"].items()}, file)
        return Speeds(say, {}, file)

    def seconds(self, config: Config, size: DataSize) -> float:
        """For one example of training, forward and back."""
        side = config.resize or size.shape[1]
        shape = (size.shape[0], side, side if config.resize else size.shape[2])
        model = config.model or suited(shape)
        key = f"{model} {'x'.join(map(str, shape))} {size.classes}"
        if key not in self.known:
            self.say(f"measuring how fast {model} trains here")
            self.known[key] = time_example(model, shape, size.classes)
            about = describe_machine()
            values = {"machine": about["machine"], "torch": about.get("torch"), "seconds": self.known}
            with suppress(UserError):
                write_whole(self.file, json_bytes(values))
        return self.known[key]


@neutral()
def time_example(model: str, shape: tuple[int, int, int], classes: int) -> float:
    """Measured on one thread, in processor time: other work on the machine does not count."""
    network = build(model, shape, classes)
    initialise(network, Key(0))
    network.train()
    taken = _time_step(network, shape, classes, FEW)
    return _time_step(network, shape, classes, BATCH) / BATCH if taken < QUICK else taken / FEW


def _time_step(network: torch.nn.Module, shape: tuple[int, int, int], classes: int, count: int) -> float:
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


def estimate_run(job: PlannedRun, speeds: Speeds) -> float | None:
    """A run's seconds on one core; None where its data are of unknown size."""
    config, size = job.config, find_size(job.config.data)
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
        return START + STORED * count_examples(config, size) + made
    return START + each * (factor * count_examples(config, size) + passes + measured) + made


def estimate_storing(jobs: Sequence[PlannedRun], speeds: Speeds) -> float:
    """For what frozen parts give: computed once, stored, and shared by all runs that freeze the same part."""
    frozen = {}
    for config in (job.config for job in jobs if job.config.train != "all"):
        if size := find_size(config.data):
            part = (config.data, config.model, config.pretrained, config.train, config.resize)
            frozen[part] = speeds.seconds(config, size) * FORWARD * (size.train + size.test)
    return sum(frozen.values())


def _retraining(calibration: str, size: DataSize) -> float:
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


def estimate_all(jobs: Sequence[PlannedRun], speeds: Speeds) -> float | None:
    """All runs on all cores; None where one cannot be estimated."""
    each = [estimate_run(job, speeds) for job in jobs]
    known = [seconds for seconds in each if seconds is not None]
    if len(known) < len(each):
        return None
    return (sum(known) + estimate_storing(jobs, speeds)) / cores()


def by_scale(jobs: Mapping[str, Sequence[PlannedRun]], speeds: Speeds) -> dict[str, float | None]:
    """The same for each scale."""
    return {scale: estimate_all(those, speeds) for scale, those in jobs.items()}
