"""How far clients go: by hand, and as it was recorded."""

import math

import pytest

from analysis.finished import content, drawn, finished_run, undisturbed, unsealed
from unskew.analysis import drift
from unskew.analysis.drift import Drift
from unskew.core.errors import Missing

LAYERS = {
    "conv1": ("params/encoder.conv1.weight", "params/encoder.conv1.bias"),
    "conv2": ("params/encoder.conv2.weight", "params/encoder.conv2.bias"),
    "fc1": ("params/encoder.fc1.weight", "params/encoder.fc1.bias"),
    "classifier": ("params/classifier.weight", "params/classifier.bias"),
}


def by_hand(model, sent, layer):
    """√Σ(local − global)² / √Σ global², over the layer's weight and bias, entry by entry."""
    far = own = 0.0
    for name in LAYERS[layer]:
        local, server = model[name].flatten().tolist(), sent[name].flatten().tolist()
        far += sum((a - b) ** 2 for a, b in zip(local, server, strict=True))
        own += sum(b * b for b in server)
    return math.sqrt(far / own)


@pytest.mark.parametrize("number", [0, 3])
def test_distances_by_hand(finished, number):
    with finished_run(finished) as opened, undisturbed():
        found = drift.take_drift(opened, round=number)
        models, state = opened.local_models(number), opened.state(number)
    assert found.layers == list(LAYERS)
    row = [each for each in found.rounds if each["round"] == number + 1][-1]
    assert row["when"] == ("after the last round" if number else "in round 1")
    assert row["clients"] == list(map(str, models))
    for distances, model in zip(row["local"], models.values(), strict=True):
        assert distances == pytest.approx([by_hand(model, state.tensors, layer) for layer in LAYERS], rel=1e-9)
    assert min(map(min, row["local"])) > 0.001


def test_recorded_rounds_are_scaled_by_the_same_server_that_clients_started_from(finished):
    """The distance is divided by the length of what the client was sent: the model before the round."""
    with finished_run(finished) as opened:
        again = {number: drift.take_drift(opened, round=number - 1) for number in (1, 2, 3)}
        plain = drift.take_drift(opened)
    for number, found in again.items():
        fresh = [row for row in found.rounds if row["round"] == number][-1]
        kept = next(row for row in plain.rounds if row["round"] == number)
        assert kept["clients"] == fresh["clients"]
        for left, right in zip(kept["local"], fresh["local"], strict=True):
            assert left == pytest.approx(right, rel=1e-9)


def test_without_a_data_set_recorded_rounds_are_shown_and_the_rest_is_said(run):
    before = content(run)
    (run.parent / "digits.npz").unlink()
    with finished_run(run) as opened:
        found = drift.take_drift(opened)
        assert [row["round"] for row in found.rounds] == [1, 2, 3]
        assert found.layers == list(LAYERS)
        assert "not after the last round" in opened.notes[0]
    (unsealed(run) / "during.jsonl").unlink()
    with finished_run(run) as opened, pytest.raises(Missing, match=r"digits\.npz does not exist"):
        drift.take_drift(opened)
    assert content(run) == {name: value for name, value in before.items() if name != "during.jsonl"}


def made(rounds=2):
    rows = [
        {"round": n + 1, "when": f"in round {n + 1}", "clients": [3, 5], "local": [[0.1, 0.4], [0.3, 0.2 + n]]}
        for n in range(rounds)
    ]
    return Drift(["conv1", "classifier"], rows)


def test_the_words_name_what_moves_most_and_least():
    """Means of the last round: (0.1 + 0.3)/2 and (0.4 + 1.2)/2."""
    assert drift.means(made().rounds[-1]) == pytest.approx([0.2, 0.8])
    assert drift.DRIFT.findings(made()) == [
        "In one visit in round 2, clients change the classifier most, by 80.0% of its norm, and conv1 least, by 20.0%."
    ]


def test_pictures_of_the_distances():
    assert [chart.name for chart in drift.DRIFT.draw(made())] == ["drift-layers", "drift-clients", "drift-rounds"]
    assert [chart.name for chart in drift.DRIFT.draw(made(1))] == ["drift-layers", "drift-clients"]
    lines = drift.DRIFT.draw(made())[-1].marks
    assert [list(line.y) for line in lines] == [pytest.approx([0.2, 0.2]), pytest.approx([0.3, 0.8])]
    assert drawn(drift.DRIFT.draw(made()))
