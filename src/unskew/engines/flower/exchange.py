"""The transport between server and nodes, as the engine sees it: messages, replies and a clock."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from unskew.engines.flower.messages import Envelope

Response = Envelope | str  # a str is the reason why there is no reply


@dataclass(frozen=True)
class Presence:
    """A connected node: the name and fingerprint of its registered key, and when it connected."""

    name: str | None = None  # None: the network has no names
    since: str = ""  # in any format
    key: str | None = None


class Transport(Protocol):
    """A network whose nodes come and go. Node ids have no meaning outside it."""

    def nodes(self) -> Mapping[int, Presence]:
        """The nodes that are connected now, by id."""

    def send(self, node: int, message: Envelope) -> str | None:
        """Send a message and return its id for ``receive``; None if it could not be sent."""

    def receive(self, ids: Iterable[str]) -> dict[str, Response]:
        """The replies to these messages that have arrived, each returned once."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""

    def pause(self, seconds: float) -> None:
        """Wait."""


@dataclass
class InProcess:
    """Nodes in this process, for tests and trials: real messages, no network.

    ``between`` may change a reply on its way, or drop it by returning None.
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

    def send(self, node: int, message: Envelope) -> str | None:
        """Queue the message until ``receive`` asks for its reply."""
        if node not in self.answers:
            return None
        self._count += 1
        self.sent += len(message)
        self._waiting[name := f"message-{self._count}"] = node, message
        return name

    def receive(self, ids: Iterable[str]) -> dict[str, Response]:
        """Let the nodes answer their queued messages."""
        replies: dict[str, Response] = {}
        for name in [name for name in ids if name in self._waiting]:
            node, question = self._waiting.pop(name)
            if node in self.answers:
                reply = self.between(node, question, self.answers[node](question))
                if reply is not None:
                    self.received += len(reply)
                    replies[name] = reply
        return replies

    def now(self) -> float:
        """Simulated time: the sum of all pauses."""
        return self._clock

    def pause(self, seconds: float) -> None:
        """Advance the simulated clock; nobody waits."""
        self._clock += seconds
