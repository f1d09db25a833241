"""The run directory: created, locked and sealed; its model, calibration and array files.

Files are written next to their target, synced and renamed, so a crash leaves either the old or the new file. The
manifest has a hash of every file that decides or shows a result. Before files are replaced, it lists the new hashes
next to the old ones; afterwards only the new ones. In between either is accepted, so a crash at any moment leaves a run
directory whose files all match.
"""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unskew.calibration.classifier import CalibratedClassifier
from unskew.core.errors import UserError
from unskew.core.files import clear_parts, is_part, json_object, make_folder, parse_json, read_content, write_whole
from unskew.core.types import CLASSIFIER, Tensors

MANIFEST = "manifest.json"
MANIFEST_LOCK = ".manifest.lock"
GROWING = ("metrics.jsonl", "during.jsonl")  # verified by the checkpoint until the run is finished
REPLACEABLE = "figures/"  # recreated if missing
VERSION = 1

T = TypeVar("T")


class SealBroken(UserError):
    """A file of a run directory was changed, added or removed."""


@dataclass(frozen=True)
class Manifest:
    """The SHA-256 of each file by its path below the run directory, and of the files about to be written."""

    files: Mapping[str, str]
    coming: Mapping[str, str]

    def accepts(self, name: str, sha256: str | None) -> bool:
        """Whether the file may have this hash; None: whether it may be missing."""
        if sha256 is None:
            return name not in self.files
        return sha256 in (self.files.get(name), self.coming.get(name))

    @property
    def names(self) -> list[str]:
        """Every file, including those about to be written."""
        return sorted({*self.files, *self.coming})


def start_manifest(path: Path, contents: Mapping[str, bytes]) -> None:
    """Begin a run directory with these files; everything that ``write_sealed`` writes later is sealed too."""
    with _locked(path / MANIFEST_LOCK, wait=True):
        _replace_files(path, Manifest({}, {}), contents, {})


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a run directory, if it has one."""
    return None if (content := read_content(path / MANIFEST)) is None else _parse_manifest(content, path)


def write_sealed(path: Path, contents: Mapping[str, bytes], *, grown: Mapping[str, str] | None = None) -> None:
    """Replace files of the run directory, in this order, and seal them.

    ``grown`` are the hashes of growing files that are now complete. Without a manifest, nothing is sealed.
    """
    if not (path / MANIFEST).exists():
        for name, content in contents.items():
            write_whole(path / name, content)
        return
    with _locked(path / MANIFEST_LOCK, wait=True):  # several measures and calibrations may run at the same time
        _replace_files(path, _settle(path), contents, grown or {})


def remove_sealed(path: Path, names: Iterable[str]) -> None:
    """Remove files of the run directory, and their hashes from its manifest."""
    removed = set(names)
    with _locked(path / MANIFEST_LOCK, wait=True):
        if (manifest := read_manifest(path)) is not None:
            files, coming = (
                {name: sha256 for name, sha256 in hashes.items() if name not in removed}
                for hashes in (manifest.files, manifest.coming)
            )
            _write(path, Manifest(files, coming))
        for name in removed:
            (path / name).unlink(missing_ok=True)


def read_sealed(path: Path, name: str) -> bytes | None:
    """A file of the run directory, refused if it was changed; None if it is missing and optional."""
    return _read_verified(path, name, read_content, lambda content: None if content is None else _sha256(content))


def require_sealed(path: Path, name: str) -> None:
    """Refuse a file of the run directory that was changed; for files that are read elsewhere."""
    _read_verified(path, name, file_sha256, lambda sha256: sha256)


def _read_verified(
    path: Path, name: str, read: Callable[[Path], T | None], hashed: Callable[[T | None], str | None]
) -> T | None:
    """What ``read`` returns for the file, if the manifest accepts it.

    Another process may be writing, so a mismatch counts only if the manifest is the same before and after.
    """
    content = read_content(path / MANIFEST)
    while True:
        value = read(path / name)
        if content is None:
            return value
        manifest = _parse_manifest(content, path)
        if _fits(path, name, manifest, hashed(value)):
            return value
        before, content = content, read_content(path / MANIFEST)
        if content == before:
            raise _broken(path, name, manifest, missing=value is None)


def seal_files(path: Path, names: list[str]) -> None:
    """Write a new manifest of these files as they are now."""
    with _locked(path / MANIFEST_LOCK, wait=True):
        hashes = {name: sha256 for name in names if (sha256 := file_sha256(path / name)) is not None}
        _write(path, Manifest(hashes, {}))


def file_sha256(file: Path) -> str | None:
    """The SHA-256 of a file of any size; None if it does not exist."""
    try:
        if not file.is_file():
            return None
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _replace_files(path: Path, before: Manifest, contents: Mapping[str, bytes], grown: Mapping[str, str]) -> None:
    """List the new hashes, replace the files, drop the old hashes."""
    coming = {**grown, **{name: _sha256(content) for name, content in contents.items()}}
    _write(path, replace(before, coming={**before.coming, **coming}))
    for name, content in contents.items():
        write_whole(path / name, content)
    rest = {name: value for name, value in before.coming.items() if name not in coming}
    _write(path, Manifest({**before.files, **coming}, rest))


def _fits(path: Path, name: str, manifest: Manifest, sha256: str | None) -> bool:
    growing = name in GROWING and "result.json" not in manifest.files and not (path / "result.json").exists()
    return growing or (sha256 is None and name.startswith(REPLACEABLE)) or manifest.accepts(name, sha256)


def _broken(path: Path, name: str, manifest: Manifest, *, missing: bool) -> SealBroken:
    if missing:
        problem = f"{path / name} is missing, but it is listed in {MANIFEST}"
    elif name in manifest.files or name in manifest.coming:
        problem = f"{path / name} was changed after it was written: it does not match its hash in {MANIFEST}"
    else:
        problem = f"{path / name} was added by hand: it is not listed in {MANIFEST}"
    delete = " delete it so that it is recreated," if name.startswith(REPLACEABLE) else ""
    return SealBroken(
        f"{problem}; restore it from a copy,{delete} or delete {path / MANIFEST} to use the run directory unsealed"
    )


def _settle(path: Path) -> Manifest:
    """The manifest after a crash: files that have their new hash are accepted, others stay pending."""
    manifest = read_manifest(path) or Manifest({}, {})
    files, coming = dict(manifest.files), dict(manifest.coming)
    for name, expected in manifest.coming.items():
        sha256 = file_sha256(path / name)
        if sha256 == expected:
            files[name] = expected
        if sha256 in (expected, manifest.files.get(name)):
            del coming[name]
    return Manifest(files, coming)


def _parse_manifest(content: bytes, path: Path) -> Manifest:
    try:
        values = json_object(content, path / MANIFEST)
        if values.pop("seal", None) != _seal(values) or values.get("unskew") != VERSION:
            raise SealBroken("its content does not match its own seal")
        return Manifest(dict(values["files"]), dict(values["coming"]))
    except (UserError, LookupError, TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"{path / MANIFEST} cannot be read: ")
        raise SealBroken(
            f"{path / MANIFEST} is damaged ({reason}); restore it from a copy, or delete it to use the run "
            "directory unsealed"
        ) from error


def _write(path: Path, manifest: Manifest) -> None:
    values = {"unskew": VERSION, "files": dict(manifest.files), "coming": dict(manifest.coming)}
    write_whole(path / MANIFEST, (json.dumps({**values, "seal": _seal(values)}, indent=2) + "\n").encode())


def _seal(values: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(values, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _locked(file: Path, *, wait: bool) -> Iterator[None]:
    """Hold a lock file; the operating system releases it when the process ends, however it ends."""
    if file.exists() and not file.is_file():  # opening a named pipe would block
        raise UserError(f"{file} cannot be locked: it is not a plain file; delete it")
    try:
        held = FileLock(file).acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise UserError(f"{file.parent} is in use by another process; wait for it or stop it") from None
    except OSError as error:
        raise UserError(f"{file} cannot be locked: {error.strerror or error}") from error
    with held:
        yield


# What safetensors raises for damaged files
UNREADABLE = (
    OSError,
    SafetensorError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    OverflowError,
    MemoryError,
)


def seal(entries: Tensors, about: Mapping[str, str]) -> str:
    """SHA-256 over the metadata and, in the order of their names, every tensor's name, type, shape and bytes."""
    names = sorted(entries)
    kinds = [[name, str(entries[name].dtype), list(entries[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps([sorted(about.items()), kinds]).encode())
    for name in names:
        digest.update(entries[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(file: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a safetensors file and its metadata. Raises one of ``UNREADABLE``."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    with safe_open(file, framework="pt") as content:
        about = dict(content.metadata() or {})
        return {name: content.get_tensor(name) for name in content.keys()}, about  # noqa: SIM118


LARGE_BYTES = 64 * 2**20  # arrays above this size are compressed less
LOCK = ".lock"
MODEL = "model.safetensors"
PARTITION = "partition.npz"


def create_run_folder(path: Path) -> None:
    """Create a run directory; an existing one may contain only leftovers of a run killed before it began."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder; choose another --out")
    if (path / "result.json").exists():
        raise UserError(f"{path} has a finished run; choose another --out")
    if path.exists() and not is_blank(path):
        raise UserError(f"{path} exists and is not empty; choose another --out, or continue with: unskew resume {path}")
    try:
        make_folder(path)
    except OSError as error:
        raise UserError(f"the run directory {path} cannot be created: {error.strerror}") from error


def is_blank(path: Path) -> bool:
    """Whether a folder has only locks, partly written files and a manifest."""
    spare = (LOCK, MANIFEST_LOCK, MANIFEST)
    return all(file.name in spare or is_part(file.name) for file in path.iterdir())


def unused_path(parent: Path, name: str) -> Path:
    """``parent/name``, or the first of ``name-2``, ``name-3``, … that does not exist."""
    number, path = 1, parent / name
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Lock the run directory for this process, and remove files that a killed process left partly written."""
    with _locked(path / LOCK, wait=False):
        clear_parts(*(path / name for name in (".", "checkpoint", "states", "figures")))
        yield


def arrays_bytes(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """An .npz file without time stamps: the same arrays give the same bytes. Large arrays are compressed less."""
    content = io.BytesIO()
    if pickled := [name for name, value in arrays.items() if value.dtype.hasobject]:
        raise TypeError(f"arrays of Python objects cannot be stored: {', '.join(pickled)}")
    if sum(value.nbytes for value in arrays.values()) <= LARGE_BYTES:
        np.savez_compressed(content, **dict[str, Any](arrays))
        return content.getvalue()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
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


def classifier_metadata(classifier: Sequence[str]) -> dict[str, str]:
    """A model file's metadata: the names of the classifier's weights, if they are not the usual ones."""
    if set(classifier) <= set(CLASSIFIER):
        return {}
    return {"classifier": json.dumps([name.partition("/")[2] for name in classifier])}


def model_bytes(model: Tensors, classifier: Sequence[str] = CLASSIFIER) -> bytes:
    """Weights as safetensors, under the network's own names, with the names of the classifier's."""
    plain = {name: value.contiguous() for name, value in plain_names(model).items()}
    return save(plain, metadata=classifier_metadata(classifier) or None)


def plain_names(model: Tensors) -> Tensors:
    """A model's tensors under the network's own names."""
    return {name.removeprefix("params/").removeprefix("buffers/"): value for name, value in model.items()}


def calibration_bytes(name: str, classifier: CalibratedClassifier) -> bytes:
    """A calibrated classifier as safetensors, with its name and how each class's Gaussian was fitted."""
    rows = [asdict(row) for row in classifier.report.classes]
    about = {"unskew": json.dumps({"method": name, "classes": rows, "kept_rows": classifier.report.kept_rows})}
    return save({key: value.contiguous() for key, value in classifier.tensors().items()}, metadata=about)


def calibration_file(path: Path, name: str) -> Path:
    """The file of the calibrated classifier of that name."""
    plain = re.sub(r"[^a-z0-9_.]+", "-", name.lower().replace("e+", "e")).strip("-")  # 1e+16 is not 1e-16
    return path / f"calibration-{plain}.safetensors"


def read_calibration(path: Path, name: str) -> Tensors:
    """A calibrated classifier's tensors, for ``unskew.calibration.classifier.load_calibrated``."""
    file = calibration_file(path, name)
    require_sealed(path, file.name)
    try:
        values, about = read_tensors(file)
        method = parse_json(about["unskew"])["method"]
    except UNREADABLE as error:
        raise _unreadable(file, error) from error
    if method != name:
        raise UserError(f"{file} contains another calibration, {method!r}; restore it from a copy, or calibrate again")
    return values


def read_model(path: Path) -> tuple[Tensors, dict[str, str]]:
    """A run's final weights under the network's own names, and the file's metadata."""
    require_sealed(path, MODEL)
    try:
        return read_tensors(path / MODEL)
    except UNREADABLE as error:
        raise _unreadable(path / MODEL, error) from error


def classifier_names(path: Path, about: Mapping[str, str]) -> list[str]:
    """The names of the classifier's weight and, if it has one, bias, from the metadata of ``read_model``."""
    try:
        names = parse_json(about.get("classifier", "null")) or [n.partition("/")[2] for n in CLASSIFIER]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("the names of the classifier's weights are not a list of strings")
    except ValueError as error:
        raise _unreadable(path / MODEL, error) from error
    return names


def _unreadable(file: Path, error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{file} does not exist")
    return UserError(f"{file} is damaged: {error}; restore it from a copy")
