"""The server's letters: numbered, sent, and their replies told apart by the number that they answer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unskew.engines.codec import NO_TENSORS, BadMessage, Body
from unskew.engines.flower.exchange import Exchange
from unskew.engines.flower.messages import field, seal, unseal
from unskew.engines.flower.numbers import STARTS

SHORT = 120.0  # seconds that a description may take, or setting up a run
GONE = "its node went away before it had answered"
SILENT = "it did not answer within the deadline"


@dataclass(frozen=True)
class Letter:
    """A message that was sent and is not answered yet."""

    node: int
    number: int
    kind: str
    until: float
    most: int  # bytes that its reply's tensors may take


@dataclass(frozen=True)
class Answer:
    """A reply: its header and tensors, or the reason why it does not count."""

    letter: Letter
    header: Mapping[str, Any]
    tensors: Sequence[tuple[str, Tensor]] = ()
    problem: str | None = None
    bad: bool = False  # whether the reply itself is at fault
    silent: bool = False  # whether none came in time
    late: bool = False  # whether one came after its time: it does not count


class Post:
    """Messages of one run; ``start`` is how often its server was started before."""

    def __init__(self, exchange: Exchange, run: str, start: int) -> None:
        self.exchange, self.run = exchange, run
        self._next = start * STARTS
        self._waiting: dict[str, Letter] = {}
        self._late: dict[str, Letter] = {}  # whose time is over; an answer shows that the node works again
        self._given_up: list[Answer] = []

    def send(
        self, kind: str, messages: Mapping[int, Mapping[str, Any]], *, until: float | None = None,
        body: Body = NO_TENSORS, most: int = 0, group: str = "",
    ) -> list[Letter]:  # fmt: skip
        """Send a message of this kind to each node, whose answers count ``until`` then; what could not be sent has no
        letter."""
        until = self.exchange.now() + SHORT if until is None else until
        envelopes, letters = {}, {}
        for node, fields in messages.items():
            number, self._next = self._next, self._next + 1
            envelopes[node] = seal({"kind": kind, "run": self.run, "number": number, **fields}, body)
            letters[node] = Letter(node, number, kind, until, most)
        ids = self.exchange.send(envelopes, group)
        self._waiting |= {ids[node]: letters[node] for node in ids}
        return [letters[node] for node in ids]

    def waiting(self, kind: str | None = None) -> list[Letter]:
        """The letters that have no answer yet."""
        return [letter for letter in self._waiting.values() if kind in (None, letter.kind)]

    def give_up(self, nodes: set[int]) -> None:
        """Wait no longer for these nodes: whoever was asked has gone."""
        for name in [name for name, letter in self._waiting.items() if letter.node in nodes]:
            letter = self._late[name] = self._waiting.pop(name)
            self._given_up.append(Answer(letter, {}, problem=GONE))

    def answers(self) -> Iterator[Answer]:
        """What has come since the last time, and letters whose time is over; what comes after that is only ``late``."""
        for name, reply in self.exchange.receive([*self._waiting, *self._late]).items():
            if name in self._late:
                yield Answer(self._late.pop(name), {}, late=True)
                continue
            letter = self._waiting.pop(name)
            if isinstance(reply, str):
                yield Answer(letter, {}, problem=reply)
                continue
            try:
                header, tensors = unseal(reply, letter.most)
                if field(header, "run", str) != self.run or field(header, "number", int) != letter.number:
                    raise BadMessage("it answers another message")
                yield Answer(letter, header, tensors)
            except BadMessage as error:
                yield Answer(letter, {}, problem=f"its reply is refused: {error}", bad=True)
        given_up, self._given_up = self._given_up, []
        yield from given_up
        now = self.exchange.now()
        for name in [name for name, letter in self._waiting.items() if letter.until <= now]:
            letter = self._late[name] = self._waiting.pop(name)
            yield Answer(letter, {}, problem=SILENT, silent=True)
