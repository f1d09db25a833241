"""The federation as an engine: visits go to the nodes as messages, what comes back is checked and added up in order."""

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
    EVERYONE,
    Engine,
    Failure,
    ImageSet,
    Job,
    Local,
    MemoryStore,
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
from unskew.engines.codec import NO_TENSORS, BadMessage, Body, by_name
from unskew.engines.flower.audit import reply_sha256
from unskew.engines.flower.exchange import Presence, Transport
from unskew.engines.flower.messages import (
    FORMS,
    STARTS,
    ClientFacts,
    Description,
    RunAgreement,
    WireContext,
    read_field,
    restore,
    seal,
    shown,
    unseal,
)
from unskew.engines.flower.node import TICKET
from unskew.engines.flower.promises import Purpose, name_of
from unskew.privacy.secure_sum import CHECK, Masked, SecureJob, describe, expected_extra
from unskew.round.client import NUMBERS, ClientSide
from unskew.round.jobs import encode_job


@dataclass(frozen=True)
class FederatedClient:
    """A client of the federation: its name, its number, what its node said of it, the node's id and name."""

    name: str
    number: int
    examples: int
    test: int
    node: int
    node_name: str


@dataclass(frozen=True)
class KnownClient:
    """A client as a run folder remembers it: a name keeps its number."""

    name: str
    number: int
    examples: int
    late: bool = False  # whether it joined after the run had begun


@dataclass
class Members:
    """The clients by number. A client is known by its name: it stays the same under another id of its node."""

    by_number: dict[int, FederatedClient] = field(default_factory=dict)
    remembered: dict[str, KnownClient] = field(
        default_factory=dict
    )  # by name, also from before the server was restarted
    begun: bool = False  # whether those that come now are late

    @property
    def roster(self) -> Roster:
        """Everyone that takes part or took part, by number; a number that nobody has yet holds nothing."""
        return roster_of(self.remembered.values())

    def admit(self, node: int, said: Description, connected: Iterable[int]) -> list[FederatedClient]:
        """The node's clients with their numbers. Raises ValueError where they cannot take part."""
        there = set(connected)
        for facts in said.clients:
            held = next((each for each in self.by_number.values() if each.name == facts.name), None)
            if held is not None and held.node != node and held.node in there:
                raise ValueError(f"another node has client {facts.name!r} already; give the client another name")
            self._check_size(facts)
        numbers = self._numbered(said.clients)
        new = [
            FederatedClient(facts.name, numbers[facts.name], facts.examples, facts.test, node, said.node)
            for facts in said.clients
        ]
        for member in new:
            self.by_number[member.number] = member
            if member.name not in self.remembered:
                self.remembered[member.name] = KnownClient(member.name, member.number, member.examples, self.begun)
        return new

    def of_node(self, node: int) -> list[FederatedClient]:
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


def roster_of(clients: Iterable[KnownClient]) -> Roster:
    """How many examples each of these clients has, by number."""
    sizes = {known.number: known.examples for known in clients}
    table = np.zeros(max(sizes, default=-1) + 1, np.int64)
    for number, examples in sizes.items():
        table[number] = examples
    return Roster(table)


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
class Delivery:
    """A reply: its header and tensors, or the reason why it does not count."""

    letter: Letter
    header: Mapping[str, Any]
    tensors: Sequence[tuple[str, Tensor]] = ()
    problem: str | None = None
    bad: bool = False  # whether the reply itself is at fault
    silent: bool = False  # whether none came in time
    late: bool = False  # whether one came after its time: it does not count
    sha256: str = ""  # of the whole reply


class Post:
    """Messages of one run; ``start`` is how often its server was started before."""

    def __init__(self, exchange: Transport, run: str, start: int) -> None:
        self.exchange, self.run = exchange, run
        self._next = start * STARTS
        self._waiting: dict[str, Letter] = {}
        self._late: dict[str, Letter] = {}  # whose time is over; an answer shows that the node works again
        self._given_up: list[Delivery] = []
        self.down: Counter[int] = Counter()  # bytes to each node, since an audit record was last written
        self.up: Counter[int] = Counter()

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
            self.down[node] += len(envelopes[node])
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
            self._given_up.append(Delivery(letter, {}, problem=GONE))

    def answers(self) -> Iterator[Delivery]:
        """What has come since the last time, and letters whose time is over; what comes after that is only ``late``."""
        for name, reply in self.exchange.receive([*self._waiting, *self._late]).items():
            late = name in self._late
            letter = (self._late if late else self._waiting).pop(name)
            self.up[letter.node] += 0 if isinstance(reply, str) else len(reply)
            if late:
                yield Delivery(letter, {}, late=True)
                continue
            if isinstance(reply, str):
                yield Delivery(letter, {}, problem=reply)
                continue
            try:
                header, tensors = unseal(reply, letter.most)
                if read_field(header, "run", str) != self.run or read_field(header, "number", int) != letter.number:
                    raise BadMessage("it answers another message")
                yield Delivery(letter, header, tensors, sha256=reply_sha256(reply))
            except BadMessage as error:
                yield Delivery(letter, {}, problem=f"its reply is refused: {error.logged}", bad=True)
            except Exception as error:  # noqa: BLE001  whatever a reply brings about costs its sender alone
                reason = f"its reply cannot be read ({type(error).__name__})"
                yield Delivery(letter, {}, problem=reason, bad=True)
        given_up, self._given_up = self._given_up, []
        yield from given_up
        now = self.exchange.now()
        for name in [name for name, letter in self._waiting.items() if letter.until <= now]:
            letter = self._late[name] = self._waiting.pop(name)
            yield Delivery(letter, {}, problem=SILENT, silent=True)


BLANK = 2  # images: BatchNorm cannot train on one

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # by name, type and shape


@dataclass(frozen=True)
class Expected:
    """The names, types and shapes of a reply's sums and extra; None where two blank images cannot tell."""

    sums: Shapes | None
    extra: Shapes

    def bytes(self, shared: Tensors) -> int:
        """What the tensors of one reply may take at most."""
        if self.sums is None:
            return 16 * sum(value.numel() for value in shared.values()) + 2**26
        shapes = [*self.sums.values(), *self.extra.values()]
        return 8 * sum(int(torch.Size(shape).numel()) for _, shape in shapes)


class Template:
    """A client with two blank images, instead of any client."""

    def __init__(self, blueprint: Blueprint, mean: tuple[float, ...], std: tuple[float, ...], frozen: Tensors) -> None:
        self._blueprint = replace(blueprint, device="cpu", stored=False)
        part = Split(np.zeros((BLANK, *blueprint.shape), np.uint8), np.zeros(BLANK, np.int64))
        classes = tuple(map(str, range(blueprint.classes)))
        images = ImageSet("blank", classes, part, part, mean, std)
        nobody = Population(np.zeros(0, np.int32), np.zeros(1, np.int64))
        self._data = dataset(images, nobody) | tensors.prefixed(frozen, FROZEN)
        self._side: ClientSide | None = None
        self._known: dict[tuple[str, bool], Expected] = {}  # by job, and whether it is a client's first visit

    def expect(self, job: Job, shared: Tensors, visit: Visit) -> Expected:
        """What the visit's reply to the job looks like: what is recorded comes from a client's first visit alone."""
        question = _lasting_name(job), visit.repeat == 0
        if question not in self._known:
            self._known[question] = self._try(job, shared, visit)
        return self._known[question]

    def _try(self, job: Job, shared: Tensors, visit: Visit) -> Expected:
        if isinstance(job, SecureJob) and not isinstance(job, Masked):
            return Expected({}, {name: ("uint8", (size,)) for name, size in expected_extra(job).items()})
        if self._side is None:
            self._side = build(self._blueprint, self._data)
        offsets = np.zeros(visit.client + 2, np.int64)
        offsets[-1] = BLANK
        mine = Population(np.arange(BLANK, dtype=np.int32), offsets)
        side = replace(self._side, population=mine, own_tests={visit.client: torch.arange(BLANK)})
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


def _lasting_name(job: Job) -> str:
    """The job without what changes from one secure sum or round to the next: replies to both look the same."""
    if isinstance(job, SecureJob):
        return f"{type(job).__name__} {len(job.members)} {_lasting_name(job.inner)}"
    inner = getattr(job, "inner", None)
    if inner is not None:
        return f"{type(job).__name__} {_lasting_name(inner)}"
    return describe(msgspec.structs.replace(job, round=0) if hasattr(job, "round") else job)  # type: ignore[type-var]


@dataclass(frozen=True)
class ClientLimits:
    """What the server knows of a visit's client beforehand."""

    local: Local
    examples: int
    test: int


@dataclass(frozen=True)
class LeftOut:
    """A result that does not count, and why. ``again``: whether asking once more may help."""

    reason: str
    again: bool = False


def read_results(
    header: Mapping[str, Any], sent: Sequence[tuple[str, Tensor]], visits: Sequence[Visit],
    limits: Sequence[ClientLimits], shared: Tensors, expected: Sequence[Expected],
) -> list[Reply | LeftOut]:  # fmt: skip
    """One for each visit, in their order. Raises BadMessage where the message as a whole does not answer the visits."""
    results = read_field(header, "results", list)
    if len(results) != len(visits):
        raise BadMessage(f"it has {len(results)} results for {len(visits)} visits")
    read, start = list[Reply | LeftOut](), 0
    for values, visit, known, shapes in zip(results, visits, limits, expected, strict=True):
        if not isinstance(values, dict):
            raise BadMessage("a result is not an object")
        if (read_field(values, "client", int), read_field(values, "repeat", int)) != (visit.client, visit.repeat):
            raise BadMessage(f"it answers for another visit, where client {visit.client} was asked")
        if "failure" in values:
            read.append(LeftOut(shown(read_field(values, "failure", str))))
            continue
        forms, count = read_field(values, "forms", list), read_field(values, "extra", int)
        end = start + len(forms) + count
        mine, start = sent[start:end], end
        if count < 0 or len(mine) < len(forms) + count or not all(form in FORMS for form in forms):
            raise BadMessage("its tensors do not fit its description of them")
        try:
            read.append(_read_one(values, mine, forms, visit, known, shared, shapes))
        except BadMessage as error:
            read.append(LeftOut(f"its result is refused: {error.logged}"))
        except Exception as error:  # noqa: BLE001  whatever a result brings about costs its sender alone
            read.append(LeftOut(f"its result cannot be read ({type(error).__name__})"))
    if start != len(sent):
        raise BadMessage("it has more tensors than results")
    return read


def _read_one(
    values: Mapping[str, Any], sent: Sequence[tuple[str, Tensor]], forms: Sequence[str], visit: Visit,
    limits: ClientLimits, shared: Tensors, expected: Expected,
) -> Reply:  # fmt: skip
    factor = float(read_field(values, "factor", (int, float)))
    if not (math.isfinite(factor) and factor > 0):
        raise BadMessage("its factor is not a number above 0")
    context = WireContext(shared, visit.weight, factor)
    pairs = zip(sent[: len(forms)], forms, strict=True)
    sums = by_name((name, restore(name, form, value, context)) for (name, value), form in pairs)
    extra = by_name(sent[len(forms) :])
    _check_shapes(sums, expected.sums, shared)
    _check_shapes(extra, None if expected.sums is None else expected.extra, shared)
    if not tensors.finite({name: value for name, value in (sums | extra).items() if value.is_floating_point()}):
        raise BadMessage("it contains NaN or infinity")
    check_numbers(sums, visit, limits)
    ticket = read_field(values, "ticket", (str, type(None)))
    if ticket is not None:
        found = TICKET.fullmatch(ticket)
        if not visit.keep or found is None or int(found[1]) != visit.client:
            raise BadMessage("its ticket is not one for this visit")
    return Reply(PackedSums.of(sums), extra, ticket)


def _check_shapes(values: Tensors, expected: Shapes | None, shared: Tensors) -> None:
    """Refuse tensors of other names, types or shapes than the job has; where they are unknown, another model's."""
    if expected is not None:
        if list(values) != list(expected):
            names, more = sorted(set(expected) - set(values)), len(set(values) - set(expected))
            missing = [f"without {', '.join(names)[:200]}"] if names else []
            unasked = [f"{more} that nobody asked for"] if more else []
            reason = ", ".join([*missing, *unasked]) or "their order differs"
            raise BadMessage(f"its tensors are not those of the job: {reason}")
        for name, (dtype, shape) in expected.items():
            found = str(values[name].dtype).removeprefix("torch."), tuple(values[name].shape)
            if found != (dtype, shape):
                raise BadMessage(f"{name[:60]} is {found[0]} {list(found[1])}; {dtype} {list(shape)} is expected")
        return
    for name, value in values.items():
        model = shared.get(name.removeprefix("delta/")) if name.startswith("delta/") else None
        if model is not None and model.shape != value.shape:
            raise BadMessage(f"{name} has shape {list(value.shape)}; {list(model.shape)} is expected")


def check_numbers(sums: Sums, visit: Visit, facts: ClientLimits) -> None:
    """Refuse impossible numbers: another weight than was asked for, more examples than the client has."""
    if any(not value.is_floating_point() for value in sums.values()):
        return  # words of a secure sum, or rounded
    if any(sums[name].numel() != 1 for name in NUMBERS if name in sums):
        raise BadMessage("a number that every reply has is a tensor in this one")
    if "weight" in sums and float(sums["weight"]) != visit.weight:
        raise BadMessage(f"it weighs {float(sums['weight']):g}, {visit.weight:g} was asked for")
    if "metric/visits" in sums and float(sums["metric/visits"]) != 1:
        raise BadMessage("it counts as more than one visit")
    most = examples_for(facts.examples if visit.take is None else visit.take, facts.local)
    if "metric/examples" in sums and not 0 <= float(sums["metric/examples"]) <= most:
        raise BadMessage(f"it saw {float(sums['metric/examples']):,.0f} examples, {most:,} are the most")
    if "metric/total" in sums and "metric/right" in sums:
        total, right = sums["metric/total"], sums["metric/right"]
        if float(total.sum()) > facts.test or bool((right > total).any()) or bool((right < 0).any()):
            raise BadMessage(f"it has other numbers of test images than its {facts.test:,}")


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
        self.known: dict[int, Description] = {}  # the last of each node, also of those that have gone
        self.notes: list[str] = []  # what happened since the last round
        self.refused = 0  # replies
        self.fits: Callable[[Description], str | None] = lambda said: None
        self.joined: Callable[[Members], None] = lambda members: None  # told where the clients change
        self.record: Callable[[Mapping[str, Any]], None] = lambda entry: None  # gets an entry for every exchange
        self._agreement: RunAgreement | None = None
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

    def answers(self) -> Iterator[Delivery]:
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
                self.refused += answer.bad
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

    def present(self, node: int) -> Presence | None:
        """How the node is connected; None where it is not."""
        return self._there.get(node)

    def describing(self, node: int) -> bool:
        """Whether the node has come back and is about to say what it brings."""
        if node not in self._there or node in self.described.keys() | self._silent.keys() | self._refused.keys():
            return False
        return any(letter.node == node for letter in self.post.waiting("describe"))

    def agree_on(self, agreement: RunAgreement, frozen: Tensors) -> None:
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

    def agreement_for(self, node: int) -> RunAgreement:
        """What was agreed, with the numbers of this node's clients."""
        if self._agreement is None:
            raise RuntimeError("nothing was agreed on yet")
        return replace(self._agreement, numbers={each.name: each.number for each in self.members.of_node(node)})

    def _hear(self, answer: Delivery) -> str | None:
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
                self._agreed[node] = read_field(answer.header, "agreement", str)
        except BadMessage as error:
            self.leave_out(node, error.logged)
            return error.logged
        except ValueError as error:
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
        if self.refused:
            self.say(f"replies of nodes that were refused in this run: {self.refused:,}")
        until = self.post.exchange.now() + FAREWELL
        self.post.send("finish", message, until=until, group="finish")
        while self.post.waiting("finish") and self.post.exchange.now() < until:
            list(self.post.answers())
            self.post.exchange.pause(POLL)

    def _describe(self, node: int, said: Description) -> None:
        self.described[node] = self.known[node] = said
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


def _joined(node: str, new: list[FederatedClient], before: set[str]) -> str:
    clients = ", ".join(f"{each.number} ({each.examples:,} examples)" for each in new[:10])
    again = all(each.name in before for each in new)
    return f"node {node} {'is back' if again else 'takes part'}: client {clients}"


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
    received: dict[int, str] = field(default_factory=dict)  # by node, the SHA-256 of its reply

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

    def __init__(self, session: Session, own: Engine, template: Template, local: Local) -> None:
        self._session, self._own, self._template, self._local = session, own, template, local
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
        self._leave_out_odd_layouts(work)
        self._until_enough(work)
        self._leave_out_odd_layouts(work)
        self._record(work)
        for index, visit in enumerate(asked):
            result = work.results.pop(index)
            if isinstance(result, LeftOut):
                yield Failure(visit.client, self._named(visit.client, result.reason), visit.repeat)
            else:
                yield result
        for text in self._session.take_notes():
            yield Note(text)

    def _record(self, work: _Work) -> None:
        """Write down who was asked, and what went to each node and came from it, before any of it is used."""
        session, post = self._session, self._session.post
        places = defaultdict[str, list[int]](list)
        for place, visit in enumerate(work.visits):
            member = session.members.by_number.get(visit.client)
            places["" if member is None else member.node_name].append(place)
        nodes = []
        for name, mine in sorted(places.items()):
            member = session.members.by_number.get(work.visits[mine[0]].client)
            node = -1 if member is None else member.node
            said, presence = session.known.get(node), session.present(node)
            failed = [result.reason for place in mine if isinstance(result := work.results[place], LeftOut)]
            nodes.append({
                "node": name, "key": presence.key if presence else None, "version": said.version if said else None,
                "data": (said.data or None) if said else None, "clients": [work.visits[place].client for place in mine],
                "bytes_down": post.down.pop(node, 0), "bytes_up": post.up.pop(node, 0),
                "reply": work.received.get(node), "left_out": failed[0] if failed else None,
            })  # fmt: skip
        session.record({"job": name_of(work.job), "round": Purpose.of(work.job).round, "nodes": nodes})

    def leave_out(self, client: int, reason: str) -> None:
        """Do not ask the client's node again, until it comes back: it broke a sum over all clients."""
        if (member := self._session.members.by_number.get(client)) is not None:
            self._session.leave_out(member.node, reason)

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

    def _leave_out_odd_layouts(self, work: _Work) -> None:
        """Sums that cannot be added to the others' do not count. Where nobody knows the layout, the most common does.

        Of two that are as common, the one of the client with the lowest number counts.
        """
        layouts = defaultdict[str, list[int]](list)
        for place, result in sorted(work.results.items()):
            if isinstance(result, Reply) and isinstance(result.sums, PackedSums):
                layouts[repr(result.sums.layout)].append(place)
        if len(layouts) < 2:
            return
        common = max(layouts.values(), key=len)
        odd = [place for places in layouts.values() if places is not common for place in places]
        self._fail(work, odd, LeftOut("its sums have other names or shapes than those of the other clients"))

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

    def _take(self, work: _Work, answer: Delivery) -> None:
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
            work.received[answer.letter.node] = answer.sha256
            self._read(work, places, answer)

    def _read(self, work: _Work, places: Sequence[int], answer: Delivery) -> None:
        visits = [work.visits[place] for place in places]
        members = [self._session.members.by_number[visit.client] for visit in visits]
        try:
            results = read_results(
                answer.header, answer.tensors, visits, [self._facts(member) for member in members], work.shared,
                [self._expected(work, place) for place in places],
            )  # fmt: skip
        except BadMessage as error:
            self._session.refused += 1
            self._fail(work, places, LeftOut(f"its reply is refused: {error.logged}"))
            return
        for place, member, result, values in zip(places, members, results, answer.header["results"], strict=True):
            work.results[place] = result
            if isinstance(result, LeftOut):
                self._session.refused += "failure" not in values
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

    def _facts(self, member: FederatedClient) -> ClientLimits:
        return ClientLimits(self._local, member.examples, member.test)

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
