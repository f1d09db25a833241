"""Nodes that are slow, go away, come back, come late, or bring what does not fit: rounds go on without them."""

from dataclasses import replace

import pytest
import torch

from nodes import THREE as VISITS
from nodes import (
    engine_over,
    exchange_of,
    federated,
    first_state,
    loop_over,
    make_node,
    make_nodes,
    outcome_of,
    slice_of_digits,
    train_round,
)
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.engines.flower.engine import Rules
from unskew.engines.flower.messages import Presence, read_header
from unskew.engines.flower.node import Node
from unskew.report.write import make_report
from unskew.round import statistics
from unskew.round.client import Survey
from unskew.round.client_memory import with_tickets
from unskew.round.evaluation import Evaluate

KEY = Key(0).fold("round", 1)


@pytest.fixture
def nodes(tmp_path):
    return make_nodes(tmp_path)


def train(engine, shared, visits=VISITS, number=1):
    return train_round(engine, shared, visits, number)


def is_job(node, question):
    """Whether it asks node 101 for work."""
    return node == 101 and read_header(question)["kind"] == "job"


def reasons(outcome):
    return {failure.client: failure.reason for failure in outcome.failures}


def test_a_node_that_is_gone_does_not_stop_the_round(nodes, shared):
    exchange = exchange_of(nodes)
    engine = engine_over(exchange)
    del exchange.answers[102]
    exchange.pause(10)
    outcome = train(engine, shared)
    assert reasons(outcome) == {2: "node-2: node node-2 is not connected"}
    expected = train(loop_over(), shared, VISITS[:2])
    assert tensors.sha256(outcome.sums) == tensors.sha256(expected.sums)


def test_a_node_slower_than_the_deadline_is_left_alone_until_it_is_heard_of_again(nodes, shared):
    held, asked = {}, []

    def between(node, question, reply):
        if is_job(node, question):
            asked.append(question)
            return None if held else reply
        return reply

    exchange = exchange_of(nodes, between=between)
    engine = engine_over(exchange, rules=Rules(deadline=30))
    held["now"] = True
    first = train(engine, shared, number=1)
    assert reasons(first) == {1: "node-1: it did not answer within the deadline"}
    before = exchange.now()
    second = train(engine, shared, number=2)
    assert reasons(second) == {1: "node-1: node node-1 has not answered since its last deadline"}
    assert exchange.now() - before < 5  # nobody waits for it
    assert len(asked) == 1
    held.clear()
    exchange.presence[101] = Presence(since="later")  # it was started again
    exchange.pause(5)
    assert train(engine, shared, number=3).failures == ()  # it describes itself meanwhile


@pytest.mark.parametrize("comes_back", [True, False])
def test_nobody_waits_for_a_node_that_was_killed_while_it_worked(nodes, shared, comes_back):
    exchange = exchange_of(nodes)
    engine = engine_over(exchange, rules=Rules(deadline=600))
    train(engine, shared)

    def between(node, question, reply):
        if not is_job(node, question):
            return reply
        if comes_back:
            exchange.presence[101] = Presence(since="again")
        else:
            del exchange.answers[101]
        return None

    exchange.between, before = between, exchange.now()
    assert reasons(train(engine, shared, number=2)) == {1: "node-1: its node disconnected before it answered"}
    assert exchange.now() - before < 10


@pytest.mark.parametrize("well", [True, False])
def test_a_node_that_is_back_takes_part_in_the_round_unless_it_cannot_say_what_it_brings(nodes, shared, well):
    def between(node, question, reply):
        broken = node == 101 and read_header(question)["kind"] == "describe" and not well
        return "the node service does not answer" if broken else reply

    exchange = exchange_of(nodes)
    engine = engine_over(exchange, rules=Rules(deadline=600))
    train(engine, shared)
    exchange.between, exchange.presence[101] = between, Presence(since="again")
    exchange.pause(5)
    before = exchange.now()
    why = {} if well else {1: "node-1: the node service does not answer"}
    assert reasons(train(engine, shared, number=2)) == why
    assert exchange.now() - before < 10


def test_a_late_reply_does_not_count_but_shows_that_the_node_works(nodes, shared):
    late = []

    def between(node, question, reply):
        if is_job(node, question) and not late:
            late.append(reply)
            return None
        return reply

    exchange = exchange_of(nodes, between=between)
    engine = engine_over(exchange, rules=Rules(deadline=30))
    assert reasons(train(engine, shared)) == {1: "node-1: it did not answer within the deadline"}
    waiting = next(iter(engine._session._late))
    receive = exchange.receive
    exchange.receive = lambda ids: {waiting: late[0], **receive([each for each in ids if each != waiting])}
    outcome = train(engine, shared, number=2)
    assert reasons(outcome) == {1: "node-1: node node-1 has not answered since its last deadline"}
    exchange.receive = receive
    assert train(engine, shared, number=3).failures == ()


def test_a_round_waits_for_as_many_replies_as_it_needs(nodes, shared):
    exchange, said = exchange_of(nodes), []
    engine = engine_over(exchange, rules=Rules(min_replies=3, wait=100), said=said.append)
    away = exchange.answers.pop(102)
    exchange.pause(5)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        exchange._clock += seconds
        if sum(pauses) > 20:
            exchange.answers[102] = away

    exchange.pause = pause
    outcome = train(engine, shared)
    assert outcome.failures == ()
    assert tensors.sha256(outcome.sums) == tensors.sha256(train(loop_over(), shared).sums)
    told = "round 1: 2 of 3 replies; waiting up to 100 s for nodes"
    assert told in said
    assert told in outcome.notes


def test_the_waiting_has_a_limit_and_the_message_says_what_to_do(nodes, shared):
    exchange = exchange_of(nodes)
    engine = engine_over(exchange, rules=Rules(min_replies=3, wait=60))
    del exchange.answers[102]
    before = exchange.now()
    with pytest.raises(UserError, match=r"only 2 of the 3 required replies arrived; .*resume the run"):
        train(engine, shared)
    assert 60 <= exchange.now() - before < 80


def test_a_survey_needs_every_client_and_waits_for_it(nodes):
    exchange = exchange_of(nodes)
    engine = engine_over(exchange, "fedir", rules=Rules(wait=20))
    away = exchange.answers.pop(100)
    outcome = outcome_of(engine, Survey(), {}, [Visit(client, 1.0) for client in range(3)], KEY)
    assert [failure.client for failure in outcome.failures] == [0]
    exchange.answers[100] = away
    exchange.pause(5)
    outcome = outcome_of(engine, Survey(), {}, [Visit(client, 1.0) for client in range(3)], KEY)
    assert float(outcome.sums["stat/fedir/counts"].sum()) == 1438


def test_a_node_that_comes_late_takes_part_from_the_next_round_on(tmp_path, shared):
    nodes = make_nodes(tmp_path)
    late = nodes.pop(101)
    exchange, said = exchange_of(nodes), []
    engine = engine_over(exchange, said=said.append)
    engine._session.members.begun = True
    assert engine.roster.sizes.tolist() == [556, 0, 447]
    exchange.answers[101] = late.answer
    exchange.pause(5)
    outcome = train(engine, shared, [VISITS[0], VISITS[2]])
    assert engine.roster.sizes.tolist() == [556, 435, 447]
    assert "node node-1 takes part: client 1 (435 examples)" in outcome.notes
    assert train(engine, shared, number=2).failures == ()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_node_that_was_killed_comes_back_with_its_memory_or_says_that_it_is_lost(tmp_path, keeps):
    nodes, method = make_nodes(tmp_path), "scaffold"
    exchange, loop = exchange_of(nodes), loop_over(method=method)
    engine, shared = engine_over(exchange, method), statistics.build_shared(first_state(method))
    visits = with_tickets(VISITS, {})
    ours, theirs = (train(each, shared, each.memory.assign(visits)) for each in (engine, loop))
    assert set(ours.tickets) == {0, 1, 2}
    if not keeps:
        for file in (tmp_path / "node-1" / "runs").glob("*/memories/*"):
            file.unlink()
    exchange.answers[101] = make_node(tmp_path, 1).answer  # a new process with the same folder
    exchange.presence[101] = Presence(since="again")
    exchange.pause(5)
    outcome_of(engine, Evaluate(), shared, VISITS, KEY)  # it describes itself meanwhile
    ours, theirs = (
        train(each, shared, each.memory.assign(with_tickets(VISITS, before.tickets)), number=2)
        for each, before in ((engine, ours), (loop, theirs))
    )
    assert ours.failures == ()
    anew = "client 1 of node node-1 has lost its saved state and starts from scratch"
    assert (anew in ours.notes) is not keeps
    assert (tensors.sha256(ours.sums) == tensors.sha256(theirs.sums)) is keeps


def test_a_node_that_lost_its_whole_folder_is_told_again_what_was_agreed_on(tmp_path, shared):
    nodes = make_nodes(tmp_path)
    exchange = exchange_of(nodes)
    engine = engine_over(exchange)
    train(engine, shared)
    exchange.answers[101] = Node(slice_of_digits(1), tmp_path / "elsewhere").answer
    outcome = train(engine, shared, number=2)
    assert outcome.failures == ()
    again = train(loop_over(), shared, number=2)
    assert tensors.sha256(outcome.sums) == tensors.sha256(again.sums)


def test_a_node_whose_name_is_not_the_one_of_its_key_is_left_out(nodes, shared):
    said = []
    exchange = exchange_of(nodes, presence={101: Presence("hospital")})
    engine = engine_over(exchange, said=said.append)
    wrong = "its key is registered for 'hospital', but it is 'node-1'"
    assert any(wrong in line for line in said)
    assert engine.roster.sizes.tolist() == [556, 0, 447]


def test_a_node_that_comes_back_with_other_data_is_left_out(tmp_path, shared):
    nodes, said = make_nodes(tmp_path), []
    exchange = exchange_of(nodes)
    engine = engine_over(exchange, said=said.append)
    smaller = slice_of_digits(1)
    client = replace(smaller.clients[0], train=smaller.clients[0].train[:100])
    exchange.answers[101] = Node(replace(smaller, clients=(client,)), tmp_path / "node-1").answer
    exchange.presence[101] = Presence(since="again")
    exchange.pause(5)
    train(engine, shared)
    outcome = train(engine, shared, number=2)
    wrong = "client 'node-1' was number 1 with 435 examples when the run began, not number 1 with 100;"
    assert f"node-1: node node-1 is left out: {wrong}" in reasons(outcome)[1]
    assert any(wrong in line for line in said)


def test_several_visits_to_one_client_go_in_one_message_and_add_up_in_their_order(nodes, shared):
    exchange = exchange_of(nodes)
    engine = engine_over(exchange)
    visits = [Visit(0, 1.0, take=64), Visit(1, 1.0, take=64), Visit(0, 1.0, take=64, repeat=1)]
    train(engine, shared, visits)
    count = exchange._count
    outcome = train(engine, shared, visits, number=2)
    assert exchange._count - count == 2
    again = train(loop_over(), shared, visits, number=2)
    assert tensors.sha256(outcome.sums) == tensors.sha256(again.sums)
    assert torch.equal(outcome.sums["metric/visits"], torch.tensor(3.0, dtype=torch.float64))


def test_the_report_of_a_run_with_a_lost_node_names_its_client_by_number(tmp_path):
    """Which client has which examples is known to the nodes alone, and the report does without it."""
    exchange = exchange_of(make_nodes(tmp_path))
    exchange.between = lambda node, question, reply: None if is_job(node, question) else reply
    federated(tmp_path, exchange, data="nodes", rounds=1, rules=Rules(deadline=5, wait=5))
    page, _ = make_report(tmp_path / "run")
    assert "client 1" in page.read_text()
