"""Releases add up, once each, and never to less than another accountant finds."""

import json
from dataclasses import asdict, replace

import pytest

from unskew.core.files import record_from
from unskew.privacy.ledger import PrivateRounds, Release, Spent, add_release, add_up, total

accounting = pytest.importorskip("dp_accounting")


def release(name, epsilon=8.0, delta=1e-5):
    return Release(name, epsilon, delta, 10.0, (f"lda {name}",))


def test_one_release_is_what_it_promises_and_of_two_the_largest_delta_counts():
    assert total([release("a", 3.0, 1e-6)]) == (3.0, 1e-6)
    assert total([release("a", 8.0, 1e-5), release("b", 8.0, 1e-6)])[1] == 1e-5


@pytest.mark.parametrize("epsilons", [(1.0, 8.0), (0.5, 1.0, 2.0), (1.0,) * 10])
def test_the_total_is_what_an_accountant_of_privacy_losses_finds(epsilons):
    """dp_accounting's PLD accountant, which composes numerically; and less than adding up."""
    accountant = accounting.pld.PLDAccountant()
    for epsilon in epsilons:
        accountant.compose(accounting.GaussianDpEvent(accounting.get_sigma_gaussian(epsilon, 1e-5)))
    found, delta = total([release(str(place), epsilon) for place, epsilon in enumerate(epsilons)])
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert max(epsilons) < found < sum(epsilons)
    assert delta == 1e-5


def test_the_same_release_counts_once_and_another_is_never_taken_back():
    assert add_release(None, None) is None
    first = add_release(None, release("a"))
    again = add_release(first, Release("a", 8.0, 1e-5, 10.0, ("ccvr",)))
    assert (again.epsilon, again.delta) == (8.0, 1e-5)
    assert again.releases[0].calibrations == ("lda a", "ccvr")
    both = add_release(again, release("b"))
    assert both.epsilon > 8.0
    assert add_release(both, None) is both
    assert [each.id for each in add_release(both, release("a")).releases] == ["a", "b"]
    assert both.describe() == "ε 12.26 at δ 1e-05 for every example, over 2 releases of statistics"


ROUNDS = PrivateRounds(3.0, 1e-5, 20, 1.0, 2.0, "poisson", replaced=False, example_epsilon=4.0)


def test_rounds_of_private_updates_alone_promise_to_clients():
    spent = add_up((), ROUNDS)
    assert (spent.epsilon, spent.delta) == (3.0, 1e-5)
    assert spent.describe() == "ε 3 at δ 1e-05 for every client, over 20 rounds of updates"
    replaced = add_up((), replace(ROUNDS, replaced=True, rounds=1))
    assert replaced.describe() == "ε 3 at δ 1e-05 for every client whose data are replaced, over 1 round of updates"
    assert add_up(()) is None


def test_rounds_and_statistics_add_up_for_every_example():
    """ε of an example whose client's data are replaced, and that of the statistics; both δ."""
    spent = add_release(add_up((), ROUNDS), release("a", 8.0, 1e-6))
    assert (spent.epsilon, spent.delta) == pytest.approx((12.0, 1.1e-5))
    assert spent.updates == ROUNDS
    assert spent.describe() == (
        "ε 12 at δ 1.1e-05 for every example, over one release of statistics and all updates; "
        "the updates alone: ε 3 at δ 1e-05 for every client, over 20 rounds"
    )
    both = add_release(spent, release("b"))
    assert both.epsilon == pytest.approx(total([release("a", 8.0, 1e-6), release("b")])[0] + 4.0)


def test_what_was_spent_is_read_back_from_json_and_what_is_not_it_is_refused():
    for spent in (add_up((), ROUNDS), add_release(add_up((), ROUNDS), release("a")), add_up([release("a")])):
        written = json.loads(json.dumps(asdict(spent)))
        assert record_from(Spent, written) == spent
        if spent.updates is None:
            assert record_from(Spent, {key: value for key, value in written.items() if key != "updates"}) == spent
    broken = json.loads(json.dumps(asdict(add_up((), ROUNDS))))
    broken["updates"]["rounds"] = "many"
    with pytest.raises(ValueError, match=r"updates\.rounds: expected int, got str"):
        record_from(Spent, broken)
