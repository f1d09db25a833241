"""The console that commands print to, and progress bars; plain lines where output is piped."""

import json
import os
import sys
from time import monotonic
from types import TracebackType
from typing import Annotated, Any, Self

import typer
from rich import progress as bars
from rich.console import Console
from rich.text import Text

from unskew.core.units import format_bytes, format_duration


class PlainConsole(Console):
    """Text is printed as it is, without markup. If the reader of a pipe has gone, the run continues in silence."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False)

    def say(self, *lines: str | Text) -> None:
        """Print each line whole: what is too long for the terminal breaks there, not here."""
        for line in lines:
            self.print(line, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Rich would end the process here."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


out = PlainConsole()  # of the commands that take --json


def _leave_stdout(as_json: bool) -> bool:
    out.stderr = as_json
    return as_json


Json = Annotated[
    bool,
    typer.Option("--json", callback=_leave_stdout, help="Print the result as JSON; all else goes to standard error."),
]


def print_json(value: Any) -> None:
    """Print a result for programs."""
    print(json.dumps(value, indent=2, default=str))  # noqa: T201


class Bar:
    """Shown where the console is a terminal; piped, there is none and ``_progress`` is None."""

    def __init__(self, console: Console, *columns: bars.ProgressColumn) -> None:
        self._console, self._columns = console, columns
        self._progress: bars.Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress = bars.Progress(*self._columns, console=self._console, transient=True)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    @staticmethod
    def _begin_task(progress: bars.Progress, words: str, done: int, total: int | None) -> None:
        for task in progress.task_ids:
            progress.remove_task(task)
        progress.add_task(words, total=total, completed=done)


class StageProgress(Bar):
    """Called with the stage, what is done and the total (0: unknown); shows it until the ``with`` block ends."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console, bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TaskProgressColumn(show_speed=True),
            bars.TimeElapsedColumn(), bars.TimeRemainingColumn(),
        )  # fmt: skip
        self._words = ""

    def __call__(self, words: str, done: int, total: int) -> None:
        """Show it; a new stage takes the last one's place."""
        if self._progress is None:
            if words != self._words:
                self._console.print(f"{words} …", soft_wrap=True)
        elif words != self._words:
            self._begin_task(self._progress, words, done, total or None)
        else:
            self._progress.update(self._progress.task_ids[-1], completed=done, total=total or None)
        self._words = words


EVERY = 10.0  # seconds between two lines


class DownloadProgress(Bar):
    """Called with the bytes so far and in all (None: unknown); a smaller number begins another file."""

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(
            console, bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn(),
            bars.TransferSpeedColumn(), bars.TimeRemainingColumn(),
        )  # fmt: skip
        self._name = name
        self._began = self._said = 0.0
        self._first = self._last = 0

    def __call__(self, done: int, total: int | None) -> None:
        """Show it."""
        if not self._began or done < self._last:
            self._begin(done, total)
        elif self._progress is not None:
            self._progress.update(self._progress.task_ids[-1], completed=done, total=total)
        elif monotonic() - self._said >= EVERY:
            self._print(done, total)
        self._last = done

    def say(self, words: str) -> None:
        """Print a sentence above the bar."""
        self._console.print(words, soft_wrap=True)

    def _begin(self, done: int, total: int | None) -> None:
        self._began = self._said = monotonic()
        self._first = done
        if self._progress is not None:
            self._begin_task(self._progress, self._name, done, total)
        else:
            of = format_bytes(total) if total else "a file of unknown size"
            after = f", continued after {format_bytes(done)}" if done else ""
            self._console.print(f"{self._name}: {of}{after} …", soft_wrap=True)

    def _print(self, done: int, total: int | None) -> None:
        self._said = monotonic()
        rate = (done - self._first) / max(self._said - self._began, 1e-9)
        left = f" of {format_bytes(total)}, {format_duration((total - done) / rate)} left" if total and rate else ""
        self._console.print(f"{self._name}: {format_bytes(done)}{left} ({format_bytes(rate)}/s)", soft_wrap=True)
