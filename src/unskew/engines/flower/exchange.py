"""The way between the server and its nodes, as the engine sees it: messages go out, replies come in, time passes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from unskew.engines.codec import Envelope

Response = Envelope | str  # a text: why there is none


@dataclass(frozen=True)
class Presence:
    """A node that is connected: the name and fingerprint of its registered key, and since when it is there."""

    name: str | None = None  # None: the network knows no names
    since: str = ""  # in any unit
    key: str | None = None


class Transport(Protocol):
    """A network with nodes that come and go; their ids mean nothing beyond it."""

    def nodes(self) -> Mapping[int, Presence]:
        """The nodes that are connected now, by id."""

    def send(self, messages: Mapping[int, Envelope], group: str) -> dict[int, str]:
        """Send a message to each of these nodes; the id under which its reply comes, by node. A node that is missing
        could not be sent anything. ``group`` names what belongs together, for logs."""

    def receive(self, ids: Iterable[str]) -> dict[str, Response]:
        """The replies that have come to these messages, each given out once."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    def pause(self, seconds: float) -> None:
        """Let time pass."""


@dataclass
class InProcess:
    """Nodes in this process, for tests and for trying a federation out: real messages, no network.

    ``between`` may change or drop a reply on its way (None: it never comes).
    """

    answers: dict[int, Callable[[Envelope], Envelope]]
    between: Callable[[int, Envelope, Envelope], Response | None] = lambda node, question, reply: reply
    presence: dict[int, Presence] = field(default_factory=dict)
    sent: int = 0  # bytes down
    received: int = 0  # bytes up
    _waiting: dict[str, tuple[int, Envelope]] = field(default_factory=dict)
    _count: int = 0
    _clock: float = 0.0

    def nodes(self) -> Mapping[int, Presence]:
        """The nodes that are connected now, by id."""
        return {node: self.presence.get(node, Presence()) for node in self.answers}

    def send(self, messages: Mapping[int, Envelope], group: str) -> dict[int, str]:
        """Keep the messages until their replies are asked for."""
        ids = {}
        for node, message in messages.items():
            if node in self.answers:
                self._count += 1
                self.sent += len(message)
                ids[node] = f"message-{self._count}"
                self._waiting[ids[node]] = (node, message)
        return ids

    def receive(self, ids: Iterable[str]) -> dict[str, Response]:
        """Let the nodes work and give their replies."""
        replies: dict[str, Response] = {}
        for name in list(ids):
            if name not in self._waiting:
                continue
            node, question = self._waiting.pop(name)
            if node not in self.answers:
                continue
            reply = self.between(node, question, self.answers[node](question))
            if reply is not None:
                self.received += len(reply)
                replies[name] = reply
        return replies

    def now(self) -> float:
        """Time as the pauses made it."""
        return self._clock

    def pause(self, seconds: float) -> None:
        """Nobody waits here: the clock is put forward."""
        self._clock += seconds
