"""Laws between methods: what commutes, what is the same as what, what is refused, what a failure leaves alone."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from federation import federation, largest_difference, remembered
from unskew import methods
from unskew.core.errors import UserError
from unskew.round import driver
from unskew.round.algorithm import Algorithm, Named, compose
from unskew.round.sampling import uniform

SIZES = (14, 9, 1, 6)
LOCAL = {"epochs": 1, "batch": 6, "momentum": 0.9, "weight_decay": 0.01}


def small(method, sizes=SIZES, **local):
    return federation(method, sizes=sizes, **{**LOCAL, **local})


def run(method, sizes=SIZES, rounds=3, per_round=3, **local):
    return small(method, sizes, **local).run(rounds, per_round=per_round)


def apart(left, right, sizes=SIZES, **settings):
    """How far the results of two texts lie apart."""
    return largest_difference(*(run(text, sizes, **settings).tensors for text in (left, right)))


# Methods on different slots commute

TOGETHER = [
    ("fedavgm(0.8)", "fedvc(size=6)", "fedir"),
    ("moon(mu=2)", "clsprox(0.3)"),
    ("prototypes", "fedir(uniform)", "fedprox(0.3)"),
    ("scaffold", "moon(mu=2)", "fedvc(size=6)"),
    ("scaffold", "fednova", "fedadam"),
    ("feddyn(0.1)", "fedir", "clsnorm"),
    ("feddyn(0.1)", "moon(mu=2)", "prototypes"),
    ("clsnorm", "clsprox(0.3)", "prototypes"),
    ("centralised", "fedprox(0.3)", "clsnorm"),
]


@pytest.mark.parametrize("texts", TOGETHER, ids=" + ".join)
def test_methods_on_different_slots_commute(texts):
    first, *others = (run(" + ".join(order)) for order in permutations(texts))
    for other in others:
        assert largest_difference(first.tensors, other.tensors) < 1e-12
        assert largest_difference(first.memory, other.memory) < 1e-12
        assert other.sent.keys() == first.sent.keys()
        assert all((other.sent[name] - value).abs().max() < 1e-12 for name, value in first.sent.items())


@pytest.mark.parametrize("texts", TOGETHER, ids=" + ".join)
def test_each_method_of_a_composition_takes_part(texts):
    """Without any one of them the result is another."""
    whole = run(" + ".join(texts)).tensors
    for text in texts:
        without = run(" + ".join(other for other in texts if other != text)).tensors
        assert largest_difference(whole, without) > 1e-7, text


# Federations in which a method has nothing to do


def test_one_client_alone_that_is_everyone_has_nothing_to_weigh():
    assert apart("centralised + fedir", "centralised") < 1e-12


@pytest.mark.parametrize("method", ["fedvc(size=6)", "fedvc(size=6) + fedavgm(0.8)", "fedvc(size=6) + scaffold"])
def test_virtual_clients_all_take_as_many_steps_so_fednova_changes_nothing(method):
    assert apart(f"{method} + fednova", method) < 1e-12


# What is refused

FIRST = {"fedvc": "sampler", "scaffold": "correction", "fednova": "aggregate", "fedavgm": "server"}


@pytest.mark.parametrize("second", ["feddyn", "centralised"])
@pytest.mark.parametrize(("first", "slot"), FIRST.items())
def test_two_methods_on_one_slot_are_refused_by_both_names_and_the_slots(first, second, slot):
    for left, right in ((first, second), (second, first)):
        with pytest.raises(UserError, match=f"{left} and {right} both claim the {slot} slot"):
            methods.parse_method(f"{left} + {right}")


def keep_sampler(algorithm):
    return replace(algorithm, sampler=uniform, claims=("sampler",))


def keep_head(algorithm):
    return replace(algorithm, claims=(*algorithm.claims, "head"))


def test_a_slot_claimed_by_name_belongs_to_its_method_whatever_is_in_it():
    plain = Algorithm()
    both = compose([Named("one", keep_sampler), Named("two", keep_head)], plain)
    assert both == replace(plain, claims=("sampler", "head"))
    fedvc = Named("fedvc", methods.METHODS["fedvc"]())
    for pair in ([Named("mine", keep_sampler), fedvc], [fedvc, Named("mine", keep_sampler)]):
        with pytest.raises(UserError, match=f"{pair[0].name} and {pair[1].name} both claim the sampler slot"):
            compose(pair, plain)


@pytest.mark.parametrize("slot", ["samplers", "terms", "claims"])
def test_only_slots_of_one_method_can_be_claimed(slot):
    with pytest.raises(UserError, match=f"mine claims '{slot}', .* choose from: available, sampler, arrive, blend"):
        compose([Named("mine", lambda algorithm: replace(algorithm, claims=(slot,)))], Algorithm())


# What clients remember


@pytest.mark.parametrize("method", ["moon(mu=2)", "scaffold", "feddyn(0.1)", "scaffold + moon(mu=2)"])
def test_a_client_that_does_not_come_keeps_what_it_remembers(method):
    fed = small(method)
    engine = fed.open()
    state, before = fed.state(), {}
    for number in range(1, 5):
        visits = fed.algorithm.sampler(fed.key.fold("round", number).fold("sample"), engine.roster, 2)
        state, _ = driver.run_round(fed.algorithm, engine, state, fed.key, per_round=2, rounds=4)
        now = remembered(engine, state)
        came = {visit.client for visit in visits}
        assert now.keys() == before.keys() | came
        for client, kept in before.items():
            unchanged = all(torch.equal(now[client][name], value) for name, value in kept.items())
            assert unchanged == (client not in came)
        before = now
    engine.close()


@pytest.mark.parametrize("method", ["scaffold", "feddyn(0.1)"])
def test_a_client_that_fails_leaves_the_means_of_corrections_whole(method):
    """Client 2 (one example) raises every time: it counts in n, never in a sum, and remembers nothing."""
    fed = small(f"{method} + outside_methods:raises(1)", epochs=2)  # no other has a batch of one
    engine = fed.open()
    state = fed.state()
    for _ in range(3):
        state, metrics = driver.run_round(
            fed.algorithm, engine, state, fed.key, per_round=4, rounds=3, skip_failures=True
        )
        assert [failure.client for failure in metrics.failures] == [2]
    kept, name = remembered(engine, state), "params/classifier.weight"
    assert kept.keys() == {0, 1, 3}
    own = method.partition("(")[0]
    wanted = sum(SIZES[client] / 30 * values[f"{own}/{name}"] for client, values in kept.items())
    found = state.sent[f"scaffold/{name}"] if own == "scaffold" else state.memory[f"h/{name}"]
    assert wanted.abs().max() > 1e-4
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    engine.close()
