"""What came out of a run: the record behind result.json."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.runs.folder import read_json


@dataclass(frozen=True)
class Calibration:
    """A classifier that was re-trained after the run."""

    name: str
    accuracy: float
    loss: float
    bytes_up: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """What came out: the fields of result.json, and where the run lies."""

    path: Path
    method: str
    data: str
    partition: str
    clients: int
    per_round: int
    rounds: int
    seed: int
    engine: str
    accuracy: float
    loss: float
    emd: float
    examples: int
    seconds: float
    examples_per_second: float
    bytes_up: int
    bytes_down: int
    weights_sha256: str
    model: str
    partition_hash: str
    data_sha256: str
    failures: int = 0
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    baseline: str | None = None  # the run trained centrally that this one is held against
    baseline_accuracy: float | None = None
    relative_accuracy: float | None = None  # accuracy / baseline_accuracy


def to_json(result: Result) -> dict[str, Any]:
    """A result as result.json holds it: without its own place and what is None, calibrations as a list."""
    values = {key: value for key, value in asdict(result).items() if value is not None}
    del values["path"]
    values["calibrations"] = list(values["calibrations"].values())
    return values


def read_result(path: Path) -> Result:
    """The result of a finished run."""
    if not (path / "result.json").is_file():
        if not path.exists():
            raise UserError(f"there is no folder {path}")
        hint = f"finish it with: unskew resume {path}" if (path / "config.toml").is_file() else "it is no run folder"
        raise UserError(f"{path} has no result.json; {hint}")
    values = read_json(path / "result.json")
    try:
        for name in ("accuracy", "loss", "emd", "seconds", "bytes_up", "bytes_down"):
            values[name] + 0.0  # a number
        for name in ("baseline_accuracy", "relative_accuracy"):
            if values.get(name) is not None:
                values[name] + 0.0
        values["calibrations"] = {row["name"]: Calibration(**row) for row in values["calibrations"]}
        return Result(path=path, **values)
    except (TypeError, KeyError) as error:
        raise UserError(f"{path / 'result.json'} is not a result of this version: {error}") from error
