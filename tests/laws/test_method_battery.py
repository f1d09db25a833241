"""Every method in the table passes the battery, and the battery catches those that should not."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

import outside_methods
from unskew.checks import QUICK, LawBroken, _bounded, _refusal, _resumes, check_method
from unskew.core.errors import ClientFailure, UserError
from unskew.core.types import ServerOptimizer, Statistic
from unskew.methods import METHODS, parse_method
from unskew.methods.description import describe
from unskew.round.algorithm import SHARED_SLOTS
from unskew.round.client_memory import whole_model

NEUTRAL = {
    "fedavg": "fedavg(lr=1)",
    "fedprox": "fedprox(mu=0)",
    "fedavgm": "fedavgm(beta=0)",
    "moon": "moon(mu=0)",
    "clsprox": "clsprox(mu=0)",
}
PAIRS = [f"{one} + {other}" for one, other in combinations((QUICK.get(name, name) for name in METHODS), 2)]
STATEFUL = {"moon", "prototypes", "fedir", "fedvc(16)", "scaffold", "feddyn", "fedavgm"}  # that resuming could forget
REFUSED = [pair for pair in PAIRS if _refusal(pair)]
COMPOSED = [pair for pair in PAIRS if pair not in REFUSED]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_passes_the_battery(name):
    assert len(check_method(QUICK.get(name, name), neutral=NEUTRAL.get(name))) == 7 + (name in NEUTRAL)


@pytest.mark.parametrize("pair", [pair for pair in COMPOSED if set(pair.split(" + ")) <= STATEFUL])
def test_every_pair_that_keeps_something_resumes_exactly_and_keeps_its_memory_bounded(pair):
    assert _resumes(pair) is None
    assert _bounded(pair) is None


@pytest.mark.heavy
@pytest.mark.parametrize("pair", COMPOSED)
def test_every_pair_passes_the_whole_battery(pair):
    assert len(check_method(pair)) == 7


def test_pairs_are_refused_only_where_both_want_one_slot():
    """Or give one name to what travels or is kept: fedeccr has prototypes in it."""
    claims = {row.name: set(row.slots.split(", ")) - {*SHARED_SLOTS, ""} for row in describe()}
    for name in METHODS:
        algorithm = parse_method(name)
        claims[name] |= {each.name for each in (*algorithm.statistics, *algorithm.remember)}
    assert len(COMPOSED) > len(REFUSED) > 10
    for pair in PAIRS:
        one, other = (name.partition("(")[0] for name in pair.split(" + "))
        assert (pair in REFUSED) == bool(claims[one] & claims[other])


def forgetful():
    """A server that keeps its velocity outside the state: resume cannot know of it."""
    kept = {}

    def update(params, gradient, memory, moment):
        for name, value in gradient.items():
            kept[name] = 0.9 * kept.get(name, 0) + value
        return {name: (value.double() - kept[name]).to(value.dtype) for name, value in params.items()}, memory

    return lambda algorithm: replace(algorithm, server=ServerOptimizer(lambda params: {}, update))


def careless():
    """A term that draws from the global generator."""
    return outside_methods._term(lambda loss, step: loss.plus(0.01 * torch.rand(()) * step.logits.square().mean()))


def grabbing():
    """A method that writes into what the server sent."""

    def term(loss, step):
        next(iter(step.shared.values())).mul_(1.5)
        return loss

    return outside_methods._term(term)


def greedy():
    """A method that throws other methods' terms away."""
    return lambda algorithm: replace(algorithm, terms=(lambda loss, step: loss,))


@pytest.mark.parametrize(
    ("method", "law"),
    [
        ("outside_methods:nan(1)", "client 2"),
        ("test_method_battery:careless", "same seed"),
        ("test_method_battery:grabbing", "arguments|agree|seed"),
        ("test_method_battery:forgetful", "seed|resume|one and two"),
        ("test_method_battery:greedy", "beside fedprox it is refused in one order only"),
    ],
)
def test_the_battery_catches_a_method_that_breaks_a_law(method, law):
    with pytest.raises((LawBroken, ClientFailure), match=law):
        check_method(method)


def test_the_battery_catches_a_neutral_text_that_is_not_neutral():
    with pytest.raises(LawBroken, match=r"fedprox\(mu=1\) is not FedAvg"):
        check_method("fedprox", neutral="fedprox(mu=1)")


def twin():
    """A method that calls its memory as MOON does."""
    return lambda algorithm: replace(algorithm, remember=(*algorithm.remember, whole_model("moon")))


@pytest.mark.parametrize("order", ["moon + test_method_battery:twin", "test_method_battery:twin + moon"])
def test_two_memories_of_one_name_are_refused_by_both_names(order):
    with pytest.raises(UserError, match=r"moon.*twin|twin.*moon") as said:
        parse_method(order)
    assert "remember slot 'moon'; rename one" in str(said.value)


def floating():
    """A statistic that is no tensor."""
    statistic = Statistic("x", measure=lambda visited: {"y": 1.0})
    return lambda algorithm: replace(algorithm, statistics=(*algorithm.statistics, statistic))


def folding():
    """A statistic whose fold raises."""
    statistic = Statistic("x", fold=lambda sent, sums, moment: sums["nothing"])
    return lambda algorithm: replace(algorithm, statistics=(*algorithm.statistics, statistic))


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("floating", "stat/x/y: a sum must be a float64 tensor, this is float"),
        ("folding", "server, statistic x: KeyError"),
    ],
)
def test_a_statistic_that_is_wrong_is_named(method, said):
    with pytest.raises(ClientFailure, match=said):
        check_method(f"test_method_battery:{method}")
