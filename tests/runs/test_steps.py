"""Local steps instead of epochs, and one partition for all seeds."""

import numpy as np
import pytest

import unskew
from analysis.finished import metrics
from unskew.runs.config import read_run

SMALL = {"data": "digits", "clients": 4, "rounds": 2, "engine": "loop", "batch": 32}


def clients_of(result):
    with np.load(result.path / "partition.npz") as arrays:
        return arrays["client"]


@pytest.mark.parametrize("method", ["fedavg", "fedvc(40)", "scaffold", "fednova", "centralised"])
def test_every_visit_takes_that_many_steps(tmp_path, method):
    result = unskew.run(out=tmp_path / "run", method=method, steps=3, **SMALL)
    assert [line["batches_max"] for line in metrics(result.path)] == [3, 3]
    assert read_run(result.path).steps == 3
    assert result.settings["steps"] == 3


def test_a_clients_steps_may_be_more_than_an_epoch(tmp_path):
    by_steps = unskew.run(out=tmp_path / "steps", partition="iid", steps=24, **SMALL)  # 12 batches of 359 or 360
    by_epochs = unskew.run(out=tmp_path / "epochs", partition="iid", epochs=2, **SMALL)
    assert by_steps.weights_sha256 == by_epochs.weights_sha256


def test_the_partition_seed_of_the_seed_changes_nothing(tmp_path):
    plain = unskew.run(out=tmp_path / "plain", steps=2, validation=0.1, **SMALL)
    same = unskew.run(out=tmp_path / "same", steps=2, validation=0.1, partition_seed=0, **SMALL)
    assert same.weights_sha256 == plain.weights_sha256
    assert same.accuracy == plain.accuracy


def test_seeds_share_one_partition_and_nothing_else(tmp_path):
    runs = unskew.run_seeds(seeds="1,2", out=tmp_path / "runs", steps=2, partition_seed=7, **SMALL)
    one, two = runs.results
    assert np.array_equal(clients_of(one), clients_of(two))
    assert one.weights_sha256 != two.weights_sha256
    other = unskew.run(out=tmp_path / "other", steps=2, seed=1, **SMALL)
    assert not np.array_equal(clients_of(one), clients_of(other))
