"""Secure sums between machines: the bits of one process, nodes that drop out, and what either side refuses."""

import json
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from functools import partial

import pytest
import torch

import unskew
from nodes import FOUR as VISITS
from nodes import (
    OPTIONS,
    PARTITION,
    SECURE,
    add_extra,
    asked,
    engine_over,
    exchange_of,
    exchanged,
    federated,
    first_state,
    loop_over,
    make_node,
    make_nodes,
    rename_first,
    secure_round,
    set_tensor,
    spoiling,
    train_round,
)
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.engines.flower.engine import Rules
from unskew.engines.flower.messages import read_header, seal, unseal
from unskew.engines.flower.policy import Purpose
from unskew.privacy.masking import BOX_BYTES, shares_needed
from unskew.privacy.secure_sum import RoundedUpdates, SecureUpdates
from unskew.round import statistics
from unskew.round.jobs import decode_job

LOST = 102  # the node of client 2
STAYING = [visit for visit in VISITS if visit.client != 2]


def losing(job, *lost):
    """A network that loses the replies of these nodes to that job."""
    return lambda node, question, reply: None if node in lost and asked(question) == job else reply


def check_sum(outcome, visits=VISITS, number=1):
    """The sum is that of these visits in one process, rounded but without masks, bit for bit."""
    plain = exchanged(RoundedUpdates(), loop_over(4), visits=visits, number=number)
    assert outcome.void == ""
    assert tensors.sha256(outcome.sums) == tensors.sha256(plain.sums)


def loop(tmp_path, name="loop", **options):
    chosen = {**OPTIONS, "clients": 4, "partition": PARTITION, "engine": "loop", "out": tmp_path / name, **options}
    return unskew.run(**chosen)


# The same bits


@pytest.mark.parametrize("method", ["scaffold + moon", "fedavgm(0.9) + fedir", "private-updates(release=false)"])
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
    result = federated(tmp_path, exchange, clients=4, method="private-updates(noise=2, delta=1e-4, release=false)")
    theirs = loop(tmp_path, method="private-updates(noise=2, delta=1e-4)")
    told = [(row["epsilon"], row["delta"]) for row in result.history]
    assert told == [(row["epsilon"], row["delta"]) for row in theirs.history]
    assert 0 < told[0][0] < told[1][0]
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["privacy"] == json.loads((tmp_path / "loop" / "result.json").read_text())["privacy"]
    assert written["privacy"]["epsilon"] == pytest.approx(told[1][0])


@pytest.mark.parametrize("masks", ["", f" + {SECURE}"])
def test_in_a_federation_private_updates_are_a_release_and_nodes_are_not_sent_the_seed(tmp_path, masks):
    seeds, nodes = [], make_nodes(tmp_path, 4)

    def listening(node, question, reply):
        header = read_header(question)
        seeds.extend([header["seed"]] if "seed" in header else [])
        return reply

    exchange = exchange_of(nodes, between=listening)
    result = federated(tmp_path, exchange, clients=4, method=f"private-updates(noise=2, delta=1e-4){masks}", seed=11)
    assert "private-updates(noise=2, delta=0.0001, release=true)" in result.method
    assert result.released
    assert (result.privacy.updates.released, result.privacy.updates.in_masks) == (True, bool(masks))
    assert seeds
    assert 11 not in seeds
    folder = tmp_path / "run"
    told = json.loads((folder / "federation.json").read_text())
    assert {each["examples"] for each in told["clients"]} == {1}
    assert {*told["mean"], *told["std"]} == {0.5}
    assert not list((folder / "checkpoint").iterdir())  # earlier checkpoints have the data's hash
    sizes = "|".join(f"{visit.weight:.0f}" for visit in VISITS)  # examples of a client
    for file in (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".safetensors"):
        assert not re.search(rf"(?<!\.)\b({sizes})\b(?!\.)", file.read_text()), file
    seen = {key for row in result.history for key in row}
    assert seen == {"round", "accuracy", "loss", "epsilon", "delta", "unit", "released"}


def test_a_client_that_comes_late_is_not_in_a_private_run(tmp_path):
    nodes = make_nodes(tmp_path, 4)
    late, said = nodes.pop(LOST), []
    exchange = exchange_of(nodes)

    def observe(event):
        exchange.answers[LOST] = late.answer
        exchange.pause(5)

    federated(tmp_path, exchange, clients=3, method="private-updates", rounds=4, observe=observe, said=said)
    assert any("node node-2 is left out: with private-updates the clients must be those" in line for line in said)


# Nodes that drop out


@pytest.mark.parametrize(
    ("job", "in_the_sum"),
    [("mask-keys", 3), ("mask-shares", 3), ("masked", 3), ("mask-survivors", 4), ("mask-openings", 4)],
)
def test_a_node_that_drops_out_in_any_exchange_is_left_out_or_its_masks_are_taken_off(tmp_path, job, in_the_sum):
    outcome = secure_round(tmp_path, losing(job, LOST), rules=Rules(deadline=20))
    check_sum(outcome, VISITS if in_the_sum == 4 else STAYING)
    assert [failure.client for failure in outcome.failures] == [2] * (4 - in_the_sum)
    assert all(failure.reason.startswith("node-2: ") for failure in outcome.failures)


def test_below_the_threshold_a_round_is_void_and_says_so_and_the_next_one_counts(tmp_path):
    lost = {101, LOST}

    def between(node, question, reply):
        if node not in lost or asked(question) != "masked":
            return reply
        first = Purpose.of(decode_job(read_header(question)["job"])).round == 1
        return "the line was cut" if first else reply

    exchange = exchange_of(make_nodes(tmp_path, 4), between=between)
    rules = Rules(deadline=20, wait=1)
    result = federated(tmp_path, exchange, clients=4, method=f"fedavg + {SECURE}", rounds=3, rules=rules)
    first = result.history[0]
    assert first["void"] == "2 of 4 visits answered, but a secure sum needs 3"
    assert (first["clients"], [each["client"] for each in first["failures"]]) == (0, [1, 2])
    assert [row["clients"] for row in result.history[1:]] == [4, 4]
    assert result.weights_sha256 != loop(tmp_path, method="fedavg + rounded", rounds=2).weights_sha256  # other batches


def test_fewer_than_the_least_replies_end_the_run_with_what_to_do(tmp_path):
    exchange = exchange_of(make_nodes(tmp_path, 4), between=losing("mask-keys", 100, 101, LOST, 103))
    with pytest.raises(UserError, match=r"only 0 of the 1 required replies .* resume the run"):
        federated(tmp_path, exchange, clients=4, method=SECURE, rules=Rules(deadline=5, wait=1))


@pytest.mark.parametrize("before", ["mask-shares", "masked", "mask-survivors", "mask-openings"])
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
    assert outcome.failures == ()
    check_sum(outcome)


# What a node refuses


class Wire:
    """A secure sum over four nodes, with every question kept by its job."""

    def __init__(self, folder):
        self.questions, self.folder = {}, folder
        self.exchange = exchange_of(make_nodes(folder, 4), between=self.keep)
        self.number = 10**6

    def keep(self, node, question, reply):
        if node == LOST:
            self.questions[asked(question)] = question
        return reply

    def again(self, job, change=lambda fields: None, node=None):
        """Ask the node once more, with another number and what ``change`` makes of it."""
        fields, sent = unseal(self.questions[job])
        self.number += 1
        fields["number"] = self.number
        change(fields)
        header, _ = unseal((node or self.exchange.answers[LOST])(seal(fields, sent)))
        return header.get("reason") or header["results"][0].get("failure") or ""


@pytest.fixture
def wire(tmp_path):
    made = Wire(tmp_path)
    exchanged(SecureUpdates(0.66), engine_over(made.exchange, SECURE))
    return made


@pytest.mark.parametrize(("job", "name"), [
    ({"type": "train"}, "train"),
    ({"type": "train", "watch": ["model"]}, "train"),
    ({"type": "rounded", "inner": {"type": "train"}, "members": 4}, "train"),
    ({"type": "evaluate"}, "evaluate"),
    ({"type": "survey"}, "survey"),
    ({"type": "moments", "request": {}}, "moments"),
    (None, "train"),  # the one that is masked
])  # fmt: skip
def test_a_job_without_masks_is_refused_where_masks_were_agreed_on(wire, job, name):
    reason = wire.again("masked", lambda fields: fields.update(job=job or fields["job"]["inner"]))
    assert f"it asks for {name} without masks, but secure" in reason


def test_statistics_without_masks_are_refused_under_secure_and_a_plain_round_is_not(tmp_path):
    wire = Wire(tmp_path)
    engine = engine_over(wire.exchange, "fedavg + lda + secure")
    shared = statistics.build_shared(first_state())
    assert train_round(engine, shared, VISITS).failures == ()
    moments = {"type": "moments", "request": {}}
    words = {"type": "fixed-point-moments", "request": {}, "classes": 10, "width": 32, "bits": 24, "members": 1}
    for job in (moments, words, {"type": "rounded", "inner": moments, "members": 1}):
        assert "moments without masks" in wire.again("train", lambda fields, job=job: fields.update(job=job))


def test_masks_that_fewer_can_take_off_are_refused(wire):
    assert shares_needed(0.66, 4) == 3
    for job in ("mask-keys", "mask-shares", "masked", "mask-openings"):
        assert "2 of 4 clients remove the masks; 3 were agreed on" in wire.again(job, put(threshold=2))


def test_a_session_is_answered_once_also_after_the_node_was_killed(wire):
    assert "has already answered this visit" in wire.again("masked")
    anew = make_node(wire.folder, 2, 4).answer
    assert "has already answered this visit" in wire.again("masked", node=anew)


def test_a_second_opening_for_other_members_is_refused_also_after_the_node_was_killed(wire):
    assert wire.again("mask-openings") == ""  # the same question: the same shares
    for node in (None, make_node(wire.folder, 2, 4).answer):
        assert "with both a client could be unmasked" in wire.again(
            "mask-openings", put(answered=[False, True, True, True]), node
        )


def put(**values):
    """Other values in the question."""
    return lambda fields: fields["job"].update(values)


def without(name):
    return lambda fields: fields["job"].pop(name)


def change_keys(change):
    """Other public keys in the question: bytes, by the members' order."""

    def changed(fields):
        fields["job"]["keys"] = [b64encode(key).decode() for key in change(list(map(b64decode, fields["job"]["keys"])))]

    return changed


def put_parcel(change):
    """Other boxes for the visit."""

    def changed(fields):
        (visit,) = fields["visits"]
        visit["parcel"] = b64encode(change(b64decode(visit["parcel"]))).decode()

    return changed


TOLD = "members have signed what client 2 received"
OTHER_WORK = {"type": "rounded", "inner": {"type": "evaluate"}, "members": 4}
FEWER = {"type": "rounded", "inner": {"type": "train", "round": 1}, "members": 3}


@pytest.mark.parametrize(("change", "wrong"), [
    (without("members"), "missing required field `members`"),
    (put(members=[[0.5, 0]] * 4), "Expected `int`, got `float`"),
    (put(members=[[client, 0] for client in range(2001)]), "3 of 2001 clients remove the masks"),
    (put(members=[[client, 0] for client in range(2001)], threshold=2000), "members of the secure sum are not valid"),
    (put(members=[[0, 0], [0, 0], [2, 0], [3, 0]]), "members of the secure sum are not valid"),
    (put(members=[[-1, 0], [1, 0], [2, 0], [3, 0]]), "members of the secure sum are not valid"),
    (put(members=[[0, 0], [1, 0], [5, 0], [3, 0]]), "members of the secure sum are not valid"),
    (put(members=[[5, 0], [1, 0], [2, 0], [3, 0]]), TOLD),
    (put(members=[[1, 0], [0, 0], [2, 0], [3, 0]]), TOLD),
    (change_keys(lambda keys: keys[:3]), "sent 3 entries for the 4 members"),
    (change_keys(lambda keys: [keys[0][:63], *keys[1:]]), "a public key does not belong to its member"),
    (change_keys(lambda keys: [keys[1], *keys[1:]]), "a public key does not belong to its member"),
    (change_keys(lambda keys: [*keys[:2], keys[3], keys[2]]), "a public key does not belong to its member"),
    (change_keys(lambda keys: [*keys[:2], b"", keys[3]]), "a public key does not belong to its member"),
    (change_keys(lambda keys: [keys[1], keys[0], *keys[2:]]), TOLD),
    (put(keys=["€"] * 4), "Invalid base64 encoded string"),
    (put(sharing=[2, True, True, True]), "Expected `bool`, got `int`"),
    (put(sharing=[True, True, True]), "sent 3 entries for the 4 members"),
    (put(sharing=[True, True, False, True]), "at least 3 must take part, including this client"),
    (put(sharing=[False, False, True, True]), "a sum over 2 nodes would reveal too much about each"),
    (without("sharing"), "sent 0 entries for the 4 members"),
    (put(session=b64encode(bytes(16)).decode()), "members of the secure sum are not valid"),
    (put(session="€"), "Invalid base64 encoded string"),
    (put(threshold=4), TOLD),
    (put(threshold=5), "members of the secure sum are not valid"),
    (put(inner=OTHER_WORK), TOLD),
    (put(inner=FEWER), TOLD),
    (put(inner={"type": "erase"}), "no job is called 'erase'"),
    (put(inner={"type": "call", "function": "os:system"}), "os:system is code that this node has not allowed"),
])  # fmt: skip
def test_a_question_that_is_none_is_refused_and_the_node_goes_on(wire, change, wrong):
    assert wrong in wire.again("masked", change)
    assert wire.again("mask-keys") == ""


@pytest.mark.parametrize(("change", "wrong"), [
    (put_parcel(lambda boxes: boxes[:-1]), "did not forward the shares"),
    (put_parcel(lambda boxes: boxes + bytes(BOX_BYTES)), "did not forward the shares"),
    (put_parcel(lambda boxes: bytes(len(boxes))), "shares of client 0's secrets: the message was modified"),
    (put_parcel(lambda boxes: boxes[BOX_BYTES:] + boxes[:BOX_BYTES]), "client 0's secrets: the message was modified"),
    (put(answered=[True] * 3), "sent 3 entries for the 4 members"),
    (put(answered=[False, False, True, True]), "a sum over 2 nodes would reveal too much about each"),
    (without("answered"), "sent 0 entries for the 4 members"),
])  # fmt: skip
def test_shares_are_opened_only_from_the_boxes_of_the_others_and_for_enough_of_them(wire, change, wrong):
    assert wrong in wire.again("mask-openings", change)
    assert wire.again("mask-openings") == ""


# What the server refuses


check_as = partial(set_tensor, "check")  # the word that shows whether the masks cancel


def extra_as(change):
    """Another tensor instead of the first extra."""

    def changed(fields, came):
        name, value = came[0]
        came[0] = (name, change(value))

    return changed


def without_extra(fields, came):
    came.pop(0)
    fields["results"][0]["extra"] -= 1


def extra_as_a_sum(fields, came):
    fields["results"][0].update(forms=["plain"], extra=1)
    came[0] = (came[0][0], came[0][1].long())


def without_a_sum(fields, came):
    came.pop()
    fields["results"][0]["forms"].pop()


@pytest.mark.parametrize(("job", "change", "wrong"), [
    ("mask-keys", extra_as(lambda keys: keys[:63]), "do not match the job"),
    ("mask-keys", extra_as(lambda keys: keys[:8].double()), "do not match the job"),
    ("mask-keys", extra_as_a_sum, "do not match the job"),
    ("mask-keys", rename_first("secret"), "do not match the job"),
    ("mask-keys", without_extra, "do not match the job"),
    ("mask-keys", add_extra("opened", torch.zeros(64, dtype=torch.uint8)), "do not match the job"),
    ("mask-shares", extra_as(lambda boxes: boxes[BOX_BYTES:]), "do not match the job"),
    ("mask-shares", without_extra, "do not match the job"),
    ("masked", check_as(lambda word: word.double()), "do not match the job"),
    ("masked", check_as(lambda word: word.view(1)), "do not match the job"),
    ("masked", check_as(lambda word: word.repeat(2)), "oversized: its tensors take"),
    ("masked", check_as(lambda word: word.int()), "its form cannot have type torch.int32"),
    ("masked", without_a_sum, "do not match the job"),
    ("masked", add_extra("model/params/classifier.bias", torch.zeros(10)), "oversized: its tensors take"),
    ("masked", add_extra("diary", torch.zeros(0)), "do not match the job"),
])  # fmt: skip
def test_an_answer_that_is_none_is_left_out_by_name(tmp_path, job, change, wrong):
    outcome = secure_round(tmp_path, spoiling(job, change, LOST))
    assert [(failure.client, wrong in failure.reason) for failure in outcome.failures] == [(2, True)]
    check_sum(outcome, STAYING)


@pytest.mark.parametrize("change", [extra_as(lambda shares: shares[1:]), extra_as(torch.Tensor.bool), without_extra])
def test_one_that_opens_nothing_is_in_the_sum_all_the_same(tmp_path, change):
    outcome = secure_round(tmp_path, spoiling("mask-openings", change, LOST))
    assert outcome.failures == ()
    check_sum(outcome)


def test_a_word_that_was_not_agreed_on_loses_the_sum_and_that_is_said(tmp_path):
    outcome = secure_round(tmp_path, spoiling("masked", check_as(lambda word: word + 1), LOST))
    assert "the masks of a secure sum do not cancel" in outcome.void
    assert outcome.failures == ()  # nobody knows whose word it was


def test_wrong_shares_cost_nobody_the_sum_where_the_others_suffice(tmp_path):
    outcome = secure_round(tmp_path, spoiling("mask-openings", extra_as(lambda shares: shares ^ 1), LOST))
    assert outcome.failures == ()
    assert "client 2 opened wrong shares" in outcome.notes[-1]
    check_sum(outcome)


def test_boxes_that_do_not_open_cost_one_round_and_their_node_its_place(tmp_path):
    """All others open what they can; the next round is without the node that sealed garbage."""
    change = spoiling("mask-shares", extra_as(lambda boxes: boxes ^ 255), LOST)
    said = []
    engine = engine_over(exchange_of(make_nodes(tmp_path, 4), between=change), SECURE, said=said.append)
    outcome = exchanged(SecureUpdates(0.66), engine)
    assert "client 2 sealed for the others are invalid" in outcome.void
    assert [failure.client for failure in outcome.failures] == [2]
    assert [line for line in said if "left out" in line] == [line for line in said if "node node-2 is left out" in line]
    check_sum(exchanged(SecureUpdates(0.66), engine, number=2), STAYING, 2)


def test_a_secure_round_takes_no_more_on_the_wire_than_its_words_keys_and_shares(tmp_path):
    exchange = exchange_of(make_nodes(tmp_path, 4))
    engine = engine_over(exchange, SECURE)
    exchanged(SecureUpdates(0.66), engine)
    before = exchange.received
    outcome = exchanged(SecureUpdates(0.66), engine)
    headers = 4 * 5 * 1500
    assert outcome.bytes_up <= exchange.received - before <= 1.01 * outcome.bytes_up + headers


def test_visits_of_the_exchanges_around_the_work_name_no_memory(tmp_path):
    wire = Wire(tmp_path)
    visits = [replace(visit, keep=True) for visit in VISITS]
    exchanged(SecureUpdates(0.66), engine_over(wire.exchange, f"scaffold + {SECURE}"), "scaffold", visits)
    kept = {job: read_header(question)["visits"][0]["keep"] for job, question in wire.questions.items() if job}
    jobs = ("mask-keys", "mask-shares", "masked", "mask-survivors", "mask-openings")
    assert kept == {job: job == "masked" for job in jobs}
