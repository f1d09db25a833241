"""The federation as an engine: visits go to the nodes as messages, what comes back is checked and added up in order."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import (
    EVERYONE,
    Engine,
    Failure,
    Job,
    MemoryStore,
    Note,
    Reply,
    Roster,
    Tensors,
    TestPart,
    Visit,
)
from unskew.engines.codec import BadMessage, Body
from unskew.engines.flower.members import Member
from unskew.engines.flower.node_memory import TICKET
from unskew.engines.flower.post import SILENT, Answer
from unskew.engines.flower.promises import Purpose, name_of
from unskew.engines.flower.replies import Facts, LeftOut, read_results, shown
from unskew.engines.flower.session import Session, between_looks
from unskew.engines.flower.template import Expected, Template
from unskew.round.jobs import encode_job

AGAIN = 5.0  # seconds before a node that did not answer is asked again, while the round waits for it


@dataclass
class _Work:
    """One exchange: what is asked, what each visit came to."""

    job: Job
    shared: Tensors
    visits: Sequence[Visit]
    key: Key
    body: Body
    open: set[int]  # indices of visits that have not been asked for, or are asked again
    asked: dict[int, list[int]] = field(default_factory=dict)  # by message number, the visits it is for
    results: dict[int, Reply | LeftOut] = field(default_factory=dict)  # by index

    @property
    def counted(self) -> int:
        return sum(isinstance(result, Reply) for result in self.results.values())


class RemoteMemory:
    """What the clients keep is on their nodes; the server only says which of it a checkpoint refers to."""

    def __init__(self) -> None:
        self.pinned: dict[int, set[str]] = {}  # by client

    def assign(self, visits: Sequence[Visit]) -> Sequence[Visit]:
        """A node makes room itself."""
        return visits

    def release(self, visits: Sequence[Visit], tickets: Mapping[int, str]) -> None:
        """A node removes what is superseded with its next job, which says what to keep."""

    def supersede(self, tickets: Iterable[str]) -> None:
        """As above."""

    def sync(self) -> None:
        """A node makes a memory durable before it answers."""

    def pin(self, tickets: Iterable[str]) -> None:
        """A checkpoint refers to these memories: the nodes must keep them."""
        pinned: dict[int, set[str]] = defaultdict(set)
        for ticket in tickets:
            if found := TICKET.fullmatch(ticket):
                pinned[int(found[1])].add(ticket)
        self.pinned = dict(pinned)


class FederatedEngine:
    """Clients on other machines. What the server itself can do, evaluation of its own test images, it does here."""

    def __init__(self, session: Session, own: Engine, template: Template, epochs: int) -> None:
        self._session, self._own, self._template, self._epochs = session, own, template, epochs
        self._memory = RemoteMemory()

    @property
    def roster(self) -> Roster:
        """The clients as they are now."""
        return self._session.members.roster

    @property
    def memory(self) -> MemoryStore:
        """Which of the nodes' memories a checkpoint refers to."""
        return self._memory

    def visit(
        self, job: Job, shared: Tensors, visits: Sequence[Visit] | Sequence[TestPart], key: Key
    ) -> Iterator[Reply | Failure | Note]:
        """Send each node what its clients shall do; yield what they answer in visit order, when all have."""
        asked = [visit for visit in visits if isinstance(visit, Visit)]
        if len(asked) < len(visits):
            yield from self._own.visit(job, shared, visits, key)
            return
        if any(visit.client == EVERYONE for visit in asked):
            raise UserError("centralised trains on all examples in one place; in a federation there is no such place")
        work = _Work(job, shared, asked, key, Body.of(shared.items()), set(range(len(asked))))
        self._until_answered(work)
        self._until_enough(work)
        for index, visit in enumerate(asked):
            result = work.results.pop(index)
            if isinstance(result, LeftOut):
                yield Failure(visit.client, self._named(visit.client, result.reason), visit.repeat)
            else:
                yield result
        for text in self._session.take_notes():
            yield Note(text)

    def close(self) -> None:
        """Close what the server itself has open."""
        self._own.close()

    def _until_answered(self, work: _Work) -> None:
        """Ask for every visit once, and wait until each was answered or its time is over."""
        exchange = self._session.post.exchange
        began = exchange.now()
        until = began + self._session.rules.deadline
        self._session.look()
        while True:
            self._ask(work, until)
            for answer in self._session.answers():
                self._take(work, answer)
            if len(work.results) == len(work.visits) or exchange.now() >= until:
                break
            exchange.pause(between_looks(exchange.now() - began))
        for place in range(len(work.visits)):
            work.results.setdefault(place, LeftOut(SILENT, again=True))
        work.open.clear()

    def _until_enough(self, work: _Work) -> None:
        """Where too few have answered, wait for nodes that may come back, and ask them again."""
        needed, exchange = self._needed(work), self._session.post.exchange
        limit = exchange.now() + self._session.rules.wait
        said = False
        while work.counted < needed and exchange.now() < limit:
            again = {place for place, each in work.results.items() if isinstance(each, LeftOut) and each.again}
            if work.counted + len(again) < needed:
                break
            if not said:
                self._session.note(_waiting(work, needed, self._session.rules.wait))
                said = True
            exchange.pause(AGAIN)
            for place in again:
                del work.results[place]
            work.open = again
            self._until_answered(work)
        least = min(len(work.visits), self._session.rules.min_replies)
        if work.counted < least and Purpose.of(work.job).trains:
            raise UserError(
                f"round {Purpose.of(work.job).round}: only {work.counted} of the {least} replies that it needs came "
                f"within {self._session.rules.wait:,.0f} seconds of waiting; start the nodes again and resume the run"
            )

    def _needed(self, work: _Work) -> int:
        """How many replies are waited for. A secure sum can do without some from its second exchange on."""
        purpose, every = Purpose.of(work.job), len(work.visits)
        least = min(every, self._session.rules.min_replies) if purpose.trains else 1
        if purpose.threshold:
            return min(every, max(least, purpose.threshold)) if purpose.under_way or purpose.may_miss else every
        return least if purpose.may_miss else every

    def _ask(self, work: _Work, until: float) -> None:
        """Send what can be sent now; a visit to a client whose node is not there has failed."""
        if not work.open:
            return
        places = defaultdict[int, list[int]](list)
        for place in sorted(work.open):
            member = self._session.members.by_number.get(work.visits[place].client)
            away = "is not connected" if member is None else self._session.absent(member.node)
            if member is not None and self._session.describing(member.node):
                continue  # it is back, and can be asked in a moment
            if member is None or away is not None:
                name = "its node" if member is None else f"node {member.node_name}"
                work.results[place] = LeftOut(f"{name} {away}", again=True)
                work.open.discard(place)
            else:
                places[member.node].append(place)
        ready = {node: mine for node, mine in places.items() if self._session.ready(node)}
        messages = {node: self._message(work, node, mine) for node, mine in ready.items()}
        if not messages:
            return
        for node, message in messages.items():
            most = sum(self._expected(work, place).bytes(work.shared) for place in ready[node])
            letters = self._session.post.send(
                "job", {node: message}, until=until, body=work.body,
                most=most, group=str(Purpose.of(work.job).round),
            )  # fmt: skip
            for letter in letters:
                work.asked[letter.number] = ready[node]
            for place in ready[node]:
                work.open.discard(place)
                if not letters:
                    work.results[place] = LeftOut("nothing could be sent to its node", again=True)

    def _message(self, work: _Work, node: int, places: Sequence[int]) -> dict[str, Any]:
        visits = [work.visits[place] for place in places]
        clients = [member.number for member in self._session.members.of_node(node)]
        return {
            "agreement": self._session.agreement_for(node).digest,
            "job": encode_job(work.job),
            "seed": work.key.seed,
            "key": list(work.key.path),
            "visits": [_plain(visit) for visit in visits],
            "keep": sorted(ticket for client in clients for ticket in self._memory.pinned.get(client, ())),
        }

    def _take(self, work: _Work, answer: Answer) -> None:
        if answer.letter.kind != "job":
            if answer.problem is not None and answer.letter.kind in ("agree", "describe"):
                again = LeftOut(answer.problem, again=not answer.bad)
                self._fail(work, self._places_of(work, answer.letter.node), again)
            return
        places = work.asked.pop(answer.letter.number, None)
        if places is None:
            return  # of an earlier job, whose time is over
        if answer.problem is not None:
            self._fail(work, places, LeftOut(answer.problem, again=not answer.bad))
        elif answer.header.get("kind") == "unknown":
            self._session.forget_agreement(answer.letter.node)
            work.open.update(places)
        elif answer.header.get("kind") != "done":
            self._fail(work, places, LeftOut(f"the node refuses: {shown(answer.header.get('reason'))}"))
        else:
            self._read(work, places, answer)

    def _read(self, work: _Work, places: Sequence[int], answer: Answer) -> None:
        visits = [work.visits[place] for place in places]
        members = [self._session.members.by_number[visit.client] for visit in visits]
        try:
            results = read_results(
                answer.header, answer.tensors, visits, [self._facts(member) for member in members], work.shared,
                [self._expected(work, place) for place in places],
            )  # fmt: skip
        except BadMessage as error:
            self._fail(work, places, LeftOut(f"its reply is refused: {error}"))
            return
        for place, member, result, values in zip(places, members, results, answer.header["results"], strict=True):
            work.results[place] = result
            if isinstance(result, LeftOut):
                self._session.say(f"client {member.number} of node {member.node_name}: {result.reason}")
            elif values.get("anew"):
                self._session.note(
                    f"client {member.number} of node {member.node_name} no longer has what it kept; it starts anew"
                )

    def _fail(self, work: _Work, places: Iterable[int], why: LeftOut) -> None:
        for place in places:
            work.results[place] = why
            work.open.discard(place)
            self._session.say(f"client {work.visits[place].client}: {why.reason}")

    def _places_of(self, work: _Work, node: int) -> list[int]:
        mine = {member.number for member in self._session.members.of_node(node)}
        return [place for place in sorted(work.open) if work.visits[place].client in mine]

    def _expected(self, work: _Work, place: int) -> Expected:
        return self._template.expect(work.job, work.shared, work.visits[place])

    def _facts(self, member: Member) -> Facts:
        return Facts(self._epochs, member.examples, member.test)

    def _named(self, client: int, reason: str) -> str:
        member = self._session.members.by_number.get(client)
        return reason if member is None else f"{member.name}: {reason}"


def _plain(visit: Visit) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(visit)
    del fields["slot"]
    return fields


def _waiting(work: _Work, needed: int, seconds: float) -> str:
    number = Purpose.of(work.job).round
    when = f"round {number}" if number else name_of(work.job)
    return (
        f"{when}: {work.counted} of the {needed} replies that it needs; waiting for nodes, {seconds:,.0f} seconds at "
        "most"
    )
