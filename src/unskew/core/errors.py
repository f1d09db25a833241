"""What goes wrong by a user's hand, said in one line, and what goes wrong inside a client."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake that its user can mend: the message says what was given, what was wanted, what to do."""


class Missing(UserError):
    """What a measure needs is not at hand; the message says what and why."""


class StorageFailure(UserError):
    """What clients remember cannot be written: the machine's failure, and no client is skipped for it."""


class LostMemory(StorageFailure):
    """What clients remember is gone or damaged: nothing that resuming could mend."""


class ClientFailure(Exception):
    """A client's work raised, or gave NaN or infinity; the message names client, round, job and seed."""


def nearest(name: str, names: Iterable[str]) -> str:
    """A closing remark for an unknown name: the nearest known one, or all of them."""
    known = list(names)
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
