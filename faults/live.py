"""A real federation on loopback for tests: the same commands that people type, each in its own process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.data import partition_files
from unskew.federation.folder import initialise, read_node, toml
from unskew.federation.network import free_port
from unskew.federation.node import node_mark, socket_path
from unskew.federation.processes import end_all, marked
from unskew.federation.server import server_mark, submit
from unskew.runs import config as configs
from unskew.runs.config import Config
from unskew.runs.folder import write_arrays
from unskew.runs.prepare import make_partition, read_data

PATIENCE = 900.0  # seconds: machines that run tests are busy
LOCAL = {"epochs": 1, "batch": 32, "lr": 0.02}


def recipe(clients: int, rounds: int, method: str = "fedavgm(0.9)", **more: object) -> str:
    """A recipe whose images are at the nodes, evaluated at its end."""
    options = {"data": "nodes", "clients": clients, "method": method, "rounds": rounds, "evaluate_every": rounds}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**options, **LOCAL, **more}.items())


def rounds_done(out: Path) -> list[dict]:
    """The lines of the run's metrics so far."""
    with suppress(FileNotFoundError):
        whole, _, _ = (out / "metrics.jsonl").read_text().rpartition("\n")  # a line may be in the middle of its writing
        return [json.loads(line) for line in whole.splitlines()]
    return []


class Command:
    """A command that runs until it is stopped, and the lines that it has printed."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unskew.federation", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.process.stdout as printed:
            for line in printed:
                self.lines.append(line.rstrip())

    def says(self, words: str) -> bool:
        return any(words in line for line in self.lines)

    def wait_for(self, words: str, seconds: float = PATIENCE) -> None:
        until(lambda: self.says(words) or self.process.poll() is not None, seconds, f"{words!r} in {self.lines}")
        assert self.says(words), self.lines

    def ends(self, seconds: float = PATIENCE) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.ends(60)


class Live:
    """A server and nodes, each holding one part of digits."""

    def __init__(self, path: Path, nodes: list[str], *, parts: int | None = None) -> None:
        self.federation = initialise(path, nodes=nodes, port=free_port(3))
        self.path, self.commands = path, dict[str, Command]()
        self.environments: dict[str, dict[str, str]] = {}  # what each command gets in addition, by name
        self.partition = path / "partition.npz"
        config = configs.checked(
            Config(data="digits", partition="dirichlet(alpha=0.3)", clients=parts or len(nodes), seed=0)
        )
        images = read_data(config)
        arrays = partition_files.to_arrays(
            make_partition(config, images.examples), images.train.labels, len(images.classes)
        )
        write_arrays(self.partition, arrays)
        for number, name in enumerate(nodes):
            self.give_data(name, number)

    def give_data(self, name: str, client: int) -> None:
        node = read_node(self.federation.node(name))
        settings = {
            "name": name,
            "data": "digits",
            "partition": f"file:{self.partition}",
            "client": [client],
            "folder": str(node.state),
            "socket": str(socket_path(node)),
        }
        write_whole(node.service_settings, toml(settings, "for a test").encode())

    def start(self, *names: str) -> None:
        """Start these, and wait until all are there."""
        for name in names:
            where = ["server", str(self.path)] if name == "server" else ["node", str(self.federation.node(name))]
            self.commands[name] = Command(*where, **self.environments.get(name, {}))
        for name in names:
            self.commands[name].wait_for("ready: nodes connect" if name == "server" else "connected to")

    def mark(self, name: str) -> str:
        return server_mark(self.federation) if name == "server" else node_mark(read_node(self.federation.node(name)))

    def kill(self, name: str) -> None:
        """All of it at once, as when the power fails."""
        watcher = self.commands.pop(name).process
        watcher.kill()
        while left := marked(self.mark(name)):  # one may have started another meanwhile
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        watcher.wait(30)

    def programs(self, name: str, word: str) -> list[int]:
        """The processes of it whose command line has this word."""
        found = []
        for number in marked(self.mark(name)):
            with suppress(OSError):  # it has ended meanwhile
                if word in Path(f"/proc/{number}/cmdline").read_text():
                    found.append(number)
        return found

    def kill_program(self, name: str, word: str) -> None:
        """One program of it, the one whose command line has this word."""
        for number in self.programs(name, word):
            os.kill(number, signal.SIGKILL)

    def run(self, out: Path, recipe: str, say: Callable[[str], None] = lambda line: None, **more: Any) -> None:
        file = self.path / f"{out.name}.toml"
        file.write_text(recipe)
        submit(self.federation, file, out, say, **more)

    def close(self) -> None:
        for command in self.commands.values():
            command.process.terminate()
        for command in self.commands.values():
            command.ends(60)
        left = {name: marked(self.mark(name)) for name in (*self.federation.public_keys(), "server")}
        for name in left:
            end_all(self.mark(name))
        assert not any(left.values()), left


class Run(threading.Thread):
    """A run in the background: how it ended is in ``trouble``, what it printed in ``said``."""

    def __init__(self, live: Live, out: Path, text: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self.said: list[str] = []
        self.trouble: UserError | None = None
        self.out = out
        self._work = lambda: live.run(out, text, self.said.append, **more)
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except UserError as error:
            self.trouble = error

    def reaches(self, number: int, seconds: float = PATIENCE) -> list[dict]:
        """Wait until so many rounds are done, or the run has ended; the rounds that are done."""
        until(lambda: len(rounds_done(self.out)) >= number or not self.is_alive(), seconds, f"round {number}")
        return rounds_done(self.out)

    def wait(self, seconds: float = 2 * PATIENCE) -> "Run":
        self.join(seconds)
        assert not self.is_alive(), self.said
        return self


def until(condition: Callable[[], object], seconds: float = PATIENCE, what: str = "it") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.1)
