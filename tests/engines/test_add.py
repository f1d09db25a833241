"""Replies are added in visit order, the only ordered addition there is; failures, tickets and extras are kept apart."""

from dataclasses import replace

import pytest
import torch

from unskew.core.errors import UserError
from unskew.core.types import Failure, Note, Outcome, Reply, Visit
from unskew.extend import add

VISITS = [Visit(client, 1.0) for client in range(3)]


def reply(value, **fields):
    return Reply({"weight": torch.tensor(value, dtype=torch.float64)}, **fields)


@pytest.mark.parametrize(("values", "total"), [((1e16, 1.0, -1e16), 0.0), ((1e16, -1e16, 1.0), 1.0)])
def test_sums_are_added_in_the_order_of_the_visits(values, total):
    """The 1 is lost where it meets 1e16 first."""
    assert add(map(reply, values), VISITS).sums["weight"].item() == total


def test_failures_tickets_notes_and_extras_are_kept_and_a_failed_visit_adds_nothing():
    marks = torch.ones(2)
    replies = [
        reply(2.0, ticket="0-aa"),
        Note("a client joined"),
        Failure(1, "no luck"),
        reply(3.0, extra={"m": marks}),
    ]
    outcome = add(replies, VISITS)
    assert outcome.sums["weight"].item() == 5.0
    assert outcome.failures == (Failure(1, "no luck"),)
    assert (outcome.tickets, outcome.notes, outcome.replied) == ({0: "0-aa"}, ("a client joined",), (0, 2))
    assert outcome.extra.keys() == {2}
    assert torch.equal(outcome.extra[2]["m"], marks)


def test_of_two_visits_to_one_client_the_last_ticket_counts():
    visits = [Visit(4, 1.0), Visit(4, 1.0, repeat=1)]
    assert add([reply(1.0, ticket="0-aa"), reply(1.0, ticket="1-bb")], visits).tickets == {4: "1-bb"}


def test_words_are_added_modulo_two_to_the_64th_next_to_floats():
    largest = torch.tensor([2**63 - 1, 5])
    replies = [Reply({"words": largest, "loss": torch.tensor(0.5, dtype=torch.float64)}) for _ in range(3)]
    sums = add(replies, VISITS).sums
    assert sums["words"].tolist() == [(3 * (2**63 - 1) + 2**63) % 2**64 - 2**63, 15]
    assert sums["loss"].item() == 1.5


def test_nothing_adds_up_to_nothing_and_the_parts_are_left_alone():
    assert add([], []) == Outcome({})
    one = reply(1.0)
    add([one, reply(2.0)], VISITS[:2])
    assert one.sums["weight"].item() == 1.0


def test_other_entries_are_refused():
    other = Reply({"loss": torch.zeros((), dtype=torch.float64)})
    with pytest.raises(ValueError, match="cannot be added: loss, weight"):
        add([reply(1.0), other], VISITS[:2])


def test_an_engine_that_answers_fewer_visits_than_it_was_given_is_noticed():
    with pytest.raises(UserError, match="the engine answered 1 of 3 visits"):
        add([reply(1.0)], VISITS)


def test_what_is_not_a_reply_or_not_in_the_order_of_the_visits_is_refused():
    with pytest.raises(UserError, match="the engine yields None; yield what answer returns, or a Failure"):
        add([None], VISITS)
    late = replace(reply(1.0), visit=VISITS[1])
    for replies in ([late], [reply(1.0)] * 4):
        with pytest.raises(UserError, match="not in the order of the visits"):
            add(replies, VISITS)
    assert add([reply(1.0), late], VISITS[:2]).sums["weight"].item() == 2.0


def test_progress_is_reported_after_every_visit():
    seen = []
    add([reply(1.0), Failure(1, "gone"), reply(1.0)], VISITS, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
