"""How far apart classes lie is a distance, measured; what calibration may gain is counted on what was drawn."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from calibration.heads import normal
from unskew.calibration.covariances import Gaussians
from unskew.calibration.forecast import DIRECTIONS, forecast
from unskew.calibration.lda import discriminate
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

KEY = Key(7)
FORMS = ("full", "diagonal", "shared", "low-rank(2)")


def separability(statistics, key):
    """The mean over all pairs of classes."""
    return forecast(None, statistics, statistics.classes, key).separability


def statistics_of(*classes, form="full", total=None):
    """Statistics of one class for each of these features; None: nobody holds it."""
    held = [(label, rows) for label, rows in enumerate(classes) if rows is not None]
    labels = torch.cat([torch.full((len(rows),), label) for label, rows in held])
    return ClassStatistics.of_features(torch.cat([rows for _, rows in held]), labels, total or len(classes), form)


def exactly(mean, spread, count=40):
    """Features on a line with exactly this mean and standard deviation."""
    rows = normal(count, 1)
    return mean + spread * (rows - rows.mean()) / rows.std()


def blob(mean, mixing, count=300, seed=0):
    rows = normal(count, len(mean), seed=seed)
    return rows @ torch.tensor(mixing, dtype=torch.float64) + torch.tensor(mean, dtype=torch.float64)


# separability


@pytest.mark.parametrize("form", ["full", "diagonal", "low-rank(1)"])
def test_on_a_line_the_distance_is_that_of_two_gaussians_exactly(form):
    """W₂² = (m − m′)² + (s − s′)²: 3-4-5, and the mean over the three pairs."""
    two = statistics_of(exactly(0, 1), exactly(3, 5), form=form)
    assert separability(two, KEY) == pytest.approx(5, rel=1e-10)
    three = statistics_of(exactly(0, 1), exactly(3, 5), exactly(3, 1), form=form)
    assert separability(three, KEY) == pytest.approx((5 + 3 + 4) / 3, rel=1e-10)


def test_where_all_classes_share_a_spread_only_the_means_count():
    assert separability(statistics_of(exactly(0, 1), exactly(3, 5), form="shared"), KEY) == pytest.approx(3, rel=1e-10)


def test_it_is_the_distance_between_samples_sorted_along_the_same_directions():
    """In one dimension the best transport pairs the k-th smallest with the k-th smallest."""
    statistics = statistics_of(
        blob([0, 0, 0], [[1, 0, 0], [0.5, 2, 0], [0, 0, 0.1]]),
        blob([1, 2, -1], [[3, 0, 0], [0, 1, 1], [0, 0, 1]], seed=1),
    )
    slices = torch.randn(3, DIRECTIONS, generator=KEY.fold("slices").torch(), dtype=torch.float64)
    slices = (slices / slices.norm(dim=0)).numpy()
    gaussians, draw = Gaussians(statistics), Key(3).numpy()
    sorted_along = []
    for place in range(2):
        covariance = statistics.covariance(place).numpy()
        drawn = draw.multivariate_normal(gaussians.means[place].numpy(), covariance, 20_000, method="cholesky")
        sorted_along.append(np.sort(drawn @ slices, axis=0))
    squared = ((sorted_along[0] - sorted_along[1]) ** 2).mean(0)
    assert separability(statistics, KEY) == pytest.approx(math.sqrt(squared.mean()), rel=0.01)


@pytest.mark.parametrize("form", FORMS)
def test_it_has_the_features_own_unit_and_does_not_care_who_is_called_what(form):
    one, other = blob([0, 0, 0], [[1, 0, 0], [0, 2, 0], [0, 0, 1]]), blob([1, 2, 0], [[2, 0, 1], [0, 1, 0], [0, 0, 1]])
    found = separability(statistics_of(one, other, form=form), KEY)
    assert separability(statistics_of(8 * one, 8 * other, form=form), KEY) == pytest.approx(8 * found, rel=1e-9)
    assert separability(statistics_of(one + 5, other + 5, form=form), KEY) == pytest.approx(found, rel=1e-9)
    assert separability(statistics_of(other, one, form=form), KEY) == pytest.approx(found, rel=1e-12)
    assert separability(statistics_of(None, other, None, one, form=form), KEY) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_one_class_has_nobody_to_lie_apart_from(form):
    assert separability(statistics_of(normal(20, 3), form=form), KEY) == 0
    assert separability(ClassStatistics.empty(4, 3, form), KEY) == 0


def test_a_key_names_the_directions_and_nobody_else_draws_from_them():
    statistics = statistics_of(normal(20, 3), normal(20, 3, seed=1) + 1)
    state = torch.random.get_rng_state()
    assert separability(statistics, KEY) == separability(statistics, KEY)
    assert separability(statistics, KEY) != separability(statistics, Key(8))
    assert torch.equal(torch.random.get_rng_state(), state)


# what may be gained


def head_of(weight, bias):
    made = nn.Linear(len(weight[0]), len(weight))
    with torch.no_grad():
        made.weight.copy_(torch.tensor(weight))
        made.bias.copy_(torch.tensor(bias))
    return made


FAR = (exactly(-10, 1), exactly(10, 1))


@pytest.mark.parametrize(
    ("weight", "bias", "wanted"),
    [([[0.0], [0.0]], [1.0, 0.0], (0.5, 1.0)), ([[-1.0], [1.0]], [0.0, 0.0], (1.0, 1.0))],
    ids=["always one class", "always right"],
)
def test_what_may_be_gained_is_what_the_classifier_gets_wrong(weight, bias, wanted):
    found = forecast(head_of(weight, bias), statistics_of(*FAR), 2, KEY)
    assert (found.before, found.after) == wanted
    assert found.separability == pytest.approx(20, rel=1e-9)


@pytest.mark.parametrize("number", [60, 1000])
def test_the_forecast_for_gaussians_is_what_unseen_features_of_them_get(number):
    def drawn(count, seed):
        return [normal(count, 12, seed=seed + place) + normal(1, 12, seed=90 + place) * 0.6 for place in range(4)]

    head = head_of(normal(4, 12, seed=3).tolist(), [0.0] * 4)
    statistics = statistics_of(*drawn(number, 10))
    found, rival = forecast(head, statistics, 4, KEY), discriminate(statistics)
    unseen = torch.cat(drawn(2000, 50)).double()
    labels = torch.arange(4).repeat_interleave(2000)
    real = (unseen @ rival.weight.t() + rival.bias).argmax(1) == labels
    assert found.after == pytest.approx(float(real.double().mean()), abs=0.04)
    assert found.before == pytest.approx(float((head(unseen.float()).argmax(1) == labels).double().mean()), abs=0.06)


@pytest.mark.parametrize(
    ("form", "width", "count"),
    [("shared", 3, 50), ("diagonal", 3, 50), ("low-rank(2)", 3, 50), ("full", 40, 6), ("full", 3, 50)],
    ids=["shared", "diagonal", "low-rank", "few examples", "no head"],
)
def test_without_own_covariances_enough_examples_or_a_head_there_is_the_separability_alone(form, width, count):
    statistics = statistics_of(normal(count, width), normal(count, width, seed=1) + 1, form=form)
    head = head_of(normal(2, width, seed=3).tolist(), [0.0] * 2)
    found = forecast(None if form == "full" and width == 3 else head, statistics, 2, KEY)
    assert (found.before, found.after) == (None, None)
    assert found.separability > 0


def test_classes_that_nobody_holds_are_neither_drawn_nor_answered_by_the_discriminant():
    found = forecast(head_of([[0.0]] * 4, [0.0, 0.0, 1.0, 0.0]), statistics_of(*FAR, total=4), 4, KEY)
    assert (found.before, found.after) == (0.0, 1.0)


def test_heads_of_several_layers_and_of_any_type_are_tried_and_left_as_they_were():
    for dtype in (torch.float32, torch.float64):
        head = nn.Sequential(nn.ReLU(), nn.Linear(1, 4), nn.Dropout(0.9), nn.Linear(4, 2)).to(dtype)
        kept = {name: value.clone() for name, value in head.state_dict().items()}
        found = forecast(head, statistics_of(*FAR), 2, KEY)
        assert found == forecast(head, statistics_of(*FAR), 2, KEY)  # nothing is dropped at random
        assert head.training
        assert all(torch.equal(value, kept[name]) for name, value in head.state_dict().items())
        assert all(value.dtype == dtype for value in head.parameters())


@pytest.mark.parametrize("form", ["full", "shared", "diagonal"])
def test_features_that_do_not_vary_are_no_reason_to_stop(form):
    """A network whose features have all died is calibrated all the same: only the forecast has less to say."""
    for rows in (torch.zeros(10, 2, dtype=torch.float64), torch.full((10, 2), 3e4, dtype=torch.float64)):
        found = forecast(head_of([[0.0, 0.0]] * 2, [0.0, 0.0]), statistics_of(rows, rows + 2, form=form), 2, KEY)
        assert (found.before, found.after) == (None, None)
        assert found.separability == pytest.approx(2, rel=0.1)
