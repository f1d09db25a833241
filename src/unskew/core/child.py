"""Child processes: start one, exchange messages with it, detect its death, end it.

Every child has its own session. An interrupt at the terminal reaches only the parent, which decides what to do. On a
busy machine Linux divides the cores among sessions (autogroup), so workers in their parent's session would share one
program's part of the machine. Nothing here imports PyTorch.
"""

import importlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import msgspec

from unskew.core.errors import UserError

INTERRUPTED = 130  # exit code of a worker that was interrupted
MAX_LOG_BYTES = 20_000_000  # a longer log becomes NAME.1 and a new one is started
OLD_LOGS = 3  # NAME.1 (the newest) to NAME.3
MAX_LINE_LENGTH = 2000

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Log:
    """A program's output without colors: the last lines in memory, all of them in a file, with date and time (UTC)."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._last: deque[str] = deque(maxlen=40)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open(path).close()
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error

    def _open(self, path: Path) -> IO[str]:
        """The file to append to, readable by its owner only; a log that is too long is rotated first."""
        with suppress(FileNotFoundError):
            if path.stat().st_size > MAX_LOG_BYTES:
                names = [path, *(path.with_name(f"{path.name}.{number + 1}") for number in range(OLD_LOGS))]
                for old, new in reversed(list(itertools.pairwise(names))):
                    with suppress(FileNotFoundError):
                        old.replace(new)
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")

    def write(self, line: bytes) -> str:
        """Write one line, unless it is empty, and return its text."""
        text = _COLOUR.sub("", line.decode(errors="replace")).rstrip()[:MAX_LINE_LENGTH]
        if text:
            self._last.append(text)
            if self.path is not None:
                with suppress(OSError), self._open(self.path) as file:  # a full disk must not end the program
                    file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")
        return text

    def last(self, most: int) -> list[str]:
        """The last lines."""
        return list(self._last)[-most:]


@cache
def _decoder(kind: Any) -> Any:
    return msgspec.json.Decoder(kind)


class JsonLines:
    """JSON messages, one per line, over a connected socket: integers of up to 64 bits, finite floats."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""

    def fileno(self) -> int:
        """The descriptor, so that a selector can wait for messages."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Send one message: anything that msgspec can encode."""
        self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self, kind: Any = Any) -> Any:
        """Wait for the next message, checked against ``kind``, a type for msgspec; None at the end."""
        while b"\n" not in self._unread:
            try:
                received = self._connection.recv(1 << 20)
            except ConnectionError:
                return None
            if not received:
                return None
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        return _decoder(kind).decode(line)

    def pending(self) -> bool:
        """Whether a complete message is buffered, which a selector cannot see."""
        return b"\n" in self._unread

    def close(self) -> None:
        """Close the connection; the other side's ``receive`` returns None."""
        self._connection.close()


class Child:
    """A process that we started, with its output in ``log``; ``heard`` is called with every line, in another thread.

    ``inherited`` are descriptors that it receives under the same numbers. A worker has ``messages`` and ``life``, our
    end of the pipe that ties its life to ours; its ``log`` has only its standard error.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        log: Log | None = None,
        heard: Callable[[str], object] = lambda line: None,
        inherited: Sequence[int] = (),
        messages: JsonLines | None = None,
        life: int | None = None,
    ) -> None:
        self.name, self.log, self.began = name, log or Log(), time.monotonic()
        self._messages, self._life = messages, life
        try:
            self._process = subprocess.Popen(
                list(command),
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if messages is None else subprocess.DEVNULL,
                stderr=subprocess.STDOUT if messages is None else subprocess.PIPE,
                pass_fds=inherited,
                start_new_session=True,
            )
        except OSError as error:
            self._release()
            raise UserError(f"cannot start {command[0]}: {error.strerror or error}") from error
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, args=(heard,), daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def _connection(self) -> JsonLines:
        assert self._messages is not None, "only worker processes exchange messages"
        return self._messages

    def fileno(self) -> int:
        """The descriptor that becomes readable when a worker sends a message or dies."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Send a message to a worker. If it has died, ``receive`` reports it."""
        with suppress(OSError):
            self._connection.send(message)

    def receive(self, kind: Any = Any) -> Any:
        """Wait for a worker's next message, checked against ``kind``; None once it has died."""
        return self._connection.receive(kind)

    def pending(self) -> bool:
        """Whether a worker's complete message is buffered."""
        return self._connection.pending()

    def wait(self) -> int:
        """Wait until the process has ended and its output is in the log; return the exit code."""
        code = self._process.wait()
        self._reader.join(timeout=2)  # a program that it started may still hold its output
        return code

    def exit_reason(self) -> str:
        """Wait until the process has ended: "signal 9", or "exit code 1: " and the last line of the log."""
        code = self.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ": ".join([how, *self.log.last(1)])

    def log_end(self, most: int = 6) -> str:
        """Wait until the process has ended; the last lines of its log."""
        self.wait()
        return "\n".join(self.log.last(most))

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does. A worker ignores it unless its module handles it."""
        self._process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM, so that the program ends cleanly."""
        self._process.terminate()

    def end(self, patience: float = 10.0) -> None:
        """Close a worker's connection, wait, kill the process group after ``patience`` seconds, release everything."""
        if self._messages is not None:
            self._messages.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=2)
        self._release()

    def _release(self) -> None:
        if self._messages is not None:
            self._messages.close()
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def _read(self, heard: Callable[[str], object]) -> None:
        stream = self._process.stdout if self._messages is None else self._process.stderr
        assert stream is not None
        with stream:
            for line in stream:
                if text := self.log.write(line):
                    heard(text)


def start_worker(module: str, *descriptors: int) -> Child:
    """Start a process that calls a module's ``main(JsonLines, *descriptors)`` and dies with this one."""
    if os.name != "posix":
        raise UserError("worker processes need Linux or macOS; use --engine loop and --jobs 1")
    ours, theirs = socket.socketpair()
    life, our_life = os.pipe()
    inherited = [theirs.fileno(), life, *descriptors]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "OMP_NUM_THREADS": "1"}
    try:
        return Child(
            "a worker process",
            [sys.executable, "-P", "-m", "unskew.core.child", module, *map(str, inherited)],
            environment=environment,
            inherited=inherited,
            messages=JsonLines(ours),
            life=our_life,
        )
    finally:
        theirs.close()
        os.close(life)


def run_worker(module: str, connection: int, life: int, *descriptors: int) -> None:
    """In the new process: watch the parent, then import the module and call its ``main``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means

    def die_with_parent() -> None:
        os.read(life, 1)  # the parent holds the pipe's other end until it dies
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
    inherit_priority()
    try:
        importlib.import_module(module).main(JsonLines(socket.socket(fileno=connection)), *descriptors)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


def inherit_priority() -> None:
    """Give this process's new session the parent's priority: Linux starts every session at the default."""
    with suppress(OSError):
        match = re.search(r"nice (-?\d+)\s*$", Path(f"/proc/{os.getppid()}/autogroup").read_text())
        Path("/proc/self/autogroup").write_text(str(max(os.nice(0), int(match[1]) if match else 0)))


if __name__ == "__main__":
    from unskew.core.child import run_worker as run  # from the module that the worker imports too, not from __main__

    run(sys.argv[1], *map(int, sys.argv[2:]))
