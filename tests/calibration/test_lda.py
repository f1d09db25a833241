"""LDA: what it estimates on random matrices, and that it is right where examples are few or classes unequal."""

import pytest
import torch
from torch import nn

from unskew.calibration.calibrate import calibrate
from unskew.calibration.lda import GRID, discriminate
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key


def drawn(counts, width, apart=0.25, seed=0, power=0.0, means=7):
    """Gaussians with the spectrum 1/j^power, class means apart by it; features and labels."""
    deviation = torch.arange(1, width + 1, dtype=torch.float64) ** (-power / 2)
    centres = apart * torch.randn(len(counts), width, generator=Key(means).torch(), dtype=torch.float64) * deviation
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    noise = torch.randn(len(labels), width, generator=Key(seed).torch(), dtype=torch.float64) * deviation
    return centres[labels] + noise, labels


def tail(largest, ratio, classes):
    return [max(1, round(largest * ratio ** (-label / (classes - 1)))) for label in range(classes)]


def accuracy(method, counts, width, **knobs):
    """Of the calibration of these examples, on 20 unseen ones of each class."""
    classes = len(counts)
    statistics = ClassStatistics.of_features(*drawn(counts, width, **knobs), classes, "shared")
    made = calibrate(nn.Linear(width, classes), statistics, method)
    unseen, labels = drawn([20] * classes, width, **knobs | {"seed": 1})
    return float((made(unseen.float()).argmax(1) == labels).double().mean())


TEXTBOOK = "lda(ridge=0.001)"


@pytest.mark.parametrize("power", [0.0, 1.0])
@pytest.mark.parametrize(
    ("counts", "gain"),
    [(tail(300, 100, 40), 0.05), (tail(300, 20, 40), 0.01), ([1500, *[6] * 49], 0.05), ([8] * 50, 0.1)],
    ids=["tail 1:100", "tail 1:20", "half in one class", "few"],
)
def test_it_beats_the_textbook_where_classes_are_unequal_or_examples_few(counts, gain, power):
    assert accuracy("lda", counts, 200, power=power) > accuracy(TEXTBOOK, counts, 200, power=power) + gain


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_it_is_the_textbooks_where_every_class_has_many_examples(power):
    knobs = {"power": power, "apart": 0.3}
    assert accuracy("lda", [3000] * 8, 20, **knobs) == pytest.approx(
        accuracy(TEXTBOOK, [3000] * 8, 20, **knobs), abs=0.02
    )
    found = discriminate(ClassStatistics.of_features(*drawn([3000] * 8, 20, power=1.0), 8, "shared"))
    assert found.ridge == GRID[0]
    assert float(found.shrinkage.min()) > 0.98
    assert found.inflation < 1.01


@pytest.mark.parametrize(("number", "width"), [(30, 20), (40, 80), (10, 200)])
def test_what_it_says_of_unseen_features_holds_for_random_matrices(number, width):
    """wᵀΣw is that of the examples times the inflation squared, for weights that were made from them."""
    ratios = []
    for seed in range(3):
        statistics = ClassStatistics.of_features(*drawn([number] * 10, width, seed=seed), 10, "shared")
        found = discriminate(statistics)
        weight = found.weight - found.weight.mean(0)
        unseen = float(weight.square().sum())  # the true covariance is I
        ratios.append(unseen / float((weight @ statistics.within() * weight).sum()))
        assert ratios[-1] == pytest.approx(found.inflation**2, rel=0.25)
    assert sum(ratios) / 3 == pytest.approx(found.inflation**2, rel=0.15)


def test_a_rare_class_is_shrunk_further():
    shrinkage = discriminate(ClassStatistics.of_features(*drawn([500, 50, 5, 1], 30), 4, "shared")).shrinkage.tolist()
    assert shrinkage == sorted(shrinkage, reverse=True)
    assert shrinkage[0] > 0.9 > 0.5 > shrinkage[3]


def test_logits_are_log_odds_of_unseen_features():
    for counts, width in (([8] * 30, 100), (tail(300, 100, 30), 100)):
        statistics = ClassStatistics.of_features(*drawn(counts, width), 30, "shared")
        found = discriminate(statistics)
        unseen, labels = drawn([60] * 30, width, seed=1)
        share, answer = (unseen @ found.weight.t() + found.bias).softmax(1).max(1)
        assert float(share.mean()) == pytest.approx(float((answer == labels).double().mean()), abs=0.08)


def test_one_class_two_examples_and_equal_means_have_an_answer():
    for counts in ([5], [2, 1], [3, 3]):
        features, labels = drawn(counts, 4, apart=0.0)
        found = discriminate(ClassStatistics.of_features(features, labels, len(counts), "shared"))
        assert bool(found.weight.isfinite().all())
        assert bool(found.bias.isfinite().all())


def test_a_shift_and_a_scale_of_all_features_change_no_answer():
    features, labels = drawn(tail(100, 20, 10), 15)
    unseen, _ = drawn([20] * 10, 15, seed=1)
    plain = discriminate(ClassStatistics.of_features(features, labels, 10, "shared"))
    moved = discriminate(ClassStatistics.of_features(3 * features + 50, labels, 10, "shared"))
    first, second = unseen @ plain.weight.t() + plain.bias, (3 * unseen + 50) @ moved.weight.t() + moved.bias
    assert torch.allclose(first.log_softmax(1), second.log_softmax(1), atol=1e-6)


def test_features_that_do_not_vary_are_refused():
    with pytest.raises(UserError, match="lda has no solution: the features do not vary within classes"):
        discriminate(ClassStatistics.of_features(torch.ones(6, 3), torch.arange(6) % 2, 2, "shared"))
