"""metrics.jsonl: a line for each round, written as it comes."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_json_lines
from unskew.round.driver import Metrics

_COUNTED = ("round", "examples", "seconds", "bytes_up", "bytes_down")  # what every line of metrics.jsonl has


class MetricsFile:
    """metrics.jsonl: a line a round, written as it comes."""

    def __init__(self, path: Path, keep: int) -> None:
        """Open for appending after the first ``keep`` bytes; what a crash left behind them is cut off."""
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close
        if self._file.tell() < keep:
            self._file.close()
            raise UserError(f"{path} is shorter than the checkpoint says; it was changed")
        self._file.truncate(keep)
        self._file.seek(keep)

    def append(self, metrics: Metrics) -> int:
        """One line, without what was not measured; how long the file is then."""
        row = {key: value for key, value in asdict(metrics).items() if value is not None and value != ()}
        try:
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self._path} cannot be written: {error.strerror or error}") from error
        return self._file.tell()

    def sync(self) -> None:
        """Make the lines durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing is lost: every line was flushed."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run, without a last line that a crash cut short."""
    rows = read_json_lines(path / "metrics.jsonl")
    for number, row in enumerate(rows, 1):
        missing = [name for name in _COUNTED if not isinstance(row.get(name), int | float)]
        if missing:
            raise UserError(f"{path / 'metrics.jsonl'} is damaged: line {number} has no {missing[0]}")
    return rows
