"""Who takes part: nodes as they describe themselves, their clients' numbers, who is left out and why."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from unskew.core.types import Roster
from unskew.engines.flower.agreement import ClientFacts, Description


@dataclass(frozen=True)
class Member:
    """A client of the federation: its name, its number, what its node said of it, the node's id and name."""

    name: str
    number: int
    examples: int
    test: int
    node: int
    node_name: str


@dataclass(frozen=True)
class Known:
    """A client as a run folder remembers it: a name keeps its number."""

    name: str
    number: int
    examples: int
    late: bool = False  # whether it joined after the run had begun


@dataclass
class Members:
    """The clients by number. A client is known by its name: it stays the same under another id of its node."""

    by_number: dict[int, Member] = field(default_factory=dict)
    remembered: dict[str, Known] = field(default_factory=dict)  # by name, also from before the server was restarted
    begun: bool = False  # whether those that come now are late

    @property
    def roster(self) -> Roster:
        """Everyone that takes part or took part, by number; a number that nobody has yet holds nothing."""
        return roster_of(self.remembered.values())

    def admit(self, node: int, said: Description, connected: Iterable[int]) -> list[Member]:
        """The node's clients with their numbers. Raises ValueError where they cannot take part."""
        there = set(connected)
        for facts in said.clients:
            held = next((each for each in self.by_number.values() if each.name == facts.name), None)
            if held is not None and held.node != node and held.node in there:
                raise ValueError(f"another node has client {facts.name!r} already; give the client another name")
            self._check_size(facts)
        numbers = self._numbered(said.clients)
        new = [
            Member(facts.name, numbers[facts.name], facts.examples, facts.test, node, said.node)
            for facts in said.clients
        ]
        for member in new:
            self.by_number[member.number] = member
            if member.name not in self.remembered:
                self.remembered[member.name] = Known(member.name, member.number, member.examples, self.begun)
        return new

    def of_node(self, node: int) -> list[Member]:
        """The clients of that node."""
        return [member for member in self.by_number.values() if member.node == node]

    def _check_size(self, facts: ClientFacts) -> None:
        known = self.remembered.get(facts.name)
        if known is not None and known.examples != facts.examples:
            raise ValueError(
                f"client {facts.name!r} has {facts.examples:,} examples, it had {known.examples:,} when the run began; "
                "its data must stay the same during a run"
            )

    def _numbered(self, clients: Iterable[ClientFacts]) -> Mapping[str, int]:
        """Numbers by name: the one it had, the one that it states, the first free one."""
        taken = {known.number: known.name for known in self.remembered.values()}
        numbers: dict[str, int] = {}
        clients = sorted(clients, key=lambda facts: (facts.number is None, facts.number or 0, facts.name))
        for facts in clients:
            if facts.name in self.remembered:
                number = self.remembered[facts.name].number
                if facts.number not in (None, number):
                    raise ValueError(f"client {facts.name!r} states number {facts.number}; in this run it is {number}")
            elif facts.number is not None:
                number = facts.number
                if number in taken:
                    raise ValueError(f"number {number} of client {facts.name!r} belongs to client {taken[number]!r}")
            else:
                number = next(each for each in range(len(taken) + 1) if each not in taken)
            taken[number] = facts.name
            numbers[facts.name] = number
        return numbers


def roster_of(clients: Iterable[Known]) -> Roster:
    """How many examples each of these clients has, by number."""
    sizes = {known.number: known.examples for known in clients}
    table = np.zeros(max(sizes, default=-1) + 1, np.int64)
    for number, examples in sizes.items():
        table[number] = examples
    return Roster(table)
