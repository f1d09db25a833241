"""Paths and files: written completely or not at all, read with limits, JSON parsed strictly, fields checked by type."""

import errno
import os
import platform
import re
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from unskew.core.errors import UserError, brief, nearest

CACHE_VARIABLE = "UNSKEW_CACHE"
FORGOTTEN_SECONDS = 24 * 3600  # no file takes a day to write, so its writer must have died
_NAME = re.compile(r"\.([A-Za-z0-9-]+)\.([0-9]{1,10})\.part$")


def user_path(text: str) -> Path:
    """The path that a user wrote, with ``~`` expanded."""
    try:
        return Path(text).expanduser()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the path {brief(text)} cannot be used: {error}; give another") from error


def usable_path(value: str | os.PathLike[str]) -> Path:
    """A path that may exist or be created: without null bytes, not too long, UTF-8."""
    path = Path(value)
    try:
        str(path).encode()
        os.lstat(path)
    except (ValueError, OSError) as error:  # ValueError: a null byte, or a surrogate
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            why = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
            raise UserError(f"the path {brief(str(path))} cannot be used: {why}; give another") from error
    return path


def working_directory() -> Path:
    """The current directory; a UserError if it was deleted."""
    try:
        return Path.cwd()
    except OSError as error:
        raise UserError("the working directory was deleted; change to another one") from error


def cache_folder(option: str | None = None) -> Path:
    """The folder given with --cache-dir or UNSKEW_CACHE, or ~/.cache/unskew; it may not exist yet."""
    return usable_path(user_path(option or os.environ.get(CACHE_VARIABLE) or "~/.cache/unskew")).absolute()


def part_beside(path: Path) -> Path:
    """The temporary file that will replace the path; every process has its own."""
    return path.with_name(f"{path.name}.{_machine()}.{os.getpid()}.part")


def is_part(name: str) -> bool:
    """Whether a file name is that of a temporary file."""
    return _NAME.search(name) is not None


def clear_parts(*folders: Path) -> None:
    """Remove temporary files whose process has ended, and those of other machines after a day."""
    for folder in folders:
        with suppress(OSError):
            for file in folder.iterdir():
                if match := _NAME.search(file.name):
                    ended = match[1] == _machine() and not _is_running(int(match[2]))
                    if ended or time.time() - file.stat().st_mtime > FORGOTTEN_SECONDS:
                        file.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        if os.name == "posix":
            os.kill(process, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # it belongs to another user
    return True


def _machine() -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", platform.node())[:40] or "here"


MAX_BYTES = 2**30  # of a JSON or TOML file
MAX_DEPTH = 32  # of nested lists and objects
MAX_WHOLE = 2**64  # absolute value of a whole number

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)


@contextmanager
def _failing(path: Path, action: str = "written") -> Iterator[None]:
    """Report an OSError inside: the path cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be {action}: {error.strerror or error}") from error


@contextmanager
def in_pieces(path: Path) -> Iterator[Path]:
    """A temporary file for a large file's pieces; it replaces the path at the end and is removed after an error."""
    temporary = part_beside(path)
    try:
        with _failing(path):
            make_folder(path.parent)
            yield temporary
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Replace a file atomically; only the owner may read a ``secret`` one."""
    with in_pieces(path) as temporary, open(os.open(temporary, _NEW, 0o600 if secret else 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_again(path: Path, content: bytes) -> None:
    """Write a file that can be recreated, without waiting for the disk."""
    with _failing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names of a folder's files durable; syncing a file alone does not."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    with suppress(PermissionError):  # writable, but not readable
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_fully(descriptor: int, content: bytes) -> None:
    """Write all bytes; one system call may write only some of them."""
    view = memoryview(content)
    while view:
        if not (done := os.write(descriptor, view)):
            raise OSError("the system accepts no more bytes")
        view = view[done:]


def append_secret(path: Path, content: bytes) -> None:
    """Append lines to a file that only its owner may read; several processes may do so. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
        write_fully(file.fileno(), content)


def wipe(file: Path) -> None:
    """Empty a file and remove it."""
    with _failing(file, "removed"), suppress(FileNotFoundError):
        os.truncate(file, 0)
        file.unlink()


def read_content(path: Path, most: int = MAX_BYTES) -> bytes | None:
    """A file's bytes; None if it does not exist. A larger file, a pipe or a device is rejected."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise UserError(f"{path} cannot be read: it is not a regular file")
            if facts.st_size > most:
                raise UserError(f"{path} cannot be read: it has {facts.st_size:,} bytes; the limit is {most:,}")
            return file.read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_json(content: bytes | str) -> Any:
    """Parse strict JSON: finite numbers, whole numbers up to 2^64, limited nesting. Raises ValueError."""
    try:
        value = msgspec.json.decode(content)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None
    level, depth = [value], 0
    while level:  # not recursive: this check must survive any nesting
        if any(isinstance(entry, int) and abs(entry) > MAX_WHOLE for entry in level):
            raise ValueError("a whole number is larger than 2^64")
        inner = [e.values() if isinstance(e, dict) else e for e in level if isinstance(e, list | dict)]
        if inner and depth == MAX_DEPTH:
            raise ValueError("lists or objects are nested too deeply")
        level, depth = [entry for entries in inner for entry in entries], depth + 1
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    content = read_content(path)
    if content is None:
        raise UserError(f"{path} cannot be read: it does not exist")
    return json_object(content, path)


def json_object(content: bytes, path: Path | str) -> dict[str, Any]:
    """The JSON object in a file's content."""
    try:
        values = parse_json(content)
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise UserError(f"{path} cannot be read: it is damaged, or not JSON: {error}") from error
    return values


def json_lines(content: bytes, path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file's content, one per line; a last line that a crash cut short is dropped."""
    return [json_object(line, f"{path} line {number}") for number, line in enumerate(content.split(b"\n")[:-1], 1)]


T = TypeVar("T")


def record_from(kind: type[T], values: Any) -> T:
    """Make a dataclass, nested ones included, from a dict of its fields; ValueError names the wrong field."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if isinstance(values, Mapping) and (unknown := next((name for name in values if name not in known), None)):
        raise ValueError(f"unknown key {brief(str(unknown))}; {nearest(str(unknown), known)}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_reason(error)) from error


def toml_record(file: Path, kind: type[T], missing: str) -> T:
    """The settings in a TOML file as a dataclass; UserError for any mistake in it."""
    content = read_content(file, 2**20)
    if content is None:
        raise UserError(missing)
    try:
        return record_from(kind, tomllib.loads(content.decode()))
    except (ValueError, UserError) as error:
        raise UserError(f"{file}: {error}") from error


def check_fields(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that does not have its field's type; fields may be missing."""
    types = get_type_hints(kind)
    for name, value in values.items():
        try:
            msgspec.convert(value, types.get(name, Any))
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {_reason(error)}") from error


def _reason(error: msgspec.ValidationError) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.a.b`" as "a.b: expected int, got str"."""
    reason, _, path = str(error).replace("`", "").partition(" - at $")
    reason = reason[0].lower() + reason[1:]
    return f"{path.lstrip('.')}: {reason}" if path else reason
