"""The files that grow with the rounds, metrics.jsonl and during.jsonl: append, verify, read, summarise."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import json_lines, read_content, record_from, sync_folder, write_fully
from unskew.round.driver import Metrics
from unskew.runs.folder import read_sealed, reading

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class Mark:
    """A position in a file, and the SHA-256 of the content before it, if known."""

    bytes: int = 0
    sha256: str = ""


class LineFile:
    """Appends lines after a mark, up to which the content must be unchanged; anything after it is cut off."""

    def __init__(self, path: Path, keep: Mark) -> None:
        self._path = path
        self._file: int | None = None  # created by the first line
        self._digest = check_beginning(path, keep)
        if path.exists():
            os.truncate(path, keep.bytes)
        self.mark = Mark(keep.bytes, self._digest.hexdigest())

    def append(self, row: Mapping[str, Any]) -> Mark:
        """Append one line and return the mark after it."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            if self._file is None:
                self._file = os.open(self._path, _APPEND, 0o666)
                sync_folder(self._path.parent)
            write_fully(self._file, line)
        except OSError as error:
            raise UserError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self._digest.update(line)
        self.mark = Mark(self.mark.bytes + len(line), self._digest.hexdigest())
        return self.mark

    def rows(self) -> list[dict[str, Any]]:
        """Read all rows from disk and check that they are those that were appended."""
        content = read_content(self._path) or b""
        if hashlib.sha256(content).hexdigest() != self.mark.sha256:
            raise UserError(f"{self._path} was changed while the run was writing it; restore it from a copy")
        return json_lines(content, self._path)

    def sync(self) -> None:
        """Make the lines durable."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def check_beginning(path: Path, keep: Mark) -> "hashlib._Hash":
    """Check the file up to the mark, and return the running hash of that part."""
    content = (read_content(path) or b"")[: keep.bytes]
    digest = hashlib.sha256(content)
    if len(content) < keep.bytes or keep.sha256 not in ("", digest.hexdigest()):
        raise UserError(
            f"{path} was changed since the checkpoint was written; restore it from a copy, or delete "
            f"{path.parent / 'checkpoint'} to start the run from the beginning"
        )
    return digest


METRICS = "metrics.jsonl"
DURING = "during.jsonl"


@dataclass(frozen=True)
class DuringRow:
    """A line of during.jsonl: vectors of the server (``server``) and of each of the ``clients`` (``local``)."""

    round: int
    norms: dict[str, list[Any]] | None = None
    drift: dict[str, list[Any]] | None = None  # an entry for each of the ``layers``
    silhouette: float | None = None


LEFT_OUT: tuple[str, ...] = ("clients", "examples", "train_loss", "batches_max", "bytes_up", "bytes_down", "seconds")
LEFT_OUT += ("available", "absent")


def leave_out(metrics: Metrics) -> Metrics:
    """A round of a release, without participation and anything else that no noise covers."""
    void = None if metrics.void is None else "too few clients stayed"
    none: dict[str, Any] = dict.fromkeys(LEFT_OUT)
    return replace(metrics, failures=(), notes=(), void=void, released=True, **none)


def metrics_row(metrics: Metrics) -> dict[str, Any]:
    """A round's line, without values that were not measured."""
    return {key: value for key, value in asdict(metrics).items() if value is not None and value != ()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run, without a last line that a crash cut short."""
    return _read_rows(path / METRICS, Metrics, "train_loss")


def read_during(path: Path) -> list[dict[str, Any]]:
    """The rows that were recorded while training, without a last line that a crash cut short."""
    return _read_rows(path / DURING, DuringRow)


def _read_rows(file: Path, kind: type, *optional: str) -> list[dict[str, Any]]:
    with reading(file):
        rows = json_lines(read_sealed(file.parent, file.name) or b"", file)
        for row in rows:
            record_from(kind, dict.fromkeys(LEFT_OUT if row.get("released") is True else optional) | row)
        return rows


# Milestones after Hsu, Qi and Brown (ECCV 2020). A round that was not evaluated has no ``accuracy``.

Rows = Sequence[Mapping[str, Any]]


def accuracy_at_round(rows: Rows, round: int) -> float | None:
    """Acc@round (Hsu et al. 2020, Table 2): the accuracy of the last evaluated round up to ``round``."""
    return next((accuracy for number, accuracy in reversed(_evaluated(rows)) if number <= round), None)


def accuracy_at_batch(rows: Rows, batches: int) -> float | None:
    """Acc@batch (Hsu et al. 2020, Table 2): the accuracy of the last evaluated round within ``batches``."""
    within = sum(count <= batches for count in accumulate(row.get("batches_max", 0) for row in rows))
    return next((accuracy for _, accuracy in reversed(_evaluated(rows[:within]))), None)


def batches(rows: Rows) -> int:
    """The steps of each round's largest client, summed over rounds. Reference: Hsu et al. 2020, Table 2."""
    return sum(row.get("batches_max", 0) for row in rows)


def rounds_to(rows: Rows, accuracy: float) -> int | None:
    """Rounds@accuracy (Hsu et al. 2020, Table 5): the first evaluated round with at least ``accuracy``."""
    # 0.9 * 0.1 > 0.09 in floating point; 1e-9 is less than one example of any test set
    return next((number for number, reached in _evaluated(rows) if reached >= accuracy - 1e-9), None)


def _evaluated(rows: Rows) -> list[tuple[int, float]]:
    return [(row["round"], row["accuracy"]) for row in rows if row.get("accuracy") is not None]
