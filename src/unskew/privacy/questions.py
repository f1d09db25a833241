"""What a server asks in a secure sum, as text and tensors: written on its side, checked on the clients'.

Every client checks it anew, since the server may be another party's machine.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unskew.core.errors import UserError
from unskew.core.types import Tensors, Visit
from unskew.privacy.agreement import BOX_BYTES, MOST_CLIENTS, PUBLIC_BYTES, member_number
from unskew.privacy.sessions import MOST_VISITS, SESSION_BYTES

MOST_MEMBERS = 2000  # every member sends every other a share: a table of n² boxes
MEMBERS = "secure/members"  # [n, 2]: the client and the number of its visit, of all who were asked
SENT: Mapping[str, tuple[torch.dtype, int, int]] = {  # type, how often n, how many numbers then; flags are 0 or 1
    "secure/keys": (torch.uint8, 1, PUBLIC_BYTES),
    "secure/present": (torch.uint8, 1, 0),
    "secure/sharing": (torch.uint8, 1, 0),
    "secure/answered": (torch.uint8, 1, 0),
    "secure/shares": (torch.uint8, 2, BOX_BYTES),
}


@dataclass(frozen=True)
class Question:
    """What all four exchanges of a session say: its id, how many must stay, the job that is masked, its options."""

    session: bytes
    threshold: int
    about: str
    options: str

    def to_text(self) -> str:
        """For a job's text."""
        return json.dumps(
            {"session": self.session.hex(), "threshold": self.threshold, "about": self.about, "options": self.options}
        )

    @staticmethod
    def from_text(text: str) -> "Question":
        """What ``to_text`` gave, checked."""
        try:
            values: Any = json.loads(text)
            session = bytes.fromhex(values["session"])
            threshold, about, options = values["threshold"], values["about"], values["options"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"a secure sum's question cannot be read: {type(error).__name__}: {error}") from error
        if len(session) != SESSION_BYTES or type(threshold) is not int or not 1 <= threshold <= MOST_MEMBERS:
            raise UserError("a secure sum's question has no session id, or no number of members that must stay")
        if not isinstance(about, str) or not isinstance(options, str) or not about.endswith(options):
            raise UserError("a secure sum's question does not say what is added up")
        return Question(session, threshold, about, options)

    @property
    def work(self) -> str:
        """The name of the job that is masked."""
        return self.about.partition(" ")[0]


def members_of(shared: Tensors) -> list[int]:
    """The numbers of all members in their order, from what the server sent along; everything else is checked too."""
    pairs = shared.get(MEMBERS)
    if pairs is None or pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2:
        raise UserError("a secure sum's members are not pairs of a client and its visit")
    count = len(pairs)
    if not 1 <= count <= MOST_MEMBERS:
        raise UserError(f"a secure sum has from 1 to {MOST_MEMBERS:,} members, {count:,} given")
    clients, visits = pairs[:, 0], pairs[:, 1]
    if int(pairs.min()) < 0 or int(clients.max()) >= MOST_CLIENTS or int(visits.max()) >= MOST_VISITS:
        raise UserError("a secure sum's members have numbers that are not possible")
    for name in (name for name in shared if name.startswith("secure/") and name != MEMBERS):
        _check_sent(name, shared, count)
    numbers = [member_number(*pair) for pair in pairs.tolist()]
    if len(set(numbers)) < count:
        raise UserError("a secure sum names one member twice")
    return numbers


def row_of(shared: Tensors, visit: Visit) -> int | None:
    """The visit's place among the members of a secure sum; None where it is not one of them."""
    pairs = shared.get(MEMBERS)
    if pairs is None:
        return None
    found = [row for row, pair in enumerate(pairs.tolist()) if pair == [visit.client, visit.repeat]]
    return found[0] if len(found) == 1 else None


def _check_sent(name: str, shared: Tensors, count: int) -> None:
    if name not in SENT:
        raise UserError(f"a secure sum sends no {name[:60]}")
    dtype, times, numbers = SENT[name]
    wanted = (count,) * times + ((numbers,) if numbers else ())
    value = shared[name]
    if value.dtype != dtype or tuple(value.shape) != wanted:
        raise UserError(f"{name} is {value.dtype} {list(value.shape)}; {dtype} {list(wanted)} is wanted")
    if not numbers and int(value.max()) > 1:
        raise UserError(f"{name} says yes or no of every member: 1 or 0")
