"""Secure sums between machines: the bits of one process, nodes that drop out, and what either side refuses."""

import json
from dataclasses import replace

import pytest
import torch

import unskew
from nodes import (
    OPTIONS,
    PARTITION,
    engine_over,
    exchange_of,
    federated,
    first_state,
    loop_over,
    make_node,
    make_nodes,
    reply_with,
)
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.engines.flower.messages import opened, read_header, sealed
from unskew.engines.flower.session import Rules
from unskew.privacy.agreement import shares_needed
from unskew.privacy.secure_updates import RoundedUpdates, SecureUpdates
from unskew.round import statistics

SECURE = "secure(updates=true)"
SIZES = (367, 235, 434, 402)
VISITS = [Visit(number, float(size)) for number, size in enumerate(SIZES)]
LOST = 102  # the node of client 2


def asked(question):
    """The job of a message, its name alone; empty where it is another message."""
    header = read_header(question)
    return header["job"].partition(" ")[0] if header["kind"] == "job" else ""


def losing(job, *lost):
    """A network that loses the replies of these nodes to that job."""
    return lambda node, question, reply: None if node in lost and asked(question) == job else reply


def exchanged(exchange, engine, method="fedavg", visits=VISITS):
    shared = statistics.shared(first_state(method))
    return exchange(engine, "train", shared, visits, Key(1).fold("round", 1), round=1)


def loop(tmp_path, name="loop", **options):
    chosen = {**OPTIONS, "clients": 4, "partition": PARTITION, "engine": "loop", "out": tmp_path / name, **options}
    return unskew.run(**chosen)


# The same bits


@pytest.mark.parametrize("method", ["scaffold + moon", "fedavgm(0.9) + fedir", "private-updates(sampling=fixed)"])
def test_masked_updates_give_the_weights_of_rounded_ones_in_one_process(tmp_path, method):
    ours = federated(tmp_path, exchange_of(make_nodes(tmp_path, 4)), clients=4, method=f"{method} + {SECURE}")
    theirs = loop(tmp_path, method=f"{method} + rounded")
    assert ours.weights_sha256 == theirs.weights_sha256
    assert [row.get("train_loss") for row in ours.history] == [row.get("train_loss") for row in theirs.history]
    assert not any("failures" in row or "void" in row for row in ours.history)


def test_masked_statistics_and_masked_evaluation_give_those_of_one_process(tmp_path):
    method = f"fedavg + {SECURE} + ccvr(per_class=20)"
    ours = federated(tmp_path, exchange_of(make_nodes(tmp_path, 4)), clients=4, method=method, data="nodes")
    theirs = loop(tmp_path, method=method)
    assert ours.weights_sha256 == theirs.weights_sha256
    assert ours.accuracy == theirs.accuracy
    assert [each.accuracy for each in ours.calibrations.values()] == [
        each.accuracy for each in theirs.calibrations.values()
    ]


def test_private_updates_tell_epsilon_by_round_and_in_the_result(tmp_path):
    exchange = exchange_of(make_nodes(tmp_path, 4))
    result = federated(tmp_path, exchange, clients=4, method="private-updates(noise=2, delta=1e-4)")
    theirs = loop(tmp_path, method="private-updates(noise=2, delta=1e-4)")
    told = [(row["epsilon"], row["delta"]) for row in result.history]
    assert told == [(row["epsilon"], row["delta"]) for row in theirs.history]
    assert 0 < told[0][0] < told[1][0]
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["privacy"] == json.loads((tmp_path / "loop" / "result.json").read_text())["privacy"]
    assert written["privacy"]["epsilon"] == pytest.approx(told[1][0])


def test_a_client_that_comes_late_is_not_in_a_private_run(tmp_path):
    nodes = make_nodes(tmp_path, 4)
    late, said = nodes.pop(LOST), []
    exchange = exchange_of(nodes)

    def observe(event):
        exchange.answers[LOST] = late.answer
        exchange.pause(5)

    federated(tmp_path, exchange, clients=3, method="private-updates", rounds=4, observe=observe, said=said)
    assert any("node node-2 is left out: private-updates counts on the clients that" in line for line in said)


# Nodes that drop out


@pytest.mark.parametrize(
    ("job", "in_the_sum"), [("mask-keys", 3), ("mask-shares", 3), ("masked-train", 3), ("mask-openings", 4)]
)
def test_a_node_that_drops_out_in_any_exchange_is_left_out_or_its_masks_are_taken_off(tmp_path, job, in_the_sum):
    exchange = exchange_of(make_nodes(tmp_path, 4), between=losing(job, LOST))
    outcome = exchanged(SecureUpdates(0.66), engine_over(exchange, SECURE, Rules(deadline=20)))
    staying = VISITS if in_the_sum == 4 else [visit for visit in VISITS if visit.client != 2]
    plain = exchanged(RoundedUpdates(), loop_over(4), visits=staying)
    assert outcome.void == ""
    assert tensors.sha256(outcome.sums) == tensors.sha256(plain.sums)
    assert [failure.client for failure in outcome.failures] == [2] * (4 - in_the_sum)
    assert all(failure.reason.startswith("node-2: ") for failure in outcome.failures)


def test_below_the_threshold_a_round_is_void_and_says_so_and_the_next_one_counts(tmp_path):
    lost = {101, LOST}

    def between(node, question, reply):
        first = read_header(question).get("round") == 1
        return "the line was cut" if node in lost and first and asked(question) == "masked-train" else reply

    exchange = exchange_of(make_nodes(tmp_path, 4), between=between)
    rules = Rules(deadline=20, wait=1)
    result = federated(tmp_path, exchange, clients=4, method=f"fedavg + {SECURE}", rounds=3, rules=rules)
    first = result.history[0]
    assert first["void"] == "2 of 4 visits answered, and 3 must for a secure sum"
    assert (first["clients"], [each["client"] for each in first["failures"]]) == (0, [1, 2])
    assert [row["clients"] for row in result.history[1:]] == [4, 4]
    assert result.weights_sha256 != loop(tmp_path, method="fedavg + rounded", rounds=2).weights_sha256  # other batches


def test_fewer_than_the_least_replies_end_the_run_with_what_to_do(tmp_path):
    exchange = exchange_of(make_nodes(tmp_path, 4), between=losing("mask-keys", 100, 101, LOST, 103))
    with pytest.raises(UserError, match=r"only 0 of the 1 replies .* resume the run"):
        federated(tmp_path, exchange, clients=4, method=SECURE, rules=Rules(deadline=5, wait=1))


@pytest.mark.parametrize("before", ["mask-shares", "masked-train", "mask-openings"])
def test_a_node_that_is_killed_between_two_exchanges_goes_on_where_it_was(tmp_path, before):
    exchange, killed = exchange_of(make_nodes(tmp_path, 4)), []

    def answer(question):
        if asked(question) == before and not killed:
            killed.append(before)
            exchange.answers[LOST] = make_node(tmp_path, 2, 4).answer  # nothing but its files is left
        return exchange.answers[LOST](question) if killed else first(question)

    first, exchange.answers[LOST] = exchange.answers[LOST], answer
    outcome = exchanged(SecureUpdates(1.0), engine_over(exchange, "secure(updates=true, threshold=1.0)"))
    assert killed
    assert (outcome.void, outcome.failures) == ("", ())
    assert tensors.sha256(outcome.sums) == tensors.sha256(exchanged(RoundedUpdates(), loop_over(4)).sums)


# What a node refuses


class Wire:
    """A secure sum over four nodes, with every question kept by its job."""

    def __init__(self, folder, method=SECURE):
        self.questions, self.folder = {}, folder
        self.exchange = exchange_of(make_nodes(folder, 4), between=self.keep)
        self.number = 10**6

    def keep(self, node, question, reply):
        if node == LOST:
            self.questions[asked(question)] = question
        return reply

    def run(self, method=SECURE):
        exchanged(SecureUpdates(0.66), engine_over(self.exchange, method))
        return self

    def again(self, job, change=lambda fields, sent: None, node=None):
        """Ask the node once more, with another number and what ``change`` makes of it."""
        fields, sent = opened(self.questions[job])
        sent = dict(sent)
        self.number += 1
        fields["number"] = self.number
        change(fields, sent)
        header, _ = opened((node or self.exchange.answers[LOST])(sealed(fields, list(sent.items()))))
        return header.get("reason") or header["results"][0].get("failure") or ""


@pytest.fixture
def wire(tmp_path):
    return Wire(tmp_path).run()


@pytest.mark.parametrize("job", ["train", "rounded-train 4", "evaluate", "survey", "moments {}"])
def test_a_job_without_masks_is_refused_where_masks_were_agreed_on(wire, job):
    reason = wire.again("masked-train", lambda fields, sent: fields.update(job=job))
    assert f"it asks for {job.partition(' ')[0]} without masks; agreed was secure" in reason


def test_statistics_without_masks_are_refused_under_secure_and_a_plain_round_is_not(tmp_path):
    wire = Wire(tmp_path)
    engine = engine_over(wire.exchange, "fedavg + lda + secure")
    shared = statistics.shared(first_state())
    engine.map_sum("train", shared, VISITS, Key(1), round=1)
    assert "moments without masks" in wire.again("train", lambda fields, sent: fields.update(job="moments {}"))


def test_masks_that_fewer_can_take_off_are_refused(wire):
    def change(fields, sent):
        name, _, options = fields["job"].partition(" ")
        fields["job"] = f"{name} " + json.dumps({**json.loads(options), "threshold": 2})

    assert shares_needed(0.66, 4) == 3
    for job in ("mask-keys", "mask-shares", "masked-train", "mask-openings"):
        assert "2 of 4 clients can take the masks off; 3 were agreed on" in wire.again(job, change)


def test_a_session_is_answered_once_also_after_the_node_was_killed(wire):
    assert "a session is answered once" in wire.again("masked-train")
    anew = make_node(wire.folder, 2, 4).answer
    assert "a session is answered once" in wire.again("masked-train", node=anew)


def test_a_second_opening_for_other_members_is_refused_also_after_the_node_was_killed(wire):
    def change(fields, sent):
        sent["secure/answered"] = torch.tensor([0, 1, 1, 1], dtype=torch.uint8)

    assert wire.again("mask-openings") == ""  # the same question: the same shares
    for node in (None, make_node(wire.folder, 2, 4).answer):
        assert "with both openings one would be unmasked" in wire.again("mask-openings", change, node)


def put(name, value):
    return lambda fields, sent: sent.update({name: value})


@pytest.mark.parametrize(("change", "wrong"), [
    (lambda fields, sent: sent.pop("secure/members"), "members are not pairs"),
    (put("secure/members", torch.zeros(4, 3, dtype=torch.int64)), "members are not pairs"),
    (put("secure/members", torch.zeros(0, 2, dtype=torch.int64)), "from 1 to 2,000 members, 0 given"),
    (put("secure/members", torch.tensor([[0, 0], [0, 0], [2, 0], [3, 0]])), "names one member twice"),
    (put("secure/members", torch.tensor([[-1, 0], [1, 0], [2, 0], [3, 0]])), "numbers that are not possible"),
    (put("secure/members", torch.tensor([[0, 0], [1, 0], [5, 0], [3, 0]])), "client 2 is not among the members"),
    (put("secure/keys", torch.zeros(4, 63, dtype=torch.uint8)), r"secure/keys is torch.uint8 [4, 63]"),
    (put("secure/sharing", torch.tensor([2, 1, 1, 1], dtype=torch.uint8)), "yes or no of every member"),
    (put("secure/odd", torch.zeros(4)), "sends no secure/odd"),
    (lambda fields, sent: sent.pop("secure/sharing"), "no secure/sharing with its question"),
    (lambda fields, sent: fields.update(job="masked-train {"), "question cannot be read"),
    (lambda fields, sent: fields.update(job='masked-train {"session": "00"}'), "question cannot be read"),
])  # fmt: skip
def test_a_question_that_is_none_is_refused_and_the_node_goes_on(wire, change, wrong):
    assert wrong in wire.again("masked-train", change)
    assert wire.again("mask-keys") == ""


# What the server refuses


def changed(job, change):
    def between(node, question, reply):
        return reply_with(reply, change) if node == LOST and asked(question) == job else reply

    return between


def speaks_for_another(fields, came):
    for at, (name, value) in enumerate(came):
        if name == "came":
            came[at] = (name, torch.ones_like(value))


def sends_all_rows(fields, came):
    """The keys of everyone, as another form would allow."""
    for at, (name, _) in enumerate(came):
        if name == "keys":
            came[at] = (name, torch.ones(4, 11, dtype=torch.float64))
            fields["results"][0]["forms"][at] = "plain"


def no_words(fields, came):
    for at, (name, _) in enumerate(came):
        if name == "low/check":
            came[at] = (name, torch.tensor(0.5, dtype=torch.float64))


def without_a_tensor(fields, came):
    came.pop()
    fields["results"][0]["forms"].pop()


@pytest.mark.parametrize(("job", "change", "wrong"), [
    ("mask-keys", speaks_for_another, "came speaks for another member"),
    ("mask-keys", sends_all_rows, "keys speaks for another member"),
    ("masked-train", no_words, "low/check is not made of half words"),
    ("masked-train", without_a_tensor, "its names are not those of the job"),
    ("mask-shares", without_a_tensor, "its names are not those of the job"),
])  # fmt: skip
def test_an_answer_that_is_none_is_left_out_by_name(tmp_path, job, change, wrong):
    exchange = exchange_of(make_nodes(tmp_path, 4), between=changed(job, change))
    outcome = exchanged(SecureUpdates(0.66), engine_over(exchange, SECURE))
    assert [(failure.client, wrong in failure.reason) for failure in outcome.failures] == [(2, True)]
    staying = [visit for visit in VISITS if visit.client != 2]
    plain = exchanged(RoundedUpdates(), loop_over(4), visits=staying)
    assert tensors.sha256(outcome.sums) == tensors.sha256(plain.sums)


def test_a_secure_round_takes_no_more_on_the_wire_than_its_words_keys_and_shares(tmp_path):
    exchange = exchange_of(make_nodes(tmp_path, 4))
    engine = engine_over(exchange, SECURE)
    exchanged(SecureUpdates(0.66), engine)
    before = exchange.received
    outcome = exchanged(SecureUpdates(0.66), engine)
    headers = 4 * 4 * 1500
    assert outcome.bytes_up <= exchange.received - before <= 1.01 * outcome.bytes_up + headers


def test_visits_of_the_exchanges_around_the_work_name_no_memory(tmp_path):
    wire = Wire(tmp_path)
    visits = [replace(visit, keep=True) for visit in VISITS]
    exchanged(SecureUpdates(0.66), engine_over(wire.exchange, f"scaffold + {SECURE}"), "scaffold", visits)
    kept = {job: read_header(question)["visits"][0]["keep"] for job, question in wire.questions.items() if job}
    assert kept == {"mask-keys": False, "mask-shares": False, "masked-train": True, "mask-openings": False}
