"""Processes that die and machines that run out: kill -9, interrupts, dead workers, a full disk, few descriptors.

Whatever happens, after `unskew resume` the result is that of a run that was never disturbed, to the last bit.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np

from faults.trials import REFUSED, SAME, Answer, Trial, refusal

UNSKEW = (sys.executable, "-m", "unskew")
METHODS = ("fedavg + ccvr", "moon + scaffold", "fedavgm + fedvc(64) + fedir", "feddyn + lda", "fedeccr")
OPTIONS = ("--data", "digits", "--clients", "6", "--rounds", "4", "--epochs", "1", "--lr", "0.05", "--per-round", "4",
           "--during", "norms + drift")  # fmt: skip
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MAX_KILLS = 5  # of one run; then it is left alone to finish
SECONDS = 300  # for one command


def kill_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """A run killed at any moment, again and again, and resumed each time."""
    for number in range(10_000):
        method, engine = METHODS[number % len(METHODS)], ("loop", "pool")[number // len(METHODS) % 2]
        work = partial(_killed, folder, method, engine, np.random.default_rng([seed, number]))
        yield Trial(f"kill {number}: {method}, {engine}", work)


def worker_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """A worker of the pool killed at any moment."""
    for number in range(10_000):
        method = METHODS[number % len(METHODS)]
        work = partial(_worker_killed, folder, method, np.random.default_rng([seed, number]))
        yield Trial(f"worker {number}: {method}", work)


def resource_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """A disk that fills up, files that may not grow, too few descriptors, too little memory."""
    for number in range(10_000):
        draw, method = np.random.default_rng([seed, number]), METHODS[number % len(METHODS)]
        kind = number % 3
        if kind == 0:
            size = int(2 ** draw.uniform(8, 20))
            limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
            yield Trial(f"files of at most {size} bytes: {method}", partial(_short, folder, method, limit))
        elif kind == 1:
            count = int(draw.integers(4, 64))
            limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (count, count))
            yield Trial(f"{count} file descriptors: {method}", partial(_short, folder, method, limit))
        else:
            size = int(draw.integers(20, 600))
            yield Trial(f"a disk of {size} kB: {method}", partial(_full_disk, folder, method, size))


@cache
def whole(folder: Path, method: str) -> tuple[str, ...]:
    """The result of a run that was never disturbed."""
    run = folder / f"whole {METHODS.index(method)}"
    answer = _ended(_started(run, method, "loop"))
    if answer.code:
        raise AssertionError(f"a run that nothing disturbs fails: {answer.err}")
    return outcome(run)


def outcome(run: Path) -> tuple[str, ...]:
    """All that must be the same: weights, calibrations, every round but for its seconds, what was recorded."""
    result = json.loads((run / "result.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in (*rows, *result["calibrations"]):
        del row["seconds"]
    during = (run / "during.jsonl").read_text() if (run / "during.jsonl").exists() else ""
    return result["weights_sha256"], json.dumps([rows, result["calibrations"]]), during


def _started(run: Path, method: str, engine: str, limit: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
    """`unskew run`, or `unskew resume` where there is something to resume."""
    if (run / "config.toml").exists():
        words = ["resume", str(run)]
    else:
        words = ["run", *OPTIONS, "--method", method, "--engine", engine, "--workers", "2", "--out", str(run)]
        words += ["--checkpoint-seconds", "0"]
    return subprocess.Popen(
        [*UNSKEW, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=limit
    )


def _ended(process: "subprocess.Popen[str]") -> Answer:
    _, err = process.communicate(timeout=SECONDS)
    return Answer(process.returncode, "", err)


def _finished(run: Path, method: str, engine: str) -> str:
    """Let the run go on to its end, undisturbed: the verdict."""
    if not (run / "result.json").exists():
        answer = _ended(_started(run, method, engine))
        if answer.code:
            return f"it could not go on: exit code {answer.code}: {answer.err[-300:]}"
    leftover = [file.name for file in run.rglob("*.part")]
    if leftover:
        return f"left behind: {', '.join(leftover)}"
    return SAME if outcome(run) == whole(run.parent, method) else "another result"


def _killed(folder: Path, method: str, engine: str, draw: np.random.Generator) -> str:
    whole(folder, method)
    run = _fresh(folder)
    for _ in range(int(draw.integers(1, MAX_KILLS + 1))):
        process = _started(run, method, engine)
        time.sleep(float(draw.uniform(0.05, 6)))
        process.send_signal(SIGNALS[int(draw.integers(len(SIGNALS)))])
        answer = _ended(process)
        if answer.code not in (0, 130, *(-number for number in SIGNALS)) or "Traceback" in answer.err:
            return f"exit code {answer.code}: {answer.err[-300:]}"
        if (run / "result.json").exists():
            break
    return _finished(run, method, engine)


def _worker_killed(folder: Path, method: str, draw: np.random.Generator) -> str:
    whole(folder, method)
    run = _fresh(folder)
    process = _started(run, method, "pool")
    for _ in range(int(draw.integers(1, 4))):
        time.sleep(float(draw.uniform(0.5, 4)))
        if workers := _children(process.pid):
            os.kill(workers[int(draw.integers(len(workers)))], signal.SIGKILL)
    answer = _ended(process)
    if answer.code and refusal(answer) != REFUSED:
        return refusal(answer)
    return _finished(run, method, "pool")


def _children(process: int) -> list[int]:
    """The processes that this one has started."""
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _short(folder: Path, method: str, limit: Callable[[], None]) -> str:
    whole(folder, method)
    run = _fresh(folder)
    answer = _ended(_started(run, method, "loop", limit))
    if answer.code and refusal(answer) != REFUSED:
        return refusal(answer)
    return _finished(run, method, "loop")


def _full_disk(folder: Path, method: str, kilobytes: int) -> str:
    """A file system of that size, where one can be mounted; elsewhere files that may not grow so large."""
    place = Path(tempfile.mkdtemp(dir=folder))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        size = kilobytes * 1024
        return _short(folder, method, partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size)))
    try:
        whole(folder, method)
        answer = _ended(_started(place / "run", method, "loop"))
        if answer.code and refusal(answer) != REFUSED:
            return refusal(answer)
        run = _fresh(folder)
        if (place / "run").exists():
            shutil.copytree(place / "run", run)
    finally:
        subprocess.run(["umount", str(place)], check=False)
        place.rmdir()
    return _finished(run, method, "loop")


def _fresh(folder: Path) -> Path:
    run = folder / "tried"
    shutil.rmtree(run, ignore_errors=True)
    return run
