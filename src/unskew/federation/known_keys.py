"""The keys that may join, as they are in the federation's folder now, and when each was last used."""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.federation.certificates import public_pem
from unskew.federation.folder import Federation

_LOOK_AGAIN = 1.0  # seconds between two looks at the folder, and between two writings of who was seen


class KnownKeys:
    """Node names by key; a file that is taken away is a node refused, from the next second on."""

    def __init__(self, federation: Federation, tell: Callable[[str], None]) -> None:
        self._federation, self._tell = federation, tell
        self._names: dict[bytes, str] = {}
        self._files: dict[Path, float] = {}
        self._seen: dict[str, float] = {}
        self._looked = self._written = 0.0

    def name(self, header: bytes) -> str | None:
        """The node that has this key, and from now on was seen."""
        if time.monotonic() > self._looked + _LOOK_AGAIN:
            self._look()
        name = self._names.get(header)
        if name is not None:
            self._see(name)
        return name

    def _look(self) -> None:
        self._looked = time.monotonic()
        files = {path: path.stat().st_mtime for path in self._federation.public_keys().values()}
        if files == self._files:
            return
        self._files, self._names = files, {}
        for name, path in self._federation.public_keys().items():
            try:
                self._names[base64.b64encode(public_pem(path))] = name
            except UserError as error:
                self._tell(f"node {name} cannot join: {error}")

    def _see(self, name: str) -> None:
        now = time.time()
        self._seen[name] = now
        if now > self._written + _LOOK_AGAIN:
            self._written = now
            write_whole(self._federation.seen, json.dumps(self._seen).encode())
