"""The run folder: made, locked, and its files written and read: models, calibrations, arrays, JSON.

Whatever is replaced is written beside, synced and renamed, so that a crash at any moment leaves a whole file.
"""

import fcntl
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unskew.calibration.classifier import CalibratedClassifier
from unskew.core.errors import UserError
from unskew.core.files import clear_parts, is_part, parse_json, write_whole
from unskew.core.types import CLASSIFIER, Tensors
from unskew.runs import manifest
from unskew.runs.manifest import require_sealed

UNREADABLE = (  # all that safetensors was seen to raise for files with a few bytes changed
    OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError,
)  # fmt: skip


def seal(entries: Tensors, about: Mapping[str, str]) -> str:
    """SHA-256 over the words, and over the tensors in the order of their names: name, type, shape and bytes of each."""
    names = sorted(entries)
    kinds = [[name, str(entries[name].dtype), list(entries[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps([sorted(about.items()), kinds]).encode())
    for name in names:
        digest.update(entries[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(file: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a safetensors file and the words beside them. Raises one of ``UNREADABLE``."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there")
    with safe_open(file, framework="pt") as content:
        about = dict(content.metadata() or {})
        return {name: content.get_tensor(name) for name in content.keys()}, about  # noqa: SIM118


LARGE_BYTES = 64 * 2**20  # of arrays that are packed quickly
LOCK = ".lock"
MODEL = "model.safetensors"
PLACES = (".", "checkpoint", "states", "figures")  # the folders of a run folder that files are written to


def create_run_folder(path: Path) -> None:
    """A new run folder, empty but for what a run that was killed before it began may have left; others are refused."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder; choose another --out")
    if (path / "result.json").exists():
        raise UserError(f"{path} holds a finished run; choose another --out")
    if path.exists() and not is_blank(path):
        raise UserError(f"{path} exists and is not empty; choose another --out, or continue with: unskew resume {path}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the run folder {path} cannot be made: {error.strerror}") from error


def is_blank(path: Path) -> bool:
    """Whether a folder has nothing but locks, parts and a manifest without its files."""
    spare = (LOCK, manifest.LOCK, manifest.MANIFEST)
    return all(each.name in spare or is_part(each.name) for each in path.iterdir())


def unused_path(parent: Path, name: str) -> Path:
    """``parent/name``, or the first of ``name-2``, ``name-3``, … that does not exist."""
    number, path = 1, parent / name
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Lock the run folder for this process alone; the lock ends with the process, however it ends.

    Parts of files that a killed process left behind are removed.
    """
    with open(path / LOCK, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is in use by another process; wait for it or stop it") from None
        clear_parts(*(path / place for place in PLACES))
        yield


def arrays_bytes(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """An .npz file; numpy adds no time stamps, so that the same arrays give the same bytes.

    Large arrays, those of a million clients, are packed in the quick way.
    """
    content = io.BytesIO()
    odd = [name for name, value in arrays.items() if value.dtype.hasobject]
    if odd:
        raise TypeError(f"object arrays would have to be pickled: {', '.join(odd)}")
    if sum(value.nbytes for value in arrays.values()) <= LARGE_BYTES:
        np.savez_compressed(content, **dict[str, Any](arrays))
        return content.getvalue()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(value), allow_pickle=False)
    return content.getvalue()


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """An .npz file, whole."""
    write_whole(path, arrays_bytes(arrays))


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """A JSON file, for people and programs to read."""
    return (json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def classifier_words(classifier: Sequence[str]) -> dict[str, str]:
    """What a model's file says beside the weights: which of them are the classifier's, where that is not usual."""
    if set(classifier) <= set(CLASSIFIER):
        return {}
    return {"classifier": json.dumps([name.partition("/")[2] for name in classifier])}


def model_bytes(model: Tensors, classifier: Sequence[str] = CLASSIFIER) -> bytes:
    """Weights as safetensors, under the network's own names; the file says which of them are the classifier's."""
    plain = {name: value.contiguous() for name, value in plain_names(model).items()}
    return save(plain, metadata=classifier_words(classifier) or None)


def plain_names(model: Tensors) -> Tensors:
    """A model's tensors under the network's own names."""
    return {name.removeprefix("params/").removeprefix("buffers/"): value for name, value in model.items()}


def calibration_bytes(name: str, classifier: CalibratedClassifier) -> bytes:
    """A calibrated classifier as safetensors, with its name and how each class's Gaussian was made."""
    rows = [asdict(row) for row in classifier.report.classes]
    about = {"unskew": json.dumps({"method": name, "classes": rows, "kept_rows": classifier.report.kept_rows})}
    return save({key: value.contiguous() for key, value in classifier.tensors().items()}, metadata=about)


def calibration_file(path: Path, name: str) -> Path:
    """The file of the calibrated classifier of that name."""
    words = re.sub(r"[^a-z0-9_.]+", "-", name.lower().replace("e+", "e")).strip("-")  # 1e+16 is not 1e-16
    return path / f"calibration-{words}.safetensors"


def read_calibration(path: Path, name: str) -> Tensors:
    """A calibrated classifier's tensors, as ``unskew.calibration.classifier.load_calibrated`` takes them."""
    file = calibration_file(path, name)
    require_sealed(path, file.name)
    try:
        values, about = read_tensors(file)
        there = parse_json(about["unskew"])["method"]
    except UNREADABLE as error:
        raise _unreadable(file, error) from error
    if there != name:
        raise UserError(f"{file} has another calibration, {there!r}; restore it from a copy, or calibrate again")
    return values


def read_model(path: Path) -> tuple[Tensors, dict[str, str]]:
    """A run's final weights under the network's own names, and the words beside them in the file."""
    require_sealed(path, MODEL)
    try:
        return read_tensors(path / MODEL)
    except UNREADABLE as error:
        raise _unreadable(path / MODEL, error) from error


def classifier_names(path: Path, about: Mapping[str, str]) -> list[str]:
    """The names of the classifier's weight and, where it has one, bias, from the words of ``read_model``."""
    try:
        names = parse_json(about.get("classifier", "null")) or [n.partition("/")[2] for n in CLASSIFIER]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("the classifier's names are not a list of texts")
    except ValueError as error:
        raise _unreadable(path / MODEL, error) from error
    return names


def _unreadable(file: Path, error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{file} is not there")
    return UserError(f"{file} cannot be read: it is damaged: {error}; restore it from a copy")
