"""A client is known by its name: it keeps its number whichever node id it comes with."""

from dataclasses import replace

import pytest

from unskew.engines.flower.engine import KnownClient, Members
from unskew.engines.flower.messages import ClientFacts, Description


def said(name, *clients):
    return Description(name, "1", clients, ("a", "b"), (1, 8, 8), (0.5,), (0.2,), False, "shift")


def alone(name, examples=10, number=None):
    return said(name, ClientFacts(name, number, examples, 0))


def test_numbers_that_nodes_state_are_theirs_and_the_others_get_the_first_free_ones():
    members = Members()
    members.admit(1, alone("x", number=1), {1})
    members.admit(2, alone("a"), {1, 2})
    members.admit(3, alone("b", 20), {1, 2, 3})
    assert {each.name: each.number for each in members.by_number.values()} == {"x": 1, "a": 0, "b": 2}
    assert members.roster.sizes.tolist() == [10, 10, 20]


def test_a_number_that_nobody_has_yet_holds_nothing():
    members = Members()
    members.admit(1, alone("x", number=3), {1})
    assert members.roster.sizes.tolist() == [0, 0, 0, 10]
    assert members.roster.inhabited.tolist() == [3]


def test_a_node_that_comes_back_with_another_id_is_the_same_client():
    members = Members()
    members.admit(1, alone("a"), {1})
    members.admit(9, alone("a"), {9})
    assert [(each.number, each.node) for each in members.by_number.values()] == [(0, 9)]
    assert members.of_node(1) == []


def test_two_nodes_cannot_have_one_client():
    members = Members()
    members.admit(1, alone("a"), {1})
    with pytest.raises(ValueError, match="another node already has client 'a'"):
        members.admit(2, alone("a"), {1, 2})


@pytest.mark.parametrize(("comes", "wrong"), [
    (alone("b", number=0), "client 'b' asks for number 0, which 'a' has"),
    (alone("a", number=1), "was number 0 with 10 examples when the run began, not number 1 with 10;"),
    (alone("a", examples=11), "when the run began, not number 0 with 11; restore its data or number"),
])  # fmt: skip
def test_what_contradicts_what_is_known_is_refused(comes, wrong):
    members = Members(remembered={"a": KnownClient("a", 0, 10)})
    with pytest.raises(ValueError, match=wrong):
        members.admit(1, comes, {1})


def test_a_node_may_have_several_clients():
    members = Members()
    facts = [ClientFacts(f"c{number}", number, number + 1, 0) for number in (2, 0)]
    members.admit(1, said("many", *facts), {1})
    assert members.roster.sizes.tolist() == [1, 0, 3]


def test_those_that_come_after_the_beginning_are_late():
    members = Members(remembered={"a": KnownClient("a", 0, 10)}, begun=True)
    members.admit(1, alone("a"), {1})
    members.admit(2, alone("b"), {1, 2})
    assert {name: known.late for name, known in members.remembered.items()} == {"a": False, "b": True}
    assert replace(members.remembered["b"], late=False) == KnownClient("b", 1, 10)
