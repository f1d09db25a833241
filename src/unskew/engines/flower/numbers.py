"""Message numbers: every message of a run has its own, so that one that is sent again is refused.

A number is which start of the server it was, and which message since then. Numbers rise, but may overtake each other on
the way: the last thousand are remembered one by one, on disk, so that a node's restart forgets nothing.
"""

from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import parse_json, read_content, write_again
from unskew.engines.codec import BadMessage

REMEMBERED = 1000
STARTS = 2**20  # a server's message numbers after its n-th start are from n·STARTS on


class Seen:
    """The numbers that a node has seen in one run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._below, self._numbers = _read(file)

    def take(self, number: int) -> None:
        """Remember the number; refuse it where it was seen, or is too old to tell."""
        if number in self._numbers or number < self._below:
            raise BadMessage(f"replayed: message {number} was seen before")
        self._numbers = set(sorted({*self._numbers, number})[-REMEMBERED:])
        if len(self._numbers) == REMEMBERED:
            self._below = max(self._below, min(self._numbers))
        self._below = max(self._below, number - number % STARTS)  # an earlier start of the server has ended
        write_again(self._file, f"[{self._below},{sorted(self._numbers)}]".encode())


def _read(file: Path) -> tuple[int, set[int]]:
    content = read_content(file)
    if content is None:
        return 0, set()
    try:
        match parse_json(content):
            case [int(below), list(numbers)] if all(type(each) is int for each in numbers):
                return below, set(numbers)
    except ValueError:
        pass
    raise UserError(f"{file} is damaged; delete the folder {file.parent}: the node then joins the run anew")
