"""What a user is told unasked: statistics that are far too large, and training that was worse than none."""

import pytest
import torch

import unskew
from unskew.calibration.covariances import Shared, advise_smaller_form
from unskew.calibration.statistics import ClassStatistics


def test_a_site_with_one_photograph_is_advised_a_smaller_form(tmp_path):
    one = ClassStatistics.of_features(torch.randn(1, 1280), [3], 10, "shared")
    with pytest.warns(
        UserWarning, match=r"^shared statistics of 1 example need 6\.6 MB; .*: diagonal \(20\.5 kB\), low-rank"
    ):
        one.save(tmp_path / "site")


def test_small_statistics_and_many_examples_need_no_advice(tmp_path):
    ClassStatistics.of_features(torch.randn(1, 64), [3], 10).save(tmp_path / "small")
    assert not advise_smaller_form(Shared(), 10, 1280, 1000)
    assert advise_smaller_form(Shared(), 10, 1280, 25)


def test_a_run_whose_clients_have_few_examples_gets_the_advice_as_a_note():
    seen = []
    unskew.run(rounds=0, method="fedavg + lda(expand=900)", clients=100, partition="iid", observe=seen.append)
    notes = [note for event in seen for note in getattr(event, "notes", ())]
    assert any(note.startswith("some clients have few examples, such as: shared statistics of 14") for note in notes)


def test_training_that_was_worse_than_none_is_reported(tmp_path):
    unskew.run(method="centralised", rounds=6, epochs=1, lr=0.02, out=tmp_path / "first")
    seen, weights = [], tmp_path / "first" / "model.safetensors"
    worse = {"epochs": 1, "lr": 0.15, "momentum": 0, "weight_decay": 0.1, "partition": "dirichlet(alpha=0.05)"}
    result = unskew.run(
        method="fedavg + lda", rounds=2, pretrained=str(weights), out=tmp_path / "second", observe=seen.append, **worse
    )
    unskew.calibrate_run(result.path, "lda + secure", "ridge", observe=seen.append)
    notes = {event.result.name: event.notes for event in seen if hasattr(event, "classifier")}
    found = [name for name, lines in notes.items() if any("network without training" in x for x in lines)]
    assert found == ["lda", "ridge"]  # protected statistics are not asked for twice
