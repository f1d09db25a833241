"""One node cannot end everybody's run: what it breaks costs that node alone, and nobody else is blamed."""

import pytest
import torch

from nodes import THREE as VISITS
from nodes import (
    engine_over,
    exchange_of,
    federated,
    loop_over,
    make_nodes,
    set_tensor,
    spoiling,
    train_round,
)
from unskew.core import tensors
from unskew.engines.flower.engine import Expected, Template

BAD = 101  # the node of client 1


def describing(**changes):
    """What the bad node says of itself, with changes; those of its client under ``client``."""
    client = changes.pop("client", {})

    def change(fields, came):
        fields["description"].update(changes)
        fields["description"]["clients"][0].update(client)

    return change


LIES = {
    "the largest client number": describing(client={"number": 2**31 - 1}),
    "a number that makes a table of 8 TB": describing(client={"number": 10**12}),
    "2^40 examples": describing(client={"examples": 2**40}),
    "2^40 - 1 examples": describing(client={"examples": 2**40 - 1}),
    "a mean of 1e300": describing(mean=[1e300]),
    "a mean of 1e6": describing(mean=[1e6]),
    "a mean of 1.01": describing(mean=[1.01]),
    "a deviation of 100": describing(std=[100.0]),
    "a million classes": describing(classes=[str(number) for number in range(10**6)]),
    "a deviation of 1e-300": describing(std=[1e-300]),
    "no deviation": describing(std=[0.0]),
    "no clients": describing(clients=[{"name": "x", "number": 1, "examples": 0, "test": 0}]),
    "an image of 65536 pixels a side": describing(shape=[1, 65536, 65536]),
    "an image that most nodes do not have": describing(shape=[1, 4096, 4096]),
    "a name with control characters": describing(client={"name": "\x1b[2J"}),
    "a client that another node has": describing(client={"name": "node-0", "number": 0}),
}


@pytest.fixture(scope="module")
def without_the_bad_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    nodes = {number: node for number, node in make_nodes(folder).items() if number != BAD}
    return federated(folder, exchange_of(nodes), data="nodes", clients=2, rounds=1).weights_sha256


@pytest.mark.parametrize("lie", LIES)
def test_a_description_that_cannot_be_leaves_its_node_out_and_the_run_goes_on(tmp_path, without_the_bad_one, lie):
    said = []
    exchange = exchange_of(make_nodes(tmp_path), between=spoiling("describe", LIES[lie]))
    result = federated(tmp_path, exchange, said=said, data="nodes", clients=3, rounds=1)
    assert result.weights_sha256 == without_the_bad_one
    left_out = [line for line in said if "left out" in line]
    assert left_out
    assert all("101" in line or "node-1" in line for line in left_out)
    assert not any("\x1b" in line for line in said)


def test_many_examples_of_no_deviation_do_not_blow_up_everyones_inputs(tmp_path):
    """Its share in the normalization is that of its 49,999,999 examples; all honest replies would be NaN."""
    lie, said = describing(client={"examples": 49_999_999}, mean=[0.0], std=[1e-9]), []
    exchange = exchange_of(make_nodes(tmp_path), between=spoiling("describe", lie))
    result = federated(tmp_path, exchange, said=said, data="nodes", clients=3, rounds=1)
    assert result.history[0]["clients"] == 2
    assert "node node-1: its images are almost uniform, with a deviation of 1e-09; all nodes' is 0.38" in said


def more(fields, came):
    came.insert(len(fields["results"][0]["forms"]), ("stat/more", torch.zeros(3, dtype=torch.float64)))
    fields["results"][0]["forms"].append("plain")


LAYOUTS = {
    "a sum more": more,
    "a number as a tensor": set_tensor("weight", lambda value: value.repeat(2)),
    "an empty number": set_tensor("metric/visits", lambda value: value.new_zeros(0)),
    "a loss of another shape": set_tensor("metric/loss", lambda value: value.reshape(1, 1)),
}


@pytest.mark.parametrize("fault", LAYOUTS)
def test_another_layout_is_its_nodes_failure_where_nobody_knows_the_layout(tmp_path, shared, monkeypatch, fault):
    """A method's own code may fail on blank images, so that the server cannot know what replies look like."""
    monkeypatch.setattr(Template, "expect", lambda *given: Expected(None, {}))
    exchange = exchange_of(make_nodes(tmp_path), between=spoiling("job", LAYOUTS[fault]))
    outcome = train_round(engine_over(exchange), shared, VISITS)
    assert [failure.client for failure in outcome.failures] == [1]
    expected = train_round(loop_over(), shared, [VISITS[0], VISITS[2]])
    assert tensors.sha256(outcome.sums) == tensors.sha256(expected.sums)


def test_the_other_sides_words_in_a_bad_reply_do_not_reach_the_log(tmp_path, shared):
    marker = "MARKER-4711"

    def spoil(fields, came):
        came[0] = (marker, came[0][1])
        fields["results"][0][marker] = marker

    said = []
    engine = engine_over(exchange_of(make_nodes(tmp_path), between=spoiling("job", spoil)), said=said.append)
    outcome = train_round(engine, shared, VISITS)
    assert "do not match the job" in outcome.failures[0].reason
    assert marker not in outcome.failures[0].reason + "\n".join(said)
