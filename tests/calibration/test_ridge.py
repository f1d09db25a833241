"""Ridge is ridge regression on the pooled examples, its strength and its scale follow from the sums alone."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from calibration.heads import normal
from unskew.calibration.calibrate import calibrate
from unskew.calibration.classifier import Lift
from unskew.calibration.ridge import GRID, Regression
from unskew.calibration.statistics import ClassStatistics, KnownNoise
from unskew.core.errors import UserError

D, C = 5, 3


def examples(counts=(30, 8, 50), *, apart=2.0, width=D, seed=0):
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return normal(len(labels), width, seed=seed) + apart * normal(len(counts), width, seed=9)[labels], labels


def made(features, labels, method, classes=C):
    head = nn.Linear(features.shape[1], classes, dtype=torch.float64)
    return calibrate(head, ClassStatistics.of_features(features, labels, classes, "shared"), method)


def direction(rows):
    """Weights without their scale."""
    rows = np.asarray(rows)
    return rows / np.linalg.norm(rows)


def plain_ridge(features, labels, strength, weights):
    """In numpy, on the examples themselves: w = (XᵀVX + λI)⁻¹XᵀVY around the weighted means, ΣV = 1."""
    x, y, v = features.numpy(), np.eye(C)[labels.numpy()], weights / weights.sum()
    middle, shares = v @ x, v @ y
    x, y = x - middle, y - shares
    second = x.T @ (v[:, None] * x)
    penalty = strength * np.trace(second) / len(second)
    weight = np.linalg.solve(second + penalty * np.eye(len(second)), x.T @ (v[:, None] * y)).T
    hat = np.sqrt(v)[:, None] * x @ np.linalg.solve(second + penalty * np.eye(len(second)), x.T * np.sqrt(v))
    residual = float((v[:, None] * (y - x @ weight.T) ** 2).sum())
    return weight, shares - weight @ middle, residual, 1 + np.trace(hat)


@pytest.mark.parametrize("strength", [0.001, 0.3, 20.0])
def test_unbalanced_ridge_is_ridge_regression_on_all_examples_and_one_hot_labels(strength):
    features, labels = examples()
    found = made(features, labels, f"ridge(strength={strength}, balanced=false)").head
    weight, bias, _, _ = plain_ridge(features, labels, strength, np.ones(len(labels)))
    wanted = np.concatenate([weight, bias[:, None]], 1)
    assert np.allclose(
        direction(torch.cat([found.weight, found.bias[:, None]], 1).detach()), direction(wanted), atol=1e-12
    )


def test_balanced_ridge_weighs_every_class_alike():
    """The classes here have one spread, so that the pooled covariance is exactly each class's own."""
    block = normal(40, D)
    block -= block.mean(0)
    labels = torch.tensor([0] * 40 + [1] * 40 + [2] * 400)
    features = torch.cat([block + 3 * normal(D, seed=1), block + 3 * normal(D, seed=2), block.repeat(10, 1)])
    found = made(features, labels, "ridge(strength=0.1)").head
    weight, bias, _, _ = plain_ridge(features, labels, 0.1, 1 / np.bincount(labels)[labels])
    assert np.allclose(direction(found.weight.detach()), direction(weight), atol=1e-12)
    assert np.allclose(direction(found.bias.detach()), direction(bias), atol=1e-12)


@pytest.mark.parametrize(("counts", "apart"), [((30, 8, 50), 2.0), ((6, 5, 4), 0.7), ((300, 300, 300), 0.3)])
def test_the_strength_has_the_least_generalised_cross_validation_score_of_the_grid(counts, apart):
    """From hat matrices of the examples, which no server sees."""
    features, labels = examples(counts, apart=apart)
    scores = {}
    for strength in GRID:
        _, _, residual, degrees = plain_ridge(features, labels, strength, np.ones(len(labels)))
        scores[strength] = residual / (1 - degrees / len(labels)) ** 2
    best = min(scores, key=scores.get)
    report = made(features, labels, "ridge(balanced=false)").report
    assert report.notes() == [f"strength {best:.2g} was chosen by generalized cross-validation"]


def test_the_effective_number_of_examples_is_that_of_equal_weights():
    statistics = ClassStatistics.of_features(*examples((20, 20, 20)), C, "shared")
    assert Regression(statistics, True, False).effective == pytest.approx(60)
    statistics = ClassStatistics.of_features(*examples((2, 10, 400)), C, "shared")
    assert Regression(statistics, True, False).effective == pytest.approx(9 / (1 / 2 + 1 / 10 + 1 / 400))
    assert Regression(statistics, False, False).effective == pytest.approx(412)


def test_of_two_gaussians_the_logits_are_their_log_odds():
    """Equal spreads, many examples: log p(1|z)/p(0|z) = δᵀΣ⁻¹(z − middle), whatever ridge's own outputs are."""
    spread = normal(D, D, seed=3)
    centres = 0.7 * normal(2, D, seed=4)
    labels = torch.arange(200_000) % 2
    features = centres[labels] + normal(200_000, D) @ spread
    found = made(features, labels, "ridge(strength=0.0001)", classes=2).head
    difference = (found.weight[1] - found.weight[0]).detach()
    wanted = torch.linalg.solve(spread.t() @ spread, centres[1] - centres[0])
    assert torch.allclose(difference, wanted, rtol=0.05, atol=0.01 * float(wanted.norm()))


def test_with_fewer_examples_than_features_the_loss_on_unseen_ones_is_that_of_somebody_who_is_not_sure():
    features, labels = examples((20, 20, 20), width=200, apart=0.25)
    unseen, truth = examples((300, 300, 300), width=200, apart=0.25, seed=5)
    for method in ("ridge", "ridge(strength=0.01)", "lda"):
        loss = float(nn.functional.cross_entropy(made(features, labels, method)(unseen).detach(), truth))
        assert loss < np.log(C) + 0.01, method  # lda with as little ridge: 20 and more
    loss = float(nn.functional.cross_entropy(made(features, labels, "lda(ridge=0.001)")(unseen).detach(), truth))
    assert loss > 3


def test_any_form_of_statistics_gives_the_same_classifier():
    features, labels = examples()
    found = []
    for form in ("shared", "full"):
        statistics = ClassStatistics.of_features(features, labels, C, form)
        found.append(calibrate(nn.Linear(D, C, dtype=torch.float64), statistics, "ridge").head.weight)
    assert torch.allclose(*found, rtol=1e-9)


def test_random_features_follow_what_no_line_can():
    """Inside and outside of a ring: no linear classifier, but ReLU of random sums."""
    points = normal(600, 2)
    labels = (points.norm(dim=1) > 1.2).long()
    plain = made(points, labels, "ridge", classes=2)
    lifted = ClassStatistics.of_features(Lift.of(2, 60)(points), labels, 2, "shared")
    bent = calibrate(nn.Linear(2, 2, dtype=torch.float64), lifted, "ridge(expand=60)")
    right = [float((each(points).argmax(1) == labels).double().mean()) for each in (plain, bent)]
    assert right[0] < 0.75
    assert right[1] > 0.9


def test_known_noise_is_not_inverted_unless_a_strength_is_given():
    features, labels = examples((300, 300, 300))
    statistics = ClassStatistics.of_features(features, labels, C, "shared")
    noisy = ClassStatistics(
        C, statistics.form, statistics.held, statistics.number, statistics.sums, KnownNoise(0.0, 4000.0)
    )
    edge = np.sqrt(2 * D) * 4000 / (900 - C)
    values = torch.linalg.eigvalsh(Regression(noisy, True, True).within)
    assert torch.allclose(values, torch.full((D,), edge * (900 - C) / 900, dtype=torch.float64))
    head = nn.Linear(D, C, dtype=torch.float64)
    given = [calibrate(head, each, "ridge(strength=0.1)").head.weight for each in (statistics, noisy)]
    assert torch.equal(*given)
    chosen = [calibrate(head, each, "ridge").head.weight for each in (statistics, noisy)]
    assert not torch.equal(*chosen)


def test_moments_that_no_features_have_are_set_right_and_said():
    features, labels = examples()
    statistics = ClassStatistics.of_features(features, labels, C, "shared")
    statistics.sums["second"][0] -= 150  # more than its scatter of 100 or so
    with pytest.warns(UserWarning, match="ridge: negative eigenvalues of the pooled covariance were set to zero"):
        found = calibrate(nn.Linear(D, C), statistics, "ridge")
    assert found.head.weight.isfinite().all()


def test_what_has_no_solution_is_refused_with_what_to_do():
    flat = torch.eye(C, D, dtype=torch.float64)[torch.arange(30) % C]
    with pytest.raises(UserError, match="the features do not vary within classes"):
        made(flat, torch.arange(30) % C, "ridge")
    features, labels = examples()
    dependent = features.repeat(1, 6)  # linearly dependent
    with pytest.raises(UserError, match=r"^ridge\(strength=1e-30\) has no solution; give a larger strength$"):
        made(dependent, labels, "ridge(strength=1e-30)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(dependent, labels, "ridge").head.weight.isfinite().all()
