"""The client's jobs in a secure sum through an engine: keys, shares for the others, the masked answer, the opening.

All secrets of a member follow from a secret of its machine and the session; what it has answered is in the machine's
record (``sessions``). The server's side is ``secure_sum``.

Shapes: n members, the visits that were asked, in the order in which the server lists them.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Sums, Tensors, Visit
from unskew.privacy import rows
from unskew.privacy.agreement import (
    BOX_BYTES,
    MOST_CLIENTS,
    PUBLIC_BYTES,
    Agreement,
    Member,
    member_number,
    named,
    require_enough,
)
from unskew.privacy.ciphers import SHARE_BYTES, derived_key
from unskew.privacy.questions import Question, members_of
from unskew.privacy.sessions import Sessions
from unskew.round.client import ClientSide
from unskew.round.jobs import Answer, job_text

CAME = "came"  # [n], 1 for the member whose answer this is
CHECK = "check"  # a word of 1 in every masked answer: the sum shows whether all masks cancelled
MIN_SECRET = 16  # bytes


@dataclass(frozen=True)
class Rounded:
    """A client's work in whole numbers, int64 by name, and what it keeps for its next visit."""

    words: dict[str, Tensor]
    kept: Tensors | None = None


Shapes = dict[str, tuple[int, ...]]  # of an answer's sums, by name

# the work behind a masked answer; the text is the inner job's, the number that of the clients in the sum
Work = Callable[[ClientSide, Tensors, Visit, Key, str, int], Rounded]


def mask_keys(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """The job: this member's public keys for the session."""
    part = _Part(side, shared, visit, options)
    content = np.frombuffer(part.member.public, np.uint8)
    return part.came() | {"keys": rows.in_row(part.row, part.count, rows.packed(content))}


def mask_shares(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """The job: shares of this member's secrets, sealed for each of the others."""
    part = _Part(side, shared, visit, options)
    part.require_enough(part.listed("present"))
    boxes = part.member.boxes(part.agreement)
    part.sessions.agree(visit.client, part.agreement.session, part.agreement.digest)
    contents = {part.numbers.index(other): box for other, box in boxes.items()}
    sealed = rows.packed(rows.as_bytes(contents, part.count, BOX_BYTES))
    return part.came() | {"shares": rows.in_row(part.row, part.count, sealed)}


@dataclass(frozen=True)
class MaskedJob:
    """The job of that name: the client's work, masked before it leaves the client."""

    name: str
    work: Work

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Answer:
        """The masked words, and what the client keeps."""
        part = _Part(side, shared, visit, options)
        part.require_enough(part.listed("sharing"))
        if part.agreement.about != job_text(self.name, part.inner):
            raise UserError(f"client {visit.client} refuses to answer {self.name}: agreed was {part.agreement.about}")
        done = self.work(side, shared, visit, key, part.inner, part.count)
        words = done.words | {CHECK: torch.ones((), dtype=torch.int64)}
        names = sorted(words)
        vector = torch.cat([words[name].flatten() for name in names])
        part.member.mask(vector.numpy().view(np.uint64), part.agreement, part.listed("sharing"))
        parts = torch.split(vector, [words[name].numel() for name in names])
        masked = {name: value.view(words[name].shape) for name, value in zip(names, parts, strict=True)}
        part.sessions.answer(visit.client, part.agreement.session, part.agreement.digest, visit.repeat)
        return Answer(part.came() | rows.halves(masked), done.kept)

    def shapes(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Shapes:
        """The names and shapes of an answer, from the work of anybody: a server knows them without any mask."""
        count = len(members_of(shared))
        done = self.work(side, shared, visit, key, Question.from_text(options).options, count)
        words = {name: tuple(value.shape) for name, value in done.words.items()} | {CHECK: ()}
        return {CAME: (count,)} | {half + name: words[name] for name in sorted(words) for half in (rows.LOW, rows.HIGH)}


def shapes_of(name: str, count: int) -> Shapes | None:
    """The names and shapes of an answer to one of the exchanges around the work; None for the work itself."""
    own = {
        "mask-keys": ("keys", (count, rows.numbers_for(PUBLIC_BYTES))),
        "mask-shares": ("shares", (count, count, rows.numbers_for(BOX_BYTES))),
        "mask-openings": ("opened", (count, count, rows.numbers_for(SHARE_BYTES))),
    }
    return {CAME: (count,), own[name][0]: own[name][1]} if name in own else None


def mask_openings(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """The job: a share of the own seed of each member that answered, of the key of each that dropped out."""
    part = _Part(side, shared, visit, options)
    sharing, answered = part.listed("sharing"), part.listed("answered")
    part.require_enough(answered)
    shares = part.member.opened(part.agreement, part.sealed_for_it(), sharing, answered)
    question = hashlib.sha256(b"unskew opening 1 " + json.dumps([sorted(sharing), sorted(answered)]).encode()).digest()
    part.sessions.open(visit.client, part.agreement.session, part.agreement.digest, question, visit.repeat)
    contents = {part.numbers.index(other): share for other, share in shares.items()}
    opened = rows.packed(rows.as_bytes(contents, part.count, SHARE_BYTES))
    return part.came() | {"opened": rows.in_row(part.row, part.count, opened)}


class _Part:
    """What a member is asked, read from a job's text and what was sent along."""

    def __init__(self, side: ClientSide, shared: Tensors, visit: Visit, options: str) -> None:
        if len(side.secret) < MIN_SECRET or side.sessions is None:
            raise UserError(
                "this engine has no secret or no record of sessions for secure sums; its author gives ClientSide both "
                "(EngineSetup.client_side does)"
            )
        self.sessions: Sessions = side.sessions
        self._question, self._shared = Question.from_text(options), shared
        self.inner = self._question.options
        self.numbers = members_of(shared)
        self.count = len(self.numbers)
        number, session = member_number(visit.client, visit.repeat), self._question.session
        if number not in self.numbers:
            raise UserError(f"{named(number)} is not among the members of the secure sum")
        seed = derived_key(side.secret, b"unskew member seed 1 " + number.to_bytes(8, "big"), session)
        self.member = Member(number, session, seed)
        self.row = self.numbers.index(number)

    @cached_property
    def agreement(self) -> Agreement:
        """What the server says that all members agree on."""
        rows_of = dict(zip(self.numbers, self._sent("keys").tolist(), strict=True))
        publics = {number: bytes(rows_of[number]) for number in self.listed("present")}
        return Agreement(self.member.session, self._question.threshold, publics, self._question.about)

    def listed(self, name: str) -> list[int]:
        """The members of whom the server says so."""
        flags = self._sent(name).tolist()
        return [number for number, there in zip(self.numbers, flags, strict=True) if there]

    def sealed_for_it(self) -> dict[int, bytes]:
        """What each other member sealed for this one, by number."""
        received = self._sent("shares")[:, self.row].numpy()  # [n, BOX_BYTES]
        return {number: received[row].tobytes() for row, number in enumerate(self.numbers)}

    def _sent(self, name: str) -> Tensor:
        if (value := self._shared.get(f"secure/{name}")) is None:
            raise UserError(f"the server sends no secure/{name} with its question")
        return value

    def require_enough(self, numbers: list[int]) -> None:
        """Refuse a sum over too few clients, however often they come."""
        require_enough(len({number % MOST_CLIENTS for number in numbers}))

    def came(self) -> Sums:
        """That this member has answered."""
        return {CAME: rows.in_row(self.row, self.count, torch.ones((), dtype=torch.float64))}
