"""A server that lies to the nodes of a secure sum: each attack is performed on real nodes, and gets nothing."""

import re
import zlib
from base64 import b64decode, b64encode
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from nodes import FOUR as VISITS
from nodes import (
    SECURE,
    asked,
    engine_over,
    exchange_of,
    exchanged,
    federated,
    first_state,
    make_node,
    make_nodes,
    node_key,
    registered,
    secure_round,
    slice_of_digits,
    spoiling,
)
from unskew.calibration.covariances import Diagonal
from unskew.calibration.federated import secure_statistics
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.protection import Layout
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.engines.flower.engine import Rules
from unskew.engines.flower.messages import RunAgreement, seal, unseal
from unskew.engines.flower.node import Node, read_node_data
from unskew.federation.folder import ROSTER, write_roster
from unskew.privacy.secure_sum import WITHHELD, SecureUpdates
from unskew.privacy.signing import Registered, Signer, Statement, read_roster
from unskew.round import statistics

VICTIM, OTHERS = 102, (100, 101, 103)  # node 102 has client 2


class LyingServer:
    """A server over four nodes that changes what it tells each of them, and writes down what they answer."""

    def __init__(self, folder, lie, nodes=None):
        self.lie, self.answers = lie, []  # (node, type of the job, why it was refused, tensors)
        self.exchange = exchange_of(nodes or make_nodes(folder, 4))
        for node, answer in list(self.exchange.answers.items()):
            self.exchange.answers[node] = self.between(node, answer)
        self.digests = {}

    def between(self, node, answer):
        def passed(question):
            fields, sent = unseal(question)
            self.lie(self, node, fields, sent)
            reply = answer(seal(fields, sent))
            header, came = unseal(reply)
            if fields["kind"] == "job":
                (result,) = header.get("results", [{"failure": header.get("reason", "")}])
                self.answers.append((node, fields["job"]["type"], result.get("failure"), came))
            return reply

        return passed

    def train(self, method=SECURE, visits=VISITS, shared=None):
        self.engine = engine_over(self.exchange, method, Rules(wait=1, min_replies=0))
        return self.train_again(visits, shared)

    def train_again(self, visits=VISITS, shared=None, number=1):
        return exchanged(SecureUpdates(0.66), self.engine, visits=visits, number=number, shared=shared)

    def refusals(self, job, node=VICTIM):
        return [reason for who, kind, reason, _ in self.answers if (who, kind) == (node, job)]

    def sent(self, job, node=VICTIM):
        """What left the node in answer to this job."""
        return [came for who, kind, reason, came in self.answers if (who, kind) == (node, job) and reason is None]


def terms_of(fields):
    """The terms in a question that the server sends, if any."""
    return fields.get("job", {}).get("terms") or {}


@pytest.fixture
def careless(monkeypatch):
    """The server takes its nodes' signatures as they are; an honest one would leave out who signed something else."""
    monkeypatch.setattr("unskew.privacy.secure_sum._Session._drop", lambda self, who, *rest: list(who))


def moved(shared):
    """Nearly the same model."""
    return {name: value * (1 + 1e-3) if value.is_floating_point() else value for name, value in shared.items()}


def honest(server, node, fields, sent):
    """Nothing is changed."""


def test_a_server_that_does_not_lie_has_its_sum(tmp_path):
    server = LyingServer(tmp_path, honest)
    outcome = server.train()
    assert (outcome.void, outcome.failures) == ("", ())
    assert len(server.answers) == 4 * 5


# The others are told something else: their part in the sum would be nothing, and the rest the victim's own


def light(server, node, fields, sent):
    """The others weigh next to nothing, and only they are told so."""
    if node in OTHERS and fields["kind"] == "job":
        fields["visits"][0]["weight"] = 1e-30


def light_for_all(server, node, fields, sent):
    """Everyone is told, the victim too, that the others weigh next to nothing."""
    light(server, node, fields, sent)
    if terms := terms_of(fields):
        terms["weights"] = [1e-30 if client != 2 else weight for client, weight in enumerate(terms["weights"])]


def light_in_their_terms(server, node, fields, sent):
    """The others weigh next to nothing, and sign this; the victim is told their usual weights."""
    if node in OTHERS:
        light_for_all(server, node, fields, sent)


def other_model(server, node, fields, sent):
    """The others get a model of zeros."""
    if node in OTHERS and fields.get("job", {}).get("type") == "masked":
        sent[:] = [(name, torch.zeros_like(value)) for name, value in sent]


def other_model_in_their_terms(server, node, fields, sent):
    """The others get a model of zeros, and its hash: they sign another agreement than the victim."""
    other_model(server, node, fields, sent)
    if node in OTHERS and (terms := terms_of(fields)):
        terms["shared"] = b64encode(b"z" * 32).decode()


def no_shares(server, node, fields, sent):
    """The server skips the exchange in which statements are checked, with keys and signatures of its own."""
    if fields.get("job", {}).get("type") == "mask-shares":
        fields["job"] = {**fields["job"], "type": "mask-keys"}
        fields["job"].pop("keys"), fields["job"].pop("terms")


@pytest.mark.parametrize(("lie", "checks", "job", "nodes", "wrong", "unsent"), [
    (light, True, "mask-shares", (100,), "sent others a different weight for client 0", "masked"),
    (light_in_their_terms, True, "mask-shares", (100,), "client 0 would have weight 1e-30, but has 367", "masked"),
    (light_for_all, True, "mask-shares", (VICTIM,), "would have weight 1e-30", "mask-shares"),
    (other_model, True, "masked", OTHERS, "a different model, rate or key than the members agreed on", "mask-openings"),
    (other_model_in_their_terms, True, "", (), "", "masked"),  # the server notices
    (other_model_in_their_terms, False, "masked", (VICTIM,), "only 1 of 4 members have signed what client 2", "masked"),
    (no_shares, True, "", (), "", "masked"),
])  # fmt: skip
def test_a_lie_is_refused_and_the_victim_does_not_answer(tmp_path, request, lie, checks, job, nodes, wrong, unsent):
    if not checks:
        request.getfixturevalue("careless")
    server = LyingServer(tmp_path, lie)
    assert server.train().void
    for node in nodes:
        assert wrong in server.refusals(job, node)[0]
    assert not server.sent(unsent)


def other_rate(server, node, fields, sent):
    """The others agree on a run in which nobody moves: their learning rate is next to nothing."""
    if node not in OTHERS or fields["kind"] not in ("agree", "job"):
        return
    if fields["kind"] == "agree":
        fields["agreement"]["blueprint"]["local"]["lr"] = 1e-30
        server.digests[node] = RunAgreement.from_json(fields["agreement"]).digest
    else:
        fields["agreement"] = server.digests[node]


@pytest.mark.parametrize("checks", [True, False])
def test_another_learning_rate_for_the_others_is_noticed(tmp_path, request, checks):
    if not checks:
        request.getfixturevalue("careless")
    server = LyingServer(tmp_path, other_rate)
    server.exchange.between = agreed_as_asked
    server.train()
    if not checks:
        assert "client 0 was sent a different run: another method, rate" in server.refusals("mask-shares")[0]
    assert not server.sent("masked")


def agreed_as_asked(node, question, reply):
    """The engine hears the digest that it has asked for, whatever the node was told."""
    (about, _), (fields, came) = unseal(question), unseal(reply)
    if about["kind"] == "agree":
        fields["agreement"] = RunAgreement.from_json(about["agreement"]).digest
    return seal(fields, came)


# Members that do not exist, keys that are not theirs


def test_invented_clients_are_refused(tmp_path):
    """The server's own two nodes have keys, data and a protocol that is in order; only nobody registered them."""
    nodes = make_nodes(tmp_path, 4)
    known = ["node-1", "node-2"]
    for number in (0, 3):
        nodes[100 + number] = make_node(tmp_path, number, 4)
    for name in known:
        write_roster(tmp_path / name / ROSTER, {each: node_key(each).public for each in [*known, "node-9"]})
    server = LyingServer(tmp_path, honest, nodes)
    assert server.train().void
    assert "the keys of client 0 are not signed by a node in roster.txt" in server.refusals("mask-shares")[0]
    assert not server.sent("mask-shares")
    assert not server.sent("masked")


def test_keys_that_the_server_made_are_refused(tmp_path, careless):
    """It wants to read what is sealed for client 0, and to know the mask that it shares with the victim."""

    def lie(server, node, fields, sent):
        if node == VICTIM and "keys" in fields.get("job", {}):
            fields["job"]["keys"][0] = b64encode(bytes(range(64))).decode()

    server = LyingServer(tmp_path, lie)
    server.train()
    assert "the keys of client 0 are not signed by a node in roster.txt" in server.refusals("mask-shares")[0]
    assert not server.sent("masked")


def test_a_statement_of_another_session_or_run_is_no_statement(tmp_path, careless):
    kept = {}

    def lie(server, node, fields, sent):
        if node == VICTIM and (terms := terms_of(fields)):
            kept.setdefault("first", list(terms["statements"]))
            terms["statements"][0] = kept["first"][0]

    server = LyingServer(tmp_path, lie)
    assert not server.train().void
    server.answers.clear()
    server.train_again(number=2)
    assert "the keys of client 0 are not signed by a node in roster.txt" in server.refusals("mask-shares")[0]


def test_clients_of_one_other_node_are_too_few_however_many_they_are(tmp_path):
    """A registered node that is on the server's side brings five clients; the victim would be alone among them."""
    names = ["ours", "theirs"]
    nodes = {}
    for number, name, own in ((100, "theirs", (0, 1, 2, 3, 4)), (VICTIM, "ours", (5,))):
        data = read_node_data(name, "digits", partition="iid", of=6, clients=own)
        nodes[number] = Node(data, tmp_path / name, registered=registered(tmp_path, name, names))
    engine = engine_over(exchange_of(nodes), SECURE, Rules(wait=1, min_replies=0))
    visits = [Visit(client, float(size)) for client, size in enumerate(engine.roster.sizes.tolist())]
    outcome = exchanged(SecureUpdates(0.66), engine, visits=visits)
    assert outcome.void
    assert "a sum over 2 nodes would reveal too much about each; at least 3" in outcome.failures[0].reason


def test_a_node_without_a_roster_or_a_key_takes_part_in_no_secure_sum(tmp_path):
    nodes = make_nodes(tmp_path, 4)
    nodes[VICTIM] = Node(slice_of_digits(2, 4), tmp_path / "node-2")
    server = LyingServer(tmp_path, honest, nodes)
    server.train()
    assert "this node has no key or no roster to check the others with" in server.refusals("mask-keys")[0]


def test_a_roster_that_its_owner_changed_counts_from_the_next_sum_on(tmp_path):
    server = LyingServer(tmp_path, honest)
    assert not server.train().void
    write_roster(tmp_path / "node-2" / ROSTER, {f"node-{each}": node_key(f"node-{each}").public for each in (1, 2, 3)})
    assert len(read_roster(tmp_path / "node-2" / ROSTER)) == 3
    outcome = server.train_again(shared=moved(statistics.build_shared(first_state())), number=2)
    assert [failure.client for failure in outcome.failures] == [2]
    assert "the keys of client 0 are not signed by a node in roster.txt" in outcome.failures[0].reason


# Exchanges that are left out, or asked in two ways


def two_lists(server, node, fields, sent):
    """Half of the nodes hear that client 3 answered, half that it dropped out: both its secrets would be opened."""
    if fields.get("job", {}).get("type") in ("mask-survivors", "mask-openings") and node in (100, VICTIM):
        fields["job"]["answered"] = [True, True, True, False]


def test_two_lists_of_who_answered_open_nothing(tmp_path):
    server = LyingServer(tmp_path, two_lists)
    assert server.train().void
    for node in (100, 101, VICTIM, 103):
        assert not server.sent("mask-openings", node)
    assert "have signed what client 2 received, but 3 must" in server.refusals("mask-openings")[0]


def test_a_member_signs_one_list_alone(tmp_path):
    server = LyingServer(tmp_path, honest)
    questions = []

    def keep(node, question, reply):
        questions.extend([question] if node == VICTIM and asked(question) == "mask-survivors" else [])
        return reply

    server.exchange.between = keep
    server.train()
    fields, sent = unseal(questions[0])
    answer = make_node(tmp_path, 2, 4).answer
    fields["number"] = 10**6
    fields["job"]["answered"] = [True, True, True, False]
    header, _ = unseal(answer(seal(fields, sent)))
    assert "it has answered or opened its shares for other members" in header["results"][0]["failure"]


def fewer_masks(server, node, fields, sent):
    """The victim masks with clients 0 and 1 alone; then all hear that 0 and 1 dropped out, whose masks are opened."""
    job = fields.get("job", {})
    if job.get("type") == "masked" and node == VICTIM:
        job["sharing"] = [True, True, True, False]
    if job.get("type") in ("mask-survivors", "mask-openings"):
        job["sharing"] = [True] * 4


def test_masks_with_some_are_not_taken_off_as_masks_with_others(tmp_path):
    server = LyingServer(tmp_path, fewer_masks)
    assert "the masks of a secure sum do not cancel" in server.train().void
    assert server.sent("masked")  # three signed the same, and are enough
    assert "it has not answered in this session under masks with these members" in server.refusals("mask-survivors")[0]
    assert not server.sent("mask-openings")


# Differences of sums


def test_a_second_sum_under_the_same_model_without_one_client_is_refused(tmp_path):
    """The difference of both sums would be the update of that client, to the bit."""
    server, first = LyingServer(tmp_path, honest), statistics.build_shared(first_state())
    assert not server.train().void
    outcome = server.train_again([visit for visit in VISITS if visit.client != 2])
    assert "train was already summed over other clients" in server.refusals("mask-survivors", 100)[-1]
    assert outcome.void
    assert not server.train_again().void  # the same sum again tells nothing new
    assert not server.train_again([visit for visit in VISITS if visit.client != 2], moved(first), 2).void


def test_a_second_sum_in_which_one_client_uses_fewer_examples_is_refused(tmp_path):
    """All members are the same and agree; the difference of both sums would still be one client's alone."""
    server, ones = LyingServer(tmp_path, honest), [replace(visit, weight=1.0) for visit in VISITS]
    assert not server.train(visits=ones).void
    fewer = [replace(visit, take=16) if visit.client == 2 else visit for visit in ones]
    assert server.train_again(fewer).void
    assert (
        "train was already summed over other clients, weights or numbers of examples"
        in server.refusals("mask-survivors")[-1]
    )
    assert server.train_again(VISITS).void  # as would be solving for two clients with two sets of weights
    assert not server.train_again(ones).void


def test_members_cannot_change_places_after_they_have_signed(tmp_path):
    """Terms are lists by member: in another order client 2 would take client 1's number of examples for its own."""
    visits = [Visit(number, 1.0, take=16 + number) for number in range(4)]

    def lie(server, node, fields, sent):
        job = fields.get("job", {})
        if node == VICTIM and job.get("type") == "masked":
            for values in (job["members"], job["keys"], job["sharing"]):
                values[1], values[2] = values[2], values[1]
            fields["visits"][0]["take"] = 17

    server = LyingServer(tmp_path, lie)
    server.train(visits=visits)
    assert "only 0 of 4 members have signed what client 2 received" in server.refusals("masked")[0]
    assert not server.sent("masked")


def test_statistics_are_asked_of_one_set_of_clients_under_whatever_model(tmp_path):
    engine = engine_over(exchange_of(make_nodes(tmp_path, 4)), "fedavg + lda + secure")
    shared = statistics.build_shared(first_state())
    width = first_state().tensors["params/classifier.weight"].shape[1]
    request, layout = StatisticsRequest(Diagonal()), Layout.of(10, width, "diagonal")
    for _ in range(2):
        secure_statistics(engine, shared, request, layout, Key(0), 0.66)
    for model in (shared, moved(shared)):
        with pytest.raises(UserError, match="statistics was already summed over other clients"):
            secure_statistics(engine, model, request, layout, Key(0), 0.66, lost={3})


def test_prototypes_are_refused_before_a_run_in_which_not_everyone_takes_part(tmp_path):
    """Which classes a client has is the same in every round: sums over changing clients can be solved for it."""
    exchange = exchange_of(make_nodes(tmp_path, 4))
    with pytest.raises(UserError, match=r"secure\(updates=true\) and prototypes: .* let every client take part"):
        federated(tmp_path, exchange, clients=4, per_round=3, method=f"prototypes + {SECURE}", data="nodes")
    assert not (tmp_path / "run").exists()


def test_nodes_refuse_prototypes_over_changing_clients(tmp_path):
    """The server samples though it was refused: what it sums up in the first round fixes the clients of the others."""
    server = LyingServer(tmp_path, honest)
    shared = statistics.build_shared(first_state("prototypes"))
    assert not server.train(f"prototypes + {SECURE}", shared=shared).void
    assert server.train_again(VISITS[:3], moved(shared), 2).void
    assert "train was already summed over other clients" in server.refusals("mask-survivors", 100)[-1]
    assert not server.train_again(VISITS, moved(shared), 3).void


# What travels beside the masks


def test_the_reason_of_a_failure_has_no_number_of_a_client(tmp_path):
    """An update too large for the sum is refused; its size stays in the node's log."""
    said = []
    nodes = make_nodes(tmp_path, 4) | {VICTIM: make_node(tmp_path, 2, 4, say=said.append)}
    server = LyingServer(tmp_path, honest, nodes)
    shared = statistics.build_shared(first_state())
    large = {name: value * 1e10 if value.is_floating_point() else value for name, value in shared.items()}
    outcome = server.train(shared=large)
    assert outcome.void
    assert {failure.reason.partition(": ")[2] for failure in outcome.failures} == {WITHHELD}
    assert not re.search(r"\d", WITHHELD)
    assert any("client 2 failed: client 2: " in line for line in said)


def test_a_receipt_is_no_test_of_what_is_in_a_memory(tmp_path):
    """Two nodes with the same data and the same model keep the same memory; their receipts differ, and no CRC fits."""
    tags, crcs = set(), set()
    for place in ("first", "second"):
        exchange = exchange_of(make_nodes(tmp_path / place, 4))
        visits = [replace(visit, keep=True) for visit in VISITS]
        outcome = exchanged(SecureUpdates(0.66), engine_over(exchange, f"scaffold + {SECURE}"), "scaffold", visits)
        kept = [file.read_bytes() for file in sorted((tmp_path / place).glob("node-2/runs/*/memories/2.*.state"))]
        assert len(kept) == 1
        tags.add(outcome.tickets[2].partition("-")[2])
        crcs.add(f"{zlib.crc32(kept[0]):08x}")
    assert len(crcs) == 1
    assert len(tags) == 2
    assert not tags & crcs


# A node that lies: the others go on without it


def restated(**changes):
    """The victim's keys and statement as it could have made them itself, signed with its registered key."""

    def between(node, question, reply):
        if node != VICTIM or asked(question) != "mask-keys":
            return reply
        fields, came = unseal(reply)
        sent = {name: value.numpy().tobytes() for name, value in came}
        stated = Statement.read(sent["statement"])
        keys = changes.get("keys", sent["keys"])
        own = Signer(Registered(private_of("node-2"), None), changes.get("context", stated.context), None, None)
        session = b64decode(unseal(question)[0]["job"]["session"])
        member = SimpleNamespace(number=2, session=session, public=keys, derive=lambda purpose: bytes(32))
        statement = own.state(member, changes.get("examples", stated.examples))
        made = {"keys": keys, "statement": statement}
        return seal(
            fields, [(name, torch.frombuffer(bytearray(each), dtype=torch.uint8)) for name, each in made.items()]
        )

    return between


def private_of(name):
    return load_ssh_private_key(node_key(name).private, None)


@pytest.mark.parametrize("changes", [{"keys": bytes(64)}, {"examples": 10**6}, {"context": b"c" * 32}], ids=str)
def test_a_node_that_lies_about_itself_is_left_out_and_the_others_have_their_sum(tmp_path, changes):
    outcome = secure_round(tmp_path, restated(**changes))
    assert (outcome.void, [failure.client for failure in outcome.failures]) == ("", [2])
    assert outcome.failures[0].reason == "the other members would refuse its keys"
    assert float(outcome.sums["metric/visits"]) == 3


@pytest.mark.parametrize(("job", "extra", "left_out"), [
    ("mask-shares", "consent", [2]),
    ("mask-survivors", "survivors", []),
])  # fmt: skip
def test_a_signature_that_is_none_costs_its_member_alone(tmp_path, job, extra, left_out):
    def reverse(fields, came):
        came[:] = [(name, value.flip(0) if name == extra else value) for name, value in came]

    outcome = secure_round(tmp_path, spoiling(job, reverse, VICTIM))
    assert (outcome.void, [failure.client for failure in outcome.failures]) == ("", left_out)
