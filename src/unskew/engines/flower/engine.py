"""The federation as an engine: sends visits to nodes as messages, then checks the replies and yields them in order."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import deterministic, neutral
from unskew.core.tensors import PackedSums
from unskew.core.types import (
    Engine,
    Failure,
    ImageSet,
    Job,
    Local,
    Note,
    Reply,
    Roster,
    Split,
    Sums,
    Tensors,
    TestPart,
    Visit,
)
from unskew.data.batches import examples_for
from unskew.data.population import Population
from unskew.engines.blueprint import FROZEN, Blueprint, build, dataset
from unskew.engines.flower.audit import reply_sha256
from unskew.engines.flower.messages import (
    NO_TENSORS,
    STARTS,
    BadMessage,
    Body,
    Description,
    Header,
    Presence,
    RunAgreement,
    SentResult,
    Transport,
    WireContext,
    by_name,
    printable,
    read,
    restore,
    seal,
    unseal,
)
from unskew.engines.flower.node import TICKET
from unskew.engines.flower.policy import Purpose, name_of
from unskew.privacy.secure_sum import CHECK, Masked, SecureJob, describe, expected_extra
from unskew.round.client import NUMBERS, ClientSide
from unskew.round.jobs import encode_job


@dataclass(frozen=True)
class FederatedClient:
    """A client of the federation, with its node's id and name."""

    name: str
    number: int
    examples: int
    test: int
    node: int
    node_name: str


@dataclass(frozen=True)
class KnownClient:
    """A client as a run directory records it: the name keeps its number."""

    name: str
    number: int
    examples: int
    late: bool = False  # whether it joined after the run had begun


@dataclass
class Members:
    """The clients by number. A name identifies a client, even if its node returns with another id."""

    by_number: dict[int, FederatedClient] = field(default_factory=dict)
    remembered: dict[str, KnownClient] = field(default_factory=dict)  # by name, kept across server restarts
    begun: bool = False  # whether clients that join now are late

    @property
    def roster(self) -> Roster:
        """All clients, past and present, by number; an unused number has no examples."""
        return roster_of(self.remembered.values())

    def admit(self, node: int, description: Description, connected: Iterable[int]) -> list[FederatedClient]:
        """Number the node's clients. Raises ValueError if they cannot take part.

        A client keeps its earlier number; a new one gets the number it states, or the first free one.
        """
        connected = set(connected)
        owners = {member.name: member.node for member in self.by_number.values()}
        taken = {known.number: known.name for known in self.remembered.values()}
        new = []
        numbered_first = sorted(description.clients, key=lambda one: (one.number is None, one.number or 0, one.name))
        for facts in numbered_first:
            if owners.get(facts.name, node) in connected - {node}:
                raise ValueError(f"another node already has client {facts.name!r}; give this client another name")
            known, number = self.remembered.get(facts.name), facts.number
            if known is not None:
                if known.examples != facts.examples or number not in (None, known.number):
                    before = f"number {known.number} with {known.examples:,} examples when the run began"
                    now = f"number {known.number if number is None else number} with {facts.examples:,}"
                    raise ValueError(f"client {facts.name!r} was {before}, not {now}; restore its data or number")
                number = known.number
            elif number is None:
                number = next(free for free in range(len(taken) + 1) if free not in taken)
            elif number in taken:
                raise ValueError(f"client {facts.name!r} asks for number {number}, which {taken[number]!r} has")
            taken[number] = facts.name
            new.append(FederatedClient(facts.name, number, facts.examples, facts.test, node, description.node))
        for one in new:
            self.by_number[one.number] = one
            self.remembered.setdefault(one.name, KnownClient(one.name, one.number, one.examples, self.begun))
        return new

    def of_node(self, node: int) -> list[FederatedClient]:
        """The node's clients."""
        return [member for member in self.by_number.values() if member.node == node]


def roster_of(clients: Iterable[KnownClient]) -> Roster:
    """The clients' numbers of examples, by client number."""
    sizes = {known.number: known.examples for known in clients}
    table = np.zeros(max(sizes, default=-1) + 1, np.int64)
    table[list(sizes)] = list(sizes.values())
    return Roster(table)


SETUP_TIMEOUT = 120.0  # seconds for a description, or for setting up a run
DISCONNECTED = "its node disconnected before it answered"
TIMED_OUT = "it did not answer within the deadline"
SILENT = "has not answered since its last deadline"


@dataclass(frozen=True)
class Pending:
    """A message that is not answered yet."""

    node: int
    number: int
    kind: str
    until: float
    max_bytes: int  # of the tensors in its reply


@dataclass(frozen=True)
class Answer:
    """The header and tensors of a reply, or why there is none that counts."""

    pending: Pending
    header: Mapping[str, Any]
    tensors: Sequence[tuple[str, Tensor]] = ()
    problem: str | None = None
    bad: bool = False  # whether the reply itself is invalid
    sha256: str = ""  # of the whole reply


def _reason(error: Exception) -> str:
    """Why something is refused, without content from the sender."""
    return error.logged if isinstance(error, BadMessage) else f"it causes {type(error).__name__}"


BLANK = 2  # images: BatchNorm cannot train on one
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # type and shape, by name


@dataclass(frozen=True)
class Expected:
    """The names, types and shapes of a reply's sums and extras; None if blank images cannot determine them."""

    sums: Shapes | None
    extra: Shapes

    def bytes(self, shared: Tensors) -> int:
        """The maximum size of a reply's tensors."""
        if self.sums is None:
            return 16 * sum(value.numel() for value in shared.values()) + 2**26
        return 8 * sum(math.prod(shape) for _, shape in (*self.sums.values(), *self.extra.values()))


class Template:
    """A stand-in client with two blank images: runs a job to learn the layout of replies."""

    def __init__(self, blueprint: Blueprint, mean: tuple[float, ...], std: tuple[float, ...], frozen: Tensors) -> None:
        self._blueprint = replace(blueprint, device="cpu", stored=False)
        part = Split(np.zeros((BLANK, *blueprint.shape), np.uint8), np.zeros(BLANK, np.int64))
        classes = tuple(map(str, range(blueprint.classes)))
        images = ImageSet("blank", classes, part, part, mean, std)
        nobody = Population(np.zeros(0, np.int32), np.zeros(1, np.int64))
        self._data = dataset(images, nobody) | tensors.prefixed(frozen, FROZEN)
        self._side: ClientSide | None = None
        self._known: dict[tuple[str, bool], Expected] = {}  # by layout key and whether it is a client's first visit

    def expect(self, job: Job, shared: Tensors, visit: Visit) -> Expected:
        """The layout of the visit's reply. Only a client's first visit has recordings."""
        key = _layout_key(job), visit.repeat == 0
        if key not in self._known:
            self._known[key] = self._dry_run(job, shared, visit)
        return self._known[key]

    def _dry_run(self, job: Job, shared: Tensors, visit: Visit) -> Expected:
        if isinstance(job, SecureJob) and not isinstance(job, Masked):
            return Expected({}, {name: ("uint8", (size,)) for name, size in expected_extra(job).items()})
        if self._side is None:
            self._side = build(self._blueprint, self._data)
        offsets = np.zeros(visit.client + 2, np.int64)
        offsets[-1] = BLANK
        population = Population(np.arange(BLANK, dtype=np.int32), offsets)
        side = replace(self._side, population=population, own_tests={visit.client: torch.arange(BLANK)})
        blank = replace(visit, take=None if visit.take is None else BLANK, ticket=None, keep=False)
        work = job.inner if isinstance(job, Masked) else job
        try:
            with neutral(), deterministic(side.device):
                reply = work(side, shared, blank, Key(0).fold("client", visit.client, visit.repeat))
        except Exception:  # noqa: BLE001  a method's own code may need more than blank images
            return Expected(None, {})
        sums = _shapes(dict(reply.sums))
        if isinstance(job, Masked):
            sums = dict(sorted({**sums, CHECK: ("int64", ())}.items()))
        return Expected(sums, _shapes(dict(reply.extra)))


def _shapes(values: Tensors) -> Shapes:
    return {name: (str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in values.items()}


def _layout_key(job: Job) -> str:
    """The job without what changes between secure sums or rounds: their replies have the same layout."""
    if (inner := getattr(job, "inner", None)) is not None:
        members = f" {len(job.members)}" if isinstance(job, SecureJob) else ""
        return f"{type(job).__name__}{members} {_layout_key(inner)}"
    return describe(msgspec.structs.replace(job, round=0) if hasattr(job, "round") else job)  # type: ignore[type-var]


@dataclass(frozen=True)
class LeftOut:
    """A result that does not count, and why. ``again``: whether to ask again."""

    reason: str
    again: bool = False


def _read_result(
    result: SentResult, sent: Sequence[tuple[str, Tensor]], visit: Visit, expected: Expected, shared: Tensors
) -> Reply:
    """The result of a visit, with the layout that it must have."""
    count = len(result.forms)
    context = WireContext(shared, visit.weight, result.factor)
    pairs = zip(sent[:count], result.forms, strict=True)
    sums = by_name((name, restore(name, form, value, context)) for (name, value), form in pairs)
    extra = by_name(sent[count:])
    if expected.sums is None:
        updates = tensors.under(sums | extra, "delta/")
        if any(name in shared and shared[name].shape != value.shape for name, value in updates.items()):
            raise BadMessage("its update and the model differ in shape")
    elif list(_shapes(sums).items()) != list(expected.sums.items()) or _shapes(extra) != expected.extra:
        raise BadMessage("its tensors do not match the job: wrong names, types, shapes or order")
    if not tensors.finite({name: value for name, value in (sums | extra).items() if value.is_floating_point()}):
        raise BadMessage("it contains NaN or infinity")
    if result.ticket is not None:
        found = TICKET.fullmatch(result.ticket)
        if not visit.keep or found is None or int(found[1]) != visit.client:
            raise BadMessage("its ticket is not for this visit")
    return Reply(PackedSums.of(sums), extra, result.ticket)


def _check_numbers(sums: Sums, visit: Visit, member: FederatedClient, local: Local) -> None:
    """Refuse impossible numbers, such as another weight than requested or more examples than the client has."""
    if any(not value.is_floating_point() for value in sums.values()):
        return  # masked or rounded
    if any(sums[name].numel() != 1 for name in NUMBERS if name in sums):
        raise BadMessage("one of its numbers is a tensor")
    exact = {"weight": visit.weight, "metric/visits": 1.0}
    if any(name in sums and float(sums[name]) != value for name, value in exact.items()):
        raise BadMessage("its weight or number of visits is not what was requested")
    limit = examples_for(member.examples if visit.take is None else visit.take, local)
    if "metric/examples" in sums and not 0 <= float(sums["metric/examples"]) <= limit:
        raise BadMessage(f"it reports {float(sums['metric/examples']):,.0f} examples; the limit is {limit:,}")
    if "metric/total" in sums and "metric/right" in sums:
        total, right = sums["metric/total"], sums["metric/right"]
        if float(total.sum()) > member.test or bool((right > total).any()) or bool((right < 0).any()):
            raise BadMessage(f"its counts of test images are impossible for the {member.test:,} it has")


NODES_INTERVAL = 2.0  # seconds between checks of who is connected
FINISH_TIMEOUT = 10.0  # seconds to deliver the end of a run: Flower drops what is undelivered when the server exits
POLL, LONGEST_POLL = 0.1, 2.0  # seconds between polls for replies, at first and after a long wait

Say = Callable[[str], None]


@dataclass(frozen=True)
class Rules:
    """A round's deadline, how many replies it needs, and how long to wait for nodes, in seconds."""

    deadline: float = 600.0
    min_replies: int = 1
    wait: float = 600.0


class Session:
    """The nodes that take part in a run, and the messages to and from them.

    ``start`` is the number of earlier server starts. ``fits`` returns why a node's data do not fit, or None.
    """

    def __init__(
        self, exchange: Transport, run: str, start: int, members: Members, rules: Rules, say: Say = lambda line: None
    ) -> None:
        self.exchange, self.run, self.members, self.rules, self.say = exchange, run, members, rules, say
        self._next = start * STARTS  # the next message's number
        self._pending: dict[str, Pending] = {}
        self._late: dict[str, Pending] = {}  # past their deadline; a reply shows that the node works again
        self._abandoned: list[Answer] = []
        self.down: Counter[int] = Counter()  # bytes to each node since the last audit record
        self.up: Counter[int] = Counter()
        self.described: dict[int, Description] = {}  # by node
        self.known: dict[int, Description] = {}  # each node's latest, even after it disconnects
        self.notes: list[str] = []  # what happened since the last round
        self.refused = 0  # replies
        self.fits: Callable[[Description], str | None] = lambda description: None
        self.joined: Callable[[Members], None] = lambda members: None  # called when the clients change
        self.record: Callable[[Mapping[str, Any]], None] = lambda entry: None  # gets an audit entry for every exchange
        self._agreement: RunAgreement | None = None
        self._frozen = NO_TENSORS
        self.agreed: dict[int, str] = {}  # the agreement that each node has confirmed
        self._passed_over: dict[int, str] = {}  # why a node is not asked: left out, or silent until it is heard again
        self._looked = -NODES_INTERVAL
        self.connected: Mapping[int, Presence] = {}
        self.open = True  # whether nodes become members when they describe themselves

    def send(
        self, kind: str, node: int, fields: Mapping[str, Any], *, until: float | None = None, body: Body = NO_TENSORS,
        max_bytes: int = 0,
    ) -> int | None:  # fmt: skip
        """Send a message, to be answered by ``until``. Returns its number; None if it could not be sent."""
        number, self._next = self._next, self._next + 1
        envelope = seal({"kind": kind, "run": self.run, "number": number, **fields}, body)
        self.down[node] += len(envelope)
        if (name := self.exchange.send(node, envelope)) is None:
            return None
        until = self.exchange.now() + SETUP_TIMEOUT if until is None else until
        self._pending[name] = Pending(node, number, kind, until, max_bytes)
        return number

    def waiting(self, kind: str) -> set[int]:
        """The nodes that have not answered a message of this kind."""
        return {pending.node for pending in self._pending.values() if pending.kind == kind}

    def _receive(self) -> Iterator[Answer]:
        """Replies since the last call, and messages whose deadline has passed. A late reply does not count."""
        for name, reply in self.exchange.receive([*self._pending, *self._late]).items():
            late = name in self._late
            pending = (self._late if late else self._pending).pop(name)
            if self._passed_over.get(pending.node) == SILENT:
                del self._passed_over[pending.node]
            self.up[pending.node] += 0 if isinstance(reply, str) else len(reply)
            if late:
                continue
            if isinstance(reply, str):
                yield Answer(pending, {}, problem=reply)
                continue
            try:
                header, tensors = unseal(reply, pending.max_bytes)
                about = read(header, Header)
                if (about.run, about.number) != (self.run, pending.number):
                    raise BadMessage("it answers another message")
                yield Answer(pending, header, tensors, sha256=reply_sha256(reply))
            except Exception as error:  # noqa: BLE001  a reply may only fail its sender
                yield Answer(pending, {}, problem=f"its reply is refused: {_reason(error)}", bad=True)
        while self._abandoned:
            yield self._abandoned.pop(0)
        now = self.exchange.now()
        for name in [name for name, pending in self._pending.items() if pending.until <= now]:
            pending = self._late[name] = self._pending.pop(name)
            if pending.node in self.connected:
                self._passed_over.setdefault(pending.node, SILENT)
            yield Answer(pending, {}, problem=TIMED_OUT)

    def look(self) -> None:
        """Check who is connected, at most every NODES_INTERVAL, and ask new nodes to describe themselves."""
        now = self.exchange.now()
        if now - self._looked < NODES_INTERVAL:
            return
        self._looked, before, self.connected = now, self.connected, self.exchange.nodes()
        changed = {node for node in before if before[node] != self.connected.get(node)}
        for name in [name for name, pending in self._pending.items() if pending.node in changed]:
            pending = self._late[name] = self._pending.pop(name)
            self._abandoned.append(Answer(pending, {}, problem=DISCONNECTED))
        for node in changed:  # gone, or back, perhaps with other data
            self._passed_over.pop(node, None)
            self.described.pop(node, None)
        known = self.described.keys() | self.waiting("describe") | self._passed_over.keys()
        for node in sorted(self.connected.keys() - known):
            self.send("describe", node, {})

    def answers(self) -> Iterator[Answer]:
        """The answers that have arrived. Those to the session's own messages are already handled."""
        self.look()
        for answer in self._receive():
            if answer.pending.kind != "job":
                answer = replace(answer, problem=self._handle(answer))
            self.refused += answer.bad
            yield answer

    def absent(self, node: int) -> str | None:
        """Why the node cannot be asked now, or None."""
        if node not in self.connected:
            return "is not connected"
        unknown = None if node in self.described else "has not described itself since it reconnected"
        return self._passed_over.get(node, unknown)

    def describing(self, node: int) -> bool:
        """Whether the node is back and about to describe itself."""
        settled = self.described.keys() | self._passed_over.keys()
        return node in self.connected and node not in settled and node in self.waiting("describe")

    def agree_on(self, agreement: RunAgreement, frozen: Tensors) -> None:
        """Set the agreement for every node. ``agreement_for`` fills in the client numbers."""
        self._agreement, self._frozen = agreement, Body.of(frozen.items())

    def ready(self, node: int) -> bool:
        """Whether the node has confirmed the agreement. If not, ask it to."""
        agreement = self.agreement_for(node)
        if self.agreed.get(node) == agreement.digest:
            return True
        if node not in self.waiting("agree"):
            self.send("agree", node, {"agreement": agreement.to_json()}, body=self._frozen)
        return False

    def agreement_for(self, node: int) -> RunAgreement:
        """The agreement with the numbers of this node's clients."""
        assert self._agreement is not None, "call agree_on first"
        return replace(self._agreement, numbers={member.name: member.number for member in self.members.of_node(node)})

    def _handle(self, answer: Answer) -> str | None:
        """Handle an answer to one of the session's own messages. Returns the problem, or None."""
        node, kind = answer.pending.node, answer.pending.kind
        problem, bad = answer.problem, answer.bad
        try:
            if problem is None and answer.header.get("kind") == "refused":
                raise ValueError(f"the node refuses: {printable(answer.header.get('reason'))}")
            if problem is None and kind == "describe":
                description = Description.from_json(answer.header.get("description"))
                self.described[node] = self.known[node] = description
                registered = self.connected[node].name if node in self.connected else None
                if registered not in (None, description.node):
                    raise ValueError(f"its key is registered for {registered!r}, but it is {description.node!r}")
                if self.open:
                    self._admit(node)
            if problem is None and kind == "agree":
                self.agreed[node] = read(answer.header.get("agreement"), str)
        except (BadMessage, ValueError) as error:
            problem, bad = error.logged if isinstance(error, BadMessage) else str(error), True
        if problem is not None and bad:
            self.leave_out(node, problem)
        return problem

    def _admit(self, node: int) -> None:
        """Make the node's clients members. Raises ValueError if they cannot take part."""
        description, known = self.described[node], {member.name for member in self.members.by_number.values()}
        if (reason := self.fits(description)) is not None:
            raise ValueError(reason)
        new = self.members.admit(node, description, self.connected)
        clients = ", ".join(f"{member.number} ({member.examples:,} examples)" for member in new[:10])
        joins = "is back" if all(member.name in known for member in new) else "takes part"
        self.note(f"node {description.node} {joins}: client {clients}")
        self.joined(self.members)

    def admit_described(self) -> None:
        """Admit every described node that fits, and from now on every node that joins."""
        self.open = True

        def order(node: int) -> tuple[int, str]:
            numbers = [facts.number for facts in self.described[node].clients if facts.number is not None]
            return min(numbers, default=2**31), self.described[node].node

        for node in sorted(self.described, key=order):
            try:
                self._admit(node)
            except ValueError as error:
                self.leave_out(node, str(error))

    def leave_out(self, node: int, reason: str) -> None:
        """Leave the node out and send it the reason."""
        description = self.described.pop(node, None)
        name = description.node if description else f"with id {node}"
        self._passed_over[node] = f"is left out: {reason}"
        self.note(f"node {name} is left out: {reason}")
        self.send("refuse", node, {"reason": reason[:2000] or "unknown"})

    def note(self, line: str) -> None:
        """Print a line and store it for the round's metrics."""
        self.say(line)
        self.notes.append(line)

    def finish(self) -> None:
        """Tell the nodes that the run is over, so that they delete their clients' memories."""
        if self.refused:
            self.say(f"replies refused in this run: {self.refused:,}")
        until = self.exchange.now() + FINISH_TIMEOUT
        for node in sorted(self.described):
            if self.absent(node) is None:
                self.send("finish", node, {}, until=until)
        while self.waiting("finish") and self.exchange.now() < until:
            list(self._receive())
            self.exchange.pause(POLL)


RETRY_DELAY = 5.0  # seconds before a round that waits for replies asks again


@dataclass
class _Work:
    """One job for many visits: what is asked, and the result of each visit."""

    job: Job
    shared: Tensors
    visits: Sequence[Visit]
    key: Key
    body: Body
    open: set[int]  # indices of visits that are still to be sent, or sent again
    asked: dict[int, list[int]] = field(default_factory=dict)  # by message number, the indices of its visits
    results: dict[int, Reply | LeftOut] = field(default_factory=dict)  # by index
    received: dict[int, str] = field(default_factory=dict)  # by node, the SHA-256 of its reply

    @property
    def counted(self) -> int:
        return sum(isinstance(result, Reply) for result in self.results.values())


class _RemoteMemory:
    """The nodes assign, sync and remove their memories; the server only tells them which ones a checkpoint needs."""

    def __init__(self) -> None:
        self.pinned: dict[int, set[str]] = {}  # by client

    def assign(self, visits: Sequence[Visit]) -> Sequence[Visit]:
        return visits

    def _left_to_nodes(self, *given: Any, **named: Any) -> None:
        pass

    release = supersede = sync = _left_to_nodes

    def pin(self, tickets: Iterable[str]) -> None:
        self.pinned = defaultdict(set)
        for ticket in tickets:
            if found := TICKET.fullmatch(ticket):
                self.pinned[int(found[1])].add(ticket)


class FederatedEngine:
    """Clients on other machines. The server evaluates its own test images itself."""

    def __init__(self, session: Session, own: Engine, template: Template, local: Local) -> None:
        self._session, self._own, self._template, self._local = session, own, template, local
        self.memory = _RemoteMemory()

    @property
    def roster(self) -> Roster:
        """The current clients."""
        return self._session.members.roster

    def visit(
        self, job: Job, shared: Tensors, visits: Sequence[Visit] | Sequence[TestPart], key: Key
    ) -> Iterator[Reply | Failure | Note]:
        """Send each node its clients' visits, wait for all replies, and yield them in visit order."""
        asked = [visit for visit in visits if isinstance(visit, Visit)]
        if len(asked) < len(visits):
            yield from self._own.visit(job, shared, visits, key)
            return
        work = _Work(job, shared, asked, key, Body.of(shared.items()), set(range(len(asked))))
        self._collect(work)
        self._wait_for_enough(work)
        self._record(work)
        for index, visit in enumerate(asked):
            result = work.results.pop(index)
            if isinstance(result, LeftOut):
                member = self._session.members.by_number.get(visit.client)
                name = "" if member is None else f"{member.name}: "
                yield Failure(visit.client, name + result.reason, visit.repeat)
            else:
                yield result
        notes, self._session.notes = self._session.notes, []
        yield from map(Note, notes)

    def _record(self, work: _Work) -> None:
        """Record who was asked and what each node was sent and replied, before any reply is used."""
        session = self._session
        by_node = defaultdict[str, list[int]](list)
        for index, visit in enumerate(work.visits):
            member = session.members.by_number.get(visit.client)
            by_node["" if member is None else member.node_name].append(index)
        nodes = []
        for name, indices in sorted(by_node.items()):
            clients = [work.visits[index].client for index in indices]
            member = session.members.by_number.get(clients[0])
            node = -1 if member is None else member.node
            known, presence = session.known.get(node), session.connected.get(node)
            reasons = (result.reason for index in indices if isinstance(result := work.results[index], LeftOut))
            nodes.append({
                "node": name, "key": presence.key if presence else None, "version": known.version if known else None,
                "data": (known.data or None) if known else None, "clients": clients,
                "bytes_down": session.down.pop(node, 0), "bytes_up": session.up.pop(node, 0),
                "reply": work.received.get(node), "left_out": next(reasons, None),
            })  # fmt: skip
        session.record({"job": name_of(work.job), "round": Purpose.of(work.job).round, "nodes": nodes})

    def leave_out(self, client: int, reason: str) -> None:
        """Do not ask the client's node again until it reconnects: it broke a sum over all clients."""
        if (member := self._session.members.by_number.get(client)) is not None:
            self._session.leave_out(member.node, reason)

    def close(self) -> None:
        """Close the server's own engine."""
        self._own.close()

    def _collect(self, work: _Work) -> None:
        """Ask for every open visit and wait for all answers or the deadline."""
        session, exchange = self._session, self._session.exchange
        began = exchange.now()
        until = began + session.rules.deadline
        session.look()
        while True:
            self._ask(work, until)
            for answer in session.answers():
                self._handle(work, answer)
            if len(work.results) == len(work.visits) or exchange.now() >= until:
                break
            waited = exchange.now() - began  # polling costs both sides; poll less often in a long wait
            exchange.pause(min(max(POLL, waited / 20), LONGEST_POLL))
        for index in range(len(work.visits)):
            work.results.setdefault(index, LeftOut(TIMED_OUT, again=True))
        work.open.clear()
        self._reject_other_layouts(work)

    def _wait_for_enough(self, work: _Work) -> None:
        """If too few have answered, wait for nodes that may come back, and ask them again."""
        exchange, rules, purpose = self._session.exchange, self._session.rules, Purpose.of(work.job)
        total = len(work.visits)
        least = min(total, rules.min_replies) if purpose.trains else 1
        needed = least if purpose.may_miss else total
        if purpose.threshold and (purpose.under_way or purpose.may_miss):
            needed = min(total, max(least, purpose.threshold))  # from its second exchange on, a sum can miss some
        limit, noted = exchange.now() + rules.wait, False
        while work.counted < needed and exchange.now() < limit:
            again = {index for index, result in work.results.items() if isinstance(result, LeftOut) and result.again}
            if work.counted + len(again) < needed:
                break
            if not noted:
                when, found = f"round {purpose.round}" if purpose.round else name_of(work.job), work.counted
                self._session.note(f"{when}: {found} of {needed} replies; waiting up to {rules.wait:,.0f} s for nodes")
            noted = True
            exchange.pause(RETRY_DELAY)
            for index in again:
                del work.results[index]
            work.open = again
            self._collect(work)
        if work.counted < least and purpose.trains:
            lost = [result for result in work.results.values() if isinstance(result, LeftOut) and not result.again]
            resume = "restart the missing nodes and resume the run"
            advice = next((result.reason for result in lost if result.reason), resume)
            few = f"only {work.counted} of the {least} required replies arrived"
            raise UserError(f"round {purpose.round}: {few}; {advice}")

    def _reject_other_layouts(self, work: _Work) -> None:
        """Leave out sums that cannot be added to the others'. If the layout is unknown, the most common one counts.

        In a tie the layout of the earliest visit counts.
        """
        layouts = defaultdict[str, list[int]](list)
        for index, result in sorted(work.results.items()):
            if isinstance(result, Reply) and isinstance(result.sums, PackedSums):
                layouts[repr(result.sums.layout)].append(index)
        common = max(layouts.values(), key=len, default=[])
        others = [index for indices in layouts.values() if indices is not common for index in indices]
        self._fail(work, others, LeftOut("its sums differ from the other clients' sums in names or shapes"))

    def _ask(self, work: _Work, until: float) -> None:
        """Send what can be sent now. A visit fails if the client's node is absent."""
        by_node, session = defaultdict[int, list[int]](list), self._session
        for index in sorted(work.open):
            member = session.members.by_number.get(work.visits[index].client)
            if member is not None and session.describing(member.node):
                continue  # it is back and can be asked in a moment
            why = "is not connected" if member is None else session.absent(member.node)
            if member is not None and why is None:
                by_node[member.node].append(index)
                continue
            name = "its node" if member is None else f"node {member.node_name}"
            work.results[index] = LeftOut(f"{name} {why}", again=True)
            work.open.discard(index)
        for node, indices in by_node.items():
            if not session.ready(node):
                continue
            expected = [self._template.expect(work.job, work.shared, work.visits[index]) for index in indices]
            number = session.send(
                "job", node, self._message(work, node, indices), until=until, body=work.body,
                max_bytes=sum(one.bytes(work.shared) for one in expected),
            )  # fmt: skip
            work.open.difference_update(indices)
            if number is None:
                left_out = LeftOut("the message to its node could not be sent", again=True)
                work.results |= dict.fromkeys(indices, left_out)
            else:
                work.asked[number] = indices

    def _message(self, work: _Work, node: int, indices: Sequence[int]) -> dict[str, Any]:
        members, pinned = self._session.members.of_node(node), self.memory.pinned
        visits: list[dict[str, Any]] = [msgspec.to_builtins(work.visits[index]) for index in indices]
        for visit in visits:
            del visit["slot"]
        return {
            "agreement": self._session.agreed[node],
            "job": encode_job(work.job),
            "seed": work.key.seed,
            "key": list(work.key.path),
            "visits": visits,
            "keep": sorted(ticket for member in members for ticket in pinned.get(member.number, ())),
        }

    def _handle(self, work: _Work, answer: Answer) -> None:
        node, kind, indices = answer.pending.node, answer.pending.kind, list[int]()
        if kind == "job":
            indices = work.asked.pop(answer.pending.number, [])
        elif answer.problem is not None and kind in ("agree", "describe"):
            clients = {member.number for member in self._session.members.of_node(node)}
            indices = [index for index in sorted(work.open) if work.visits[index].client in clients]
        if not indices:
            return  # nothing waits for it, or it answers an earlier job, whose deadline has passed
        if answer.problem is not None:
            self._fail(work, indices, LeftOut(answer.problem, again=not answer.bad))
        elif answer.header.get("kind") == "unknown":
            self._session.agreed.pop(node, None)  # agree again: the node no longer has the agreement
            work.open.update(indices)
        elif answer.header.get("kind") != "done":
            self._fail(work, indices, LeftOut(f"the node refuses: {printable(answer.header.get('reason'))}"))
        else:
            work.received[node] = answer.sha256
            self._read_reply(work, indices, answer)

    def _read_reply(self, work: _Work, indices: Sequence[int], answer: Answer) -> None:
        """A result for each visit; none if the reply as a whole does not answer the visits."""
        session, visits, sent = self._session, [work.visits[index] for index in indices], answer.tensors
        try:
            results = read(answer.header.get("results"), list[SentResult])
            if [(one.client, one.repeat) for one in results] != [(visit.client, visit.repeat) for visit in visits]:
                raise BadMessage("it answers other visits")
            if sum(len(one.forms) + one.extra for one in results) != len(sent):
                raise BadMessage("its tensors do not match their description")
        except BadMessage as error:
            session.refused += 1
            self._fail(work, indices, LeftOut(f"its reply is refused: {error.logged}"))
            return
        start = 0
        for index, visit, result in zip(indices, visits, results, strict=True):
            member = session.members.by_number[visit.client]
            name = f"client {member.number} of node {member.node_name}"
            mine = sent[start : start + len(result.forms) + result.extra]
            start += len(mine)
            left_out = None if result.failure is None else printable(result.failure)
            if left_out is None:
                try:
                    expected = self._template.expect(work.job, work.shared, visit)
                    reply = _read_result(result, mine, visit, expected, work.shared)
                    _check_numbers(dict(reply.sums), visit, member, self._local)
                    work.results[index] = reply
                    if result.anew:
                        session.note(f"{name} has lost its saved state and starts from scratch")
                    continue
                except Exception as error:  # noqa: BLE001  a result may only fail its sender
                    session.refused += 1
                    left_out = f"its result is refused: {_reason(error)}"
            work.results[index] = LeftOut(left_out)
            session.say(f"{name}: {left_out}")

    def _fail(self, work: _Work, indices: Iterable[int], why: LeftOut) -> None:
        for index in indices:
            work.results[index] = why
            work.open.discard(index)
            self._session.say(f"client {work.visits[index].client}: {why.reason}")
