"""The validation part: its share of every client and class, drawn from the seed; nothing else sees the test images."""

import json
from dataclasses import replace

import numpy as np
import pytest

import unskew
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data import sources
from unskew.data.population import Population, hold_out, split_validation
from unskew.runs import config as configs
from unskew.runs.config import Config
from unskew.runs.prepare import prepare
from unskew.runs.train import resume, run

KEY = Key(3).fold("validation")


def drawn(sizes, classes=4, unheld=0):
    """Clients of these sizes with classes at random; the last examples are held by no client."""
    client = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(unheld, -1)]).astype(np.int32)
    draw = np.random.default_rng(0)
    return draw.permutation(client), draw.integers(0, classes, len(client))


@pytest.mark.parametrize("share", [0.01, 0.15, 0.5, 0.99])
def test_every_client_and_class_gives_its_share_up_to_one_example(share):
    client, labels = drawn([400, 40, 3, 200], unheld=50)
    rows = hold_out(client, labels, share, KEY)
    assert len(rows) == len(set(rows.tolist()))
    assert abs(len(rows) - share * 643) <= 1 + 4
    for each in range(4):
        assert abs(np.count_nonzero(client[rows] == each) - share * np.count_nonzero(client == each)) <= 1
        for label in range(4):
            cell = (client == each) & (labels == label)
            assert abs(np.count_nonzero(cell[rows]) - share * np.count_nonzero(cell)) <= 2
    assert (client[rows] >= 0).all()


def test_a_client_keeps_at_least_one_example():
    client, labels = drawn([1] * 300)
    assert len(hold_out(client, labels, 0.9, KEY)) == 0
    client, labels = drawn([2] * 300)
    rows = hold_out(client, labels, 0.9, KEY)
    assert np.bincount(client[rows], minlength=300).max() == 1
    assert len(hold_out(np.zeros(0, np.int32), np.zeros(0, np.int64), 0.5, KEY)) == 0


def test_the_seed_decides_what_is_held_out():
    client, labels = drawn([100, 100])
    one, again, other = (hold_out(client, labels, 0.2, Key(seed)) for seed in (0, 0, 1))
    assert (one == again).all()
    assert set(one.tolist()) != set(other.tolist())


def test_training_and_evaluation_share_no_example():
    prepared = prepare(Config(validation=0.15))
    whole = sources.load("digits", None)
    trained = set(prepared.population.order.tolist())
    rows = sorted(set(range(len(whole.train))) - trained)
    assert prepared.images.test.rows.tolist() == rows
    assert (prepared.images.test.images == whole.train.images).all()
    assert (prepared.images.test.labels == whole.train.labels[rows]).all()
    assert abs(len(rows) - 0.15 * len(whole.train)) <= 1
    assert prepared.partition.hash == prepare(Config()).partition.hash
    assert prepared.data_sha256 == prepare(Config()).data_sha256


def test_the_owners_of_the_held_out_examples_go_with_them():
    images = sources.load("digits", None)
    users = np.array([f"u{i % 7}" for i in range(len(images.train))])
    parts = prepare(Config()).partition
    part, rest = split_validation(replace(images, users=users), parts, 0.1, KEY)
    rows = np.flatnonzero((parts.client >= 0) & (rest.client < 0))
    assert (part.test_users == users[rows]).all()
    assert Population.from_partition(rest).sizes.sum() == len(images.train) - len(rows)


def test_too_small_a_share_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match=r"--validation 1e-06: this share of 1,438 examples is less than one"):
        run(validation=1e-6, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match=r"--validation .*0 or more and less than 1"):
            configs.checked(replace(Config(), validation=share))


def test_a_run_says_what_it_was_evaluated_on_and_the_test_images_play_no_part(tmp_path):
    images = sources.load("digits", None)
    small = {"rounds": 1, "epochs": 1, "clients": 4, "partition": "iid", "engine": "loop", "validation": 0.2}
    blank = replace(images, test=replace(images.test, images=np.zeros_like(images.test.images)))
    one = unskew.run(data=images, out=tmp_path / "one", **small)
    other = unskew.run(data=blank, out=tmp_path / "other", **small)
    assert (one.accuracy, one.loss, one.weights_sha256) == (other.accuracy, other.loss, other.weights_sha256)
    assert json.loads((tmp_path / "one" / "result.json").read_text())["evaluated_on"] == "validation"
    assert "on the validation images" in str(one)
    plain = unskew.run(data=images, out=tmp_path / "plain", **small | {"validation": 0.0})
    assert plain.evaluated_on == "test"
    assert "validation" not in plain.settings
    with pytest.raises(UserError, match="is not comparable; give a run on the same data"):
        run(data=images, baseline=str(tmp_path / "plain"), out=tmp_path / "new", **small)


def test_a_resumed_run_holds_out_the_same_examples(tmp_path):
    small = {"rounds": 3, "epochs": 1, "clients": 4, "engine": "loop", "validation": 0.2, "checkpoint_seconds": 0.0}
    whole = run(out=tmp_path / "whole", **small)
    with pytest.raises(unskew.StopRun):
        run(out=tmp_path / "cut", observe=lambda event: unskew.STOP if hasattr(event, "train_loss") else None, **small)
    again = resume(tmp_path / "cut")
    assert (again.weights_sha256, again.accuracy) == (whole.weights_sha256, whole.accuracy)
