"""manifest.json: a hash of every file of a run folder that decides a result or is shown, written with the file.

Before files are replaced the manifest names the hashes to come beside those that are; afterwards it names the new ones
alone. In between either is accepted, so that a crash at any moment leaves a folder whose files all fit.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from unskew.core.errors import UserError
from unskew.core.files import json_object, read_content, write_whole

MANIFEST = "manifest.json"
LOCK = ".manifest.lock"
GROWING = ("metrics.jsonl", "during.jsonl")  # until the run is finished, the checkpoint vouches for these
REPLACEABLE = "figures/"  # a missing one is made again
VERSION = 1

T = TypeVar("T")


class SealBroken(UserError):
    """A file of a run folder is not the one that was written."""


@dataclass(frozen=True)
class Manifest:
    """By a file's path below the run folder, its SHA-256; and that of the files about to be written."""

    files: Mapping[str, str]
    coming: Mapping[str, str]

    def accepts(self, name: str, sha256: str | None) -> bool:
        """Whether the file may have this hash; None: whether it may be missing."""
        if sha256 is None:
            return name not in self.files
        return sha256 in (self.files.get(name), self.coming.get(name))

    @property
    def names(self) -> list[str]:
        """Every file, also those to come."""
        return sorted({*self.files, *self.coming})


def start_manifest(path: Path, contents: Mapping[str, bytes]) -> None:
    """Begin a run folder with these files: what is written with ``write_sealed`` from now on is sealed too."""
    with _locked(path):
        _replace_files(path, Manifest({}, {}), contents, {})


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a run folder; None where it has none."""
    return None if (content := _content(path)) is None else _parsed(content, path)


def write_sealed(path: Path, contents: Mapping[str, bytes], *, grown: Mapping[str, str] | None = None) -> None:
    """Replace files of the run folder, in this order, and seal them; ``grown`` are hashes of files that are complete.

    A folder without a manifest gets the files alone.
    """
    if not (path / MANIFEST).exists():
        for name, content in contents.items():
            write_whole(path / name, content)
        return
    with _locked(path):
        _replace_files(path, _settled(path), contents, grown or {})


def read_sealed(path: Path, name: str) -> bytes | None:
    """A file of the run folder, if it is as it was written; None where it is missing and may be."""
    return _checked(path, name, read_content, lambda content: None if content is None else _sha256(content))


def require_sealed(path: Path, name: str) -> None:
    """Refuse a file of the run folder that is not as it was written; for files that are read elsewhere."""
    _checked(path, name, file_sha256, lambda sha256: sha256)


def _checked(
    path: Path, name: str, read: Callable[[Path], T | None], hashed: Callable[[T | None], str | None]
) -> T | None:
    """What ``read`` gives of the file, if the manifest accepts it.

    A writer may come between: what does not fit counts only where the manifest is the same before and after.
    """
    content = _content(path)
    while True:
        found = read(path / name)
        if content is None:
            return found
        manifest = _parsed(content, path)
        if _fits(path, name, manifest, hashed(found)):
            return found
        before, content = content, _content(path)
        if content == before:
            raise _broken(path, name, manifest, missing=found is None)


def seal_as_it_is(path: Path, names: list[str]) -> None:
    """A new manifest over these files as they are now."""
    with _locked(path):
        hashes = {name: sha256 for name in names if (sha256 := file_sha256(path / name)) is not None}
        _write(path, Manifest(hashes, {}))


def file_sha256(file: Path) -> str | None:
    """Of a file of any size; None where there is none."""
    try:
        if not file.is_file():
            return None
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _replace_files(path: Path, before: Manifest, contents: Mapping[str, bytes], grown: Mapping[str, str]) -> None:
    """Name the hashes to come, replace the files, drop the old hashes."""
    coming = {**grown, **{name: _sha256(content) for name, content in contents.items()}}
    _write(path, replace(before, coming={**before.coming, **coming}))
    for name, content in contents.items():
        write_whole(path / name, content)
    rest = {name: value for name, value in before.coming.items() if name not in coming}
    _write(path, Manifest({**before.files, **coming}, rest))


def _fits(path: Path, name: str, manifest: Manifest, sha256: str | None) -> bool:
    if name in GROWING and "result.json" not in manifest.files and not (path / "result.json").exists():
        return True
    if sha256 is None and name.startswith(REPLACEABLE):
        return True
    return manifest.accepts(name, sha256)


def _broken(path: Path, name: str, manifest: Manifest, *, missing: bool) -> SealBroken:
    if missing:
        what = f"{path / name} is missing; {MANIFEST} says that the run has it"
    elif name in manifest.files or name in manifest.coming:
        what = f"{path / name} was changed after it was written: it does not match its hash in {MANIFEST}"
    else:
        what = f"{path / name} was added by hand: {MANIFEST} does not name it"
    again = " or delete it to have it made again," if name.startswith(REPLACEABLE) else ""
    return SealBroken(f"{what}; restore it from a copy,{again} or delete {path / MANIFEST} to use the folder unsealed")


def _settled(path: Path) -> Manifest:
    """The manifest with what a crash left open decided by the files; what fits neither hash stays open."""
    manifest = read_manifest(path) or Manifest({}, {})
    files, coming = dict(manifest.files), dict(manifest.coming)
    for name, expected in manifest.coming.items():
        found = file_sha256(path / name)
        if found == expected:
            files[name] = expected
        if found == expected or found == manifest.files.get(name):
            del coming[name]
    return Manifest(files, coming)


def _parsed(content: bytes, path: Path) -> Manifest:
    try:
        values = json_object(content, path / MANIFEST)
        found = values.pop("seal", None)
        if found != _seal(values) or values.get("unskew") != VERSION:
            raise SealBroken("its content does not match its own seal")
        return Manifest(dict(values["files"]), dict(values["coming"]))
    except (UserError, LookupError, TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"{path / MANIFEST} cannot be read: ")
        raise SealBroken(
            f"{path / MANIFEST} is damaged ({reason}); restore it from a copy, or delete it to use the folder unsealed"
        ) from error


def _write(path: Path, manifest: Manifest) -> None:
    values = {"unskew": VERSION, "files": dict(manifest.files), "coming": dict(manifest.coming)}
    write_whole(path / MANIFEST, (json.dumps({**values, "seal": _seal(values)}, indent=2) + "\n").encode())


def _seal(values: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(values, sort_keys=True).encode())


def _content(path: Path) -> bytes | None:
    return read_content(path / MANIFEST)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time: measures and calibrations of one run may be made at once."""
    try:
        file = open(path / LOCK, "w", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise UserError(f"{path / LOCK} cannot be written: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(f"{path / LOCK} cannot be locked: {error.strerror or error}") from error
        yield
