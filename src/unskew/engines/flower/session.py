"""The server's view of the federation: who is there, what was agreed, keeping both up to date while a run goes on."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unskew.core.types import Tensors
from unskew.engines.codec import NO_TENSORS, BadMessage, Body
from unskew.engines.flower.agreement import Agreement, Description
from unskew.engines.flower.exchange import Presence
from unskew.engines.flower.members import Member, Members
from unskew.engines.flower.messages import field
from unskew.engines.flower.post import Answer, Post
from unskew.engines.flower.replies import shown

LOOK = 2.0  # seconds between looks at who is connected
FAREWELL = 10.0  # seconds that nodes have to hear that a run is over: what Flower has not delivered then is dropped
POLL, LONGEST_POLL = 0.1, 2.0  # seconds between looks for replies, at first and where they take long

Say = Callable[[str], None]


@dataclass(frozen=True)
class Rules:
    """How long a round may take, how many replies it needs, how long to wait for nodes."""

    deadline: float = 600.0
    min_replies: int = 1
    wait: float = 600.0


class Session:
    """The nodes that take part. ``fits`` says why a node's data cannot; None where they can."""

    def __init__(self, post: Post, members: Members, rules: Rules, say: Say = lambda line: None) -> None:
        self.post, self.members, self.rules, self.say = post, members, rules, say
        self.described: dict[int, Description] = {}  # by node
        self.notes: list[str] = []  # what happened since the last round
        self.fits: Callable[[Description], str | None] = lambda said: None
        self.joined: Callable[[Members], None] = lambda members: None  # told where the clients change
        self._agreement: Agreement | None = None
        self._frozen = NO_TENSORS
        self._agreed: dict[int, str] = {}  # by node, the agreement that it has confirmed
        self._refused: dict[int, str] = {}
        self._looked = -LOOK
        self._there: Mapping[int, Presence] = {}
        self._silent: dict[int, Presence] = {}  # nodes that did not answer, as they were connected then
        self._open = True  # whether what nodes describe makes them members

    def look(self) -> None:
        """See who is connected, from time to time. New nodes are asked to describe themselves."""
        now = self.post.exchange.now()
        if now - self._looked < LOOK:
            return
        self._looked, before, self._there = now, self._there, self.post.exchange.nodes()
        for node in [node for node in self._silent if self._silent[node] != self._there.get(node)]:
            del self._silent[node]
        changed = {node for node in before if before[node] != self._there.get(node)}
        self.post.give_up(changed)
        for node in changed:  # gone, or gone and back: it may bring something else
            self._refused.pop(node, None)
            self.described.pop(node, None)
        asked = {letter.node for letter in self.post.waiting("describe")}
        known = self.described.keys() | asked | self._refused.keys() | self._silent.keys()
        new = {node: dict[str, Any]() for node in sorted(self._there) if node not in known}
        self.post.send("describe", new, group="describe")

    def answers(self) -> Iterator[Answer]:
        """What has come to the jobs; answers to the session's own questions are taken on the way."""
        self.look()
        for answer in self.post.answers():
            node = answer.letter.node
            if answer.silent and node in self._there:
                self._silent[node] = self._there[node]
            else:
                self._silent.pop(node, None)
            if not answer.late:
                if answer.letter.kind != "job":
                    answer = replace(answer, problem=self._hear(answer))
                yield answer

    def absent(self, node: int) -> str | None:
        """Why the node cannot be asked now; None where it can."""
        if node not in self._there:
            return "is not connected"
        if node in self._silent:
            return "has not answered since its last deadline"
        if node in self._refused:
            return f"is left out: {self._refused[node]}"
        return None if node in self.described else "has not said what it brings since it came back"

    def describing(self, node: int) -> bool:
        """Whether the node has come back and is about to say what it brings."""
        if node not in self._there or node in self.described.keys() | self._silent.keys() | self._refused.keys():
            return False
        return any(letter.node == node for letter in self.post.waiting("describe"))

    def agree_on(self, agreement: Agreement, frozen: Tensors) -> None:
        """What every member is told before its first job; ``numbers`` are filled in for each node."""
        self._agreement, self._frozen = agreement, Body.of(frozen.items())

    def ready(self, node: int) -> bool:
        """Whether the node has confirmed the agreement; otherwise it is asked to."""
        agreement = self.agreement_for(node)
        if self._agreed.get(node) == agreement.digest:
            return True
        if node not in {letter.node for letter in self.post.waiting("agree")}:
            message = {node: {"agreement": agreement.to_json()}}
            self.post.send("agree", message, body=self._frozen, group="agree")
        return False

    def forget_agreement(self, node: int) -> None:
        """The node does not know it any more."""
        self._agreed.pop(node, None)

    def agreement_for(self, node: int) -> Agreement:
        """What was agreed, with the numbers of this node's clients."""
        if self._agreement is None:
            raise RuntimeError("nothing was agreed on yet")
        return replace(self._agreement, numbers={each.name: each.number for each in self.members.of_node(node)})

    def _hear(self, answer: Answer) -> str | None:
        """Take an answer to a question of the session's own; the problem where there is one."""
        node, kind = answer.letter.node, answer.letter.kind
        if answer.problem is None and answer.header.get("kind") == "refused":
            answer = replace(answer, problem=f"the node refuses: {shown(answer.header.get('reason'))}", bad=True)
        try:
            if answer.problem is not None:
                if answer.bad:
                    raise BadMessage(answer.problem)
                return answer.problem
            if kind == "describe":
                self._describe(node, Description.from_json(answer.header.get("description")))
            elif kind == "agree":
                self._agreed[node] = field(answer.header, "agreement", str)
        except (BadMessage, ValueError) as error:
            self.leave_out(node, str(error))
            return str(error)
        return None

    def admit_described(self) -> None:
        """Make members of all that have described themselves and fit; from now on of any that comes."""
        self._open = True
        order = sorted(self.described, key=lambda node: _order(self.described[node]))
        for node in order:
            self._admit(node)

    def hold_back(self) -> None:
        """Nodes may describe themselves, but nobody is a member before ``admit_described``."""
        self._open = False

    def leave_out(self, node: int, reason: str) -> None:
        """The node does not take part, and is told why."""
        said = self.described.pop(node, None)
        name = said.node if said else f"of id {node}"
        self._refused[node] = reason
        self.note(f"node {name} is left out: {reason}")
        self.post.send("refuse", {node: {"reason": reason[:2000] or "unknown"}}, group="refuse")

    def note(self, line: str) -> None:
        """Say it, and keep it for the round's line in the metrics."""
        self.say(line)
        self.notes.append(line)

    def take_notes(self) -> tuple[str, ...]:
        """What happened since the last time."""
        notes, self.notes = tuple(self.notes), []
        return notes

    def finish(self) -> None:
        """Tell the nodes that the run is over, so that they delete what their clients kept."""
        message: dict[int, dict[str, Any]] = {node: {} for node in sorted(self.described) if self.absent(node) is None}
        until = self.post.exchange.now() + FAREWELL
        self.post.send("finish", message, until=until, group="finish")
        while self.post.waiting("finish") and self.post.exchange.now() < until:
            list(self.post.answers())
            self.post.exchange.pause(POLL)

    def _describe(self, node: int, said: Description) -> None:
        self.described[node] = said
        registered = self._there[node].name if node in self._there else None
        if registered is not None and registered != said.node:
            raise ValueError(f"its key is registered for node {registered!r}, it calls itself {said.node!r}")
        if (reason := self.fits(said)) is not None:
            raise ValueError(reason)
        if self._open:
            self._admit(node)

    def _admit(self, node: int) -> None:
        said = self.described[node]
        if (reason := self.fits(said)) is not None:
            self.leave_out(node, reason)
            return
        before = {each.name for each in self.members.by_number.values()}
        try:
            new = self.members.admit(node, said, self._there)
        except ValueError as error:
            self.leave_out(node, str(error))
            return
        self.note(_joined(said.node, new, before))
        self.joined(self.members)


def between_looks(waited: float) -> float:
    """Seconds until replies are looked for again: a look costs both sides, and a long wait needs fewer of them."""
    return min(max(POLL, waited / 20), LONGEST_POLL)


def _order(said: Description) -> tuple[int, str]:
    numbers = [facts.number for facts in said.clients if facts.number is not None]
    return min(numbers, default=2**31), said.node


def _joined(node: str, new: list[Member], before: set[str]) -> str:
    clients = ", ".join(f"{each.number} ({each.examples:,} examples)" for each in new[:10])
    again = all(each.name in before for each in new)
    return f"node {node} {'is back' if again else 'takes part'}: client {clients}"
