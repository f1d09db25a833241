"""Tasks in several processes at once, each on one core; an interrupt lets every run write its checkpoint."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unskew.sweeps.work import RunFailure, Task, do

WORKER = str(Path(__file__).with_name("worker.py"))
PATIENCE = 60.0  # seconds that a run has to write its checkpoint after an interrupt

Done = Callable[[int, RunFailure | None], None]  # the task's place, and why it failed
Progress = Callable[[int, int], None]  # the task's place, and the round that is done


def do_all(tasks: Sequence[Task], jobs: int, done: Done, progress: Progress) -> None:
    """Do the tasks, ``jobs`` at a time; those of several jobs take the loop engine, whose weights are the same."""
    if min(jobs, len(tasks)) <= 1:
        for place, task in enumerate(tasks):
            done(place, do(task, lambda number, place=place: progress(place, number)))  # type: ignore[misc]
        return
    waiting, workers = list(enumerate(tasks)), list[_Worker]()
    selector = selectors.DefaultSelector()
    try:
        for _ in range(min(jobs, len(tasks))):
            workers.append(_begun(selector))
        while waiting or any(worker.place is not None for worker in workers):
            for key, _ in selector.select():
                _hear(key.data, selector, workers, waiting, done, progress)
    except BaseException:
        for worker in workers:
            worker.process.send_signal(signal.SIGINT)
        raise
    finally:
        for worker in workers:
            worker.close()
        selector.close()


class _Worker:
    """A process, the lines to and from it, and the task it is at."""

    def __init__(self) -> None:
        life, self._life = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        self.place: int | None = None
        self._rest = b""
        path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        self.process = subprocess.Popen(
            [sys.executable, "-P", WORKER, str(life)], pass_fds=[life], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, start_new_session=True,  # an interrupt of the terminal comes through the parent
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        os.close(life)

    def give(self, place: int, task: Task) -> None:
        """Hand over a task; that the worker has died is noticed when its line closes."""
        self.place = place
        config = replace(task.config, engine="loop", workers=1)
        line = json.dumps({**asdict(replace(task, config=config)), "path": str(task.path.absolute())}) + "\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except OSError:
            return

    def heard(self) -> list[dict[str, Any]] | None:
        """The whole lines that have come; None where the process has ended."""
        assert self.process.stdout is not None
        some = os.read(self.process.stdout.fileno(), 65536)
        if not some:
            return None
        *lines, self._rest = (self._rest + some).split(b"\n")
        return [json.loads(line) for line in lines]

    def exit_reason(self) -> str:
        """How it ended, with the last line of its standard error."""
        code = self.process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended with {how}" + (f": {said[-1]}" if said else "")

    def close(self) -> None:
        """Let it end: without a task at once, otherwise when its checkpoint is written."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        os.close(self._life)
        self._errors.close()


def _begun(selector: selectors.BaseSelector) -> _Worker:
    worker = _Worker()
    assert worker.process.stdout is not None
    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
    return worker


def _hear(
    worker: _Worker, selector: selectors.BaseSelector, workers: list[_Worker], waiting: list[tuple[int, Task]],
    done: Done, progress: Progress,
) -> None:  # fmt: skip
    """Take what a worker says: it is ready, has done a round or a task, or has ended."""
    lines = worker.heard()
    if lines is None:
        selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        reason, place = worker.exit_reason(), worker.place
        workers.remove(worker)
        worker.close()
        if place is None:
            raise RuntimeError(f"a process for runs could not start: {reason}")
        done(place, RunFailure(reason))
        if waiting:
            workers.append(_begun(selector))
        return
    for line in lines:
        place = worker.place
        if "round" in line and place is not None:
            progress(place, line["round"])
            continue
        if place is not None:
            failed = line.get("failed")
            worker.place = None
            done(place, None if failed is None else RunFailure(failed, line["diverged"]))
        if waiting:
            worker.give(*waiting.pop(0))
