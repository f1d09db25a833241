"""The run folder: made, locked, and its files written and read: models, calibrations, arrays, JSON.

Whatever is replaced is written beside, synced and renamed, so that a crash at any moment leaves a whole file.
"""

import fcntl
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unskew.calibration.classifier import CalibratedClassifier
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.types import CLASSIFIER, Tensors


def create_run_folder(path: Path) -> None:
    """A new, empty run folder; one that holds something is refused."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder; choose another --out")
    if (path / "result.json").exists():
        raise UserError(f"{path} holds a finished run; choose another --out")
    if path.exists() and any(path.iterdir()):
        raise UserError(f"{path} exists and is not empty; choose another --out, or continue with: unskew resume {path}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the run folder {path} cannot be made: {error.strerror}") from error


def unused_path(parent: Path, name: str) -> Path:
    """``parent/name``, or the first of ``name-2``, ``name-3``, … that does not exist."""
    number, path = 1, parent / name
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Lock the run folder for this process alone; the lock ends with the process, however it ends."""
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
    """What ``write_json`` wrote."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return values


def write_model(path: Path, model: Tensors, classifier: Sequence[str] = CLASSIFIER) -> None:
    """Weights as safetensors, under the network's own names; the file says which of them are the classifier's."""
    plain = {name.removeprefix("params/").removeprefix("buffers/"): value for name, value in model.items()}
    usual = set(classifier) <= set(CLASSIFIER)
    about = None if usual else {"classifier": json.dumps([name.partition("/")[2] for name in classifier])}
    write_whole(path, save({name: value.contiguous() for name, value in plain.items()}, metadata=about))


def write_calibration(path: Path, name: str, classifier: CalibratedClassifier) -> None:
    """A calibrated classifier beside the run's own weights: ``calibration-<name>.safetensors``."""
    rows = [asdict(row) for row in classifier.report.classes]
    about = {"unskew": json.dumps({"method": name, "classes": rows, "kept_rows": classifier.report.kept_rows})}
    content = {key: value.contiguous() for key, value in classifier.tensors().items()}
    write_whole(calibration_file(path, name), save(content, metadata=about))


def calibration_file(path: Path, name: str) -> Path:
    """The file of the calibrated classifier of that name."""
    words = re.sub(r"[^a-z0-9_.]+", "-", name.lower().replace("e+", "e")).strip("-")  # 1e+16 is not 1e-16
    return path / f"calibration-{words}.safetensors"


def read_calibration(path: Path, name: str) -> Tensors:
    """A calibrated classifier's tensors, as ``unskew.calibration.classifier.load_calibrated`` takes them."""
    return _read_tensors(calibration_file(path, name))


def read_model(path: Path) -> Tensors:
    """The weights that ``write_model`` wrote, under the network's own names."""
    return _read_tensors(path)


def read_classifier_names(path: Path) -> list[str]:
    """The names of the classifier's weight and, where it has one, bias in a file that ``write_model`` wrote."""
    try:
        with safe_open(path, framework="pt") as content:
            about = content.metadata() or {}
        names: list[str] = json.loads(about.get("classifier", "null")) or [n.partition("/")[2] for n in CLASSIFIER]
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return names


def _read_tensors(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path} is not there") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
