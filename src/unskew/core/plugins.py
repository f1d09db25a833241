"""Code from outside the package: functions named ``package.module:function``, and optional dependencies."""

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from unskew.core.errors import Ended, MissingExtra, UserError, brief, describe_error
from unskew.core.files import read_content

_PLUGIN = re.compile(r"([^\W\d][\w-]*(?:\.[^\W\d][\w-]*)*):([^\W\d]\w*)")
_NOT_PLUGINS = re.compile(
    r"unskew\.(?!data\.|models\.|methods\.|calibration\.|engines\.|loggers\.|reproduce\.networks\.)"
)
_WORD = re.compile(r"[\w.:-]+")  # the characters of a name in our texts


@dataclass(frozen=True)
class Plugin:
    """The name of a function outside the package."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


Check = Callable[[Plugin], None]
_check: ContextVar[Check | None] = ContextVar("check", default=None)


def parse_plugin(name: str, what: str = "plug-in") -> Plugin:
    """Parse ``package.module:function``, in one place so that loading, listing and allowing agree."""
    match = _PLUGIN.fullmatch(name)
    if match is None:
        raise UserError(f"{what} {brief(name)} cannot be imported: it does not have the form package.module:function")
    return Plugin(match[1], match[2])


def find_plugins(text: str, what: str = "plug-in") -> list[Plugin]:
    """The plug-ins in a text, without importing them; every word with a colon must be one (not ``folder:``)."""
    return [parse_plugin(word, what) for word in _WORD.findall(text) if ":" in word]


@contextmanager
def guard_plugins(check: Check) -> Iterator[None]:
    """Inside, call ``check`` before each import of a plug-in; it raises to prevent the import."""
    before = _check.set(check)
    try:
        yield
    finally:
        _check.reset(before)


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Import ``package.module:function``; ``what`` names its kind in messages."""
    plugin = parse_plugin(name, what)
    if (check := _check.get()) is not None:
        check(plugin)
    if _NOT_PLUGINS.match(f"{plugin.module}."):
        raise UserError(f"{what} {name!r}: Unskew's own functions cannot be used as plug-ins")
    add_working_directory()
    try:
        with _same_dtype():
            function: Callable[..., Any] = getattr(importlib.import_module(plugin.module), plugin.function)
    except (KeyboardInterrupt, Ended):
        raise
    except BaseException as error:  # importing a module may raise anything, SystemExit included
        raise UserError(f"{what} {name!r} cannot be imported: {describe_error(error)}") from error
    if not callable(function):
        raise UserError(f"{what} {name!r} is not a function")
    return function


def plugin_sha256(plugin: Plugin) -> str:
    """SHA-256 of the source file of a plug-in's module, without importing it or its packages."""
    add_working_directory()
    folders: Any = None
    for end in range(1, plugin.module.count(".") + 2):
        spec = PathFinder.find_spec(".".join(plugin.module.split(".")[:end]), folders)
        if spec is None:
            raise UserError(f"plug-in {plugin}: the module {plugin.module} does not exist")
        folders = spec.submodule_search_locations
    content = read_content(Path(spec.origin)) if spec is not None and spec.has_location and spec.origin else None
    if content is None:
        raise UserError(f"plug-in {plugin}: the module {plugin.module} has no source file to compute its hash from")
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _same_dtype() -> Iterator[None]:
    """Restore PyTorch's default dtype: results must not depend on when a module was imported."""
    before = sys.modules["torch"].get_default_dtype() if "torch" in sys.modules else None
    try:
        yield
    finally:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_default_dtype(before or torch.float32)


def add_working_directory() -> None:
    """Make modules in the working directory importable, after installed ones."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def require_extra(module: str, name: str = "privacy") -> Any:
    """Import a module that is installed only with the extra ``name``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(f'{module.split(".")[0]} is not installed; pip install "unskew[{name}]"') from error
