"""How a file is written: at once or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from unskew.core.errors import UserError


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file at once: it is the old one or the new one, never half of either."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def append(path: Path, content: bytes) -> None:
    """Add to a file's end; one that is not there is made."""
    try:
        with open(path, "ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
