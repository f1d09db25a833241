"""Where a page of results leads to: a run's report, its folder, or its record where the folder is gone."""

import os
from pathlib import Path

from unskew.reproduce.records import RECORDS, Record


def run_link(record: Record, folder: Path) -> str:
    """The link to a run, from a page in that folder."""
    path = record.result.path
    report = path / "report.html"
    if report.exists():
        return os.path.relpath(report, folder)
    if path.exists():
        return os.path.relpath(path, folder)
    out = path.parent.parent.parent  # OUT/runs/TRAINING/seed0
    return os.path.relpath(out / RECORDS / record.training / f"{path.name}.json", folder)
