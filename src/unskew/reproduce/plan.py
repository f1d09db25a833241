"""The runs that recipes need: plan them, estimate their time on this machine, do them."""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from unskew.core import language
from unskew.core.errors import UserError, brief
from unskew.core.files import cache_folder, read_json, write_whole
from unskew.core.key import Key, seeded
from unskew.core.machine import neutral, resolve_device
from unskew.data import sources
from unskew.models import build, choose_model, initialise
from unskew.report.write import write_report
from unskew.reproduce.cells import Variant, list_seeds, make_cells, name_training, select_cells, with_seed
from unskew.reproduce.recipe import Recipe
from unskew.reproduce.records import RunRecord, describe_machine, make_record, read_record, run_folder, write_failure
from unskew.runs.config import Config
from unskew.runs.folder import json_bytes
from unskew.runs.result import RESULT
from unskew.sweeps.tasks import RunFailure, Task, count_at_once, run_tasks


def plan_runs(recipes: Sequence[tuple[Recipe, Variant]], out: Path = Path()) -> list[Task]:
    """The runs of these recipes, each once, in the order of the recipes and seed by seed."""
    tasks: dict[Path, Task] = {}

    def add(config: Config, seed: int, after: str = "", measures: Sequence[str] = ()) -> None:
        config = with_seed(config, seed)
        path = run_folder(out, name_training(config), seed)
        task = tasks.get(path) or Task(config, path)
        if config.during:  # recording does not change the result
            task = replace(task, config=replace(task.config, during=config.during))
        calibrations = tuple(dict.fromkeys(filter(None, (*task.calibrations, after))))
        measures = tuple(dict.fromkeys((*task.measures, *measures)))
        tasks[path] = replace(task, calibrations=calibrations, measures=measures)

    for recipe, variant in recipes:
        cells = select_cells(make_cells(recipe, variant), variant)
        for seed in (seeds := list_seeds(recipe, variant)):
            for cell in cells:
                if cell.baseline is not None:
                    add(cell.baseline, seed)
                measured = recipe.measure_all or seed == seeds[0]
                add(cell.config, seed, cell.after, cell.measures if measured else ())
    return list(tasks.values())


def find_record(task: Task) -> RunRecord | RunFailure | None:
    """The run's record if that is complete, or how it diverged; None if something is left to do."""
    record = read_record(task.path)
    if isinstance(record, RunRecord):
        complete = {*task.calibrations} <= {*record.result.calibrations} and {*task.measures} <= {*record.measures}
        return record if complete else None
    return record


def select_part(tasks: Sequence[Task], text: str) -> list[Task]:
    """The i-th of n parts, ``"1/4"``: every n-th run, so that all parts take about the same time."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--cells {brief(text)}: give a part such as 1/4")
    return list(tasks[int(match[1]) - 1 :: int(match[2])])


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


def explain_missing_data(missing: Sequence[str], command: str, stand_ins: Sequence[str]) -> str:
    """One message: which data are missing, how to get them, and what can be run instead."""
    known = {request.source.name: request.source for request in map(sources.parse, missing)}
    parts = [f"these data sets are not on this machine: {', '.join(known)}"]
    for name, source in known.items():
        by_hand = f"{name} must be downloaded by hand, see docs/how-to/data.md"
        fetch = f"download it with: unskew data fetch {name} --data-dir DIR"
        parts.append(fetch if source.download and not source.download.splits else by_hand)
    parts.append("then give --data-dir DIR or set UNSKEW_DATA")
    others = " or ".join(f"{command} --data {name}" for name in stand_ins)
    return "; ".join([*parts, *([f"or use other data: {others}"] if others else [])])


def do_runs(
    tasks: Sequence[Task],
    *,
    data_dir: str | None = None,
    at_once: int | None = None,
    finished: Callable[[Task, RunFailure | None, int, int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Path, RunFailure]:
    """Do these runs, one per core at a time; returns the failures by the run's directory.

    An interrupted run resumes when this is called again. ``finished`` is called with a run, its failure, the number of
    runs done and the total; ``progress`` with the number of rounds done and the total.
    """
    tasks = [replace(task, config=replace(task.config, data_dir=data_dir or task.config.data_dir)) for task in tasks]
    failures: dict[Path, RunFailure] = {}
    done = 0

    def end(index: int, failure: RunFailure | None) -> None:
        nonlocal done
        task, done = tasks[index], done + 1
        if failure is not None:
            failures[task.path] = failure
        if (task.path / RESULT).exists():
            make_record(task.path, task.measures, failure.reason if failure else "")
            with suppress(UserError):  # the table does not need the run's page
                write_report(task.path, only=("skew", "curves"))  # the cheapest measures
        elif failure is not None and failure.diverged:
            write_failure(task.path, failure)
        if finished is not None:
            finished(task, failure, done, len(tasks))

    run_tasks(tasks, at_once, end, progress)
    return failures


COSTS = {"moon": 1.75, "prototypes": 1.15, "fedprox": 1.06, "feddyn": 1.06}  # of a step relative to FedAvg: measured.md
START, CALIBRATED = 1.0, 2.0  # seconds to start and finish a run, and for a calibration
FORWARD = 1 / 3  # cost of a pass without gradients, relative to a step
STORED = 2e-5  # seconds per example behind a frozen part
TIMES, ENOUGH = 12, 1.0  # limits for timing: steps and seconds; the fastest step counts


@dataclass(frozen=True)
class DataSize:
    """The size of a data set, for time estimates."""

    train: int
    test: int
    classes: int
    shape: tuple[int, int, int]
    users: int = 10


SIZES = {  # examples, test examples, classes, users and side of an image, where no knob changes them
    "unskew.data.synthetic_set:population": (120_300, 12_030, 1203, 9275, 32),
    "inaturalist": (120_300, 12_030, 1203, 9275, 224),  # Hsu, Table 1
    "landmarks": (164_172, 19_526, 2028, 1262, 224),
}


def find_size(data: str, partition: str = "") -> DataSize | None:
    """The size of a data set by its name, or of the part that a partition uses; None if the data must be read."""
    if part := re.match(r"unskew\.reproduce\.networks:few_examples\(.*?examples=(\d+)", partition):
        size = find_size(data)
        return size and replace(size, train=min(size.train, int(part[1])))
    if sizes := SIZES.get(data.partition("(")[0]):
        knobs = language.parse_calls(data, "data set")[0].knobs
        names = ("examples", "test", "classes", "users", "size")
        train, test, classes, users, side = (int(knobs.get(*known)) for known in zip(names, sizes, strict=True))
        return DataSize(train, test, classes, (3, side, side), users)
    source = sources.parse(data).source
    if not source.sizes or not source.classes or not source.shape:
        return None
    return DataSize(*source.sizes, source.classes, source.shape)


def count_examples(config: Config, size: DataSize) -> float:
    """How many examples all clients train on over all rounds."""
    clients = config.clients or size.users
    if cell := re.fullmatch(r"geo\(max=(\d+)\)", config.partition):
        clients = max(2, 2 * size.train // int(cell[1]))  # cells are about half full
    visits = min(config.per_round or clients, clients)
    if virtual := re.search(r"fedvc\((?:size=)?(\d+)", config.method):
        return float(config.rounds * visits * int(virtual[1]))
    return config.rounds * config.epochs * size.train * visits / clients


class Speeds:
    """Seconds per example of a network on one core or a GPU, measured once on this machine and cached."""

    def __init__(self, say: Callable[[str, int, int], None]) -> None:
        self.say, self.file = say, cache_folder() / "example-seconds.json"
        about = describe_machine()
        self.machine = f"{about['machine']}, torch {about.get('torch')}"
        self.known: dict[str, float] = {}
        with suppress(UserError):
            self.known = read_json(self.file)

    def seconds(self, config: Config, size: DataSize) -> float:
        """Seconds to train on one example, forward and backward."""
        side = config.resize or size.shape[1]
        shape = (size.shape[0], side, side if config.resize else size.shape[2])
        model, device = config.model or choose_model(shape), resolve_device(config.device)
        key = f"{self.machine}, {device.type}: {model} {'x'.join(map(str, shape))} {size.classes}"
        if key not in self.known:
            self.say(f"measuring how fast {model} trains on this machine", 0, 0)
            self.known[key] = time_example(model, shape, size.classes, device)
            with suppress(UserError):
                write_whole(self.file, json_bytes(self.known))
        return self.known[key]


@neutral()
def time_example(model: str, shape: tuple[int, int, int], classes: int, device: torch.device) -> float:
    """Seconds of processor time per example on one thread, so that other work does not count; on a GPU, wall time."""
    network = build(model, shape, classes)
    initialise(network, Key(0))
    network.train().to(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    batch = 64 if shape[1] <= 64 else 4
    images = torch.rand(batch, *shape, generator=Key(0).fold("images").torch()).to(device)
    labels = (torch.arange(batch) % classes).to(device)
    times: list[float] = []
    with seeded(Key(0)):
        while len(times) < TIMES and sum(times) <= ENOUGH:
            began = clock()
            loss = cross_entropy(network(images), labels)
            (gradient, *_) = torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad])
            gradient.cpu()  # waits for a GPU
            times.append(clock() - began)
    return min(times) / batch


def estimate_all(runs: Sequence[Task], speeds: Speeds) -> float | None:
    """Seconds for all runs, one per core at a time or one after another on a GPU; None if a data size is unknown."""
    total, frozen = 0.0, dict[tuple[object, ...], float]()
    for run in runs:
        config, size = run.config, find_size(run.config.data, run.config.partition)
        if size is None:
            return None
        total += START + CALIBRATED * len(run.calibrations)
        examples, seconds = count_examples(config, size), speeds.seconds(config, size)
        if config.train != "all":  # the output of the frozen part is computed once for all runs
            part = (config.data, config.model, config.pretrained, config.train, config.resize)
            frozen[part] = seconds * FORWARD * (size.train + size.test)
            total += STORED * examples
            continue
        factor = max([COSTS[name] for name in COSTS if name in config.method], default=1.0)
        evaluations = -(-config.rounds // config.evaluate_every) + len(run.calibrations)
        passes = FORWARD * (evaluations * size.test + (size.train if run.calibrations else 0))
        retraining = sum("cka" in measure or "norms" in measure for measure in run.measures)
        total += seconds * (factor * examples + passes + retraining * config.epochs * size.train)
    return (total + sum(frozen.values())) / (count_at_once(runs[0].config) if runs else 1)
