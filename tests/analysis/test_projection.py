"""Features in the plane: the same places every time and in every panel."""

import itertools

import pytest
import torch

from analysis.finished import NAMES, SMALL, finished_run, images, result, undisturbed
from unskew.analysis import projection
from unskew.analysis.projection import Projection, embed
from unskew.charts.files import svg
from unskew.core.errors import Missing, UserError
from unskew.core.key import Key
from unskew.runs import train


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


def test_another_seed_gives_other_places():
    """Nothing varies: only the draw decides."""
    constant = torch.ones(6, 3)
    assert not torch.equal(embed(constant, 5.0, 1), embed(constant, 5.0, 2))
    assert torch.equal(embed(constant, 5.0, 1), embed(constant, 5.0, 1))


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
    for chart in charts:
        assert svg(chart).startswith("<svg")


def test_all_images_are_taken_where_there_are_no_more(finished):
    with finished_run(finished) as opened:
        found = projection.take_projection(opened, images=120, calibrations=1)
    assert len(found.truth) == 120
    assert len(found.predicted) == 2
    kept = max(result(finished)["calibrations"], key=lambda row: row["accuracy"])["name"]
    assert list(found.predicted) == ["before", kept]
    right = sum(a == b for a, b in zip(found.predicted["before"], found.truth, strict=True)) / 120
    assert right == pytest.approx(result(finished)["accuracy"])


@pytest.mark.parametrize("knobs", [{"images": 4}, {"perplexity": 0.0}, {"perplexity": -1.0}, {"calibrations": -1}])
def test_impossible_knobs_are_refused(finished, knobs):
    with finished_run(finished) as opened, pytest.raises(UserError, match=r"projection\(|calibrations=-1"):
        projection.take_projection(opened, **knobs)


def test_fewer_than_five_test_images_are_too_few(tmp_path):
    import numpy as np

    with np.load(images(tmp_path)) as archive:
        arrays = {name: archive[name] for name in archive.files}
    np.savez(tmp_path / "few.npz", **(arrays | {name: arrays[name][:4] for name in ("x_test", "y_test")}))
    train.run(out=tmp_path / "run", data=f"arrays:{tmp_path / 'few.npz'}", **{**SMALL, "rounds": 1})
    with finished_run(tmp_path / "run") as opened, pytest.raises(Missing, match="the test set has only 4 images"):
        projection.take_projection(opened)


def test_five_images_have_places_whatever_the_perplexity():
    """t-SNE wants a perplexity below the number of images: a third of the others is taken instead."""
    assert embed(features(5), 30.0, 0).isfinite().all()


@pytest.mark.parametrize("d", [1, 2, 3])
def test_features_of_few_dimensions_have_places_too(d):
    assert embed(features(20, d), 5.0, 0).isfinite().all()


def test_features_that_do_not_vary_have_places_too():
    assert embed(torch.full((12, 4), 0.3), 30.0, 0).isfinite().all()


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
    (said,) = projection.projection_findings(made([0, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 2]))
    assert "one" in said
    assert "2.50 times" in said
    (said,) = projection.projection_findings(made([0, 1, 2], [0, 1, 2]))
    assert said == "No class is predicted much more often than it occurs."


def test_a_class_that_does_not_occur_but_is_predicted_is_not_passed_over():
    """Nine, of which there is no image here, swallows everything: to say that no class does would be false."""
    (said,) = projection.projection_findings(made([0, 1, 2, 0, 1, 2], [9, 9, 9, 9, 9, 2]))
    assert said != "No class is predicted much more often than it occurs."


def test_panels_have_names_of_their_own(finished):
    with finished_run(finished) as opened:
        names = [chart.name for chart in projection.PROJECTION.draw(projection.take_projection(opened, images=20))]
    assert all(a != b for a, b in itertools.combinations(names, 2))
