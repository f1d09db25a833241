"""The console that the commands print to."""

import os
import sys

from rich.console import Console


class PlainConsole(Console):
    """Text is printed as it is, without markup. If the reader of a pipe has gone, the run continues in silence."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False)

    def on_broken_pipe(self) -> None:
        """Rich would end the process here."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
