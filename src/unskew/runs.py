"""The run folder: configuration, partition, metrics, checkpoint, result. The only writer of files.

Whatever is replaced is written beside, synced and renamed, so that a crash at any moment leaves a whole file.
"""

import fcntl
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unskew.calibration.head import CalibratedClassifier
from unskew.errors import UserError
from unskew.files import write_whole as write_whole
from unskew.round.driver import Metrics
from unskew.tensors import sha256, under
from unskew.types import ServerState, Tensors

_COUNTED = ("round", "examples", "seconds", "bytes_up", "bytes_down")  # what every line of metrics.jsonl has

CHECKPOINT = Path("checkpoint") / "state.safetensors"
MEMORIES = Path("checkpoint") / "memories.bin"
KEPT_MEMORIES = 64 * 2**20  # bytes that a finished run may keep of what its clients remember


@dataclass(frozen=True)
class Progress:
    """What a checkpoint knows beside the state: how much of metrics.jsonl belongs to it, what it stands on."""

    metrics_bytes: int
    seconds: float
    data_sha256: str
    partition_hash: str
    config_sha256: str


def create(path: Path) -> None:
    """A new, empty run folder; one that holds something is refused."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is no folder; choose another --out")
    if (path / "result.json").exists():
        raise UserError(f"{path} holds a finished run; choose another --out")
    if path.exists() and any(path.iterdir()):
        raise UserError(f"{path} exists and is not empty; choose another --out, or go on with: unskew resume {path}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the run folder {path} cannot be made: {error.strerror}") from error


def unused(parent: Path, name: str) -> Path:
    """``parent/name``, or the first of ``name-2``, ``name-3``, … that does not exist."""
    number, path = 1, parent / name
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run folder for this process alone; the lock goes with the process, however it ends."""
    with open(path / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is in use by another process; wait for it or stop it") from None
        yield


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """An .npz file, whole; numpy adds no time stamps, so that the same arrays give the same bytes."""
    content = io.BytesIO()
    odd = [name for name, value in arrays.items() if value.dtype.hasobject]
    if odd:
        raise TypeError(f"object arrays would have to be pickled: {', '.join(odd)}")
    np.savez_compressed(content, **dict[str, Any](arrays))
    write_whole(path, content.getvalue())


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """A JSON file, whole."""
    write_whole(path, (json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of ours."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return values


def write_model(path: Path, model: Tensors) -> None:
    """Weights as safetensors, under the network's own names."""
    plain = {name.removeprefix("params/").removeprefix("buffers/"): value for name, value in model.items()}
    write_whole(path, save({name: value.contiguous() for name, value in plain.items()}))


def write_calibration(path: Path, name: str, classifier: CalibratedClassifier) -> None:
    """A calibrated classifier beside the run's own weights: ``calibration-<name>.safetensors``."""
    rows = [asdict(row) for row in classifier.report.classes]
    about = {"unskew": json.dumps({"method": name, "classes": rows, "kept_rows": classifier.report.kept_rows})}
    content = {key: value.contiguous() for key, value in classifier.tensors().items()}
    write_whole(calibration_file(path, name), save(content, metadata=about))


def calibration_file(path: Path, name: str) -> Path:
    """Where the calibrated classifier of that name lies."""
    words = re.sub(r"[^a-z0-9_.]+", "-", name.lower().replace("e+", "e")).strip("-")  # 1e+16 is not 1e-16
    return path / f"calibration-{words}.safetensors"


def read_calibration(path: Path, name: str) -> Tensors:
    """A calibrated classifier's tensors, as ``unskew.calibration.head.stand_in`` takes them."""
    return _read_tensors(calibration_file(path, name))


def read_model(path: Path) -> Tensors:
    """The weights that ``write_model`` wrote, under the network's own names."""
    return _read_tensors(path)


def _read_tensors(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path} is not there") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


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
    try:
        lines = (path / "metrics.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    try:
        rows = [json.loads(line) for line in lines[:-1]]
    except ValueError as error:
        raise UserError(f"{path / 'metrics.jsonl'} is damaged: {error}") from error
    for number, row in enumerate(rows, 1):
        missing = [name for name in _COUNTED if not isinstance(row, dict) or not isinstance(row.get(name), int | float)]
        if missing:
            raise UserError(f"{path / 'metrics.jsonl'} is damaged: line {number} has no {missing[0]}")
    return rows


def kept_state(path: Path, number: int) -> Path:
    """Where the server's state after that round lies, if it was kept."""
    return path / "states" / f"round-{number:06d}.safetensors"


def save_checkpoint(path: Path, state: ServerState, progress: Progress) -> None:
    """All that resuming needs, in one file that is replaced at once."""
    save_state(path / CHECKPOINT, state, progress)


def save_state(file: Path, state: ServerState, progress: Progress) -> None:
    """The server's state in one file that is replaced at once."""
    entries = {f"model/{name}": value for name, value in state.tensors.items()}
    entries |= {f"memory/{name}": value for name, value in state.memory.items()}
    entries |= {f"sent/{name}": value for name, value in state.sent.items()}
    if state.clients:
        places = [(client, *place) for client, place in state.clients.items()]
        entries["clients"] = torch.tensor(places, dtype=torch.int64)  # client, slot, checksum
    about = {"unskew": json.dumps({"round": state.round, "sha256": sha256(entries), **asdict(progress)})}
    content = save({name: value.contiguous() for name, value in entries.items()}, metadata=about)
    write_whole(file, content)


def open_memories(path: Path) -> int:
    """The descriptor of the file that holds what clients remember; made where it is not there."""
    file = path / MEMORIES
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


def drop_memories(path: Path) -> None:
    """A finished run keeps them for measures of its local models, unless they would be most of what it weighs."""
    file = path / MEMORIES
    if file.exists() and file.stat().st_size > KEPT_MEMORIES:
        file.unlink()


def load_checkpoint(path: Path) -> tuple[ServerState, Progress] | None:
    """The last checkpoint, or None where the run was stopped before its first."""
    file = path / CHECKPOINT
    return load_state(file) if file.exists() else None


def load_state(file: Path) -> tuple[ServerState, Progress]:
    """What ``save_state`` wrote."""
    try:
        with safe_open(file, framework="pt") as content:
            about = json.loads(content.metadata()["unskew"])
            entries = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        if about.pop("sha256") != sha256(entries):
            raise ValueError("its content does not match its checksum")
        places = entries.pop("clients").tolist() if "clients" in entries else []
        state = ServerState(
            about.pop("round"),
            under(entries, "model/"),
            under(entries, "memory/"),
            under(entries, "sent/"),
            clients={client: (slot, checksum) for client, slot, checksum in places},
        )
        return state, Progress(**about)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint {file} is damaged ({error}); delete it to start the run anew") from error
