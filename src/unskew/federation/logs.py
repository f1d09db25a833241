"""The log of a program that we started: plain text, the previous one kept beside it when it is long."""

import re
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from unskew.core.errors import UserError

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
