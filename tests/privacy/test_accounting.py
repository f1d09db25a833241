"""ε of private updates: the accountant's, an upper bound, and right in the cases that can be written down."""

import math

import pytest

from unskew.privacy.ledger import CLIENT, REPLACED_CLIENT
from unskew.privacy.noise import PrivateUpdates

accounting = pytest.importorskip("dp_accounting")

ALL, SOME, FIXED = (
    {"drawn": 10, "clients": 10, "poisson": True},
    {"drawn": 10, "clients": 100, "poisson": True},
    {"drawn": 10, "clients": 100, "poisson": False},
)


def compute_epsilon(noise, delta, rounds, drawing, replaced=False):
    mechanism = PrivateUpdates(1.0, noise, delta, drawing["poisson"])
    return mechanism.epsilon(rounds, drawing["drawn"], drawing["clients"], replaced=replaced)


def unit(drawing):
    return PrivateUpdates(1.0, 2.0, 1e-5, drawing["poisson"]).unit(drawing["drawn"], drawing["clients"])


def test_with_everyone_in_every_round_it_is_one_gaussian_mechanism():
    """ε(δ) of T rounds with z is that of one round with z/√T (Balle and Wang's formula, inverted by dp_accounting)."""
    assert compute_epsilon(2.0, 1e-5, 16, ALL) == accounting.get_epsilon_gaussian(0.5, 1e-5)
    assert compute_epsilon(2.0, 1e-5, 16, ALL, replaced=True) == accounting.get_epsilon_gaussian(0.25, 1e-5)
    assert compute_epsilon(2.0, 1e-5, 16, {**ALL, "poisson": False}) == compute_epsilon(2.0, 1e-5, 16, ALL)


def test_one_sampled_round_keeps_the_promise_that_can_be_written_down():
    """One round, removing a client: δ(ε) = q·δ_Gauss(log(1 + (e^ε − 1)/q)), tight for Poisson sampling (Zhu, Dong and
    Wang 2022). The accountant's ε must not be below it, and not far above."""
    share, noise, delta = 0.1, 1.0, 1e-5

    def gauss_delta(epsilon):
        def phi(x):
            return 0.5 * math.erfc(-x / math.sqrt(2))

        return phi(0.5 / noise - epsilon * noise) - math.exp(epsilon) * phi(-0.5 / noise - epsilon * noise)

    low, high = 0.0, 20.0
    for _ in range(80):
        middle = (low + high) / 2
        promised = share * gauss_delta(math.log1p(math.expm1(middle) / share))
        low, high = (middle, high) if promised > delta else (low, middle)
    found = compute_epsilon(noise, delta, 1, SOME)
    assert high - 1e-9 <= found < high + 0.01


def test_poisson_is_what_the_finer_accountant_finds_and_less_than_renyis():
    fine = accounting.pld.PLDAccountant()
    coarse = accounting.rdp.RdpAccountant()
    for accountant in (fine, coarse):
        accountant.compose(accounting.PoissonSampledDpEvent(0.1, accounting.GaussianDpEvent(2.0)), 50)
    found = compute_epsilon(2.0, 1e-5, 50, SOME)
    assert fine.get_epsilon(1e-5) <= found <= 1.01 * fine.get_epsilon(1e-5)
    assert found < coarse.get_epsilon(1e-5)


def test_more_rounds_and_less_noise_and_more_clients_cost_more():
    base = compute_epsilon(2.0, 1e-5, 20, SOME)
    assert base < compute_epsilon(2.0, 1e-5, 40, SOME)
    assert base < compute_epsilon(1.0, 1e-5, 20, SOME)
    assert base < compute_epsilon(2.0, 1e-5, 20, {**SOME, "drawn": 50})
    assert base < compute_epsilon(2.0, 1e-5, 20, SOME, replaced=True)
    assert base < compute_epsilon(2.0, 1e-5, 20, ALL)


def test_a_fixed_number_promises_for_replaced_data_and_costs_more_than_poisson():
    assert unit(FIXED) == REPLACED_CLIENT
    assert unit(SOME) == unit({**ALL, "poisson": False}) == CLIENT
    found = compute_epsilon(2.0, 1e-5, 20, FIXED)
    assert found == compute_epsilon(2.0, 1e-5, 20, FIXED, replaced=True)
    assert found > compute_epsilon(2.0, 1e-5, 20, SOME, replaced=True)
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    event = accounting.SampledWithoutReplacementDpEvent(100, 10, accounting.GaussianDpEvent(1.0))
    assert found == pytest.approx(accountant.compose(event, 20).get_epsilon(1e-5), rel=1e-6)
