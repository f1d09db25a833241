"""A file that grows line by line, hashed as it grows: a checkpoint vouches for its beginning up to a mark."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from unskew.core.errors import UserError
from unskew.core.files import json_lines, read_content


@dataclass(frozen=True)
class Mark:
    """A place in a file, and SHA-256 over what is before it; empty in checkpoints of earlier versions."""

    bytes: int = 0
    sha256: str = ""


class LineFile:
    """Lines are appended after a mark. The file is made with its first line."""

    def __init__(self, path: Path, keep: Mark) -> None:
        """Continue after ``keep``: what is before it must be as it was, what a crash left after it is cut off."""
        self._path = path
        self._file: BinaryIO | None = None
        self._digest = check_beginning(path, keep)
        if path.exists():
            os.truncate(path, keep.bytes)
        self.mark = Mark(keep.bytes, self._digest.hexdigest())

    def append(self, row: Mapping[str, Any]) -> Mark:
        """One line; the mark after it."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            self._open().write(line)
        except OSError as error:
            raise UserError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self._digest.update(line)
        self.mark = Mark(self.mark.bytes + len(line), self._digest.hexdigest())
        return self.mark

    def rows(self) -> list[dict[str, Any]]:
        """All rows as they are on disk, which must be what was appended."""
        content = read_content(self._path) or b""
        if hashlib.sha256(content).hexdigest() != self.mark.sha256:
            raise UserError(f"{self._path} was changed while the run was writing it: {_restore(self._path)}")
        return json_lines(content, self._path)

    def sync(self) -> None:
        """Make the lines durable."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing is lost: every line went to the file at once."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        if self._file is None:
            try:
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  closed by close
            except OSError as error:
                raise UserError(f"{self._path} cannot be written: {error.strerror or error}") from error
        assert self._file is not None
        return self._file


def check_beginning(path: Path, keep: Mark) -> "hashlib._Hash":
    """The running hash over the file up to the mark; refused where that is not what the mark vouches for."""
    content = (read_content(path) or b"")[: keep.bytes]
    if len(content) < keep.bytes:
        raise UserError(f"{path} is shorter than the checkpoint says; it was changed: {_restore(path)}")
    digest = hashlib.sha256(content)
    if keep.sha256 and digest.hexdigest() != keep.sha256:
        raise UserError(f"{path} was changed since the checkpoint was written: {_restore(path)}")
    return digest


def _restore(path: Path) -> str:
    return f"restore it from a copy, or delete {path.parent / 'checkpoint'} to start the run from the beginning"
