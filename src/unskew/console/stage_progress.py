"""Progress of work without rounds: a bar on a terminal, a line for each stage where piped."""

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from unskew.console.bar import Bar


class StageProgress(Bar):
    """Called with the stage, what is done and the total (0: unknown); shows it until the ``with`` block ends."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console, TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(show_speed=True),
            TimeElapsedColumn(), TimeRemainingColumn(),
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
