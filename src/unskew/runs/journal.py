"""during.jsonl: what was recorded while a run trained, one line for each round."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from unskew.core.errors import UserError
from unskew.core.files import json_lines, read_content
from unskew.core.records import check_fields
from unskew.round.driver import Metrics
from unskew.runs.manifest import read_sealed


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


METRICS = "metrics.jsonl"

_COUNTED = ("round", "examples", "seconds", "bytes_up", "bytes_down")  # what every line of metrics.jsonl has


def metrics_row(metrics: Metrics) -> dict[str, Any]:
    """A round as its line has it: without what was not measured."""
    return {key: value for key, value in asdict(metrics).items() if value is not None and value != ()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run, without a last line that a crash cut short."""
    rows = json_lines(read_sealed(path, METRICS) or b"", path / METRICS)
    for number, row in enumerate(rows, 1):
        try:
            if missing := [name for name in _COUNTED if name not in row]:
                raise ValueError(f"it has no {missing[0]}")
            check_fields(Metrics, row)
            if not isinstance(row.get("failures", []), list):
                raise ValueError("failures must be a list")
        except ValueError as error:
            raise UserError(f"{path / METRICS} is damaged: line {number}: {error}") from error
    return rows


DURING = "during.jsonl"


def mark_after(path: Path, number: int) -> Mark:
    """The part of during.jsonl up to that round, for checkpoints of earlier versions, which do not tell."""
    content = read_content(path / DURING) or b""
    kept = sum(row["round"] <= number for row in _checked(json_lines(content, path / DURING), path))
    return Mark(sum(len(line) + 1 for line in content.split(b"\n")[:kept]))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that were recorded while training, without a last line that a crash cut short."""
    return _checked(json_lines(read_sealed(path, DURING) or b"", path / DURING), path)


def _checked(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    try:
        for row in rows:
            _check_recorded(row)
        return rows
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path / DURING} is damaged: {type(error).__name__} {error}") from error


def _check_recorded(row: dict[str, Any]) -> None:
    """Refuse a line of during.jsonl that the recorder did not write."""
    if isinstance(row["round"], bool) or not isinstance(row["round"], int) or row["round"] < 1:
        raise ValueError(f"{row['round']!r} is not a round")
    if not math.isfinite(row.get("silhouette") or 0.0):
        raise ValueError(f"round {row['round']} has the silhouette {row['silhouette']!r}")
    for name in ("norms", "drift"):
        if name in row:
            seen = row[name]
            table = np.array([seen["server"], *seen["local"]], float)  # unequal rows are refused here
            widths = {len(seen["server"]), *([len(seen["layers"])] if name == "drift" else [])}
            clients = [int(client) for client in seen["clients"]]
            if len(widths) > 1 or len(clients) + 1 != len(table) or not np.isfinite(table).all():
                raise ValueError(f"round {row['round']} has {name} of other lengths")
