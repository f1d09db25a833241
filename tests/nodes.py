"""A federation in one process through real messages: nodes with slices of digits, and a server over them."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from unskew import engines, models
from unskew.core import tensors
from unskew.core.files import write_whole
from unskew.core.key import Key
from unskew.core.types import Local, Visit
from unskew.data.partition import partition_examples
from unskew.data.population import Population
from unskew.data.sources import load
from unskew.engines.blueprint import Blueprint, dataset
from unskew.engines.flower.engine import FederatedEngine, Members, Rules, Session, Template
from unskew.engines.flower.messages import Envelope, Presence, Response, RunAgreement, read_header, seal, unseal
from unskew.engines.flower.node import Node, read_node_data
from unskew.engines.flower.policy import Policy
from unskew.federation.folder import ROSTER, write_roster
from unskew.federation.network import make_node_key
from unskew.methods import parse_method
from unskew.privacy.secure_sum import SecureUpdates
from unskew.privacy.signing import Registered
from unskew.round import driver, statistics
from unskew.round.client import Train
from unskew.round.jobs import add, encode_job
from unskew.runs.federated import FederatedRequest, run_federated

PARTITION, SEED = "dirichlet(alpha=0.3)", 3
OPTIONS = {"data": "digits", "clients": 3, "method": "fedavg", "rounds": 2, "epochs": 1, "seed": SEED, "lr": 0.05}


def slice_of_digits(number, clients=3):
    """Client ``number``'s part of the digits, as a node brings it."""
    return read_node_data(f"node-{number}", "digits", partition=PARTITION, clients=(number,), of=clients, seed=SEED)


@lru_cache
def node_key(name):
    """A node's key, the same for all nodes of that name."""
    return make_node_key()


def registered(folder, name, names):
    """The node's key, and a roster of these nodes, in its folder."""
    place = Path(folder) / name
    write_whole(place / "node.key", node_key(name).private, secret=True)
    write_roster(place / ROSTER, {each: node_key(each).public for each in names})
    return Registered.read(place / "node.key", place / ROSTER)


def make_node(folder, number, clients=3, **settings):
    """Node ``number`` of so many; its roster has them all."""
    settings.setdefault("policy", Policy(min_class=1))  # as in a simulation, where nobody is protected
    own = registered(folder, f"node-{number}", [f"node-{each}" for each in range(clients)])
    return Node(slice_of_digits(number, clients), Path(folder) / f"node-{number}", registered=own, **settings)


def make_nodes(folder, clients=3):
    """By id, so many nodes with a client each."""
    return {100 + number: make_node(folder, number, clients) for number in range(clients)}


@dataclass
class InProcess:
    """Nodes in this process: real messages, no network.

    ``between`` may change a reply on its way, or drop it by returning None.
    """

    answers: dict[int, Callable[[Envelope], Envelope]]
    between: Callable[[int, Envelope, Envelope], Response | None] = lambda node, question, reply: reply
    presence: dict[int, Presence] = field(default_factory=dict)
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


def exchange_of(nodes, **settings):
    return InProcess({number: node.answer for number, node in nodes.items()}, **settings)


def federated(folder, exchange, *, resume=False, rules=None, classes=(), said=None, observe=None, out="run", **options):
    """A run over the nodes of the exchange."""
    recipe = Path(folder) / "recipe.toml"
    chosen = {**OPTIONS, **options}
    recipe.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in chosen.items() if value is not None))
    asked = FederatedRequest(recipe, Path(folder) / out, resume, rules or Rules(), classes)
    return run_federated(exchange, asked, observe or (lambda event: None), (said if said is not None else []).append)


def blueprint_of(method="fedavg", model="tiny-cnn"):
    return Blueprint(method, model, (1, 8, 8), 10, Local(epochs=1, batch=64, lr=0.05))


@lru_cache
def template_of(method):
    """What replies to this method's jobs look like, tried once for all engines."""
    images = load("digits", None)
    return Template(blueprint_of(method), images.mean, images.std, {})


def engine_over(exchange, method="fedavg", rules=None, said=None):
    """The federated engine over all nodes of the exchange, which have described themselves."""
    session = Session(exchange, os.urandom(16).hex(), 0, Members(), rules or Rules(), said or print)
    for _ in range(2):
        list(session.answers())
    images, blueprint = load("digits", None), blueprint_of(method)
    session.agree_on(RunAgreement(session.run, blueprint, images.classes, images.mean, images.std, {}), {})
    session.notes.clear()
    return FederatedEngine(session, None, template_of(method), Local(epochs=1))


def loop_over(clients=3, method="fedavg"):
    """All clients in this process: what the federation must equal."""
    images = load("digits", None)
    parts = partition_examples(PARTITION, images.train.labels, clients=clients, key=Key(SEED), classes=10)
    data = dataset(images, Population.from_partition(parts))
    return engines.open_engine("loop", engines.EngineSetup(blueprint_of(method), data))


def first_state(method="fedavg"):
    network = blueprint_of(method).network()
    models.initialise(network, Key(0))
    return driver.start(parse_method(method, blueprint_of().local), tensors.of_module(network))


def outcome_of(engine, job, shared, visits, key):
    """What a job comes to over all the visits."""
    return add(engine.visit(job, shared, visits, key), visits)


def train_round(engine, shared, visits, number=1):
    """What a round of training comes to."""
    return outcome_of(engine, Train(number), shared, visits, Key(0).fold("round", number))


def reply_with(reply, change):
    """A reply whose fields and tensors ``change(fields, tensors)`` has changed in place."""
    fields, came = unseal(reply)
    change(fields, came)
    return seal(fields, came)


def asked(question):
    """The type of a message's job; empty where it is another message."""
    return read_header(question).get("job", {}).get("type", "")


def spoiling(what, change, bad=101):
    """A network that changes the bad node's replies to messages of this kind, or with this job, as ``reply_with``."""

    def between(node, question, reply):
        wanted = node == bad and what in (read_header(question)["kind"], asked(question))
        return reply_with(reply, change) if wanted else reply

    return between


THREE = [Visit(0, 556.0), Visit(1, 435.0), Visit(2, 447.0)]  # one to each of three clients
SECURE = "secure(updates=true)"
FOUR = [Visit(number, float(size)) for number, size in enumerate((367, 235, 434, 402))]  # one to each of four clients


def exchanged(exchange, engine, method="fedavg", visits=FOUR, number=1, shared=None):
    """What a round's training comes to through an exchange such as SecureUpdates."""
    shared = statistics.build_shared(first_state(method)) if shared is None else shared
    return exchange(engine, Train(number), shared, visits, Key(1).fold("round", number))


def secure_round(folder, between, **settings):
    """What a secure sum over four nodes comes to, through this network."""
    engine = engine_over(exchange_of(make_nodes(folder, 4), between=between), SECURE, **settings)
    return exchanged(SecureUpdates(0.66), engine)


def set_tensor(name, value):
    """A change of one tensor of a reply."""

    def change(fields, came):
        index = [each for each, _ in came].index(name)
        came[index] = (name, value(came[index][1]))

    return change


def rename_first(name):
    """A change of the first tensor's name."""
    return lambda fields, came: came.__setitem__(0, (name, came[0][1]))


def add_extra(name, value):
    """A change to a reply: one extra tensor, which its description counts."""

    def change(fields, came):
        came.append((name, value))
        fields["results"][0]["extra"] += 1

    return change


RUN = "ab" * 16
VISIT = Visit(1, 435.0)
TRAIN = encode_job(Train(1))


def plain_visit(visit):
    """A visit as the server sends it; what is none already goes as it is."""
    return {name: value for name, value in vars(visit).items() if name != "slot"} if isinstance(visit, Visit) else visit


class Asking:
    """A server's side for one node: numbers its messages."""

    def __init__(self, node, method="fedavg"):
        self.node, self.method, self.number = node, method, 0
        images = load("digits", None)
        self.agreement = RunAgreement(RUN, blueprint_of(method), images.classes, images.mean, images.std, {"node-1": 1})

    def ask(self, kind, sent=(), **fields):
        self.number += 1
        header = {"kind": kind, "run": RUN, "number": self.number, **fields}
        return unseal(self.node.answer(seal(header, list(sent))))

    def agree(self):
        header = self.agree_on()
        assert header["kind"] == "agreed", header
        return self

    def agree_on(self, blueprint=None, **changes):
        """The answer to the agreement with these changes, those of its blueprint first."""
        changed = replace(self.agreement.blueprint, **(blueprint or {}))
        return self.ask("agree", agreement=replace(self.agreement, blueprint=changed, **changes).to_json())[0]

    def job(self, job=TRAIN, visits=(VISIT,), shared=None, **fields):
        shared = statistics.build_shared(first_state(self.method)) if shared is None else shared
        asked = {
            "agreement": self.agreement.digest, "job": job, "seed": 0, "key": ["round", 1],
            "visits": list(map(plain_visit, visits)), "keep": [], **fields,
        }  # fmt: skip
        return self.ask("job", shared.items(), **asked)


def refused(header):
    assert header["kind"] == "refused"
    return header["reason"]
