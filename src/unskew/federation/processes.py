"""Child programs: started with a log, supervised, and ended with all their descendants."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from unskew.core.child import Child, Log
from unskew.core.errors import UserError
from unskew.core.units import counted

MARK = "UNSKEW_FEDERATION"  # environment variable that marks our processes and their descendants
WATCHER = b"unskew.federation"  # on the command line of supervisors
PATIENCE = 10.0  # seconds for a program to exit by itself
ENDS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))  # not on Windows


class ProcessGroup:
    """The programs of one server or node; leaving the block ends them, the first one last."""

    def __init__(self, mark: str, logs: Path, folder: Path, patience: float = PATIENCE) -> None:
        self.mark, self._logs, self._folder, self._patience = mark, logs, folder, patience
        self._children: list[Child] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        heard: Callable[[str], None] = lambda line: None,
    ) -> Child:
        """Start a program; its log is ``name.log``."""
        self._children = [child for child in self._children if child.code is None]
        marked = {**environment, MARK: self.mark}
        log = Log(self._logs / f"{name.replace(' ', '-')}.log")
        child = Child(name, command, environment=marked, folder=self._folder, log=log, heard=heard)
        self._children.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _undisturbed():
            for wave in (self._children[1:], self._children[:1]):
                for child in wave:
                    child.terminate()
                for child in wave:
                    child.end(self._patience)
            end_all(self.mark, patience=2.0)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without a signal in between that would leave programs running: we are ending already."""
    main = threading.current_thread() is threading.main_thread()  # no other thread has signals
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDS} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def marked(mark: str) -> list[int]:
    """This user's other processes with the mark; none without /proc."""
    wanted, own = f"{MARK}={mark}".encode(), str(os.getpid())
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name != own and wanted in _words(entry / "environ"):
            found.append(int(entry.name))
    return sorted(found)


def claim(mark: str, what: str, say: Callable[[str], None]) -> None:
    """Refuse to supervise programs that have a supervisor; end those that a killed one left running."""
    running = marked(mark)
    if watching := [number for number in running if WATCHER in _words(Path(f"/proc/{number}/cmdline"))]:
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
        if _gone(mark, patience):
            break
    return len(running)


def _gone(mark: str, patience: float) -> bool:
    end = time.monotonic() + patience
    while marked(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _words(file: Path) -> list[bytes]:
    """The words in a file of /proc; none if the process has ended or is another user's."""
    try:
        return file.read_bytes().split(b"\0")
    except OSError:
        return []


def _parent(number: int) -> int:
    try:
        return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
