"""Features in the plane: the same places every time and in every panel."""

import pytest
import torch

from analysis.finished import NAMES, finished_run, undisturbed
from unskew.analysis import projection
from unskew.analysis.projection import Projection, embed
from unskew.charts.files import svg
from unskew.core.errors import Missing, UserError
from unskew.core.key import Key


def features(n=30, d=5):
    return torch.randn(n, d, generator=Key(0).torch()) + 20 * (torch.arange(n) % 2)[:, None]


def test_the_same_seed_gives_the_same_places_twice(finished):
    with finished_run(finished) as one, finished_run(finished) as other, undisturbed():
        left, right = (projection.take_projection(each, images=40) for each in (one, other))
    assert left == right
    assert len(left.x) == len(left.y) == len(left.truth) == 40


def test_neighbours_stay_neighbours():
    """Two groups far apart: the nearest place to each is one of its own group."""
    places = embed(features(), 5.0, 7)
    assert places.shape == (30, 2)
    far = torch.cdist(places, places).fill_diagonal_(float("inf"))
    assert (far.argmin(1) % 2 == torch.arange(30) % 2).all()


def test_all_panels_have_the_same_places_and_the_images_their_own_classes(finished):
    with finished_run(finished) as opened:
        found = projection.take_projection(opened, images=50)
        outputs = opened.outputs
        index = torch.randperm(120, generator=opened.key.fold("analysis", "images").torch())[:50].sort().values
    assert found.truth == outputs.labels[index].tolist()
    assert list(found.predicted) == ["before", *opened.result.calibrations]
    assert found.predicted["before"] == outputs.predicted[""][index].tolist()
    for name in opened.result.calibrations:
        assert found.predicted[name] == outputs.predicted[name][index].tolist()
    charts = projection.PROJECTION.draw(found)
    assert len(charts) == 5
    spots = [sorted((x, y) for mark in chart.marks for x, y in zip(mark.x, mark.y, strict=True)) for chart in charts]
    assert all(each == spots[0] for each in spots)
    assert spots[0] == sorted(zip(found.x, found.y, strict=True))
    assert all(svg(chart).startswith("<svg") for chart in charts)


@pytest.mark.parametrize("knobs", [{"images": 4}, {"perplexity": 0.0}, {"calibrations": -1}])
def test_impossible_knobs_are_refused(finished, knobs):
    with finished_run(finished) as opened, pytest.raises(UserError, match=r"projection needs|calibrations=-1"):
        projection.take_projection(opened, **knobs)


@pytest.mark.parametrize("given", [*(features(20, d) for d in (1, 2, 3)), torch.full((12, 4), 0.3)])
def test_features_of_few_dimensions_or_without_spread_have_places_too(given):
    assert embed(given, 5.0, 0).isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_no_numbers_are_missing(value):
    broken = features()
    broken[3, 2] = value
    with pytest.raises(Missing, match="NaN or infinity"):
        embed(broken, 5.0, 0)


def made(truth, before):
    at = [float(place) for place in range(len(truth))]
    return Projection(list(NAMES), at, at, truth, {"before": before})


def test_the_class_that_swallows_others_is_named():
    """Class one occurs twice and is predicted five times."""
    (said,) = projection.PROJECTION.findings(made([0, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 2]))
    assert "one" in said
    assert "2.50 times" in said
    (said,) = projection.PROJECTION.findings(made([0, 1, 2], [0, 1, 2]))
    assert said == "No class is predicted much more often than it occurs."


def test_a_class_that_does_not_occur_but_is_predicted_is_not_passed_over():
    """Nine, of which there is no image here, swallows everything: to say that no class does would be false."""
    (said,) = projection.PROJECTION.findings(made([0, 1, 2, 0, 1, 2], [9, 9, 9, 9, 9, 2]))
    assert said != "No class is predicted much more often than it occurs."
