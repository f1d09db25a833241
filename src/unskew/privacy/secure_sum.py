"""A secure sum through an engine, the server's side: it starts the clients' jobs and takes the masks off the sum.

Four exchanges: public keys, sealed shares, masked answers, opened shares. The server sees public keys, boxes that it
cannot open, the sum of the masked answers, and shares that take the masks off this sum and no other: never what one
client sent. A client that drops out on the way is left out of the sum, while at least t of n stay; with fewer the sum
does not come about. The clients' side is ``secure_jobs``.

Shapes: n members, the visits that were asked, in their order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Engine, Failure, Mask, Outcome, Tensors, Visit
from unskew.privacy import rows
from unskew.privacy.agreement import (
    BOX_BYTES,
    MIN_CLIENTS,
    PUBLIC_BYTES,
    Agreement,
    member_number,
    shares_needed,
    unmask,
)
from unskew.privacy.ciphers import SHARE_BYTES
from unskew.privacy.questions import MEMBERS, MOST_MEMBERS, Question
from unskew.privacy.secure_jobs import CAME, CHECK
from unskew.privacy.sessions import new_session
from unskew.round.jobs import job_text


@dataclass(frozen=True)
class SecureSum:
    """The words of all who answered, int64 by name; none, and why, where the sum did not come about."""

    words: Mapping[str, Tensor] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    receipts: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what else happened on the way
    void: str = ""
    bytes_up: int = 0
    bytes_down: int = 0  # beside what the work itself is sent


class _TooFew(Exception):
    """Fewer members are left than must stay."""


def secure_words(
    engine: Engine, job: str, options: str, shared: Tensors, visits: Sequence[Visit], key: Key, *, threshold: float,
    round: int = 0,
) -> SecureSum:  # fmt: skip
    """The sum of a masked job's words over these visits; of a single one the server learns nothing.

    ``threshold`` is the share of the visits that must stay to the end.
    """
    if len(visits) > MOST_MEMBERS:
        raise UserError(f"a secure sum over {len(visits):,} visits is refused; at most {MOST_MEMBERS:,} can take part")
    session = _Session(engine, visits, key, threshold, round)
    try:
        words = session.summed(job, options, shared)
    except _TooFew as reason:
        engine.accept(session.receipts.values())  # no state refers to what clients kept of it
        return session.outcome({}, {}, str(reason))
    return session.outcome(words, session.receipts)


class _Session:
    """One secure sum under way: who is asked, what has come so far."""

    def __init__(self, engine: Engine, visits: Sequence[Visit], key: Key, threshold: float, number: int) -> None:
        self._engine, self._visits, self._key, self._round = engine, list(visits), key, number
        self._numbers = [member_number(visit.client, visit.repeat) for visit in visits]
        self._needed = shares_needed(threshold, len(visits))
        self._id = new_session()
        self.failures: list[Failure] = []  # of visits that are not in the sum
        self.receipts: Mapping[int, str] = {}
        self._notes: list[str] = []
        self._bytes_up = self._bytes_down = 0

    def outcome(self, words: Mapping[str, Tensor], receipts: Mapping[int, str], void: str = "") -> SecureSum:
        """What came of it."""
        return SecureSum(
            words, tuple(self.failures), receipts, tuple(self._notes), void, self._bytes_up, self._bytes_down
        )  # fmt: skip

    def summed(self, job: str, options: str, shared: Tensors) -> dict[str, Tensor]:
        """All four exchanges, one after another."""
        count, about = len(self._visits), job_text(job, options)
        question = Question(self._id, self._needed, about, options).to_text()
        everyone = self._enough(np.ones(count, dtype=bool), "take part")
        pairs = [(visit.client, visit.repeat) for visit in self._visits]
        sent: Tensors = {MEMBERS: torch.tensor(pairs, dtype=torch.int64)}
        outcome, present = self._asked("mask-keys", question, sent, everyone)
        self._enough(present, "gave keys")
        publics = rows.unpacked(outcome.sums["keys"], PUBLIC_BYTES)  # [n, PUBLIC_BYTES]
        keys = {self._numbers[place]: publics[place].tobytes() for place in _places(present)}
        agreement = Agreement(self._id, self._needed, keys, about)
        self._count(up=PUBLIC_BYTES, down=PUBLIC_BYTES * int(present.sum()), of=present)

        sent |= {"secure/keys": torch.from_numpy(publics), "secure/present": _flags(present)}
        outcome, sharing = self._asked("mask-shares", question, sent, present)
        self._enough(sharing, "handed out shares")
        boxes = torch.from_numpy(rows.unpacked(outcome.sums["shares"], BOX_BYTES))  # [n, n, BOX_BYTES]: from, to
        self._count(up=BOX_BYTES * (int(present.sum()) - 1), of=sharing)

        sent["secure/sharing"] = _flags(sharing)
        outcome, answered = self._asked(job, question, shared | sent, sharing, quiet=False)
        self.receipts, masked = outcome.receipts, rows.joined(outcome.sums)
        self._count(up=8 * sum(value.numel() for value in masked.values()), of=answered)
        self._enough(answered, "answered")

        sent |= {"secure/answered": _flags(answered), "secure/shares": boxes}
        in_the_sum = len(self.failures)
        outcome, opening = self._asked("mask-openings", question, sent, answered)
        self._count(up=SHARE_BYTES * int(sharing.sum()), down=BOX_BYTES * (int(sharing.sum()) - 1), of=answered)
        self._enough(opening, "opened their shares")
        del self.failures[in_the_sum:]  # who left only now is in the sum all the same
        shares = rows.unpacked(outcome.sums["opened"], SHARE_BYTES)  # [n, n, SHARE_BYTES]: by whom, of whom
        opened = {
            self._numbers[by]: {self._numbers[of]: shares[by, of].tobytes() for of in _places(sharing)}
            for by in _places(opening)
        }
        return _unmasked(masked, agreement, self._of(sharing), self._of(answered), opened)

    def _asked(self, job: str, question: str, sent: Tensors, who: Mask, *, quiet: bool = True) -> tuple[Outcome, Mask]:
        """A job's outcome, and who answered it."""
        visits = [self._visits[place] for place in _places(who)]
        if quiet:  # around the work itself nobody keeps anything
            visits = [replace(visit, ticket=None, keep=False) for visit in visits]
        with _silent(self._engine, quiet):
            outcome = self._engine.map_sum(job_text(job, question), sent, visits, self._key, round=self._round)
        self.failures += outcome.failures
        self._notes += outcome.notes
        came = outcome.sums.get(CAME)
        return outcome, np.zeros(len(who), dtype=bool) if came is None else who & (came.numpy() > 0)

    def _enough(self, who: Mask, verb: str) -> Mask:
        clients, given = len({self._visits[place].client for place in _places(who)}), int(who.sum())
        if given < self._needed:
            raise _TooFew(f"{given} of {len(who)} visits {verb}, and {self._needed} must for a secure sum")
        if clients < MIN_CLIENTS:
            raise _TooFew(f"{clients} clients {verb}, and a secure sum needs {MIN_CLIENTS}")
        return who

    def _of(self, who: Mask) -> list[int]:
        return [self._numbers[place] for place in _places(who)]

    def _count(self, up: int, of: Mask, down: int = 0) -> None:
        self._bytes_up += up * int(of.sum())
        self._bytes_down += down * int(of.sum())


def _unmasked(
    masked: Mapping[str, Tensor], agreement: Agreement, sharing: Sequence[int], answered: Sequence[int],
    opened: Mapping[int, Mapping[int, bytes]],
) -> dict[str, Tensor]:  # fmt: skip
    """The sums without masks, each under its name."""
    names = sorted(masked)
    vector = torch.cat([masked[name].flatten() for name in names])
    unmask(vector.numpy().view(np.uint64), agreement, sharing, answered, opened)
    parts = torch.split(vector, [masked[name].numel() for name in names])
    words = {name: part.view(masked[name].shape) for name, part in zip(names, parts, strict=True)}
    if int(words.pop(CHECK)) != len(answered):
        raise UserError("the masks of a secure sum do not cancel: a client sent what was not agreed; the sum is lost")
    return words


def _flags(who: Mask) -> Tensor:
    return torch.from_numpy(who.astype(np.uint8))


def _places(who: Mask) -> list[int]:
    places: list[int] = np.flatnonzero(who).tolist()
    return places


@contextmanager
def _silent(engine: Engine, quiet: bool) -> Iterator[None]:
    """The exchanges around the work itself are not shown as progress."""
    before = engine.progress
    if quiet:
        engine.progress = None
    try:
        yield
    finally:
        engine.progress = before
