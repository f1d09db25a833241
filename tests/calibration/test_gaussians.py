"""Every class held has a Gaussian, however few or flat its examples; what had to be done for it is reported."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.heads import normal
from unskew.calibration.calibrate import calibrate
from unskew.calibration.covariances import Gaussians, draw_directions, pack, parse_form, unpack
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

C, D = 4, 6
FORMS = ("full", "diagonal", "shared", "low-rank(3)")
OWN = ("full", "diagonal", "low-rank(3)")  # forms that know something of each class's own covariance


def examples(counts, seed=0, rank=D):
    """Features of classes 0, 1, … with their own means and covariances of this rank; and their labels."""
    features = [
        normal(count, rank, seed=seed + 10 * label) @ normal(rank, D, seed=100 + label)
        + 3 * normal(1, D, seed=200 + label)
        for label, count in enumerate(counts)
    ]
    return torch.cat(features), torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def statistics_of(counts, form="full", **knobs):
    return ClassStatistics.of_features(*examples(counts, **knobs), C, form)


def made(number, sums, form="diagonal", **second):
    """Statistics of class 0 by hand, true or not."""
    sums = {"sums": torch.tensor([sums]), **{name: torch.as_tensor(value)[None] for name, value in second.items()}}
    sums = {name: value.double() for name, value in sums.items()}
    return ClassStatistics(C, parse_form(form), torch.tensor([0]), torch.tensor([number]), sums)


def covariance(spread):
    """F·Fᵀ + diag(v): the covariance of what is drawn."""
    found = spread.factor @ spread.factor.t()
    return found if spread.variance is None else found + torch.diag(spread.variance)


def own_covariance(features, labels, label):
    return torch.from_numpy(np.cov(features[labels == label].numpy(), rowvar=False))


def within(features, labels):
    around = torch.cat([features[labels == label] - features[labels == label].mean(0) for label in labels.unique()])
    return around.t() @ around / (len(labels) - len(labels.unique()))


def diagonal(matrix):
    return torch.diag(matrix.diagonal())


def near(found, wanted, relative=1e-10):
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= relative * float(wanted.abs().max())


# a class's Gaussian


@pytest.mark.parametrize("form", FORMS)
def test_a_large_class_has_its_own_mean_and_covariance_and_nothing_is_done_to_it(form):
    features, labels = examples([50, 80])
    found = Gaussians(ClassStatistics.of_features(features, labels, C, form))
    near(found.means, torch.stack([features[labels == label].mean(0) for label in (0, 1)]))
    spread, report = found.spread(1)
    assert (report.label, report.count) == (1, 80)
    assert report.shrunk == (1.0 if form == "shared" else 0.0)
    assert report.clipped < 1e-14
    own = own_covariance(features, labels, 1)
    if form == "full":
        near(covariance(spread), own)
    elif form == "shared":
        near(covariance(spread), within(features, labels))
    else:
        near(covariance(spread).diagonal(), own.diagonal())
        assert (form == "diagonal") == (not spread.factor.numel())


@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("count", [1, 2, 3, D, D + 1, D + 2])
def test_a_small_class_is_mixed_with_the_pooled_covariance_by_a_reported_weight(form, count):
    """1 − (N − 1)/d: one for a single example, zero from d + 1 on. Where the form is low-rank, the pooled part is
    diagonal."""
    features, labels = examples([40, count, 30])
    spread, report = Gaussians(ClassStatistics.of_features(features, labels, C, form)).spread(1)
    weight = max(0.0, 1 - (count - 1) / D)
    assert report.shrunk == pytest.approx(weight, abs=1e-15)
    assert (report.label, report.count) == (1, count)
    pooled = within(features, labels)
    own = torch.zeros(D, D, dtype=torch.float64) if count == 1 else own_covariance(features, labels, 1)
    wanted = (1 - weight) * own + weight * pooled
    if form == "full":
        near(covariance(spread), wanted)
    else:
        near(covariance(spread).diagonal(), wanted.diagonal())
    if form == "low-rank(3)" and count <= 4:  # a scatter of rank 3 at most: the sketch knows it whole
        near(covariance(spread), (1 - weight) * own + weight * diagonal(pooled), 1e-8)


# covariances that are singular, or none


@pytest.mark.parametrize("form", ["full", "shared", "low-rank(3)"])
def test_features_in_a_plane_are_drawn_in_that_plane(form):
    """Features that are a linear map of two dimensions."""
    features, labels = examples([60], rank=2)
    found = Gaussians(ClassStatistics.of_features(features, labels, C, form))
    spread, report = found.spread(0)
    near(covariance(spread), own_covariance(features, labels, 0), 1e-8)
    assert report.clipped < 1e-12
    assert report.left_over < 1e-12
    if form != "low-rank(3)":
        assert spread.factor.shape == (D, 2)
    drawn, _ = found.draw(0, 200, Key(0))
    beyond = torch.linalg.svd(features - features.mean(0)).Vh[2:]
    assert bool(drawn.isfinite().all())
    assert float(((drawn - found.means[0]) @ beyond.t()).abs().max()) < 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [0.0, 0.1, -7e3])
def test_features_that_are_all_equal_are_drawn_as_they_are(form, value):
    """Rounding leaves 1e-16 of Σz², so 1e-8 of a feature."""
    features = torch.full((50, D), value, dtype=torch.float64) * torch.arange(D)
    found = Gaussians(ClassStatistics.of_features(features, torch.zeros(50, dtype=torch.int64), C, form))
    drawn, report = found.draw(0, 100, Key(0))
    assert float((drawn - features[0]).abs().max()) <= 1e-6 * abs(value)
    assert 0 <= report.clipped <= 1
    assert 0 <= report.left_over <= 1


@settings(max_examples=25)
@given(form=st.sampled_from(FORMS), counts=st.lists(st.integers(1, 12), min_size=1, max_size=C), rank=st.integers(1, D))
def test_any_class_can_be_drawn_from_where_one_has_two_examples(form, counts, rank):
    counts = [2, *counts[1:]]
    found = Gaussians(statistics_of(counts, form, rank=rank))
    for place, count in enumerate(counts):
        drawn, report = found.draw(place, 3, Key(1))
        assert drawn.shape == (3, D)
        assert drawn.dtype == torch.float64
        assert bool(drawn.isfinite().all())
        assert report.count == count
        assert all(0 <= share <= 1 for share in (report.shrunk, report.clipped, report.left_over))


@pytest.mark.parametrize("form", ["full", "shared"])
def test_negative_eigenvalues_are_set_to_zero_and_their_share_is_reported(form):
    """Eigenvalues 4, 2, 1, 0, 0 and −1, as noise on statistics may leave them: 1 of 8 is clipped."""
    vectors = torch.linalg.qr(normal(D, D, seed=1)).Q
    values = torch.tensor([4.0, 2.0, 1.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    second = pack(10 * (vectors * values) @ vectors.t())
    given_ = made(11, [0.0] * D, form, second=second)
    if form == "shared":
        given_ = ClassStatistics(C, given_.form, given_.held, given_.number, {**given_.sums, "second": second})
    spread, report = Gaussians(given_).spread(0)
    assert report.clipped == pytest.approx(1 / 8, rel=1e-12)
    assert spread.factor.shape == (D, 3)
    near(covariance(spread), (vectors * values.clamp(min=0)) @ vectors.t())


def test_negative_variances_are_set_to_zero_and_their_share_is_reported():
    """Σz² of 40, 30, 20, 10, 0 and 0, taken 10 off by a mean of 1: 3, 2, 1, 0, −1 and −1 for N = 10, over 9."""
    given_ = made(10, [10.0] * D, squares=[40.0, 30.0, 20.0, 10.0, 0.0, 0.0])
    spread, report = Gaussians(given_).spread(0)
    assert report.clipped == pytest.approx(2 / 8)
    near(covariance(spread), torch.diag(torch.tensor([30.0, 20.0, 10.0, 0.0, 0.0, 0.0], dtype=torch.float64)) / 9)


def test_a_covariance_that_is_negative_throughout_is_clipped_whole():
    for given_ in (made(10, [10.0] * D, squares=[0.0] * D), made(10, [0.0] * D, "full", second=pack(-torch.eye(D)))):
        drawn, report = Gaussians(given_).draw(0, 5, Key(0))
        assert report.clipped == 1
        assert torch.equal(drawn, (given_.sums["sums"] / 10).expand(5, D))


def test_a_sketch_that_says_more_than_the_variances_allow_is_clipped_and_reported():
    """F·Fᵀ has 2 on the diagonal where Σz² says 1: the rest would be −1 in each feature, a third of all."""
    omega = draw_directions(D, D)
    given_ = made(10, [0.0] * D, f"low-rank({D})", sketch=2 * omega, squares=[1.0] * D)
    spread, report = Gaussians(given_).spread(0)
    assert report.clipped == pytest.approx(1 / 3)
    assert bool((spread.variance == 0).all())


def test_pooled_variances_below_zero_give_no_nan():
    """A class of one beside one whose sums cannot be true."""
    given_ = ClassStatistics(
        C, parse_form("low-rank(1)"), torch.tensor([0, 1]), torch.tensor([1, 10]),
        {"sums": torch.ones(2, D, dtype=torch.float64), "squares": torch.zeros(2, D, dtype=torch.float64),
         "sketch": torch.zeros(2, D, 1, dtype=torch.float64)},
    )  # fmt: skip
    drawn, _ = Gaussians(given_).draw(0, 5, Key(0))
    assert bool(drawn.isfinite().all())


# a few directions instead of a covariance


def scatter_with(values, seed):
    """Features whose scatter has these eigenvalues, in random directions, around a mean."""
    count, width = 3 * len(values), len(values)
    left = normal(count, width, seed=seed)
    left = torch.linalg.qr(left - left.mean(0)).Q
    right = torch.linalg.qr(normal(width, width, seed=seed + 1)).Q
    return (left * values.sqrt()) @ right.t() + normal(1, width, seed=seed + 2)


def low_rank(features, rank):
    return ClassStatistics.of_features(features, torch.zeros(len(features), dtype=torch.int64), 1, f"low-rank({rank})")


@settings(max_examples=25)
@given(rank=st.integers(1, 8), known=st.integers(1, 8), seed=st.integers(0, 1000))
def test_a_scatter_of_rank_r_is_known_whole_and_no_other_is_overstated(rank, known, seed):
    """rank(S) ≤ r: S itself. Otherwise S − F·Fᵀ has no negative eigenvalue and the diagonal is S's."""
    values = torch.zeros(8, dtype=torch.float64)
    values[:known] = torch.linspace(1, 3, known, dtype=torch.float64)
    features = scatter_with(values, seed)
    around = features - features.mean(0)
    whole = around.t() @ around
    given_ = low_rank(features, rank)
    found = given_.form.scatter(given_, 0)
    near(found.diagonal(), whole.diagonal(), 1e-8)
    if known <= rank:
        near(found, whole, 1e-8)
    spread, report = Gaussians(given_).spread(0)
    factor = spread.factor * (len(features) - 1) ** 0.5
    assert factor.shape[1] <= rank
    assert float(torch.linalg.eigvalsh(whole - factor @ factor.t())[0]) >= -1e-8 * float(whole.trace())
    left = float(whole.trace() - (factor @ factor.t()).trace())
    assert report.left_over == pytest.approx(left / float(whole.trace()), abs=1e-8)
    assert report.clipped < 1e-8


@pytest.mark.parametrize("rank", [2, 5])
def test_the_directions_are_nystroms(rank):
    """S·Ω·(Ωᵀ·S·Ω)⁻¹·(S·Ω)ᵀ, in numpy."""
    features = scatter_with(torch.linspace(0.1, 5, 8, dtype=torch.float64), 3)
    around = (features - features.mean(0)).numpy()
    omega, whole = draw_directions(8, rank).numpy(), around.T @ around
    sketch = whole @ omega
    wanted = torch.from_numpy(sketch @ np.linalg.inv(omega.T @ sketch) @ sketch.T)
    spread, _ = Gaussians(low_rank(features, rank)).spread(0)
    near(spread.factor @ spread.factor.t() * (len(features) - 1), wanted, 1e-9)


# drawing


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [3, 60])
def test_what_is_drawn_has_the_gaussians_mean_and_covariance(form, count):
    """40,000 draws: every entry within 5 standard errors, √(σ_ii/M) and √((σ_ii·σ_jj + σ_ij²)/M), and no skewness."""
    found, draws = Gaussians(statistics_of([40, count], form)), 40_000
    drawn, report = found.draw(1, draws, Key(5))
    spread, again = found.spread(1)
    assert report == again
    wanted = covariance(spread)
    variances = wanted.diagonal()
    assert bool(((drawn.mean(0) - found.means[1]).abs() <= 5 * (variances / draws).sqrt()).all())
    error = ((torch.outer(variances, variances) + wanted.square()) / draws).sqrt()
    assert bool(((drawn.t().cov() - wanted).abs() <= 5 * error).all())
    standard = (drawn - found.means[1]) / variances.sqrt()
    assert bool((standard.pow(3).mean(0).abs() <= 5 * (15 / draws) ** 0.5).all())
    assert bool((standard.pow(4).mean(0) - 3).abs().max() <= 5 * (96 / draws) ** 0.5)


@pytest.mark.parametrize("form", FORMS)
def test_a_key_and_a_class_name_one_stream_of_draws(form):
    found = Gaussians(statistics_of([30, 30], form))
    first, other = found.draw(0, 50, Key(1))[0], found.draw(1, 50, Key(1))[0]
    assert torch.equal(first, Gaussians(statistics_of([30, 30], form)).draw(0, 50, Key(1))[0])
    assert not torch.equal(first, found.draw(0, 50, Key(2))[0])
    assert not torch.equal(first, found.draw(0, 50, Key(1).fold("epoch", 1))[0])
    standard = [
        torch.linalg.lstsq(covariance(found.spread(place)[0]), (drawn - found.means[place]).t()).solution
        for place, drawn in enumerate((first, other))
    ]
    assert not torch.allclose(*standard)


@pytest.mark.parametrize("form", ["full", "diagonal", "low-rank(3)"])
def test_the_draws_of_a_large_class_do_not_depend_on_who_else_is_there(form):
    """Class 2 at place 2 of three, and at place 0 alone."""
    features, labels = examples([9, 9, 30])
    among = Gaussians(ClassStatistics.of_features(features, labels, C, form))
    alone = Gaussians(ClassStatistics.of_features(features[labels == 2], labels[labels == 2], C, form))
    assert torch.equal(among.draw(2, 20, Key(4))[0], alone.draw(0, 20, Key(4))[0])
    assert among.draw(2, 20, Key(4))[1] == alone.draw(0, 20, Key(4))[1]


def indefinite(form):
    """Second moments whose diagonal is possible and whose matrix is not: no features have them."""
    features = torch.randn(60, 3, generator=Key(5).torch(), dtype=torch.float64)
    statistics = ClassStatistics.of_features(features, torch.arange(60) % 3, 3, form)
    second = unpack(statistics.sums["second"], 3)
    second[..., 0, 1] = 0.999 * (second[..., 0, 0] * second[..., 1, 1]).sqrt()
    second[..., 0, 2] = 0.999 * (second[..., 0, 0] * second[..., 2, 2]).sqrt()
    second[..., 1, 2] = -0.999 * (second[..., 1, 1] * second[..., 2, 2]).sqrt()
    return replace(statistics, sums={**statistics.sums, "second": pack(second)})


@pytest.mark.parametrize("form", ["full", "shared"])
def test_moments_that_no_features_have_are_clipped_and_it_is_said(form):
    statistics = indefinite(form)
    assert torch.linalg.eigvalsh(statistics.within()).min() < 0
    layer = torch.nn.Linear(3, 3)
    drawn = calibrate(layer, statistics, "ccvr(per_class=20, epochs=1)")
    assert any("negative eigenvalues were set to zero" in note for note in drawn.report.notes())
    with pytest.warns(UserWarning, match="negative eigenvalues of the pooled covariance were set to zero"):
        solved = calibrate(layer, statistics, "lda(ridge=0.001)")
    with pytest.warns(UserWarning, match="lda: negative eigenvalues of the pooled covariance were set to zero"):
        assert bool(calibrate(layer, statistics, "lda").head.weight.isfinite().all())
    values, vectors = torch.linalg.eigh(statistics.within())
    within = (vectors * values.clamp(min=0)) @ vectors.t()
    ridge = 0.001 * within.diagonal().mean() * torch.eye(3, dtype=torch.float64)
    wanted = torch.linalg.solve(within + ridge, statistics.means().t()).t()
    assert torch.allclose(solved.head.weight.double(), wanted, rtol=1e-3)
