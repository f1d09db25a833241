"""The runs that recipes need: plan them, estimate their time on this machine, do them."""

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
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
from unskew.models import build, choose_model, initialise
from unskew.report.write import write_report
from unskew.reproduce.cells import Variant, list_seeds, make_cells, name_training, select_cells, with_seed
from unskew.reproduce.recipe import Recipe
from unskew.reproduce.records import RunRecord, describe_machine, make_record, read_record, run_folder, write_failure
from unskew.runs.config import Config
from unskew.runs.folder import json_bytes
from unskew.runs.result import RESULT
from unskew.sweeps.tasks import RunFailure, Task, run_tasks


@dataclass(frozen=True)
class PlannedRun:
    """One training with one seed, and its calibrations and measures."""

    training: str
    config: Config  # with its seed
    calibrations: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    def task(self, out: Path, data_dir: str | None) -> Task:
        """The run as a task for worker processes."""
        config = replace(self.config, data_dir=data_dir or self.config.data_dir)
        return Task(config, run_folder(out, self.training, self.seed), self.calibrations, self.measures)

    def state(self, out: Path) -> RunRecord | RunFailure | None:
        """Its record if that is complete, or how it diverged; None if something is left to do."""
        record = read_record(out, self.training, self.seed)
        partial = isinstance(record, RunRecord) and not record.has(self.calibrations, self.measures)
        return None if partial else record


def plan_runs(recipes: Sequence[tuple[Recipe, Variant]]) -> list[PlannedRun]:
    """The runs of these recipes, each once, in the order of the recipes and seed by seed."""
    jobs: dict[tuple[str, int], PlannedRun] = {}
    for recipe, variant in recipes:
        cells = select_cells(make_cells(recipe, variant), variant)
        for seed in (seeds := list_seeds(recipe, variant)):
            for cell in cells:
                if cell.baseline is not None:
                    _add(jobs, cell.baseline, seed)
                measured = recipe.measure_all or seed == seeds[0]
                _add(jobs, cell.config, seed, cell.after, cell.measures if measured else ())
    return list(jobs.values())


def _add(
    jobs: dict[tuple[str, int], PlannedRun], config: Config, seed: int, after: str = "", measures: Iterable[str] = ()
) -> None:
    config = with_seed(config, seed)
    name = name_training(config)
    job = jobs.get((name, seed)) or PlannedRun(name, config)
    if config.during and config.during != job.config.during:  # recording does not change the result
        job = replace(job, config=replace(job.config, during=config.during))
    calibrations = dict.fromkeys((*job.calibrations, *filter(None, [after])))
    measures = dict.fromkeys((*job.measures, *measures))
    jobs[name, seed] = replace(job, calibrations=tuple(calibrations), measures=tuple(measures))


def select_part(jobs: Sequence[PlannedRun], text: str) -> list[PlannedRun]:
    """The i-th of n parts, ``"1/4"``: every n-th run, so that all parts take about the same time."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--cells {brief(text)}: give a part such as 1/4")
    return list(jobs[int(match[1]) - 1 :: int(match[2])])


def find_missing_data(names: Sequence[str], data_dir: str | None) -> dict[str, str]:
    """The data sets that are not on this machine, with the reason; only file names are checked."""
    folder = data_dir or os.environ.get("UNSKEW_DATA")
    reasons = {}
    for name in dict.fromkeys(names):
        try:
            sources.locate(name, Path(folder) if folder else None)
        except UserError as error:
            reasons[name] = str(error)
    return reasons


def split_by_data(jobs: Sequence[PlannedRun], data_dir: str | None) -> tuple[list[PlannedRun], dict[str, str]]:
    """The runs whose data are available, and why the data of the others are not."""
    missing = find_missing_data([job.config.data for job in jobs], data_dir)
    return [job for job in jobs if job.config.data not in missing], missing


def explain_missing_data(missing: Sequence[str], command: str, stand_ins: Sequence[str]) -> str:
    """One message: which data are missing, how to get them, and what can be run instead."""
    known = {source.name: source for source, _ in map(sources.parse, missing)}
    fetchable = [name for name, source in known.items() if source.download and not source.download.splits]
    others = [name for name in known if name not in fetchable]
    text = f"these data sets are not on this machine: {', '.join(known)}"
    if fetchable:
        commands = "; ".join(f"unskew data fetch {name} --data-dir DIR" for name in fetchable)
        text += f"; download them with: {commands}; then give --data-dir DIR or set UNSKEW_DATA"
    if others:
        text += f"; {', '.join(others)} must be downloaded by hand, see docs/how-to/data.md"
    if stand_ins:
        text += f"; or use other data: {' or '.join(f'{command} --data {name}' for name in stand_ins)}"
    return text


def do_runs(
    runs: Sequence[PlannedRun],
    out: Path,
    *,
    data_dir: str | None = None,
    at_once: int | None = None,
    finished: Callable[[PlannedRun, RunFailure | None, int, int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[tuple[str, int], RunFailure]:
    """Do these runs, one per core at a time; returns the failures by training and seed.

    An interrupted run resumes when this is called again. ``finished`` is called with a run, its failure, the number of
    runs done and the total; ``progress`` with the number of rounds done and the total.
    """
    tasks = [run.task(out, data_dir) for run in runs]
    rounds, total = [0] * len(runs), sum(max(run.config.rounds, 1) for run in runs)
    failures: dict[tuple[str, int], RunFailure] = {}
    done = 0

    def end(index: int, failure: RunFailure | None) -> None:
        nonlocal done
        run, done = runs[index], done + 1
        if failure is not None:
            failures[run.training, run.seed] = failure
        if (tasks[index].path / RESULT).exists():
            make_record(out, run.training, run.seed, run.measures, failure.reason if failure else "")
            with suppress(UserError):  # the table does not need the run's page
                write_report(tasks[index].path, only=("skew", "curves"))  # the cheapest measures
        elif failure is not None and failure.diverged:
            write_failure(out, run.training, run.seed, failure)
        if finished is not None:
            finished(run, failure, done, len(runs))

    def advance(index: int, number: int) -> None:
        rounds[index] = number
        if progress is not None:
            progress(sum(rounds), total)

    if runs:
        run_tasks(tasks, at_once or count_at_once(runs[0].config), end, advance)
    return failures


COSTS = {"moon": 1.75, "prototypes": 1.15, "fedprox": 1.06, "feddyn": 1.06}  # of a step relative to FedAvg: measured.md
START = 1.0  # seconds to start and finish a run
FORWARD = 1 / 3  # cost of a pass without gradients, relative to a step
STORED = 2e-5  # seconds per example behind a frozen part
RETRAINED = 1.5e-4  # seconds per step of the classifier alone
SOLVED = 10.0  # seconds for a closed form on thousands of random features
TIMES, ENOUGH = 12, 1.0  # limits for timing: steps and seconds; the fastest step counts
QUICK, BATCH, FEW = 0.3, 64, 4  # if a step of FEW images takes less than QUICK seconds, a full batch is timed


@dataclass(frozen=True)
class DataSize:
    """The size of a data set, for time estimates."""

    train: int
    test: int
    classes: int
    shape: tuple[int, int, int]


POPULATION = "unskew.data.synthetic_set:population"
POPULATION_KNOBS = {"examples": 120_300, "test": 12_030, "classes": 1203, "size": 32}  # with their defaults
GEO = {"geo(max=30000)": 11, "geo(max=3000)": 135, "geo(max=1000)": 368, "geo(max=100)": 3606}
CLIENTS = {"inaturalist": {"users": 9275, **GEO}, "landmarks": {"users": 1262}}
PHOTOGRAPHS = {"inaturalist": (120_300, 12_030, 1203), "landmarks": (164_172, 19_526, 2028)}  # Hsu et al., Table 1


def find_size(data: str, partition: str = "") -> DataSize | None:
    """The size of a data set by its name, or of the part that a partition uses; None if the data must be read."""
    if part := re.match(r"unskew\.reproduce\.networks:few_examples\(.*?examples=(\d+)", partition):
        size = find_size(data)
        return size and replace(size, train=min(size.train, int(part[1])))
    if data.startswith(POPULATION):
        knobs = text.parse_calls(data, "data set")[0].knobs
        train, test, classes, width = (int(knobs.get(name, usual)) for name, usual in POPULATION_KNOBS.items())
        return DataSize(train, test, classes, (3, width, width))
    if sources.is_function(data):
        return None
    source, request = sources.parse(data)
    if source.name in PHOTOGRAPHS:
        side = int(request.call.knobs.get("size", 224))
        return DataSize(*PHOTOGRAPHS[source.name], (3, side, side))
    if not source.sizes or not source.classes or not source.shape:
        return None
    return DataSize(*source.sizes, source.classes, source.shape)


def count_clients(config: Config, size: DataSize) -> int:
    """The number of clients, estimated without reading the data."""
    if config.clients:
        return config.clients
    name = re.split(r"[(?]", config.data)[0]
    if clients := CLIENTS.get(name, {}).get(config.partition):
        return clients
    users, cell = re.search(r"users=(\d+)", config.data), re.fullmatch(r"geo\(max=(\d+)\)", config.partition)
    if cell:
        return max(2, 2 * size.train // int(cell[1]))  # cells are about half full
    return int(users[1]) if users else 10


def count_examples(config: Config, size: DataSize) -> float:
    """How many examples all clients train on over all rounds."""
    clients = count_clients(config, size)
    visits = min(config.per_round or clients, clients)
    if virtual := re.search(r"fedvc\((?:size=)?(\d+)", config.method):
        return float(config.rounds * visits * int(virtual[1]))
    return config.rounds * config.epochs * size.train * visits / clients


@dataclass
class Speeds:
    """Seconds per example of a network on one core or a GPU, measured once on this machine and cached."""

    say: Callable[[str], None]
    known: dict[str, float]
    file: Path

    @staticmethod
    def of_machine(say: Callable[[str], None]) -> "Speeds":
        """The speeds measured on this machine so far."""
        about = describe_machine()
        file = cache_folder() / "speeds.json"
        with suppress(UserError):
            cached = read_json(file)
            if cached.get("machine") == about["machine"] and cached.get("torch") == about.get("torch"):
                return Speeds(say, {str(key): float(value) for key, value in cached["seconds"].items()}, file)
        return Speeds(say, {}, file)

    def seconds(self, config: Config, size: DataSize) -> float:
        """Seconds to train on one example, forward and backward."""
        side = config.resize or size.shape[1]
        shape = (size.shape[0], side, side if config.resize else size.shape[2])
        model = config.model or choose_model(shape)
        key, device = f"{model} {'x'.join(map(str, shape))} {size.classes}", resolve_device(config.device)
        key += "" if device.type == "cpu" else f" {device.type}"
        if key not in self.known:
            self.say(f"measuring how fast {model} trains on this machine")
            self.known[key] = time_example(model, shape, size.classes, device)
            about = describe_machine()
            values = {"machine": about["machine"], "torch": about.get("torch"), "seconds": self.known}
            with suppress(UserError):
                write_whole(self.file, json_bytes(values))
        return self.known[key]


@neutral()
def time_example(model: str, shape: tuple[int, int, int], classes: int, device: torch.device) -> float:
    """Seconds of processor time per example on one thread, so that other work does not count; on a GPU, wall time."""
    network = build(model, shape, classes)
    initialise(network, Key(0))
    network.train().to(device)
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter

    def time_step(count: int) -> float:
        images = torch.rand(count, *shape, generator=Key(0).fold("images").torch()).to(device)
        labels = (torch.arange(count) % classes).to(device)
        times: list[float] = []
        while len(times) < TIMES and sum(times) <= ENOUGH:
            began = clock()
            loss = cross_entropy(network(images), labels)
            (gradient, *_) = torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad])
            if not on_cpu:
                gradient.cpu()  # waits for the GPU
            times.append(clock() - began)
        return min(times)

    with seeded(Key(0)):
        few = time_step(FEW)
        return time_step(BATCH) / BATCH if few < QUICK else few / FEW


def estimate_run(run: PlannedRun, speeds: Speeds) -> float | None:
    """A run's seconds on one core; None if the size of its data is unknown."""
    config, size = run.config, find_size(run.config.data, run.config.partition)
    if size is None:
        return None
    calibrating = START + sum(_estimate_retraining(name, size) for name in run.calibrations)
    examples = count_examples(config, size)
    if config.train != "all":  # estimate_storing covers the frozen part
        return calibrating + STORED * examples
    factor = max([COSTS[name] for name in COSTS if name in config.method], default=1.0)
    evaluations = -(-config.rounds // config.evaluate_every) + len(run.calibrations)
    passes = FORWARD * (evaluations * size.test + (size.train if run.calibrations else 0))
    retraining = sum("cka" in measure or "norms" in measure for measure in run.measures)
    measuring = retraining * (FORWARD * 10 * size.test + config.epochs * size.train)
    return calibrating + speeds.seconds(config, size) * (factor * examples + passes + measuring)


def estimate_storing(runs: Sequence[PlannedRun], speeds: Speeds) -> float:
    """Seconds to compute the output of frozen parts, once for all runs with the same part."""
    frozen = {}
    for config in (run.config for run in runs if run.config.train != "all"):
        if size := find_size(config.data, config.partition):
            part = (config.data, config.model, config.pretrained, config.train, config.resize)
            frozen[part] = speeds.seconds(config, size) * FORWARD * (size.train + size.test)
    return sum(frozen.values())


def _estimate_retraining(calibration: str, size: DataSize) -> float:
    """Seconds for a calibration, in addition to its statistics."""
    call = text.parse_calls(calibration, "calibration")[0]
    if call.name in ("lda", "ridge"):
        return SOLVED if call.knobs.get("expand") else 0.1
    per_class = size.train // size.classes
    defaults = {"uscc": (400, 20), "oracle": (per_class, 50)}.get(call.name, (2000, 10))
    features = call.knobs.get("per_class", defaults[0])
    count = per_class if features == "all" else int(features)
    return RETRAINED * count * size.classes * int(call.knobs.get("epochs", defaults[1])) / BATCH


def estimate_all(runs: Sequence[PlannedRun], speeds: Speeds) -> float | None:
    """Seconds for all runs, one per core at a time or one after another on a GPU; None if one is unknown."""
    known = [seconds for run in runs if (seconds := estimate_run(run, speeds)) is not None]
    if len(known) < len(runs):
        return None
    return (sum(known) + estimate_storing(runs, speeds)) / (count_at_once(runs[0].config) if runs else 1)


def count_at_once(config: Config) -> int:
    """How many runs to do at the same time: one per core, or one on a GPU."""
    return cores() if resolve_device(config.device).type == "cpu" else 1
