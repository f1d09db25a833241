"""Progress of work without rounds: a bar on a terminal, a line for each stage where piped."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StageProgress:
    """Called with the stage, what is done and the total (0: unknown); shows it until the ``with`` block ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._words = ""
        self._progress: Progress | None = None

    def __enter__(self) -> "StageProgress":
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(show_speed=True),
                       TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, words: str, done: int, total: int) -> None:
        """Show it; a new stage takes the last one's place."""
        if self._progress is None:
            if words != self._words:
                self._console.print(f"{words} …", soft_wrap=True)
        elif words != self._words:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(words, total=total or None, completed=done)
        else:
            self._progress.update(self._progress.task_ids[-1], completed=done, total=total or None)
        self._words = words
