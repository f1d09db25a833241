"""Commands in a shell, waited for or in the background."""

import os
import subprocess
import sys
import time
from pathlib import Path

UNSKEW = [sys.executable, "-m", "unskew"]
TESTS = str(Path(__file__).parent)
SEES_TESTS = {**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}


def flags(**options):
    """The options as a user types them."""
    return [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def shell(*words, cwd=None, check=False):
    command = [*UNSKEW, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=SEES_TESTS, capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, done.stderr
    return done


def started(*words, cwd=None, run=None, rounds=0, until=None):
    """A command in the background that has got so far: this many rounds of the run, or until something is true."""
    process = subprocess.Popen(
        [*UNSKEW, *map(str, words)], cwd=cwd, env=SEES_TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(12_000):  # two minutes: the machine may be busy
        if until() if until else _lines(run / "metrics.jsonl") >= rounds:
            return process
        if process.poll() is not None:
            raise AssertionError(process.stderr.read())
        time.sleep(0.01)
    raise AssertionError("it never got so far")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else -1
