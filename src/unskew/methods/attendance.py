"""Partial availability: some sampled clients stay away, or only some can be sampled at all."""

import csv
import hashlib
import io
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from unskew.core import text
from unskew.core.errors import UserError
from unskew.core.files import read_content
from unskew.core.key import Key
from unskew.core.limits import check_plain, user_path
from unskew.core.types import Mask, Roster, Visit
from unskew.data.population import Ints
from unskew.round.algorithm import Algorithm, Method

ROUNDS = ("round", "client")  # one row per client and round
STAYS = ("from", "to", "client")  # the first and the last round of a stay
MAX_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class Trace:
    """Clients' stays, one per row: a client is available from round ``first`` to round ``last``."""

    path: Path
    client: Ints
    first: Ints
    last: Ints

    @property
    def rounds(self) -> int:
        """The trace's last round, after which it starts again."""
        return int(self.last.max())

    def available(self, number: int, clients: int) -> Mask:
        """[K], which clients are available in that round."""
        if (most := int(self.client.max())) >= clients:
            excess = f"{self.path} has a client {most}, but clients are numbered from 0 to {clients - 1:,}"
            raise UserError(f"{excess}; give a trace of these clients")
        now = (number - 1) % self.rounds + 1
        mask = np.zeros(clients, bool)
        mask[self.client[(self.first <= now) & (now <= self.last)]] = True
        return mask


def hash_trace(path: Path) -> str:
    """SHA-256 of the file."""
    return hashlib.sha256(_read_content(path)).hexdigest()


def read_trace(path: Path) -> Trace:
    """Read a trace with the columns round,client or client,from,to, in any order; others are ignored."""
    try:
        rows = csv.reader(io.StringIO(_read_content(path).decode("utf-8-sig"), newline=""), strict=True)
        header = [name.strip().lower() for name in next(rows, [])]
        wanted = next((names for names in (STAYS, ROUNDS) if set(names) <= set(header)), None)
        if wanted is None:
            wrong = f"{path} is not a trace: its header is {','.join(header)[:80]!r}"
            raise UserError(f"{wrong}; use the columns round,client or client,from,to")
        columns = [header.index(name) for name in wanted]
        table = np.array([_parse_row(path, rows.line_num, row, columns) for row in rows if row], np.int64)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a trace: it is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}; write it again") from error
    if not len(table):
        raise UserError(f"{path} has no rows, so no client would ever be available; give one row per stay")
    return Trace(path, *table.T)


def _parse_row(path: Path, line: int, row: list[str], columns: list[int]) -> list[int]:
    """The client, numbered from 0, and the first and last round of its stay, numbered from 1."""
    try:
        *rounds, client = (int(row[column]) for column in columns)
    except (ValueError, IndexError):
        raise UserError(f"{path}, line {line}: {','.join(row)[:80]!r}; give whole numbers in every column") from None
    if client < 0 or min(rounds) < 1 or max(client, *rounds) >= 2**31 or rounds != sorted(rounds):
        rule = "clients are numbered from 0, rounds from 1, and a stay cannot end before it begins"
        raise UserError(f"{path}, line {line}: {','.join(row)[:80]!r}; {rule}")
    return [client, rounds[0], rounds[-1]]


def _read_content(path: Path) -> bytes:
    check_plain(path)
    content = read_content(path, MAX_BYTES)
    if content is None:
        raise UserError(f"the trace {path} does not exist; give the path of a CSV file")
    return content


DIGITS = 12  # of a trace's hash in a run's configuration


def absent(share: float = 0.3) -> Method:
    """Lets each sampled client stay away with a given probability.

    Each of a round's K clients stays away with probability ``share``, independently, and is not asked again in that
    round: (1 − share)·K take part on average, and the mean is over those. A client that fedvc samples twice misses both
    visits. If nobody takes part, the model does not change. Surveys before the first round and calibrations after the
    last include everyone.

    Parameters
    ----------
    share
        The probability with which a sampled client stays away.
    """
    if not 0 <= share < 1:
        raise ValueError(f"absent(share={share}): share, a probability, must be at least 0 and below 1")

    def arrive(key: Key, visits: list[Visit]) -> list[Visit]:
        clients, index = np.unique([visit.client for visit in visits], return_inverse=True)
        arrives = (key.numpy().random(len(clients)) >= share)[index]
        return [visit for visit, arrived in zip(visits, arrives.tolist(), strict=True) if arrived]

    return lambda algorithm: replace(algorithm, arrive=arrive)


def available(file: str = "", share: float = 0.5, period: int = 24, sha256: str = "") -> Method:
    """Samples only clients that are available in that round.

    With a ``file``, a trace lists who is available. Without one, availability alternates like day and night: each
    client is available for ``share`` of every ``period`` rounds, in one stretch whose start is drawn from the seed.

    The sampler (uniform, fedvc) chooses among the available clients. If nobody is available, the model does not change.
    Surveys before the first round and calibrations after the last include everyone.

    Parameters
    ----------
    file
        A CSV trace with the columns round,client (one row per client and round) or client,from,to (the first and last
        round of a stay). Rounds are numbered from 1, clients from 0. A client without a row is never available. After
        its last round the trace starts again.
    share
        The share of the time for which a client is available, without a file.
    period
        The length of a day in rounds, without a file.
    sha256
        The first digits of the trace's SHA-256; a different trace is rejected. A run records it.

    Reference: for day and night, Eichner et al., "Semi-Cyclic Stochastic Gradient Descent", ICML 2019, section 2.
    """
    if file:
        if sha256 and not re.fullmatch(r"[0-9a-f]{8,64}", sha256):
            raise ValueError(f"available(sha256={text.cut(sha256)}): give 8 to 64 hexadecimal digits, or none")
        return _FromTrace(file, sha256)
    if sha256:
        raise ValueError("available(sha256=…): this is the hash of a trace; give the file too")
    if not 0 < share <= 1:
        raise ValueError(f"available(share={share}): the share of the time must be above 0 and at most 1")
    if period < 1:
        raise ValueError(f"available(period={period}): period must be at least 1 round")
    stay = max(1, round(share * period))

    def by_day(key: Key, number: int, roster: Roster) -> Mask:
        begins = key.numpy().integers(0, period, roster.clients)
        return (number - 1 - begins) % period < stay

    return lambda algorithm: replace(algorithm, available=by_day)


@dataclass(frozen=True)
class _FromTrace:
    """The method ``available`` with a file, which is read at its first use: a finished run does not need it."""

    file: str
    sha256: str = ""

    @cached_property
    def path(self) -> Path:
        return user_path(self.file).absolute()

    @cached_property
    def spelling(self) -> str:
        """The method's text with the absolute path and the content's hash, which identify the trace."""
        if {"'", '"'} <= set(str(self.path)):
            raise UserError(f"{self.path} has both kinds of quotes in its name; rename it to use it in a method's text")
        known = self.sha256 or hash_trace(self.path)[:DIGITS]
        return f"available({text.spell(str(self.path))}, sha256={text.spell(known)})"

    @cached_property
    def trace(self) -> Trace:
        if not hash_trace(self.path).startswith(self.sha256):
            changed = "has changed since the run was started"
            raise UserError(f"the trace {self.path} {changed}; restore it, or start another run")
        return read_trace(self.path)

    def __call__(self, algorithm: Algorithm) -> Algorithm:
        return replace(algorithm, available=lambda _, number, roster: self.trace.available(number, roster.clients))
