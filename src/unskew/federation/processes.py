"""Programs that run beside us: started with a log, watched, ended together with all that they have started."""

import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

from unskew.core.errors import UserError
from unskew.core.units import counted

MOST_BYTES = 20_000_000  # then the log begins anew, and the old one is NAME.1
MOST_LETTERS = 2000  # of a line

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Log:
    """Lines with the time of day; the last ones are remembered for messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: deque[str] = deque(maxlen=40)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size > MOST_BYTES:
                path.replace(path.with_name(f"{path.name}.1"))
            self._append("")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error

    def write(self, raw: bytes) -> str:
        """Write what a program printed, without colours; the line that was written, empty for an empty one."""
        line = _COLOUR.sub("", raw.decode("utf-8", "replace")).rstrip()[:MOST_LETTERS]
        if line:
            self._last.append(line)
            with suppress(OSError):  # a full disk: the program itself goes on
                self._append(f"{time.strftime('%H:%M:%S')} {line}\n")
        return line

    def _append(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)

    def last(self, most: int) -> list[str]:
        """The last lines."""
        return list(self._last)[-most:]


MARK = "UNSKEW_FEDERATION"  # an environment variable: by it we know our processes again, and those that they started
WATCHER = b"unskew.federation"  # a word of the command line of those who watch over others
PATIENCE = 10.0  # seconds that a program gets to end by itself


class Child:
    """One program: what it prints goes to a log, line by line, and to ``heard``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Log,
        heard: Callable[[str], None],
    ) -> None:
        self.name, self.log = name, log
        self.began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal reaches us alone; we end the others in order
            )
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror or error}") from error
        self._reader = Thread(target=self._read, args=(heard,), daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def last_words(self, most: int = 6) -> str:
        """The last lines that it printed, once it has ended."""
        self._reader.join(timeout=2)
        return "\n".join(self.log.last(most))

    def ask_to_end(self) -> None:
        """Send the signal at which a program ends in order."""
        self._process.terminate()

    def end(self, patience: float = PATIENCE) -> None:
        """Wait until it has ended, and end it by force after ``patience`` seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=2)

    def _read(self, heard: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            for raw in printed:
                if line := self.log.write(raw):
                    heard(line)


class Group:
    """The programs of one server or one node; leaving the block ends them, the first one last."""

    def __init__(self, mark: str, logs: Path, folder: Path) -> None:
        self.mark, self._logs, self._folder = mark, logs, folder
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
        child = Child(name, command, marked, self._folder, Log(self._logs / f"{name.replace(' ', '-')}.log"), heard)
        self._children.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for wave in (self._children[1:], self._children[:1]):
            for child in wave:
                child.ask_to_end()
            for child in wave:
                child.end()
        end_all(self.mark, patience=2.0)


def marked(mark: str) -> list[int]:
    """The processes of this user that carry the mark, ours left out; none where there is no /proc."""
    wanted, own = f"{MARK}={mark}".encode(), str(os.getpid())
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name != own and wanted in _words(entry / "environ"):
            found.append(int(entry.name))
    return sorted(found)


def claim(mark: str, what: str, say: Callable[[str], None]) -> None:
    """Refuse to be the second to watch over these programs; end what one that was killed has left running."""
    there = marked(mark)
    if watching := [number for number in there if WATCHER in _words(Path(f"/proc/{number}/cmdline"))]:
        raise UserError(f"{what} is running already, as process {watching[0]}; end it with: unskew federation stop")
    if there:
        end_all(mark)
        say(f"ended {counted(len(there), 'program')} left over from before")


def end_all(mark: str, *, patience: float = PATIENCE) -> int:
    """End the processes that carry the mark: first those that watch over others, which end them in order."""
    there = marked(mark)
    above = [number for number in there if _parent(number) not in there]
    for how, numbers in ((signal.SIGTERM, above), (signal.SIGTERM, there), (signal.SIGKILL, there)):
        for number in numbers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, how)
        if _gone(mark, patience):
            break
    return len(there)


def _gone(mark: str, patience: float) -> bool:
    end = time.monotonic() + patience
    while marked(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _words(file: Path) -> list[bytes]:
    """A file of /proc that is a list of words; none where the process has ended, or is another user's."""
    try:
        return file.read_bytes().split(b"\0")
    except OSError:
        return []


def _parent(number: int) -> int:
    try:
        return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
