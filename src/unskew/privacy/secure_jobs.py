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
    Agreement,
    Member,
    member_number,
    require_enough,
)
from unskew.privacy.ciphers import derived_key
from unskew.privacy.sessions import Sessions
from unskew.privacy.shamir import SHARE_BYTES
from unskew.round.client import ClientSide
from unskew.round.jobs import Answer, Job, job_text

CAME = "came"  # [n], 1 for the member whose answer this is
CHECK = "check"  # a word of 1 in every masked answer: the sum shows whether all masks cancelled
MIN_SECRET = 16  # bytes


@dataclass(frozen=True)
class Rounded:
    """A client's work in whole numbers, int64 by name, and what it keeps for its next visit."""

    words: dict[str, Tensor]
    kept: Tensors | None = None


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


def masked_job(name: str, work: Work) -> Job:
    """The job of that name: the client's work, masked before it leaves the client."""

    def masked(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Answer:
        part = _Part(side, shared, visit, options)
        part.require_enough(part.listed("sharing"))
        if part.agreement.about != job_text(name, part.inner):
            raise UserError(f"client {visit.client} refuses to answer {name}: agreed was {part.agreement.about}")
        done = work(side, shared, visit, key, part.inner, part.count)
        words = done.words | {CHECK: torch.ones((), dtype=torch.int64)}
        names = sorted(words)
        vector = torch.cat([words[name].flatten() for name in names])
        part.member.mask(vector.numpy().view(np.uint64), part.agreement, part.listed("sharing"))
        parts = torch.split(vector, [words[name].numel() for name in names])
        masked = {name: value.view(words[name].shape) for name, value in zip(names, parts, strict=True)}
        part.sessions.answer(visit.client, part.agreement.session, part.agreement.digest, visit.repeat)
        return Answer(part.came() | rows.halves(masked), done.kept)

    return masked


def mask_openings(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """The job: a share of the own seed of each member that answered, of the key of each that dropped out."""
    part = _Part(side, shared, visit, options)
    sharing, answered = part.listed("sharing"), part.listed("answered")
    part.require_enough(answered)
    received = shared["secure/shares"][:, part.row].numpy()  # [n, BOX_BYTES], of each member for this one
    boxes = {number: received[row].tobytes() for row, number in enumerate(part.numbers) if number in sharing}
    shares = part.member.opened(part.agreement, boxes, sharing, answered)
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
        fields = json.loads(options)
        self.sessions: Sessions = side.sessions
        self.inner: str = fields.get("options", "")
        self._fields, self._shared, self._client = fields, shared, visit.client
        self.numbers = [member_number(*pair) for pair in shared["secure/members"].tolist()]
        self.count = len(self.numbers)
        number, session = member_number(visit.client, visit.repeat), bytes.fromhex(fields["session"])
        seed = derived_key(side.secret, b"unskew member seed 1 " + number.to_bytes(8, "big"), session)
        self.member = Member(number, session, seed)
        self.row = self.numbers.index(number)

    @cached_property
    def agreement(self) -> Agreement:
        """What the server says that all members agree on."""
        rows_of = dict(zip(self.numbers, self._shared["secure/keys"].tolist(), strict=True))
        publics = {number: bytes(rows_of[number]) for number in self.listed("present")}
        return Agreement(self.member.session, int(self._fields["threshold"]), publics, str(self._fields["about"]))

    def listed(self, name: str) -> list[int]:
        """The members of whom the server says so."""
        flags = self._shared[f"secure/{name}"].tolist()
        return [number for number, there in zip(self.numbers, flags, strict=True) if there]

    def require_enough(self, numbers: list[int]) -> None:
        """Refuse a sum over too few clients, however often they come."""
        require_enough(len({number % MOST_CLIENTS for number in numbers}))

    def came(self) -> Sums:
        """That this member has answered."""
        return {CAME: rows.in_row(self.row, self.count, torch.ones((), dtype=torch.float64))}
