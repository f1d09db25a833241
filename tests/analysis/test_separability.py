"""How far classes lie apart: exactly where features have one dimension, and against plain sums elsewhere."""

import math

import numpy as np
import pytest
import torch

from analysis.finished import drawn, finished_run, recorded, undisturbed, unsealed
from unskew.analysis import separability
from unskew.analysis.separability import Separability
from unskew.calibration.covariances import Full
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.forecast import pairwise_separability
from unskew.core.errors import Missing


def one_feature(shape, classes):
    """A network whose feature is the mean pixel: one dimension, where every direction is ±1."""
    from torch import nn

    from unskew.models.networks import Network

    return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), nn.Linear(1, classes))


@pytest.fixture(scope="module")
def narrow(runs_of):
    """A finished run whose features have one dimension."""
    return runs_of(model="test_separability:one_feature", rounds=1)


def test_a_run_s_distances_are_those_of_all_clients_features_together(narrow):
    """The sums travel by client; what comes out is the mean and deviation of each class over everybody."""
    with finished_run(narrow) as opened, undisturbed():
        found = separability.take_separability(opened)
        side = opened.side
        side.load(opened.model, training=False)
        with torch.no_grad():
            images, labels = side.train.batch(torch.arange(240))
            features = side.network.encoder(images).double()[:, 0]
    m = [float(features[labels == c].mean()) for c in range(10)]
    s = [float(features[labels == c].std()) for c in range(10)]
    wanted = [[math.hypot(m[a] - m[b], s[a] - s[b]) for b in range(10)] for a in range(10)]
    assert np.array(found.distances) == pytest.approx(np.array(wanted), rel=1e-4, abs=1e-7)
    pairs = [wanted[a][b] for a in range(10) for b in range(a)]
    assert found.mean == pytest.approx(sum(pairs) / len(pairs), rel=1e-4)
    assert found.form == "full"
    assert found.classes == opened.classes


def test_the_silhouette_is_the_one_that_was_recorded_last(finished):
    with finished_run(finished) as opened:
        found = separability.take_separability(opened)
    assert found.rounds == [(row["round"], row["silhouette"]) for row in recorded(finished)]
    assert found.silhouette == found.rounds[-1][1]


def test_without_a_data_set_recorded_silhouettes_are_shown(run):
    (run.parent / "digits.npz").unlink()
    with finished_run(run) as opened:
        found = separability.take_separability(opened)
        assert found.rounds == [(row["round"], row["silhouette"]) for row in recorded(run)]
        assert "distances between classes are missing" in opened.notes[0]
        assert [chart.name for chart in separability.SEPARABILITY.draw(found)] == ["separability-silhouette"]
        assert separability.SEPARABILITY.findings(found)
    (unsealed(run) / "during.jsonl").unlink()
    with finished_run(run) as opened, pytest.raises(Missing, match=r"digits\.npz does not exist"):
        separability.take_separability(opened)


def made(**changes):
    table = [[0.0, 1.0, 4.0], [1.0, 0.0, 2.0], [4.0, 2.0, 0.0]]
    values = {"classes": ["a", "b", "c"], "distances": table, "mean": 7 / 3, "form": "full", "before": 0.5}
    return Separability(**(values | {"after": 0.75, "silhouette": 0.125, "rounds": [(1, 0.1), (3, 0.2)]} | changes))


def test_the_words_name_the_closest_pair_and_what_is_left_to_gain():
    said = separability.SEPARABILITY.findings(made())
    assert "50.0%" in said[0]
    assert "75.0%" in said[0]
    assert "25.0 points" in said[0]
    assert "b and a" in said[1] or "a and b" in said[1]
    assert "1 apart" in said[1]
    assert "2.33" in said[1]
    assert "0.1250" in said[2]
    assert "0.0 points" in separability.SEPARABILITY.findings(made(before=0.9))[0]  # nothing is lost by it either
    assert separability.SEPARABILITY.findings(made(before=None, silhouette=None, classes=["a", "b"])) == []


def test_the_deviation_is_that_over_draws_of_directions(finished):
    with finished_run(finished) as opened:
        found = separability.take_separability(opened)
        statistics = separability._gather_statistics(opened, StatisticsRequest(Full()))
        keys = [opened.key, *(opened.key.fold("draw", n) for n in range(1, 5))]
        draws = [pairwise_separability(statistics, key) for key in keys]
    assert found.deviation == pytest.approx(float(np.std([float(each.mean()) for each in draws], ddof=1)))
    table = np.array(found.deviations)
    assert table[0, 1] == table[1, 0] == pytest.approx(float(np.std([float(each[0]) for each in draws], ddof=1)))
    assert 0 < found.deviation < found.mean
    assert f"± {found.deviation:.2g} (± over 5 draws of 256 directions)" in separability.SEPARABILITY.findings(found)[1]


def test_pictures_of_the_distances():
    charts = separability.SEPARABILITY.draw(made())
    assert drawn(charts) == ["separability-pairs", "separability-silhouette"]
    assert separability.SEPARABILITY.draw(made(rounds=[(3, 0.1)], classes=["a"], distances=[[0.0]])) == []
