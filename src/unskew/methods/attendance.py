"""Partial availability: some sampled clients stay away, or only some can be sampled at all."""

import csv
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from unskew.core import language
from unskew.core.errors import UserError
from unskew.core.files import user_path
from unskew.core.key import Key
from unskew.core.limits import read_plain
from unskew.core.types import Mask, Roster, Visit
from unskew.round.algorithm import Algorithm, Method

DIGITS = 12  # of a trace's hash in a run's configuration


def read_trace(path: Path) -> Callable[[int, int], Mask]:
    """Read a trace with the columns round,client or client,from,to, in any order; others are ignored.

    The result maps a round and the number of clients K to [K], which clients are available; after its last round the
    trace starts again.
    """
    try:
        rows = csv.reader(io.StringIO(_read_content(path).decode("utf-8-sig"), newline=""), strict=True)
        header = [name.strip().lower() for name in next(rows, [])]
        names = ("client", "from", "to") if "from" in header else ("client", "round", "round")
        columns = [header.index(name) for name in names]
        stays = np.array([[int(row[column]) for column in columns] for row in rows if row], np.int64)
        client, first, last = stays.T
        if not ((client >= 0) & (client < 2**31) & (first >= 1) & (first <= last)).all():
            raise ValueError("a client, a round or the end of a stay is out of range")
    except (csv.Error, ValueError, IndexError, OverflowError) as error:
        rule = "give rows of round,client or client,from,to, clients numbered from 0 and rounds from 1"
        raise UserError(f"{path} is not a trace ({error}); {rule}") from error

    def present(number: int, clients: int) -> Mask:
        if (most := int(client.max())) >= clients:
            excess = f"{path} lists client {most:,}, but clients are numbered from 0 to {clients - 1:,}"
            raise UserError(f"{excess}; give a trace for these clients")
        now = (number - 1) % int(last.max()) + 1
        mask = np.zeros(clients, bool)
        mask[client[(first <= now) & (now <= last)]] = True
        return mask

    return present


def _read_content(path: Path) -> bytes:
    return read_plain(path, "check the path of the trace")


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
        return _FromTrace(file, sha256)
    if not 0 < share <= 1 or period < 1:
        rule = "give a share above 0 and at most 1, and a period of at least 1 round"
        raise ValueError(f"available(share={share}, period={period}): {rule}")
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
        known = self.sha256 or hashlib.sha256(_read_content(self.path)).hexdigest()[:DIGITS]
        return f"available({language.spell(str(self.path))}, sha256={language.spell(known)})"

    @cached_property
    def trace(self) -> Callable[[int, int], Mask]:
        if not hashlib.sha256(_read_content(self.path)).hexdigest().startswith(self.sha256):
            raise UserError(f"the trace {self.path} has changed since the run began; restore it, or start a new run")
        return read_trace(self.path)

    def __call__(self, algorithm: Algorithm) -> Algorithm:
        return replace(algorithm, available=lambda _, number, roster: self.trace(number, roster.clients))
