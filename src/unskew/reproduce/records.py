"""Records: the result of a run in one small file that outlives the run directory.

Tables and figures need only records. ``records/TRAINING/seed0.json`` belongs to ``runs/TRAINING/seed0``.
"""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from unskew.analysis import parse_measure
from unskew.analysis.measure import load_measure
from unskew.core.errors import UserError
from unskew.core.files import json_object, read_content, write_whole
from unskew.core.machine import cores, physical_memory
from unskew.core.units import counted
from unskew.runs import journal
from unskew.runs.finished import FinishedRun
from unskew.runs.result import Result, read_result, result_from, to_json
from unskew.sweeps.tasks import RunFailure

RECORDS, RUNS = "records", "runs"
VERSION = 1
PACKAGES = ("unskew", "torch", "numpy", "scikit-learn")


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its result, its evaluations, the values of its measures, and the machine."""

    result: Result  # its path is the run directory, OUT/runs/TRAINING/seed0, which may have been deleted
    curve: Sequence[Mapping[str, Any]]  # evaluated rounds: round, accuracy, batches_max since the previous one
    silhouettes: Sequence[tuple[int, float]] = ()  # recorded during training: round, value
    measures: Mapping[str, Any] = field(default_factory=dict)  # by their text
    machine: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""  # why something could not be computed

    @property
    def training(self) -> str:
        """The training's name, which its runs with other seeds share."""
        return self.result.path.parent.name

    def measure(self, name: str) -> Any | None:
        """The values of a measure by its name, with any knobs; None if it was not taken."""
        knobbed = next((text for text in self.measures if text.startswith(f"{name}(")), name)
        return self.measures.get(name, self.measures.get(knobbed))


def run_folder(out: Path, training: str, seed: int) -> Path:
    """The run's directory."""
    return out / RUNS / training / f"seed{seed}"


def record_file(path: Path) -> Path:
    """The file of the record of the run in this directory, OUT/runs/TRAINING/seed0."""
    return path.parents[2] / RECORDS / path.parent.name / f"{path.name}.json"


def make_record(path: Path, measures: Sequence[str], failure: str = "") -> None:
    """Write the record of a finished run with these measures, keeping those of an earlier record."""
    before = read_record(path)
    known = dict(before.measures) if isinstance(before, RunRecord) else {}
    with FinishedRun(path) as run:
        for text in measures:
            measured = load_measure(run, parse_measure(text))
            if measured is not None:
                known[text] = vars(measured.values)
    during = journal.read_during(path)
    silhouettes = [(row["round"], row["silhouette"]) for row in during if row.get("silhouette") is not None]
    result = read_result(path)
    if isinstance(before, RunRecord) and before.result.weights_sha256 == result.weights_sha256:
        # the run was repeated after its directory was deleted
        result = replace(result, calibrations={**before.result.calibrations, **result.calibrations})
    curve, batches = [], 0  # batches since the previous evaluation
    for row in journal.read_metrics(path):
        batches += int(row.get("batches_max", 0))
        if row.get("accuracy") is not None:
            curve.append({"round": row["round"], "accuracy": row["accuracy"], "batches_max": batches})
            batches = 0
    record = RunRecord(result, curve, silhouettes, known, describe_machine(), failure)
    write_whole(record_file(path), to_bytes(record))


def to_bytes(record: RunRecord) -> bytes:
    """The content of a record's file."""
    return _bytes({"unskew": VERSION, **vars(record), "result": to_json(record.result)})


def write_failure(path: Path, failure: RunFailure) -> None:
    """Record that a run diverged, so that it is not repeated."""
    write_whole(record_file(path), _bytes({"unskew": VERSION, "diverged": failure.reason}))


def read_record(path: Path) -> RunRecord | RunFailure | None:
    """The record of a run, or how it diverged; None if there is neither."""
    file = record_file(path)
    content = read_content(file)
    if content is None:
        return None
    values = json_object(content, file)
    try:
        if values.pop("unskew") != VERSION:
            raise ValueError("it was written by another version")
        if "diverged" in values:
            return RunFailure(str(values["diverged"]), diverged=True)
        return msgspec.convert({**values, "result": result_from(values["result"], file, path)}, RunRecord)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {error}; delete it and run the command again") from error


def describe_machine() -> dict[str, str]:
    """This machine, and the versions of the packages that compute."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        known = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
        processor = " ".join(known[1].split()) if known else processor
    facts = {"machine": f"{processor}, {counted(cores(), 'core')}, {physical_memory() / 2**30:.0f} GB"}
    facts |= {"system": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def _bytes(values: Mapping[str, Any]) -> bytes:
    """JSON with one line per field, so that diffs show which field changed."""
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False)
    lines = ",\n".join(f"{dump(name)}: {dump(value)}" for name, value in values.items())
    return f"{{\n{lines}\n}}\n".encode()


def link_run(record: RunRecord, folder: Path) -> str:
    """The link to a run from a page in ``folder``."""
    pages = record.result.path / "report.html", record.result.path
    return os.path.relpath(next((page for page in pages if page.exists()), record_file(record.result.path)), folder)
