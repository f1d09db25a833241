"""Rounds in turn: programs that each do a round when told to, so that a busy moment of the machine hits all of them.

A program may be several processes: every one of them waits for its turn, and a round ends when the last one says so.
Nothing but the standard library is used, since the programs run in other environments.
"""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

START = 300  # seconds that a program may take until it waits for its first turn


class Turn:
    """A program's side: ``while turn.wait(): … turn.done()``."""

    def __init__(self, address):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address)

    def wait(self):
        """Whether there is another round to do; sleeps until that is known."""
        return bool(self.connection.recv(1))

    def done(self):
        self.connection.sendall(b".")


@dataclass(frozen=True)
class Speed:
    """What a program's rounds took, as medians over the turns."""

    seconds: float  # by the clock
    processor: float  # processor seconds of all its processes together


class Program:
    """A program of so many processes, started and waiting for its first turn."""

    def __init__(self, name, command, processes, environment):
        self.name, self.seconds, self.processor = name, [], []
        self.folder = tempfile.TemporaryDirectory()
        self.errors = Path(self.folder.name, "errors")
        address = f"{self.folder.name}/turns"
        with socket.socket(socket.AF_UNIX) as server, self.errors.open("wb") as errors:
            server.bind(address)
            server.listen()
            server.settimeout(1)
            self.process = subprocess.Popen(
                [*command, address], env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )
            self.lines = [self._accepted(server) for _ in range(processes)]

    def _accepted(self, server):
        end = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return server.accept()[0]
        raise SystemExit(f"{self.name} does not start; the last that it wrote:\n{self._last()}")

    def _last(self):
        return "\n".join(self.errors.read_text(errors="replace").splitlines()[-15:])

    def round(self, counts=True):
        """Do a round; what it took is kept unless it does not count."""
        before, began = processor_seconds(self.process.pid), time.perf_counter()
        for line in self.lines:
            line.sendall(b".")
        if not all(line.recv(1) for line in self.lines):
            raise SystemExit(f"{self.name} died in a round; the last that it wrote:\n{self._last()}")
        seconds = time.perf_counter() - began
        if counts:
            self.seconds.append(seconds)
            self.processor.append(processor_seconds(self.process.pid) - before)

    def speed(self):
        return Speed(statistics.median(self.seconds), statistics.median(self.processor))

    def close(self):
        for line in self.lines:
            line.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
        self.folder.cleanup()


def processor_seconds(root):
    """Processor time of a process and all that it started, ended threads and children included; 0 without /proc."""
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stats[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()
    family = {root} & stats.keys()
    while more := {pid for pid, fields in stats.items() if int(fields[1]) in family} - family:
        family |= more
    total = 0.0
    for pid in family:
        ended = int(stats[pid][13]) + int(stats[pid][14])  # ticks of children that were waited for
        total += ended / os.sysconf("SC_CLK_TCK")
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)
    return total


@contextlib.contextmanager
def busy(cores):
    """One other process a core at the lowest priority, each a session as a program is, while the block lasts."""
    loop = "import os\nos.nice(19)\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop], start_new_session=True) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
