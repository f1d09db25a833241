"""A reply that is not what it should be does not count; the others do, and the reason is told by name."""

import json

import pytest
import torch

from nodes import THREE as VISITS
from nodes import (
    add_extra,
    engine_over,
    exchange_of,
    first_state,
    loop_over,
    make_nodes,
    outcome_of,
    rename_first,
    set_tensor,
    spoiling,
    train_round,
)
from unskew.core import tensors
from unskew.core.key import Key
from unskew.engines.flower.engine import Rules
from unskew.engines.flower.messages import PROTOCOL, Envelope, read_header
from unskew.round.evaluation import Evaluate

KEY = Key(0).fold("round", 1)
BAD = 101  # the node of client 1


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    return make_nodes(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def without_client_1(shared):
    outcome = train_round(loop_over(), shared, [VISITS[0], VISITS[2]])
    return tensors.sha256(outcome.sums)


def set_result(**values):
    return lambda fields, came: fields["results"][0].update(values)


def one_more(fields, came):
    came.append(("more", torch.zeros(1)))


def one_less(fields, came):
    del came[-1]


def swapped(fields, came):
    came[0], came[1] = came[1], came[0]


def as_extra(fields, came):
    fields["results"][0]["forms"].pop()
    fields["results"][0]["extra"] = 1


def with_nan(value):
    value = value.clone()
    value.view(-1)[0] = float("nan")
    return value


def failed(fields, came):
    fields["results"] = [{"client": 1, "repeat": 0, "failure": "out of memory"}]
    came.clear()


BIAS = "delta/params/classifier.bias"
FAULTS = {
    "NaN": (set_tensor(BIAS, with_nan), "NaN or infinity"),
    "infinity": (set_tensor("metric/loss", lambda value: value + float("inf")), "NaN or infinity"),
    "another shape": (set_tensor(BIAS, lambda value: value[:5]), "differs in shape or type from the model's"),
    "another shape of a sum": (set_tensor("weight", lambda value: value.repeat(2)), "do not match the job"),
    "another type": (set_tensor(BIAS, lambda value: value.double()), "differs in shape or type from the model's"),
    "another name": (rename_first("wait"), "do not match the job"),
    "another order": (swapped, "do not match the job"),
    "a tensor more": (one_more, "do not match their description"),
    "a tensor less": (one_less, "do not match their description"),
    "another weight": (set_tensor("weight", lambda value: value * 1000), "its weight or number of visits"),
    "more visits than one": (set_tensor("metric/visits", lambda value: value * 5), "number of visits"),
    "too many examples": (set_tensor("metric/examples", lambda value: value * 2), "it reports 870 examples"),
    "another client": (set_result(client=2), "it answers other visits"),
    "another repeat": (set_result(repeat=1), "it answers other visits"),
    "a client that is no number": (set_result(client="1"), "at `$[0].client`"),
    "a form more": (lambda fields, came: fields["results"][0]["forms"].append("plain"), "not match their"),
    "forms that are none": (set_result(forms="plain"), "at `$[0].forms`"),
    "an unknown form": (set_result(forms=["x"] * 13), "at `$[0].forms[0]`"),
    "a sum as whole numbers": (set_tensor("weight", torch.Tensor.long), "do not match the job"),
    "a sum as extra": (as_extra, "do not match the job"),
    "an extra that nobody asked for": (add_extra("diary", torch.zeros(3, dtype=torch.uint8)), "do not match the job"),
    "an extra that does not come": (set_result(extra=1), "do not match their description"),
    "fewer extras than none": (set_result(extra=-1), "at `$[0].extra`"),
    "a factor of nothing": (set_result(factor=0), "at `$[0].factor`"),
    "a factor that is no number": (set_result(factor="1"), "at `$[0].factor`"),
    "a ticket that nobody asked for": (set_result(ticket="1.0-00000000"), "its ticket is not for this visit"),
    "its own failure": (failed, "out of memory"),
    "no results": (lambda fields, came: fields.update(results=[]), "it answers other visits"),
    "results that are none": (lambda fields, came: fields.update(results=[3]), "at `$[0]`"),
    "another run": (lambda fields, came: fields.update(run="0" * 32), "answers another message"),
    "another message": (lambda fields, came: fields.update(number=1), "answers another message"),
}


def ask(nodes, shared, between, **rules):
    said = []
    engine = engine_over(exchange_of(nodes, between=between), rules=Rules(**rules), said=said.append)
    return train_round(engine, shared, VISITS), said


def is_job(question):
    return read_header(question)["kind"] == "job"


def test_without_a_fault_the_sums_are_those_of_one_process(nodes, shared):
    outcome, _ = ask(nodes, shared, lambda node, question, reply: reply)
    expected = train_round(loop_over(), shared, VISITS)
    assert outcome.failures == ()
    assert list(outcome.sums) == list(expected.sums)
    assert tensors.sha256(outcome.sums) == tensors.sha256(expected.sums)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_left_out_by_name_with_its_reason(nodes, shared, without_client_1, fault):
    change, wrong = FAULTS[fault]
    outcome, said = ask(nodes, shared, spoiling("job", change))
    (failure,) = outcome.failures
    assert (failure.client, failure.repeat) == (1, 0)
    assert failure.reason.startswith("node-1: ")
    assert wrong in failure.reason
    assert tensors.sha256(outcome.sums) == without_client_1
    assert any(wrong in line for line in said)


@pytest.mark.parametrize(("reply", "wrong"), [
    (Envelope(b"not JSON"), "not JSON"),
    (Envelope(b""), "not JSON"),
    (Envelope(json.dumps({"protocol": PROTOCOL, "tensors": []}).encode(), b"x" * 10**6), "oversized"),
    ("ClientApp stopped responding.", "ClientApp stopped responding."),
])  # fmt: skip
def test_what_is_no_reply_at_all_is_left_out(nodes, shared, without_client_1, reply, wrong):
    outcome, _ = ask(nodes, shared, lambda node, asked, came: reply if node == BAD and is_job(asked) else came)
    assert [failure.client for failure in outcome.failures] == [1]
    assert wrong in outcome.failures[0].reason
    assert tensors.sha256(outcome.sums) == without_client_1


def test_a_reply_that_was_recorded_earlier_is_refused(nodes, shared, without_client_1):
    recorded = []

    def between(node, question, reply):
        if node != BAD or not is_job(question):
            return reply
        recorded.append(reply)
        return recorded[0]

    said = []
    engine = engine_over(exchange_of(nodes, between=between), said=said.append)
    assert train_round(engine, shared, VISITS).failures == ()
    outcome = train_round(engine, shared, VISITS)
    assert "it answers another message" in outcome.failures[0].reason
    assert tensors.sha256(outcome.sums) == without_client_1


def test_test_images_are_counted_as_the_node_said(nodes, shared):
    change = set_tensor("metric/total", lambda value: value * 3)
    engine = engine_over(exchange_of(nodes, between=spoiling("job", change)))
    outcome = outcome_of(engine, Evaluate(), first_state().tensors, VISITS, KEY)
    assert "its counts of test images are impossible for the 120 it has" in outcome.failures[0].reason
    assert float(outcome.sums["metric/total"].sum()) == 120 + 119
