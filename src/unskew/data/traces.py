"""Traces of availability: a CSV that says in which rounds each client is there."""

import csv
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unskew.core.errors import UserError
from unskew.core.files import read_content
from unskew.core.limits import check_plain
from unskew.core.types import Mask
from unskew.data.population import Ints

ROUNDS = ("round", "client")  # a row for each round in which a client is there
STAYS = ("client", "from", "to")  # the first and the last round of a stay
MAX_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class Trace:
    """Stays, one in each place of the arrays: the client is there from round ``first`` to round ``last``."""

    path: Path
    client: Ints
    first: Ints
    last: Ints

    @property
    def rounds(self) -> int:
        """The trace's last round; after it, it starts again."""
        return int(self.last.max())

    def there(self, number: int, clients: int) -> Mask:
        """[K], who is there in that round."""
        if (most := int(self.client.max())) >= clients:
            raise UserError(
                f"{self.path} has client {most}, but there are {clients:,} clients, counted from 0; give a trace of "
                "these clients"
            )
        now = (number - 1) % self.rounds + 1
        mask = np.zeros(clients, bool)
        mask[self.client[(self.first <= now) & (now <= self.last)]] = True
        return mask


def trace_sha256(path: Path) -> str:
    """SHA-256 of the file."""
    return hashlib.sha256(_content(path)).hexdigest()


def read_trace(path: Path) -> Trace:
    """A trace with the columns round,client or client,from,to, in any order; other columns are not read."""
    try:
        rows = csv.reader(io.StringIO(_content(path).decode("utf-8-sig"), newline=""), strict=True)
        header = [name.strip().lower() for name in next(rows, [])]
        wanted = next((names for names in (STAYS, ROUNDS) if set(names) <= set(header)), None)
        if wanted is None:
            raise UserError(
                f"{path} is not a trace: its header is {','.join(header)[:80]!r}; give round,client or client,from,to"
            )
        places = [header.index(name) for name in wanted]
        table = np.array([_numbers(path, rows.line_num, row, places) for row in rows if row], np.int64)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a trace: it is not UTF-8 ({error.reason})") from error
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}") from error
    if not len(table):
        raise UserError(f"{path} has no rows: no client would ever come; give a row for each stay")
    if wanted == ROUNDS:
        return Trace(path, table[:, 1], table[:, 0], table[:, 0])
    return Trace(path, table[:, 0], table[:, 1], table[:, 2])


def _numbers(path: Path, line: int, row: list[str], places: list[int]) -> list[int]:
    """A row's whole numbers; the client is counted from 0, rounds from 1, and a stay does not end before it begins."""
    try:
        values = [int(row[place]) for place in places]
    except (ValueError, IndexError):
        raise UserError(f"{path}, line {line}: {','.join(row)[:80]!r}; give whole numbers in every column") from None
    client, *rounds = values if len(values) == 3 else values[::-1]
    if client < 0 or min(rounds) < 1 or max(values) >= 2**31 or rounds != sorted(rounds):
        raise UserError(
            f"{path}, line {line}: {','.join(row)[:80]!r}; clients count from 0, rounds from 1, and a stay ends in the "
            "round in which it begins or later"
        )
    return values


def _content(path: Path) -> bytes:
    check_plain(path)
    content = read_content(path, MAX_BYTES)
    if content is None:
        raise UserError(f"there is no trace {path}")
    return content
