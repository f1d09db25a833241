"""What a job is: a named function that the client's side runs for each visit and that answers with sums.

Jobs have names since a function cannot cross a wire. A job's text is its name, or ``package.module:function``, and may
carry what it needs to know: ``moments {…}``. Each package has its own table of jobs; the engines put them together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.core.errors import StorageFailure, UserError, nearest
from unskew.core.key import Key
from unskew.core.machine import deterministic
from unskew.core.plugins import load_function
from unskew.core.tensors import PackedSums
from unskew.core.types import Failure, Sums, Tensors, TestPart, Visit

if TYPE_CHECKING:
    from unskew.round.client import ClientSide

NOT_FINITE = "its result holds NaN or infinity; a smaller --lr or smaller knobs of the method may help"


@dataclass(frozen=True)
class Answer:
    """What a job gives: sums for the server, by name or packed, and what the client keeps for its next visit."""

    given: Sums | PackedSums
    kept: Tensors | None = None

    @property
    def sums(self) -> Sums:
        """By name."""
        return self.given.by_name() if isinstance(self.given, PackedSums) else self.given

    def packed(self) -> PackedSums:
        """All of them in one vector on the CPU."""
        if isinstance(self.given, PackedSums):
            return self.given
        _require_sums(self.given)
        return PackedSums.of(self.given)


@dataclass(frozen=True)
class Done:
    """A visit that succeeded: its sums, and the ticket for what the client kept."""

    packed: PackedSums
    receipt: str | None = None

    @property
    def sums(self) -> Sums:
        """By name."""
        return self.packed.by_name()


Job = Callable[["ClientSide", Tensors, "Visit", Key, str], "Sums | Answer"]  # the text after the job's name comes last


def job_text(name: str, options: str = "") -> str:
    """The text of a job: what ``find_job`` takes."""
    return f"{name} {options}" if options else name


def find_job(text: str, table: Mapping[str, Job]) -> tuple[Job, str]:
    """The job that a text names, and what the text tells it."""
    name, _, options = text.partition(" ")
    if name in table:
        return table[name], options
    if ":" in name:
        return load_function(name, "job"), options
    raise UserError(f"no job is called {name!r}; {nearest(name, table)}")


def visit_key(key: Key, visit: Visit) -> Key:
    """What a visit draws from, made from its round's key."""
    return key.fold("client", visit.client, visit.repeat)


def attempt(
    side: "ClientSide", job: tuple[Job, str], shared: Tensors, visit: Visit | TestPart, key: Key
) -> Done | Failure:
    """Run the job for one visit: its result, or the reason why it failed."""
    work, options = job
    if isinstance(visit, Visit):
        client, repeat, key = visit.client, visit.repeat, visit_key(key, visit)
    else:
        client, repeat = None, 0
    try:
        with deterministic(side.device):
            answer = work(side, shared, visit, key, options)  # type: ignore[arg-type]  # a job knows what it is given
        answer = answer if isinstance(answer, Answer) else Answer(answer)
        packed = answer.packed()
    except StorageFailure:
        raise
    except Exception as error:  # noqa: BLE001  whatever a client's code raises, the round decides what follows
        return Failure(client, f"{type(error).__name__}: {error}", repeat)
    if not packed.finite():
        return Failure(client, NOT_FINITE, repeat)
    if side.memory is None or answer.kept is None or not isinstance(visit, Visit) or visit.slot is None:
        return Done(packed)
    return Done(packed, side.memory.write(visit.slot, answer.kept))


def _require_sums(sums: Sums) -> None:
    for name, value in sums.items():
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name}: a sum must be a float64 tensor, this is {kind}")
