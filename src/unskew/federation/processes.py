"""Child programs: started with a log, supervised, and ended with all their descendants."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from unskew.core.child import Child, Log
from unskew.core.errors import UserError
from unskew.core.units import counted

MARK = "UNSKEW_FEDERATION"  # environment variable that marks our processes and their descendants
WATCHER = b"unskew.federation"  # on the command line of supervisors
MAX_RESTARTS = 5  # of programs that ran for less than a minute
PATIENCE = 10.0  # seconds for a program to exit by itself
Say = Callable[[str], None]
ENDS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))  # not on Windows


class ProcessGroup:
    """The programs of one server or node; leaving the block ends them, the first one last."""

    def __init__(self, mark: str, logs: Path, folder: Path, patience: float = PATIENCE) -> None:
        self.mark, self._logs, self._folder, self._patience = mark, logs, folder, patience
        self._children: list[Child] = []
        self._restarts = 0

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], heard: Say = lambda line: None
    ) -> Child:
        """Start a program; its log is ``name.log``."""
        self._children = [child for child in self._children if child.code is None]
        marked = {**environment, MARK: self.mark}
        log = Log(self._logs / f"{name.replace(' ', '-')}.log")
        child = Child(name, command, environment=marked, folder=self._folder, log=log, heard=heard)
        self._children.append(child)
        return child

    def count_restart(self, child: Child, say: Say) -> None:
        """Report that a program has ended, and pause before it is restarted; refused if it keeps exiting."""
        self._restarts = 1 if time.monotonic() - child.began > 60 else self._restarts + 1
        if self._restarts > MAX_RESTARTS:
            raise UserError(describe_end(child, f"{child.name} keeps exiting"))
        say(f"{child.name} ended with {child.exit_reason()}; restarting it; its log is {child.log.path}")
        time.sleep(min(2.0**self._restarts, 20.0) - 1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # a signal now would leave programs running, and we are ending already; only the main thread has signals
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDS} if main else {}
        try:
            for wave in (self._children[1:], self._children[:1]):
                for child in wave:
                    child.terminate()
                for child in wave:
                    child.end(self._patience)
            end_all(self.mark, patience=2.0)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def describe_end(child: Child, what: str) -> str:
    """The user's mistake that the program reported, or else the end of its log."""
    output = child.log_end()
    if child.code == 2 and "unskew: " in output:
        return output.rpartition("unskew: ")[2]
    return f"{what}, with exit code {child.code}; {child.log.path} ends with:\n{output}"


def marked(mark: str) -> list[int]:
    """This user's other processes with the mark; none without /proc."""
    wanted, numbers = f"{MARK}={mark}".encode(), [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return sorted(n for n in numbers if n != os.getpid() and wanted in _words(f"{n}/environ"))


def claim(mark: str, what: str, say: Say) -> None:
    """Refuse to supervise programs that have a supervisor; end those that a killed one left running."""
    running = marked(mark)
    if watching := [number for number in running if WATCHER in _words(f"{number}/cmdline")]:
        raise UserError(f"{what} is already running as process {watching[0]}; stop it with: unskew federation stop")
    if running:
        end_all(mark)
        say(f"ended {counted(len(running), 'program')} that a killed process had left running")


def end_all(mark: str, *, patience: float = PATIENCE) -> int:
    """End all processes with the mark: first the supervisors, which end their own in order."""
    running = marked(mark)
    above = [number for number in running if _parent(number) not in running]
    for how, numbers in ((signal.SIGTERM, above), (signal.SIGTERM, running), (signal.SIGKILL, running)):
        for number in numbers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, how)
        end = time.monotonic() + patience
        while (left := marked(mark)) and time.monotonic() < end:
            time.sleep(0.1)
        if not left:
            break
    return len(running)


def _words(file: str) -> list[bytes]:
    """The words in a file of /proc; none if the process has ended or is another user's."""
    try:
        return (Path("/proc") / file).read_bytes().split(b"\0")
    except OSError:
        return []


def _parent(number: int) -> int:
    return int((_words(f"{number}/stat") or [b") ? 0"])[0].rpartition(b")")[2].split()[1])
