"""Code from outside the package: functions named ``package.module:function``, trusted ones, optional dependencies."""

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from unskew.core.errors import Ended, MissingExtra, UserError, brief, describe_error
from unskew.core.files import append_secret, parse_json, read_content
from unskew.core.language import parse_calls

_PLUGIN = re.compile(r"[^\W\d][\w-]*(?:\.[^\W\d][\w-]*)*:[^\W\d]\w*")
_NOT_PLUGINS = re.compile(
    r"unskew\.(?!data\.|models\.|methods\.|calibration\.|engines\.|loggers\.|reproduce\.networks\.)"
)
_WORD = re.compile(r"[\w.:-]+")  # the characters of a name in our texts


Check = Callable[[str], None]  # the name of a function outside the package
_check: ContextVar[Check | None] = ContextVar("check", default=None)


def parse_plugin(name: str, what: str = "plug-in") -> str:
    """Check that a name is ``package.module:function``, in one place so that loading, listing and allowing agree."""
    if _PLUGIN.fullmatch(name) is None:
        raise UserError(f"{what} {brief(name)} cannot be imported: it does not have the form package.module:function")
    return name


def find_plugins(text: str) -> list[str]:
    """The plug-ins in a text, without importing them; every word with a colon must be one (not ``folder:``)."""
    return [parse_plugin(word) for word in _WORD.findall(text) if ":" in word]


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
    module, _, function_name = parse_plugin(name, what).partition(":")
    if (check := _check.get()) is not None:
        check(name)
    if _NOT_PLUGINS.match(f"{module}."):
        raise UserError(f"{what} {name!r}: Unskew's own functions cannot be used as plug-ins")
    add_working_directory()
    before = sys.modules["torch"].get_default_dtype() if "torch" in sys.modules else None
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), function_name)
    except (KeyboardInterrupt, Ended):
        raise
    except BaseException as error:  # importing a module may raise anything, SystemExit included
        raise UserError(f"{what} {name!r} cannot be imported: {describe_error(error)}") from error
    finally:  # results must not depend on when a module was imported
        if torch := sys.modules.get("torch"):
            torch.set_default_dtype(before or torch.float32)
    if not callable(function):
        raise UserError(f"{what} {name!r} is not a function")
    return function


def plugin_sha256(plugin: str) -> str:
    """SHA-256 of the source file of a plug-in's module, without importing it or its packages."""
    add_working_directory()
    module, folders = plugin.partition(":")[0], cast(Any, None)
    for package in accumulate(module.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(package, folders)
        if spec is None:
            raise UserError(f"plug-in {plugin}: the module {module} does not exist")
        folders = spec.submodule_search_locations
    content = read_content(Path(spec.origin)) if spec and spec.has_location and spec.origin else None
    if content is None:
        raise UserError(f"plug-in {plugin}: the module {module} has no source file to compute its hash from")
    return hashlib.sha256(content).hexdigest()


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


# Only plug-ins that this user has named on this machine run; a run directory cannot bring others. They are listed in
# $XDG_STATE_HOME/unskew/plugins.jsonl, each call with the file or folder of its module, since a module of the same name
# in another location is different code: ["my_nets:small(width=8)", "/home/ada/nets/my_nets.py"]
OWN = ("timm:", "unskew.data.synthetic_set:", "unskew.reproduce.networks:")  # harmless with any arguments


def plugins_in(text: str) -> list[str]:
    """The plug-in calls in a text, in canonical spelling; a text that cannot be parsed counts as one call."""
    try:
        calls = [str(call) for call in parse_calls(text, "method")]
    except UserError:
        calls = [text]
    return [call for call in calls if ":" in call and not call.startswith(OWN)]


def remember(texts: Iterable[str]) -> None:
    """Record that the user has named the plug-ins in these texts, if the list can be written."""
    new, file = [call for text in texts for call in unknown_plugins(text)], _register()
    with suppress(OSError):
        if new and file is not None:
            append_secret(file, "".join(json.dumps([call, _locate(call)]) + "\n" for call in new).encode())


def unknown_plugins(text: str) -> list[str]:
    """The plug-ins in a text that the user has not named on this machine."""
    if not (calls := plugins_in(text)):
        return []
    known: set[tuple[str, str]] = set()
    file = _register()
    with suppress(UserError):
        for line in ((file and read_content(file)) or b"").splitlines():
            with suppress(ValueError, TypeError):
                call, location = parse_json(line)
                known |= {(str(call), str(location)), (str(call), "")}  # a module that does not exist cannot run
    return [call for call in calls if (call, _locate(call)) not in known]


def _register() -> Path | None:
    """The list's path, always absolute: a run directory must not bring its own list. None without a home folder."""
    base = os.environ.get("XDG_STATE_HOME") or ""
    folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.local/state"))
    return folder / "unskew" / "plugins.jsonl" if folder.is_absolute() else None


def _locate(call: str) -> str:
    try:
        add_working_directory()
        spec = importlib.util.find_spec(call.partition(":")[0].partition(".")[0])
    except (OSError, ImportError, ValueError):
        return ""
    locations = () if spec is None else (spec.origin, *(spec.submodule_search_locations or ()))
    return next(filter(None, locations), "")
