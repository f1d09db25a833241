"""Which plug-ins this user has named on this machine: others do not run only because a run directory names them.

They are listed in ``$XDG_STATE_HOME/unskew/plugins.jsonl`` (``~/.local/state`` by default), each call with the file or
folder of its module: ``["my_nets:small(width=8)", "/home/ada/nets/my_nets.py"]``. A module of that name elsewhere is
other code.
"""

import importlib.util
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import append_secret, parse_json, read_content
from unskew.core.plugins import see_own_folder
from unskew.core.text import parse_calls

OWN = ("timm:", "unskew.data.synthetic_set:", "unskew.reproduce.networks:")  # harmless whatever their knobs


def plugins_in(text: str) -> list[str]:
    """The calls in a text that name a plug-in, in their plainest spelling; of a text that is none, all of it."""
    try:
        calls = [str(call) for call in parse_calls(text, "method")]
    except UserError:
        calls = [text]
    return [call for call in calls if ":" in call and not call.startswith(OWN)]


def remember(texts: Iterable[str]) -> None:
    """Take note that the user has named the plug-ins of these texts. Where that cannot be written, nothing happens."""
    new, file = [call for text in texts for call in strangers(text)], _register()
    with suppress(OSError):
        if new and file is not None:
            append_secret(file, "".join(json.dumps([call, _locate(call)]) + "\n" for call in new).encode())


def strangers(text: str) -> list[str]:
    """The plug-ins of a text that the user has not named on this machine."""
    if not (calls := plugins_in(text)):
        return []
    known: dict[str, set[str]] = {}
    file = _register()
    with suppress(UserError):
        for line in ((file and read_content(file)) or b"").splitlines():
            with suppress(ValueError, TypeError):
                call, location = parse_json(line)
                known.setdefault(str(call), set()).add(str(location))
    # a module that is nowhere cannot run
    return [call for call in calls if call not in known or _locate(call) not in {"", *known[call]}]


def _register() -> Path | None:
    """The list, always below an absolute path: a received folder must not bring its own. None without a home."""
    base = os.environ.get("XDG_STATE_HOME") or ""
    folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.local/state"))
    return folder / "unskew" / "plugins.jsonl" if folder.is_absolute() else None


def _locate(call: str) -> str:
    try:
        see_own_folder()
        spec = importlib.util.find_spec(call.partition(":")[0].partition(".")[0])
    except (OSError, ImportError, ValueError):
        return ""
    locations = () if spec is None else (spec.origin, *(spec.submodule_search_locations or ()))
    return next(filter(None, locations), "")
