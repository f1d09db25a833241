"""The runs of a sweep as tasks, in this process or in several; failures are recorded, not raised."""

import selectors
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from unskew.core.child import Child, JsonLines, start_worker
from unskew.core.errors import ClientFailure, UserError
from unskew.core.machine import cores, resolve_device
from unskew.round.driver import Metrics
from unskew.runs import train
from unskew.runs.config import CONFIG, Config
from unskew.runs.finished import FinishedRun, calibrate_run
from unskew.runs.result import RESULT, read_result

OVERFLOW = "NaN or infinity"  # in the message of a run that diverged


@dataclass(frozen=True)
class Task:
    """A run: its configuration, its folder, and the calibrations and measures after training."""

    config: Config
    path: Path
    calibrations: tuple[str, ...] = ()  # canonical names, as in results
    measures: tuple[str, ...] = ()  # "cka(clients=20)"


@dataclass(frozen=True)
class RunFailure:
    """Why a run has no result. A run that ``diverged`` is not tried again; others are."""

    reason: str
    diverged: bool = False


def run_task(task: Task, say: Callable[[int], None] = lambda number: None) -> RunFailure | None:
    """Do the run, or the rest of it; None if it succeeded. ``say`` is called with each completed round."""

    def observe(event: object) -> None:
        if isinstance(event, Metrics):
            say(event.round)

    try:
        if not (task.path / CONFIG).exists():
            train.run(task.config, out=task.path, observe=observe)
        elif not (task.path / RESULT).exists():
            train.resume(task.path, observe=observe, **{name: getattr(task.config, name) for name in train.WORK})
    except (ClientFailure, UserError, OSError) as error:
        if not (task.path / RESULT).exists():  # otherwise only a calibration failed
            return RunFailure(str(error), OVERFLOW in str(error))
    where = {name: getattr(task.config, name) for name in ("engine", "workers", "data_dir", "device")}
    failures = [*_calibrate(task, where), *(_measure(task, where) if task.measures else ())]
    return RunFailure("; ".join(failures)) if failures else None


def _calibrate(task: Task, where: dict[str, Any]) -> list[str]:
    """Add the missing calibrations, which share the clients' statistics; returns why some failed."""
    failures: list[str] = []
    missing: Sequence[str] = task.calibrations
    while missing := [name for name in missing if name not in read_result(task.path).calibrations]:
        try:
            calibrate_run(task.path, *missing, **where)
            break
        except (ClientFailure, UserError) as error:
            failures.append(str(error))
            done = read_result(task.path).calibrations
            missing = [name for name in missing if name not in done][1:]  # the first of these failed
    return failures


def _measure(task: Task, where: dict[str, Any]) -> list[str]:
    """Take the missing measures; returns why some failed."""
    from unskew.analysis import parse_measure  # sweeps take none, and measures need scikit-learn
    from unskew.analysis.measure import load_or_take

    failures = []
    with FinishedRun(task.path, **where) as run:
        for text in task.measures:
            try:
                load_or_take(run, parse_measure(text))
            except UserError as error:
                failures.append(f"{text}: {error}")
    return failures


ATTEMPTS = 2  # at a run whose process dies; the second continues from the checkpoint of the first
CHECKPOINT_SECONDS = 60.0  # for a run to write its checkpoint after an interrupt
MAX_STARTS = 3  # workers that may die before they have a task

Done = Callable[[int, RunFailure | None], None]  # the task's number, and why it failed
Progress = Callable[[int, int], None]  # the completed rounds of all tasks, and the total


def count_at_once(config: Config) -> int:
    """How many runs to do at the same time: one per core, or one on a GPU."""
    return cores() if resolve_device(config.device).type == "cpu" else 1


def run_tasks(tasks: Sequence[Task], jobs: int | None, done: Done, progress: Progress | None = None) -> None:
    """Do the tasks in ``jobs`` processes (None: see ``count_at_once``), each on one core with the loop engine.

    After an interrupt every run writes its checkpoint.
    """
    if not tasks:
        return
    jobs = jobs or count_at_once(tasks[0].config)
    rounds, total = [0] * len(tasks), sum(max(task.config.rounds, 1) for task in tasks)

    def advance(number: int, completed: int) -> None:
        rounds[number] = completed
        if progress is not None:
            progress(sum(rounds), total)

    if min(jobs, len(tasks)) <= 1:
        for number, task in enumerate(tasks):
            done(number, run_task(task, partial(advance, number)))
        return
    waiting, workers, died = list(range(len(tasks))), dict[Child, int | None](), Counter[int | None]()
    with selectors.DefaultSelector() as selector:

        def start() -> None:
            child = start_worker(__name__)
            workers[child] = None
            selector.register(child, selectors.EVENT_READ)

        def handle(child: Child, message: dict[str, Any]) -> None:
            number = workers[child]
            if number is not None and "round" in message:
                advance(number, message["round"])
                return
            workers[child] = None
            if number is not None:
                done(number, RunFailure(**message["failure"]) if message["failure"] else None)
            if waiting:
                workers[child] = number = waiting.pop(0)
                config = replace(tasks[number].config, engine="loop", workers=1)
                task = replace(tasks[number], config=config)
                child.send({**asdict(task), "path": str(task.path.absolute())})

        def replace_dead(child: Child) -> None:
            selector.unregister(child)
            number, reason = workers.pop(child), child.exit_reason()
            child.end(patience=0)
            died[number] += 1
            if number is None:
                if waiting and died[None] > MAX_STARTS:
                    raise UserError(f"a worker process could not start: it ended with {reason}; try --jobs 1")
            elif died[number] < ATTEMPTS:
                waiting.insert(0, number)
            else:
                done(number, RunFailure(f"its process ended with {reason}"))
            if waiting:
                start()

        try:
            for _ in range(min(jobs, len(tasks))):
                start()
            while waiting or any(number is not None for number in workers.values()):
                for key, _ in selector.select():
                    child: Any = key.fileobj
                    while (message := child.receive()) is not None:
                        handle(child, message)
                        if not child.pending():
                            break
                    else:
                        replace_dead(child)
        except BaseException:
            for child in workers:
                child.interrupt()
            raise
        finally:
            for child in workers:
                child.end(CHECKPOINT_SECONDS)


def main(parent: JsonLines) -> None:
    """A worker process: do the tasks that the parent sends until it closes the connection."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent.send({})
    while (message := parent.receive()) is not None:
        task = msgspec.convert(message, Task, dec_hook=lambda kind, value: kind(value))  # a Path
        parent.send({"failure": run_task(task, lambda number: parent.send({"round": number}))})
