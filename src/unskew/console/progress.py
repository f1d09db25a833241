"""The console that commands print to, and progress bars; plain lines where output is piped."""

import json
import os
import sys
from typing import Annotated, Any, Self

import typer
from rich import progress as bars
from rich.console import Console
from rich.text import Text


class PlainConsole(Console):
    """Text is printed as it is, without markup. If the reader of a pipe has gone, the run continues in silence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

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


class StageProgress:
    """Called with the stage, what is done and the total (0: unknown); shows it until the ``with`` block ends.

    On a terminal a bar, elsewhere a line for each tenth.
    """

    def __init__(self, console: Console, in_bytes: bool = False) -> None:
        amount = (bars.DownloadColumn(), bars.TransferSpeedColumn()) if in_bytes else (bars.TaskProgressColumn(),)
        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *amount)
        self._console, self._stage, self._tenth = console, "", 0
        self._progress = bars.Progress(
            *columns, bars.TimeElapsedColumn(), bars.TimeRemainingColumn(), console=console, transient=True
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show it; a new stage replaces the previous one."""
        tenth = 10 * done // total if total else 0
        if not self._console.is_terminal and (stage, tenth) != (self._stage, self._tenth):
            so_far = f": {tenth}0 %" if stage == self._stage else " …"
            self._console.print(f"{stage}{so_far}", soft_wrap=True)
        self._tenth = tenth
        if stage != self._stage:
            self._stage = stage
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(stage, total=None)
        self._progress.update(self._progress.task_ids[0], completed=done, total=total or None)
