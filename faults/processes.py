"""A federation of real processes whose network, clocks, disks and programs fail while a run is on.

The oracle is that of ``nemesis``: the weights are, to the bit, those of a simulation of whoever answered, by the run's
own log. Every node reaches the server over a wire of ours, on loopback. One federation serves all trials; a trial is
one run, resumed where a fault has ended it.

Clocks are moved with a library that is loaded before libc (``clock.c``); without a C compiler those trials are left
out. A disk is full where a process may write no file beyond a size (RLIMIT_FSIZE), which is lifted again.
"""

import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from faults.trials import SAME, Trial
from faults.wires import CLOSED, CORRUPT, HELD, OPEN, SLOW, TORN, Wire

NODES = ("a", "b", "c")  # nothing happens to a's wire, clock and disk: one reply at least comes in every round
METHODS = ("scaffold", "fedavgm(0.9)")
ROUNDS, DEADLINE = 4, 120.0
LIMIT = 1800.0  # seconds for a trial on a busy machine; starting Flower's programs takes most of it
MAX_RESUMES = 6
BACK = 300.0  # seconds that a node may take to be back, once the fault is over

# the programs of a server and of a node, by a word of their command line; the first one watches over the others
SERVER = ("unskew.federation", "flower-superlink", "flower-superexec", "unskew.federation.gateway", "flwr-serverapp")
NODE = ("unskew.federation", "node_service", "flower-supernode", "flower-superexec", "flwr-clientapp")
PROGRAMS = (*(("server", word) for word in SERVER), *(("b", word) for word in NODE))


def process_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """Each fault in turn, on one federation, which ends with the trials."""
    nemesis = Nemesis(folder / "processes")
    faults = nemesis.faults()
    try:
        for number in range(10_000):
            name = list(faults)[number % len(faults)]
            draw, method = np.random.default_rng([seed, number]), METHODS[number % len(METHODS)]
            work = partial(nemesis.tried, faults[name], method, draw, folder / f"run-{number}")
            yield Trial(f"{name} {number}: {method}", work, LIMIT)
    finally:
        nemesis.close()


class Nemesis:
    """A server and three nodes, and everything that can be done to them."""

    def __init__(self, folder: Path) -> None:
        from faults.live import Live
        from unskew.federation.folder import read_node, toml

        folder.mkdir(parents=True)
        self.live = Live(folder / "f", list(NODES))
        self.wires = {name: Wire(self.live.federation.settings.port) for name in NODES}
        for name, wire in self.wires.items():
            settings = toml({"name": name, "server": f"127.0.0.1:{wire.port}"}, "for a trial")
            (read_node(self.live.federation.node(name)).path / "node.toml").write_text(settings)
        self.clocks: dict[str, Path] = {}
        if library := build_clock(folder):
            for name in ("server", "b"):
                self.clocks[name] = folder / f"{name}.clock"
                self.set_clock(name, 0)
                self.live.environments[name] = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(self.clocks[name])}

    def faults(self) -> dict[str, Callable[[np.random.Generator], None]]:
        """What can happen, by name; each call does it, waits, and puts it right."""
        found: dict[str, Callable[[np.random.Generator], None]] = {
            "slow wire": partial(self._wire, SLOW, ("b",)),
            "partition": partial(self._wire, HELD, ("b",)),
            "partition of all nodes": partial(self._wire, HELD, NODES),
            "connections reset": partial(self._wire, CLOSED, ("b", "c")),
            "torn message": partial(self._wire, TORN, ("b",)),
            "corrupted bytes": partial(self._wire, CORRUPT, ("b",)),
        }
        for name, word in PROGRAMS:
            found[f"stop {word} of {name}"] = partial(self._stop, name, word)
            found[f"kill {word} of {name}"] = partial(self._kill, name, word)
        for name, word in (("b", "node_service"), ("server", "flwr-serverapp"), ("server", "flower-superlink")):
            found[f"disk full for {word} of {name}"] = partial(self._fill, name, word)
        for name in self.clocks:
            for seconds in (-400, -120, 120):
                found[f"clock of {name} {seconds:+} s"] = partial(self._skew, name, seconds)
        return found

    def tried(
        self, fault: Callable[[np.random.Generator], None], method: str, draw: np.random.Generator, out: Path
    ) -> str:
        """One run with this fault in the middle of it, resumed to its end, against the simulation of who answered."""
        from faults.live import LOCAL, Run, recipe
        from unskew.core.types import Local

        replay = from_tests("replay")
        text = recipe(len(NODES), ROUNDS, method, data="digits", checkpoint_seconds=0, seed=0)
        rules: dict[str, Any] = {"deadline": DEADLINE, "min_replies": 1, "wait": 600.0}
        self.heal()
        run = Run(self.live, out, text, **rules)
        begun = run.reaches(1, LIMIT / 2)
        if begun and begun[0]["clients"] < len(NODES):
            return f"an earlier fault has cost a node: {begun[0].get('notes')}"
        time.sleep(float(draw.uniform(0, 3)))
        fault(draw)
        for _ in range(MAX_RESUMES):
            run.wait(LIMIT / 3)
            if (out / "result.json").exists():
                break
            self.heal()
            resumes = (out / "config.toml").exists()
            run = Run(self.live, out, text, resume=resumes, **rules)
        else:
            return f"it did not end in {MAX_RESUMES} attempts: {run.trouble}"
        self.heal()
        failed = replay.failed_by_round(out)
        again = replay.replayed(one_process(self.live.partition, method), method, Local(**LOCAL), 0, failed)
        return SAME if again == _weights(out) else f"other weights than those who answered make: {failed}"

    def heal(self) -> None:
        """Remove every fault, and start again what has ended."""
        from faults.live import until

        for wire in self.wires.values():
            wire.mode = OPEN
        for name in self.clocks:
            self.set_clock(name, 0)
        ended = [name for name, command in self.live.commands.items() if command.process.poll() is not None]
        for name in ended:
            del self.live.commands[name]
        self.live.start(*(name for name in ("server", *NODES) if name not in self.live.commands))
        until(self._answers, LIMIT / 3, "the server's program is restarted")
        began = time.time()
        try:
            until(lambda: not self._missing(began), BACK, "every node is back")
        except AssertionError:
            lost = self._missing(began)
            for name in lost:  # for the trials that follow
                self.live.kill(name)
            raise AssertionError(f"lost for good: node {', '.join(lost)}") from None

    def _missing(self, since: float) -> list[str]:
        """The nodes that the server has not heard of since then."""
        from unskew.federation.metrics import last_seen

        seen = last_seen(self.live.federation)
        return [name for name in NODES if seen.get(name, 0.0) < since]

    def _answers(self) -> bool:
        from unskew.federation.server import is_running

        return is_running(self.live.federation)

    def set_clock(self, name: str, seconds: int) -> None:
        """Put the wall clock of a server or node forward or back."""
        with self.clocks[name].open("r+b" if self.clocks[name].exists() else "wb") as file:
            file.write(struct.pack("q", seconds))  # in place: the processes have the file mapped

    def close(self) -> None:
        """End everything."""
        for wire in self.wires.values():
            wire.mode = OPEN
        try:
            self.live.close()
        finally:
            for wire in self.wires.values():
                wire.close()

    def _wire(self, mode: str, names: tuple[str, ...], draw: np.random.Generator) -> None:
        for name in names:
            self.wires[name].mode = mode
        time.sleep(float(draw.uniform(5, 20)))
        for name in names:
            self.wires[name].mode = OPEN

    def _pids(self, name: str, word: str) -> list[int]:
        from faults.live import until

        if word == NODE[0]:  # the watcher itself is our child
            return [self.live.commands[name].process.pid]
        until(lambda: self.live.programs(name, word), LIMIT / 10, f"a {word} of {name}")  # an app lives for one message
        return self.live.programs(name, word)

    def _stop(self, name: str, word: str, draw: np.random.Generator) -> None:
        stopped = self._pids(name, word)
        _send(stopped, signal.SIGSTOP)
        time.sleep(float(draw.uniform(3, 15)))
        _send(stopped, signal.SIGCONT)

    def _kill(self, name: str, word: str, draw: np.random.Generator) -> None:
        _send(self._pids(name, word), signal.SIGKILL)

    def _fill(self, name: str, word: str, draw: np.random.Generator) -> None:
        size, limited = int(2 ** draw.uniform(8, 16)), self._pids(name, word)
        before = {number: _limit(number, size) for number in limited}
        time.sleep(float(draw.uniform(5, 15)))
        for number, old in before.items():
            _limit(number, old)

    def _skew(self, name: str, seconds: int, draw: np.random.Generator) -> None:
        self.set_clock(name, seconds)
        time.sleep(float(draw.uniform(5, 20)))
        self.set_clock(name, 0)


def build_clock(folder: Path) -> Path | None:
    """The library that moves a process's wall clock; None where there is no C compiler."""
    compiler, library = shutil.which("cc"), folder / "clock.so"
    if compiler is None:
        print("  no C compiler: clocks are left alone", file=sys.stderr)
        return None
    source = str(Path(__file__).parent / "clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    return library


def one_process(partition: Path, method: str, seed: int = 0) -> Any:
    """All clients of the federation as an engine in this process."""
    from faults.live import LOCAL
    from unskew import engines
    from unskew.core.types import Local
    from unskew.data.population import Population
    from unskew.data.sources import load
    from unskew.engines.blueprint import Blueprint, dataset
    from unskew.runs import config as configs
    from unskew.runs.config import Config
    from unskew.runs.prepare import make_partition

    images, local = load("digits", None), Local(**LOCAL)
    config = configs.checked(Config(data="digits", partition=f"file:{partition}", clients=len(NODES), seed=seed))
    data = dataset(images, Population.from_partition(make_partition(config, images.examples)))
    return engines.open_engine("loop", engines.EngineSetup(Blueprint(method, "tiny-cnn", (1, 8, 8), 10, local), data))


def from_tests(name: str) -> Any:
    """A module of the tests' own."""
    tests = str(Path(__file__).parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    return __import__(name)


def _weights(out: Path) -> str:
    from unskew.runs.result import read_result

    return read_result(out).weights_sha256


def _send(numbers: list[int], what: signal.Signals) -> None:
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, what)


def _limit(number: int, size: int) -> int:
    """Let a process write no file beyond this size; the limit it had."""
    try:
        soft, hard = resource.prlimit(number, resource.RLIMIT_FSIZE)
        resource.prlimit(number, resource.RLIMIT_FSIZE, (size, hard))
    except ProcessLookupError:
        return size
    return soft
