"""Progress of a download: a bar with rate and remaining time on a terminal, a line now and then where piped."""

from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from unskew.console.bar import Bar
from unskew.core.units import format_bytes, format_duration

EVERY = 10.0  # seconds between two lines


class DownloadProgress(Bar):
    """Called with the bytes so far and in all (None: unknown); a smaller number begins another file."""

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(
            console, TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(),
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
        """A sentence beside the bar."""
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
