"""Releases add up, once each, and never to less than another accountant finds."""

import pytest

from unskew.privacy.ledger import Release, Spent, total, with_release

accounting = pytest.importorskip("dp_accounting")


def release(name, epsilon=8.0, delta=1e-5):
    return Release(name, epsilon, delta, 10.0, (f"lda {name}",))


def test_one_release_is_what_it_promises():
    assert total([release("a", 3.0, 1e-6)]) == (3.0, 1e-6)


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


def test_the_largest_delta_counts():
    assert total([release("a", 8.0, 1e-5), release("b", 8.0, 1e-6)])[1] == 1e-5


def test_the_same_release_counts_once_and_another_is_never_taken_back():
    assert with_release(None, None) is None
    first = with_release(None, release("a"))
    again = with_release(first, Release("a", 8.0, 1e-5, 10.0, ("ccvr",)))
    assert (again.epsilon, again.delta) == (8.0, 1e-5)
    assert again.releases[0].calibrations == ("lda a", "ccvr")
    both = with_release(again, release("b"))
    assert both.epsilon > 8.0
    assert with_release(both, None) is both
    assert [each.id for each in with_release(both, release("a")).releases] == ["a", "b"]
    assert both.words() == "ε 12.26 at δ 1e-05 for every example, over 2 releases of statistics"
    assert Spent.of_json(None) is None
