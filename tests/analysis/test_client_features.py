"""Features of clients and of the server: by hand, and what is missing."""

import pytest
import torch

from analysis.finished import drawn, finished_run, undisturbed
from unskew.analysis import parse_measure
from unskew.analysis.curves import CURVES, Curves, volatility
from unskew.analysis.drift import CLIENT_FEATURES, DRIFT, ClientFeatures, Drift, take_client_features
from unskew.analysis.skew import PLACES, Places, take_places
from unskew.core.errors import Missing, UserError


def test_shifts_by_hand(finished):
    with finished_run(finished) as opened, undisturbed():
        found = take_client_features(opened, clients=2)
        models, side = opened.local_models(None, 2), opened.side
        images, labels = side.test.batch(torch.arange(len(side.test.labels)))
        side.load(opened.model, training=False)
        with torch.no_grad():
            server = side.network.encoder(images).double()
            side.load(models[int(found.clients[1])], training=False)
            local = side.network.encoder(images).double()
    assert found.classes == [str(name) for name in opened.classes]
    own = labels == 3
    spread = (server[own] - server[own].mean(0)).square().sum(1).mean().sqrt()
    expected = (local[own].mean(0) - server[own].mean(0)).norm() / spread
    assert found.shifts[1][3] == pytest.approx(float(expected), rel=1e-4)
    assert found.shifts[1][3] > 0
    counts = dict.fromkeys(range(len(found.classes)), 0)
    counts |= {int(label): int(n) for client, label, n in opened.holdings.cells if client == int(found.clients[1])}
    assert found.held[1] == [counts[label] > 0 for label in counts]
    (sentence,) = CLIENT_FEATURES.findings(found)
    assert "spreads for classes they have" in sentence
    assert drawn(CLIENT_FEATURES.draw(found))


def test_a_sentence_has_only_what_there_is():
    everything = ClientFeatures(3, [0], ["a", "b"], [[1.0, 2.0]], [[True, True]], None, [None])
    (sentence,) = CLIENT_FEATURES.findings(everything)
    assert sentence.endswith("differ from the server's by 1.50 spreads for classes they have.")
    assert everything.mean(held=False) is None


def test_places_are_those_of_the_classes_that_were_named(tmp_path):
    import unskew

    data = "unskew.data.synthetic_set:population(users=20, classes=4, examples=200, test=40, size=8)"
    run = unskew.run(data=data, partition="users", rounds=0, out=tmp_path / "run")
    with finished_run(run.path) as opened:
        found = take_places(opened, classes="class 2; class 0")
        largest = take_places(opened)
        with pytest.raises(UserError, match="no class is called 'class 9'"):
            take_places(opened, classes="class 9")
        labels = opened.images.train.labels
    assert found.classes == ["class 2", "class 0"]
    assert found.counts == [int((labels == 2).sum()), int((labels == 0).sum())]
    assert [len(points) for points in found.points] == found.counts
    assert all(-180 <= east <= 180 and -90 <= north <= 90 for east, north in found.points[0])
    assert len(largest.classes) == 2
    assert drawn(PLACES.draw(found))


def test_without_places_nothing_is_drawn(finished):
    with finished_run(finished) as opened, pytest.raises(Missing, match="no coordinates"):
        parse_measure("places").take(opened)
    assert PLACES.findings(Places(["a"], [1], [[(0.0, 0.0)]])) == ["a: 1 training example with coordinates."]


def test_one_trained_layer_is_not_called_most_and_least():
    rows = [{"round": 1, "when": "after the last round", "clients": [0], "local": [[0.261]]}]
    assert DRIFT.findings(Drift(["_fc"], rows)) == [
        "In one visit after the last round, clients change _fc by 26.1% of its norm."
    ]


def test_volatility_is_zero_for_a_steady_rise_and_the_deviation_for_noise():
    assert volatility([0.1, 0.2, 0.3, 0.4]) == pytest.approx(0, abs=1e-12)
    assert volatility([0.1, 0.2]) is None
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert volatility(noise.tolist()) == pytest.approx(1, rel=0.03)


def test_runs_are_compared_by_their_volatility():
    def curves(method, accuracy):
        count = list(range(len(accuracy)))
        empty = dict.fromkeys(("batches", "bytes", "seconds", "loss"), count)
        return Curves(method, {"method": method}, 0, count, accuracy=accuracy, train_loss=[], calibrated={}, **empty)

    runs = {"a": curves("fedavg", [0.1, 0.5, 0.1, 0.5]), "b": curves("fedvc", [0.1, 0.2, 0.3, 0.4])}
    (sentence,) = CURVES.compare.findings(runs)
    assert "steadiest from one evaluation to the next with fedvc (volatility 0.00 points)" in sentence
    assert CURVES.compare.findings({"a": runs["a"]}) == []
