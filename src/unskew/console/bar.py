"""A bar for one task at a time, on a terminal, until its ``with`` block ends."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class Bar:
    """Shown where the console is a terminal; piped, there is none and ``_progress`` is None."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console, self._columns = console, columns
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress = Progress(*self._columns, console=self._console, transient=True)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    @staticmethod
    def _begin_task(progress: Progress, words: str, done: int, total: int | None) -> None:
        """A new task takes the last one's place."""
        for task in progress.task_ids:
            progress.remove_task(task)
        progress.add_task(words, total=total, completed=done)
