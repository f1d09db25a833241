"""How files are written, whole or not at all, and how JSON lines are read."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file with one JSON object a line; a last line that a crash cut short is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is damaged: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path} is damaged: line {number} is not a JSON object")
        rows.append(row)
    return rows
