"""What is noise in a covariance ends where the semicircle ends, and what is done about it is what is said."""

import math
from dataclasses import replace

import pytest
import torch

from unskew.calibration.calibrate import calibrate
from unskew.calibration.covariances import pack
from unskew.calibration.forecast import forecast
from unskew.calibration.lda import discriminate, solve_discriminant
from unskew.calibration.protection import (
    Guarantee,
    add_noise,
    clip_features,
    flatten_noise,
    noise_edge,
    notes_on_noise,
    pooled_edge,
    raise_eigenvalues,
)
from unskew.calibration.statistics import ClassStatistics, KnownNoise
from unskew.core.key import Key
from unskew.privacy.noise import normal

C, D, RADIUS = 5, 24, 6.0


def examples(count=3000, seed=0, apart=2.0):
    """Gaussian classes whose features have very different variances."""
    generator = Key(seed).fold("known noise").torch()
    labels = torch.arange(count) % C
    means = apart * torch.randn(C, D, generator=generator, dtype=torch.float64) / D**0.5
    spread = torch.logspace(0, -2, D, dtype=torch.float64)
    features = means[labels] + torch.randn(count, D, generator=generator, dtype=torch.float64) * spread
    return clip_features(features, RADIUS), labels


def released(epsilon, form="shared", draw=0, **knobs):
    features, labels = examples(**knobs)
    return add_noise(ClassStatistics.of_features(features, labels, C, form), RADIUS, epsilon, 1e-5, Key(draw))


def symmetric_noise(width, *path):
    noise = normal((width, width), Key(0), *path)
    return (noise + noise.t()) / 2


@pytest.mark.parametrize("width", [64, 200])
def test_the_noise_ends_at_the_edge_and_reaches_it(width):
    """Random matrices as `private` draws them: the largest eigenvalue is the edge's, within a few per cent."""
    for draw in range(5):
        largest = float(torch.linalg.eigvalsh(3.0 * symmetric_noise(width, "test", draw))[-1])
        assert 0.84 * noise_edge(3.0, width) < largest < 1.05 * noise_edge(3.0, width)


def test_pure_noise_is_evened_out_to_nothing_or_to_its_mean_variance():
    noise = 0.1 * symmetric_noise(100, "test")
    floor = 0.05 * torch.eye(100, dtype=torch.float64)
    limit = 1.05 * noise_edge(0.1, 100)
    assert torch.allclose(flatten_noise(noise - floor, limit), torch.zeros_like(noise))  # its mean is negative
    found = flatten_noise(noise + floor, limit)
    assert torch.allclose(found, (noise + floor).trace() / 100 * torch.eye(100, dtype=torch.float64))


def test_what_is_above_the_edge_stays_and_the_trace_stays():
    strong = torch.zeros(80, 80, dtype=torch.float64)
    strong[0, 0] = 50.0
    noisy_one = strong + torch.eye(80) + 0.3 * symmetric_noise(80, "one")
    limit = noise_edge(0.3, 80) + 1
    for found in (flatten_noise(noisy_one, limit), raise_eigenvalues(noisy_one, limit)):
        assert float(torch.linalg.eigvalsh(found)[-1]) == pytest.approx(float(torch.linalg.eigvalsh(noisy_one)[-1]))
    assert float(flatten_noise(noisy_one, limit).trace()) == pytest.approx(float(noisy_one.trace()))
    assert float(torch.linalg.eigvalsh(raise_eigenvalues(noisy_one, limit))[0]) == pytest.approx(limit)
    assert torch.allclose(raise_eigenvalues(noisy_one + 10 * torch.eye(80), 0.0), noisy_one + 10 * torch.eye(80))
    assert torch.allclose(flatten_noise(strong, 0.0), strong)


@pytest.mark.parametrize("form", ["full", "shared"])
def test_the_pooled_edge_is_where_the_noise_of_the_pooled_covariance_ends(form):
    """Measured: the pooled noise of statistics without any variance, whose classes have a large mean count."""
    number, sigma = 10**6, Guarantee.of(1.0, 1.0, 1e-5).sigma
    second = torch.stack([sigma * pack(symmetric_noise(D * 4, "x", label)) for label in range(C)])
    sums = {"sums": torch.zeros(C, D * 4, dtype=torch.float64), "second": second if form == "full" else second[0]}
    empty = ClassStatistics.empty(C, D * 4, form)
    plain = replace(empty, held=torch.arange(C), number=torch.full((C,), number), sums=sums)
    known = replace(plain, noise=KnownNoise(sigma, sigma))
    largest = float(torch.linalg.eigvalsh(plain.within())[-1])
    assert 0.84 * pooled_edge(known) < largest < 1.05 * pooled_edge(known)
    assert pooled_edge(plain) == 0.0


def test_variances_alone_have_the_largest_of_so_many_draws_for_an_edge():
    found = released(1.0, "diagonal")
    wanted = found.noise.second * math.sqrt(C) / (int(found.number.sum()) - C) * math.sqrt(2 * math.log(D))
    assert pooled_edge(found) == pytest.approx(wanted)


def test_lda_gets_better_with_epsilon_on_average_and_ends_where_there_is_no_noise():
    """Means differ where variance is large. Without the rule it is worst in the middle."""
    generator = Key(0).fold("stretched").torch()
    labels, spread = torch.arange(1500) % C, torch.logspace(0, -4, D, dtype=torch.float64)
    means = torch.randn(C, D, generator=generator, dtype=torch.float64) * spread**2
    features = means[labels] + torch.randn(1500, D, generator=generator, dtype=torch.float64) * spread
    plain = ClassStatistics.of_features(clip_features(features, RADIUS), labels, C, "shared")

    def accuracy(statistics):
        made = calibrate(torch.nn.Linear(D, C), statistics, "lda")
        return float((made(features.float()).argmax(1) == labels).double().mean())

    found = [
        sum(accuracy(add_noise(plain, RADIUS, epsilon, 1e-5, Key(draw))) for draw in range(5)) / 5
        for epsilon in (1.0, 8.0, 100.0, 1e4, 1e6)
    ]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(accuracy(plain), abs=0.01)


def test_a_ridge_of_your_own_is_the_ridge():
    statistics = released(8.0)
    head = torch.nn.Linear(D, C)
    own = calibrate(head, statistics, "lda(ridge=0.3)").head
    assert torch.equal(own.weight, solve_discriminant(head, statistics, 0.3).weight)


def test_more_noise_shrinks_class_means_further():
    shrinkage = [discriminate(released(epsilon)).shrinkage.mean() for epsilon in (1.0, 8.0, 1e6)]
    assert shrinkage == sorted(shrinkage)
    assert shrinkage[0] < 0.97 < shrinkage[2]


def test_a_note_says_when_noise_rules():
    for form, method in (("shared", "lda"), ("full", "ccvr(per_class=20, epochs=1)")):
        said = calibrate(torch.nn.Linear(D, C), released(0.5, form), method).report.notes()
        assert any(note.startswith("mostly noise: ") and f"of {D} directions" in note for note in said)
        assert notes_on_noise(released(1e6, form)) == ()


def test_the_forecast_knows_of_the_noise():
    """Classes that are equal but for noise: nothing to gain, however far apart noise has driven their means."""
    head = torch.nn.Linear(D, C)
    noise_alone = forecast(head, released(1.0, "full", apart=0.0), C, Key(0))
    blind = forecast(head, replace(released(1.0, "full", apart=0.0), noise=None), C, Key(0))
    assert noise_alone.after < 0.5 < blind.after
    shares = [forecast(head, released(epsilon, "full"), C, Key(0)).after for epsilon in (1.0, 8.0, 1e6)]
    assert shares == sorted(shares)


def test_the_noise_is_saved_with_the_statistics(tmp_path):
    statistics = released(8.0)
    statistics.save(tmp_path / "s.safetensors")
    assert ClassStatistics.load(tmp_path / "s.safetensors").noise == statistics.noise
