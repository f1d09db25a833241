"""The run directory: created, locked and sealed; its model, calibration and array files.

Its manifest lists a file's new hash next to the old one while it is replaced, so after a crash all files match."""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save

from unskew.calibration.classifier import CalibratedClassifier
from unskew.core.errors import UserError
from unskew.core.files import clear_parts, is_part, make_folder, parse_json, read_content, write_whole
from unskew.core.types import CLASSIFIER, Tensors

MANIFEST = "manifest.json"
MANIFEST_LOCK = ".manifest.lock"
GROWING = ("metrics.jsonl", "during.jsonl")  # verified by the checkpoint until the run is finished
REPLACEABLE = "figures/"  # recreated if missing
VERSION = 1


class SealBroken(UserError):
    """A file of a run directory was changed, added or removed."""


@contextmanager
def reading(file: Path, instead: str = "") -> Iterator[None]:
    """Turn whatever a missing or damaged file raises into one message; ``instead`` of a copy, the user may do this."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())  # PyTorch's messages have several lines
        raise UserError(f"{file} is damaged or missing ({reason}); restore it from a copy{instead}") from error


@dataclass(frozen=True)
class Manifest:
    """The SHA-256 of each file by its path below the run directory, and of the files about to be written."""

    files: Mapping[str, str]
    coming: Mapping[str, str]


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a run directory, if it has one."""
    if (content := read_content(path / MANIFEST)) is None:
        return None
    try:
        values = parse_json(content)
        if values.pop("seal") != _seal(values) or values["unskew"] != VERSION:
            raise ValueError("its content does not match its seal, or its version is unknown")
        return Manifest(dict(values["files"]), dict(values["coming"]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        instead = "restore it from a copy, or delete it to use the run directory unsealed"
        raise SealBroken(f"{path / MANIFEST} is damaged ({error}); {instead}") from error


def _write(path: Path, manifest: Manifest) -> None:
    values = {"unskew": VERSION, "files": dict(manifest.files), "coming": dict(manifest.coming)}
    write_whole(path / MANIFEST, (json.dumps({**values, "seal": _seal(values)}, indent=2) + "\n").encode())


def _seal(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def start_manifest(path: Path, contents: Mapping[str, bytes]) -> None:
    """Begin a run directory with these files; everything that ``write_sealed`` writes later is sealed too."""
    _write(path, Manifest({}, {}))
    write_sealed(path, contents)


def write_sealed(path: Path, contents: Mapping[str, bytes], *, grown: Mapping[str, str] | None = None) -> None:
    """Replace files in this order and seal them; ``grown``: the hashes of growing files that are complete."""
    if not (path / MANIFEST).exists():
        for name, content in contents.items():
            write_whole(path / name, content)
        return
    with _locked(path / MANIFEST_LOCK, wait=True):  # several measures and calibrations may run at the same time
        manifest = read_manifest(path) or Manifest({}, {})
        files, coming = dict(manifest.files), dict(manifest.coming)
        for name, expected in manifest.coming.items():  # after a crash some of them have their new content
            sha256 = file_sha256(path / name)
            if sha256 == expected:
                files[name] = expected
            if sha256 in (expected, manifest.files.get(name)):
                del coming[name]
        new = {**(grown or {}), **{name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}}
        _write(path, Manifest(files, coming | new))
        for name, content in contents.items():
            write_whole(path / name, content)
        _write(path, Manifest(files | new, {name: value for name, value in coming.items() if name not in new}))


def remove_sealed(path: Path, name: str) -> None:
    """Remove a file of the run directory, and its hash from the manifest."""
    with _locked(path / MANIFEST_LOCK, wait=True):
        if (manifest := read_manifest(path)) is not None:
            files, coming = dict(manifest.files), dict(manifest.coming)
            files.pop(name, None)
            coming.pop(name, None)
            _write(path, Manifest(files, coming))
        (path / name).unlink(missing_ok=True)


def seal_files(path: Path, names: Iterable[str]) -> None:
    """Write a new manifest of these files as they are now."""
    with _locked(path / MANIFEST_LOCK, wait=True):
        hashes = {name: sha256 for name in names if (sha256 := file_sha256(path / name)) is not None}
        _write(path, Manifest(hashes, {}))


def read_sealed(path: Path, name: str) -> bytes | None:
    """A file of the run directory, refused if it was changed; None if it is missing and optional."""
    require_sealed(path, name)
    return read_content(path / name)


def require_sealed(path: Path, name: str) -> None:
    """Refuse a file that was changed, added or removed, unless another process is just writing it."""
    manifest = read_manifest(path)
    while manifest is not None:
        sha256 = file_sha256(path / name)
        unfinished = "result.json" not in manifest.files and not (path / "result.json").exists()
        listed = manifest.files.get(name)
        if (name in GROWING and unfinished) or sha256 in (listed, manifest.coming.get(name, listed)):
            return
        if sha256 is None and name.startswith(REPLACEABLE):
            return
        before, manifest = manifest, read_manifest(path)
        if manifest == before:
            instead = f"restore it from a copy, or delete {path / MANIFEST} to use the run directory unsealed"
            raise SealBroken(f"{path / name} was changed, added or removed: it does not match {MANIFEST}; {instead}")


def file_sha256(file: Path) -> str | None:
    """The SHA-256 of a file of any size; None if it does not exist."""
    try:
        if not file.is_file():
            return None
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


LARGE_BYTES = 64 * 2**20  # arrays above this size are compressed less
LOCK = ".lock"
MODEL = "model.safetensors"
PARTITION = "partition.npz"


@contextmanager
def _locked(file: Path, *, wait: bool) -> Iterator[None]:
    """Hold a lock file; the operating system releases it when the process ends, however it ends."""
    try:
        if file.exists() and not file.is_file():  # opening a named pipe would block
            raise OSError("it is not a plain file; delete it")
        held = FileLock(file).acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise UserError(f"{file.parent} is in use by another process; wait for it or stop it") from None
    except OSError as error:
        raise UserError(f"{file} cannot be locked: {error.strerror or error}") from error
    with held:
        yield


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Lock the run directory for this process, and remove files that a killed process left partly written."""
    with _locked(path / LOCK, wait=False):
        clear_parts(*(path / name for name in (".", "checkpoint", "states", "figures")))
        yield


def create_run_folder(path: Path) -> None:
    """Create a run directory; an existing one may contain only leftovers of a run killed before it began."""
    require_blank(path)
    try:
        make_folder(path)
    except OSError as error:
        raise UserError(f"the run directory {path} cannot be created: {error.strerror}") from error


def require_blank(path: Path) -> None:
    """Refuse to start a run in a folder with more than locks, partly written files and a manifest."""
    spare = (LOCK, MANIFEST_LOCK, MANIFEST)
    blank = path.is_dir() and all(file.name in spare or is_part(file.name) for file in path.iterdir())
    if path.exists() and not blank:
        problem = f"{path} exists and is not an empty folder"
        raise UserError(f"{problem}; choose another --out, or continue a run with: unskew resume {path}")


def numbered_paths(parent: Path, name: str) -> Iterator[Path]:
    """``parent/name``, ``name-2``, ``name-3``, …"""
    return (parent / (name if number == 1 else f"{name}-{number}") for number in count(1))


def unused_path(parent: Path, name: str) -> Path:
    """The first of these paths that does not exist."""
    return next(path for path in numbered_paths(parent, name) if not path.exists())


def seal(entries: Tensors, about: Mapping[str, str]) -> str:
    """SHA-256 over the metadata and, in the order of their names, every tensor's name, type, shape and bytes."""
    names = sorted(entries)
    kinds = [[name, str(entries[name].dtype), list(entries[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps([sorted(about.items()), kinds]).encode())
    for name in names:
        digest.update(entries[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(file: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a safetensors file and its metadata."""
    if not file.is_file():  # a named pipe would block
        raise FileNotFoundError(f"{file} is not a file")
    with safe_open(file, framework="pt") as content:
        about = dict(content.metadata() or {})
        return {name: content.get_tensor(name) for name in content.keys()}, about  # noqa: SIM118


def arrays_bytes(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """An .npz file without time stamps: the same arrays give the same bytes. Large arrays are compressed less."""
    content = io.BytesIO()
    level = 1 if sum(value.nbytes for value in arrays.values()) > LARGE_BYTES else None
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(value), allow_pickle=False)
    return content.getvalue()


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write an .npz file atomically."""
    write_whole(path, arrays_bytes(arrays))


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """The content of an indented JSON file."""
    return (json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def plain_names(model: Tensors) -> Tensors:
    """A model's tensors under the network's own names."""
    return {name.removeprefix("params/").removeprefix("buffers/"): value for name, value in model.items()}


def classifier_metadata(classifier: Sequence[str]) -> dict[str, str]:
    """A model file's metadata: the names of the classifier's weights, if they are not the usual ones."""
    if set(classifier) <= set(CLASSIFIER):
        return {}
    return {"classifier": json.dumps([name.partition("/")[2] for name in classifier])}


def model_bytes(model: Tensors, classifier: Sequence[str] = CLASSIFIER) -> bytes:
    """Weights as safetensors, under the network's own names, with the names of the classifier's."""
    plain = {name: value.contiguous() for name, value in plain_names(model).items()}
    return save(plain, metadata=classifier_metadata(classifier) or None)


def read_model(path: Path) -> tuple[Tensors, dict[str, str]]:
    """A run's final weights under the network's own names, and the file's metadata."""
    require_sealed(path, MODEL)
    with reading(path / MODEL):
        return read_tensors(path / MODEL)


def calibration_file(path: Path, name: str) -> Path:
    """The file of the calibrated classifier of that name."""
    plain = re.sub(r"[^a-z0-9_.]+", "-", name.lower().replace("e+", "e")).strip("-")  # 1e+16 is not 1e-16
    return path / f"calibration-{plain}.safetensors"


def calibration_bytes(name: str, classifier: CalibratedClassifier) -> bytes:
    """A calibrated classifier as safetensors, with its name and how each class's Gaussian was fitted."""
    rows = [asdict(row) for row in classifier.report.classes]
    about = {"unskew": json.dumps({"method": name, "classes": rows, "kept_rows": classifier.report.kept_rows})}
    return save({key: value.contiguous() for key, value in classifier.tensors().items()}, metadata=about)
