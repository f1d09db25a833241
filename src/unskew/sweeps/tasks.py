"""The runs of a sweep as tasks, in this process or in several; failures are recorded, not raised."""

import selectors
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from unskew.runs.finished import calibrate_run
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
    from unskew.runs.finished import FinishedRun

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


@dataclass(eq=False)
class _Worker:
    child: Child = field(default_factory=lambda: start_worker(__name__))
    ready: bool = False
    task: int | None = None


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
    waiting, workers, died = list(enumerate(tasks)), list[_Worker](), Counter[int | None]()
    with selectors.DefaultSelector() as selector:

        def start() -> None:
            workers.append(_Worker())
            selector.register(workers[-1].child, selectors.EVENT_READ, workers[-1])

        def replace_dead(worker: _Worker) -> None:
            selector.unregister(worker.child)
            workers.remove(worker)
            reason = f"its process ended with {worker.child.exit_reason()}"
            worker.child.end(patience=0)
            died[worker.task] += 1
            if worker.task is None:
                if waiting and died[None] > MAX_STARTS:
                    raise UserError(f"a worker process could not start: {reason}; try --jobs 1")
            elif died[worker.task] < ATTEMPTS:
                waiting.insert(0, (worker.task, tasks[worker.task]))
            else:
                done(worker.task, RunFailure(reason))
            if waiting:
                idle = next((other for other in workers if other.ready and other.task is None), None)
                start() if idle is None else assign(idle)

        def handle(worker: _Worker, message: dict[str, Any]) -> None:
            if "round" in message and worker.task is not None:
                advance(worker.task, message["round"])
                return
            worker.ready = True
            if worker.task is not None:
                failure = RunFailure(message["failed"], message["diverged"]) if "failed" in message else None
                ended, worker.task = worker.task, None
                done(ended, failure)
            if waiting:
                assign(worker)

        def assign(worker: _Worker) -> None:
            worker.task, task = waiting.pop(0)
            config = replace(task.config, engine="loop", workers=1)
            worker.child.send({**asdict(replace(task, config=config)), "path": str(task.path.absolute())})

        try:
            for _ in range(min(jobs, len(tasks))):
                start()
            while waiting or any(worker.task is not None for worker in workers):
                for key, _ in selector.select():
                    worker = key.data
                    while (message := worker.child.receive()) is not None:
                        handle(worker, message)
                        if not worker.child.messages.pending():
                            break
                    else:
                        replace_dead(worker)
        except BaseException:
            for worker in workers:
                worker.child.interrupt()
            raise
        finally:
            for worker in workers:
                worker.child.end(CHECKPOINT_SECONDS)


def main(parent: JsonLines) -> None:
    """A worker process: do the tasks that the parent sends until it closes the connection."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent.send({"ready": True})
    while (message := parent.receive()) is not None:
        task = msgspec.convert(message, Task, dec_hook=lambda kind, value: kind(value))  # a Path
        failure = run_task(task, lambda number: parent.send({"round": number}))
        parent.send({"done": True} if failure is None else {"failed": failure.reason, "diverged": failure.diverged})
