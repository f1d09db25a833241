"""metrics.jsonl: a line for each round, written as it comes."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import json_lines
from unskew.core.records import check_fields
from unskew.round.driver import Metrics
from unskew.runs.manifest import read_sealed

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
