"""Clients that do not come: some of those drawn stay away, or only some can be drawn at all."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from unskew.core import text
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.limits import user_path
from unskew.core.roster import Roster
from unskew.core.types import Mask, Visit
from unskew.data.traces import Trace, read_trace, trace_sha256
from unskew.round.algorithm import Algorithm, Method

DIGITS = 12  # of a trace's hash that a run writes down


def absent(share: float = 0.3) -> Method:
    """Lets each client that is drawn stay away with a given chance.

    Of the K clients that a round draws, each fails to come with the chance ``share``, independently, and is not asked
    again in that round: (1 − share)·K come on average, and the mean is over those. A client that fedvc draws twice
    stays away with both visits. Where nobody comes the model stays as it is. Surveys before the first round and
    calibrations after the last ask everyone.
    """
    if not 0 <= share < 1:
        raise ValueError(f"absent(share={share}): share is a chance, give 0 or more and less than 1")

    def arrive(key: Key, visits: list[Visit]) -> list[Visit]:
        clients, place = np.unique([visit.client for visit in visits], return_inverse=True)
        comes = (key.numpy().random(len(clients)) >= share)[place]
        return [visit for visit, here in zip(visits, comes.tolist(), strict=True) if here]

    return lambda algorithm: replace(algorithm, arrive=arrive)


def available(file: str = "", share: float = 0.5, period: int = 24, sha256: str = "") -> Method:
    """Draws only clients that are there in that round.

    ``file`` is a trace, a CSV with the columns round,client (one row for each round in which a client is there) or
    client,from,to (the first and last round of a stay). Rounds count from 1, clients from 0; a client without a row is
    never there, and after the trace's last round it starts again from round 1. A run writes down how the trace's
    ``sha256`` begins, and refuses another.

    Without a file clients come and go as day and night: each is there for ``share`` of every ``period`` rounds, in one
    stretch that begins at its own time, drawn with the seed.

    Whatever samples the clients (uniform, fedvc) draws among those that are there, and at most as many as there are.
    Where nobody is there the model stays as it is. Surveys before the first round and calibrations after the last ask
    everyone.

    Reference: for day and night, Eichner et al., "Semi-Cyclic Stochastic Gradient Descent", ICML 2019, section 2.
    """
    if file:
        if sha256 and not re.fullmatch(r"[0-9a-f]{8,64}", sha256):
            raise ValueError(f"available(sha256={text.cut(sha256)}): give 8 to 64 hexadecimal digits, or leave it out")
        return _FromTrace(file, sha256)
    if sha256:
        raise ValueError("available(sha256=…): it is the trace's, give its file too")
    if not 0 < share <= 1:
        raise ValueError(f"available(share={share}): share is a part of the time, give a number above 0, at most 1")
    if period < 1:
        raise ValueError(f"available(period={period}): period counts rounds, give at least 1")
    stay = max(1, round(share * period))

    def by_day(key: Key, number: int, roster: Roster) -> Mask:
        begins = key.numpy().integers(0, period, roster.clients)
        return (number - 1 - begins) % period < stay

    return lambda algorithm: replace(algorithm, available=by_day)


@dataclass(frozen=True)
class _FromTrace:
    """The method ``available`` with a file. The file is read at its first use: a finished run does without it."""

    file: str
    sha256: str = ""

    @cached_property
    def path(self) -> Path:
        return user_path(self.file).absolute()

    @cached_property
    def spelling(self) -> str:
        """The method's text with the whole path and the content's hash: the same trace from anywhere, or none."""
        if {"'", '"'} <= set(str(self.path)):
            raise UserError(
                f"{self.path} has both kinds of quotes in its name, which a method's text cannot; rename it"
            )
        known = self.sha256 or trace_sha256(self.path)[:DIGITS]
        return f"available({text.spell(str(self.path))}, sha256={text.spell(known)})"

    @cached_property
    def trace(self) -> Trace:
        if not trace_sha256(self.path).startswith(self.sha256):
            raise UserError(
                f"{self.path} is not the trace that the run was started with: its content has changed; restore it, or "
                "start another run"
            )
        return read_trace(self.path)

    def __call__(self, algorithm: Algorithm) -> Algorithm:
        return replace(algorithm, available=self._there)

    def _there(self, key: Key, number: int, roster: Roster) -> Mask:
        return self.trace.there(number, roster.clients)
