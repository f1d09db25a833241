"""Discrete Gaussian noise is drawn exactly, and clients' shares of it add up to what was promised."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from unskew.core.errors import UserError
from unskew.methods import parse_method
from unskew.privacy import noise
from unskew.privacy.noise import BITS, PrivateUpdates, discrete_gaussian, share_of

accounting = pytest.importorskip("dp_accounting")

MASKED, RELEASED = "secure(updates=true)", "private-updates(release=true)"
MECHANISM = PrivateUpdates(clip=0.5, noise=2.0, delta=1e-5, poisson=False, release=True, in_masks=True)

STEPS = 2.0**BITS  # z·S in steps


def chances(deviation, reach):
    """P(x) for |x| ≤ reach, from the definition."""
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
    return weights / weights.sum()


@pytest.mark.parametrize("deviation", [1, 2, 5])
def test_draws_have_the_distribution_of_the_definition(deviation):
    """Pearson's χ² over all values that 200,000 draws reach 10 times or more; it fails once in 10⁶ by chance."""
    count, reach = 200_000, 10 * deviation
    drawn, expected = discrete_gaussian(count, deviation), count * chances(deviation, reach)
    assert len(drawn) == count
    assert np.abs(drawn).max() <= reach
    found = np.bincount(drawn + reach, minlength=2 * reach + 1)
    usual = expected >= 10
    found, expected = np.append(found[usual], found[~usual].sum()), np.append(expected[usual], expected[~usual].sum())
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(1 - 1e-6, len(found) - 1)


def test_large_draws_have_the_promised_moments():
    """As many steps as a client's share has: deviation to 5 standard errors, fourth moment 3·σ⁴, mean 0."""
    deviation, count = 2**20 + 12_345, 200_000
    drawn = discrete_gaussian(count, deviation) / deviation
    assert abs(drawn.mean()) < 5 / math.sqrt(count)
    assert drawn.std() == pytest.approx(1.0, abs=5 / math.sqrt(2 * count))
    assert (drawn**4).mean() == pytest.approx(3.0, abs=5 * math.sqrt(96 / count))


def test_the_coin_comes_up_with_the_chance_of_an_exponential():
    """exp(−γ) for fractions below and above 1, to 5 standard errors."""
    for numerator, denominator in ((0, 7), (1, 3), (3, 3), (17, 4)):
        heads = noise._flip_exp(np.full(100_000, numerator), denominator).mean()
        chance = math.exp(-numerator / denominator)
        assert heads == pytest.approx(chance, abs=5 * math.sqrt(chance * (1 - chance) / 100_000) + 1e-12)


def test_numbers_below_a_bound_are_equally_likely_and_none_is_reached_by_rounding():
    found = np.bincount(noise._uniform_below(3, 90_000), minlength=3)
    assert np.abs(found - 30_000).max() < 5 * math.sqrt(20_000)
    assert noise._uniform_below(2**63 - 1, 10).min() >= 0


@pytest.mark.parametrize("deviation", [0, 2**24 + 1])
def test_a_deviation_that_is_not_exact_is_refused(deviation):
    with pytest.raises(ValueError, match="the deviation must be from 1 to"):
        discrete_gaussian(3, deviation)


def words_of(count, value=0):
    return {"delta/params/a": torch.full((count,), value, dtype=torch.int64), "weight": torch.tensor(1 << BITS)}


@pytest.mark.parametrize(("members", "needed"), [(5, 4), (12, 8), (3, 3)])
def test_the_shares_of_any_clients_that_can_take_the_masks_off_add_up_to_the_promised_noise(members, needed):
    """z·S = 1 on every parameter, from the shares of exactly ``needed`` clients, to 5 standard errors."""
    count = 50_000
    shares = [MECHANISM.with_share(words_of(count), needed, members) for _ in range(needed)]
    assert all(int(share["weight"]) == 1 << BITS for share in shares)
    total = sum(share["delta/params/a"] for share in shares).double() * 2.0**-BITS
    assert float(total.std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * count))
    sigma, shift = share_of(STEPS, needed)
    assert 2**20 <= sigma <= 2**21
    assert needed * (sigma * 2.0 ** (shift - BITS)) ** 2 >= 1.0  # never less than promised


def test_words_and_noise_are_on_one_lattice_and_words_move_by_half_a_step_at_most():
    sigma, shift = share_of(STEPS, 4)
    noisy = MECHANISM.with_share(words_of(1000, 123_456_789), 4, 5)["delta/params/a"]
    assert bool((noisy % 2**shift == 0).all())
    assert share_of(2.0**-20 * 2**BITS, 4)[1] == 0
    with pytest.raises(UserError, match=r"a client's share of the noise, .* is too small"):
        replace(MECHANISM, clip=1e-9).with_share(words_of(1), 4, 5)
    with pytest.raises(UserError, match="too large for a secure sum"):
        replace(MECHANISM, clip=1e8).with_share(words_of(1), 4, 5)
    assert sigma > 0


def test_an_update_is_cut_so_that_the_coarser_steps_do_not_make_it_longer():
    value = torch.rand(20_000, dtype=torch.float64) - 0.5
    numbers = {"weight": 1.0, "scaled": 1.0, "metric/loss": 3.0, "metric/examples": 7.0, "metric/visits": 1.0}
    sums = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
    clipped = MECHANISM.clip_update(sums | {"delta/params/a": value})
    assert "metric/examples" not in clipped  # an exact count
    _, shift = share_of(STEPS, 1)
    steps = (clipped["delta/params/a"] * 2.0**BITS).round().long()
    rounded = ((steps + 2**shift // 2) >> shift) << shift
    assert float(rounded.double().norm()) * 2.0**-BITS <= 0.5


def test_clients_add_the_noise_where_a_release_is_masked_and_nowhere_else():
    def mechanism(text):
        return parse_method(text).mechanism

    for text in (f"{MASKED} + {RELEASED}", f"{RELEASED} + {MASKED}"):
        assert mechanism(text).in_masks
    silent = f"private-updates(release=true, noise=0) + {MASKED}"
    for text in (RELEASED, f"{RELEASED} + secure", f"private-updates + {MASKED}", f"{RELEASED} + rounded", silent):
        assert not mechanism(text).in_masks
    summed = {"delta/params/a": torch.ones(3, dtype=torch.float64)}
    released = MECHANISM.add_noise(summed, {"params/a": torch.zeros(3)}, 4, None)
    assert released["delta/params/a"].tolist() == [1.0, 1.0, 1.0]  # the noise is in the sum already


def test_the_price_of_distributed_noise_is_a_concentration_and_no_less_than_the_gaussians():
    """ρ = T/(2z²), from concentrated to (ε, δ): an upper bound on the Gaussian's own, 20 % above it at most here."""
    for rounds, size in ((1, 1.0), (20, 4.0), (100, 8.0)):
        exact = accounting.get_epsilon_gaussian(size / math.sqrt(rounds), 1e-5)
        assert exact < replace(MECHANISM, noise=size).epsilon(rounds, 50, 50) < 1.2 * exact
    assert replace(MECHANISM, noise=4.0).epsilon(20, 50, 50, replaced=True) == MECHANISM.epsilon(20, 50, 50)
    assert MECHANISM.epsilon(20, 5, 50) == MECHANISM.epsilon(20, 50, 50)  # sampling does not count
    assert MECHANISM.unit(5, 50) == "client"
