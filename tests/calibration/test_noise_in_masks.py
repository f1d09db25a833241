"""Statistics whose noise the clients add, inside the masks: its size, its price, and servers that ask for less."""

import math

import pytest
import torch

import unskew
from unskew.calibration.covariances import parse_form
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.jobs import WORDS, FixedPointMoments
from unskew.calibration.protection import SENSITIVITY, Guarantee, Layout, clip_features
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import PrivacyBudget
from unskew.privacy.ledger import Release, concentration, epsilon_of_concentration, total
from unskew.round.algorithm import Algorithm

accounting = pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

CLASSES, WIDTH, RADIUS = 3, 4, 2.0
MEMBERS, NEEDED = 6, 4
PROMISE = Guarantee.of(RADIUS, 50.0, 1e-5, in_masks=True)


def statistics_of(client, form, count=3000):
    generator = Key(client).fold("features").torch()
    features = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) + torch.arange(WIDTH)
    layout = Layout.of(CLASSES, WIDTH, form)
    features = clip_features(features, layout.shorter(RADIUS, PROMISE.sigma))
    return ClassStatistics.of_features(features, torch.arange(count) % CLASSES, classes=CLASSES, form=form)


@pytest.mark.parametrize("form", ["full", "diagonal", "shared"])
def test_the_sum_of_noisy_vectors_is_the_statistics_with_the_promised_noise(form):
    """Means and covariances to 6 deviations of the noise; six clients' shares where four were needed: √(6/4) of it."""
    layout, parts = Layout.of(CLASSES, WIDTH, form), [statistics_of(client, form) for client in range(MEMBERS)]
    vectors = [layout.quantise(part, MEMBERS, "a client") for part in parts]
    exact = layout.statistics(sum(vectors), "the sum")
    noisy = sum(layout.with_share(vector, PROMISE, NEEDED, MEMBERS) for vector in vectors)
    found = layout.released(noisy, PROMISE, MEMBERS / NEEDED)
    sigma = PROMISE.sigma * math.sqrt(MEMBERS / NEEDED)
    assert found.noise.sums == pytest.approx(sigma * RADIUS)
    assert found.noise.second == pytest.approx(sigma * RADIUS**2)
    assert found.held.tolist() == [0, 1, 2]
    assert (found.number - exact.number).abs().max() <= 6 * sigma + 1
    assert (found.sums["sums"] - exact.sums["sums"]).abs().max() <= 6 * sigma * RADIUS
    for name in found.sums:
        assert (found.sums[name] - exact.sums[name]).abs().max() <= 12 * sigma * RADIUS**2


def test_noise_on_every_entry_has_the_promised_size():
    layout = Layout.of(200, 60, "diagonal")
    empty = torch.zeros(layout.bytes // 8, dtype=torch.int64)
    total = sum(layout.with_share(empty, PROMISE, NEEDED, MEMBERS) for _ in range(NEEDED)).double() * 2.0**-layout.bits
    counts, sums = layout._split(total)
    for part, expected in ((counts, 1), (sums["sums"], RADIUS), (sums["squares"], RADIUS**2)):
        error = 5 / math.sqrt(2 * part.numel())
        assert float(part.std()) == pytest.approx(PROMISE.sigma * expected, rel=error)


def test_the_noise_is_what_concentration_needs_and_prices_add_up():
    for epsilon in (0.5, 1.0, 8.0):
        rho = concentration(epsilon, 1e-5)
        assert epsilon_of_concentration(rho, 1e-5) == pytest.approx(epsilon, rel=1e-6)
        sigma = Guarantee.of(1.0, epsilon, 1e-5, in_masks=True).sigma / SENSITIVITY
        assert 1 / (2 * sigma**2) == pytest.approx(rho)
        assert sigma > accounting.get_sigma_gaussian(epsilon, 1e-5)
    one, other = (Release(name, 2.0, 1e-5, 1.0, in_masks=True) for name in "ab")
    gaussian = Release("c", 2.0, 1e-5, 1.0)
    assert total([one, other])[0] == pytest.approx(epsilon_of_concentration(2 * concentration(2.0, 1e-5), 1e-5))
    assert total([one])[0] == 2.0
    assert total([one, gaussian])[0] > total([gaussian, gaussian])[0]


class Side:
    def __init__(self, private):
        self.algorithm = Algorithm(private=private)


def job(budget, clip):
    request = StatisticsRequest(form=parse_form("diagonal"), clip=clip)
    return FixedPointMoments(request.to_plain(), CLASSES, WIDTH, 24, MEMBERS, budget)


def test_a_server_that_asks_for_less_noise_or_longer_features_than_agreed_is_refused():
    agreed, clip = (
        PrivacyBudget(50.0, 1e-5, RADIUS, True),
        Layout.of(CLASSES, WIDTH, "diagonal").shorter(RADIUS, PROMISE.sigma),
    )
    words = {WORDS: torch.zeros(job(None, clip)._layout.bytes // 8, dtype=torch.int64)}
    noisy = job((50.0, 1e-5, RADIUS), clip).with_share(Side(agreed), words, NEEDED, MEMBERS)
    assert int((noisy[WORDS] != 0).sum()) == len(words[WORDS])
    for budget in (None, (500.0, 1e-5, RADIUS), (50.0, 1e-5, 0.1)):
        with pytest.raises(UserError, match="without the agreed noise"):
            job(budget, clip).with_share(Side(agreed), words, NEEDED, MEMBERS)
    for longer in (0.0, RADIUS, 100.0):
        with pytest.raises(UserError, match="but the agreed noise covers 2"):
            job((50.0, 1e-5, RADIUS), longer).with_share(Side(agreed), words, NEEDED, MEMBERS)
    assert job(None, 0.0).with_share(Side(None), words, NEEDED, MEMBERS) is words


def test_a_run_releases_statistics_whose_sum_the_server_never_saw(tmp_path, monkeypatch):
    def never(*given):
        raise AssertionError("the clear sum")

    monkeypatch.setattr(Layout, "statistics", never)
    method = "lda + secure + private(epsilon=50, clip=3, release=true)"
    result = unskew.run(
        data="digits", clients=6, method=f"fedavg + {method}", rounds=1, epochs=1, engine="loop", out=tmp_path
    )
    (release,) = result.privacy.releases
    assert (release.in_masks, release.released, release.unit, release.epsilon) == (True, True, "example", 50.0)
    (made,) = result.calibrations.values()
    assert made.accuracy > 0.3  # a network of one epoch; by chance it would be 0.1
