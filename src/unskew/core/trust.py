"""The plug-ins that this user has named on this machine; a run directory alone cannot make others run.

They are listed in ``$XDG_STATE_HOME/unskew/plugins.jsonl`` (``~/.local/state`` by default), each call with the file or
folder of its module: ``["my_nets:small(width=8)", "/home/ada/nets/my_nets.py"]``. A module of the same name in another
location is different code.
"""

import importlib.util
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import append_secret, parse_json, read_content
from unskew.core.plugins import add_working_directory
from unskew.core.text import parse_calls

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
    known: dict[str, set[str]] = {}
    file = _register()
    with suppress(UserError):
        for line in ((file and read_content(file)) or b"").splitlines():
            with suppress(ValueError, TypeError):
                call, location = parse_json(line)
                known.setdefault(str(call), set()).add(str(location))
    # a module that does not exist cannot run
    return [call for call in calls if call not in known or _locate(call) not in {"", *known[call]}]


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
