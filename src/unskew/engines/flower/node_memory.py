"""What a node's clients keep between visits: one file for each visit that left something, on the node's own disk.

A file is written whole before the server hears of it, so that a kill at any moment loses nothing that the server knows
of. It stays until the server no longer refers to it, in its state or in its last checkpoint.
"""

import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unskew.core.errors import StorageFailure, UserError
from unskew.core.files import clear_parts, read_content, write_whole
from unskew.core.types import Tensors, Visit, Visited
from unskew.round.client_memory import MemoryFormat

TICKET = re.compile(r"(\d{1,10})\.(\d{1,18})-([0-9a-f]{8})")  # client, number of the file, checksum
FILE = re.compile(r"(\d{1,10})\.(\d{1,18})\.state")


class NodeMemory:
    """The files of one run, in a folder of their own."""

    def __init__(self, folder: Path, layout: MemoryFormat) -> None:
        self._folder, self._format = folder, layout
        self._clients: dict[int, int] = {}  # by the number of the file that a visit will write
        self.lost: list[int] = []  # clients whose memory was not there, since it was last looked at
        with suppress(OSError):
            clear_parts(folder)
        self._next = max((number for _, number in self._files()), default=-1) + 1

    def assign(self, visit: Visit) -> Visit:
        """The visit with the number of the file that it may write."""
        if not visit.keep:
            return visit
        number, self._next = self._next, self._next + 1
        self._clients = {number: visit.client}
        return replace(visit, slot=number)

    def recall(self, visit: Visit) -> Tensors:
        """What the client kept at its last visit; nothing where that is not there, as at its first visit."""
        if visit.ticket is None:
            return {}
        content = self._content(visit)
        if content is None:
            self.lost.append(visit.client)
            return {}
        return self._format.unpacked(content)

    def values(self, visited: Visited) -> Tensors:
        """What the methods keep of this visit."""
        return self._format.values(visited)

    def write(self, slot: int, values: Tensors) -> str:
        """Write the file of that number; the ticket that reads it back."""
        content, client = self._format.packed(values), self._clients[slot]
        try:
            write_whole(self._file(client, slot), bytes(content))
        except UserError as error:
            raise StorageFailure(f"the client's state cannot be saved: {error}") from error
        return f"{client}.{slot}-{zlib.crc32(content):08x}"

    def clear(self, visits: Iterable[Visit], tickets: Iterable[str]) -> None:
        """Of the clients that are about to write a new file, remove those that neither a visit nor a ticket names."""
        writing = [visit for visit in visits if visit.keep]
        clients = {visit.client for visit in writing}
        all_named = [*tickets, *(visit.ticket for visit in writing if visit.ticket)]
        named = {(int(found[1]), int(found[2])) for ticket in all_named if (found := TICKET.fullmatch(ticket))}
        for client, number in self._files():
            if client in clients and (client, number) not in named:
                with suppress(OSError):
                    self._file(client, number).unlink(missing_ok=True)

    def close(self) -> None:
        """No file stays open."""

    def _content(self, visit: Visit) -> bytearray | None:
        found = TICKET.fullmatch(visit.ticket or "")
        if found is None or int(found[1]) != visit.client:
            return None
        try:
            content = read_content(self._file(visit.client, int(found[2])), self._format.bytes)
        except UserError:
            return None
        if content is None or len(content) != self._format.bytes or f"{zlib.crc32(content):08x}" != found[3]:
            return None
        return bytearray(content)

    def _file(self, client: int, number: int) -> Path:
        return self._folder / f"{client}.{number}.state"

    def _files(self) -> list[tuple[int, int]]:
        try:
            names = [file.name for file in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        return [(int(found[1]), int(found[2])) for name in names if (found := FILE.fullmatch(name))]
