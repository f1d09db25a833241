"""Accuracy for each client, against plain counting; what a run stores of it, and what an older run lacks."""

import json
import math
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unskew
from unskew.core.errors import UserError
from unskew.core.types import ImageSet, Split
from unskew.data.population import Partition
from unskew.round.evaluation import Evaluation
from unskew.runs import result as records
from unskew.runs.result import ByClient, measure_clients, on_own_images, read_clients, read_result, summarise_clients
from unskew.runs.seals import seal_folder


def score(right, total, marks=None):
    return Evaluation(0.5, 1.0, np.array(right, float), np.array(total, float), marks)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 6), st.integers(1, 80))
def test_a_clients_accuracy_is_the_mean_over_its_examples_of_their_classes(seed, clients, classes, examples):
    draw = np.random.default_rng(seed)
    client, labels = draw.integers(-1, clients, examples).astype(np.int32), draw.integers(0, classes, examples)
    total = draw.integers(0, 4, classes)
    right = draw.integers(0, total + 1)
    found = measure_clients(Partition(client, clients, "test", 0), labels, None, score(right, total))
    for k in range(clients):
        own = [int(label) for owner, label in zip(client, labels, strict=True) if owner == k]
        known = [right[c] / total[c] for c in own if total[c]]
        assert found.counted[k] == len(known)
        assert found.complete[k] == (len(known) == len(own))
        if known:
            assert found.accuracy[k] == pytest.approx(sum(known) / len(known), abs=1e-12)
        else:
            assert math.isnan(found.accuracy[k])


def test_a_summary_is_counted_by_hand():
    seen = ByClient(np.array([0.2, 0.4, 0.6, np.nan]), np.array([1, 1, 2, 0]), np.array([True, False, True, False]))
    found = summarise_clients(seen)
    assert (found.clients, found.left_out, found.partly) == (3, 1, 1)
    assert (found.worst, found.p50) == (0.2, 0.4)
    assert (found.p10, found.p20, found.mean, found.p80, found.p90) == pytest.approx((0.24, 0.28, 0.4, 0.52, 0.56))
    assert found.by_examples == pytest.approx((0.2 + 0.4 + 2 * 0.6) / 4)
    assert found.deviation == pytest.approx(math.sqrt(0.08 / 3))
    assert found.jain == pytest.approx(1.2**2 / (3 * (0.04 + 0.16 + 0.36)))


@pytest.mark.parametrize(("accuracies", "jain"), [([0.3] * 5, 1.0), ([1, 0, 0, 0], 0.25), ([0.0, 0.0], 1.0)])
def test_jains_index_is_one_where_all_are_alike_and_the_share_of_those_who_have_it_all(accuracies, jain):
    values = np.array(accuracies, float)
    assert summarise_clients(ByClient(values, np.ones(len(values)), values >= 0)).jain == pytest.approx(jain)


def test_own_images_are_found_by_the_users_names():
    owners = owners_of(("7", "anna", "10"), ["anna", "anna", "10", "nobody"])
    assert owners.tolist() == [1, 1, 2, -1]
    found = on_own_images(owners, 3, score([], [], np.array([1.0, 0.0, 1.0, 1.0])))
    assert found.counted.tolist() == [0, 2, 1]
    assert np.isnan(found.accuracy[0])
    assert found.accuracy[1:].tolist() == [0.5, 1.0]
    unknown = [(None, ["anna"]), (("anna",), None), (("anna",), ["ann", "annas"]), (("anna",), ["anna"], 2)]
    assert [owners_of(*given) for given in unknown] == [None] * 4


def owners_of(names, users, images=None):
    """The owners of test images, of clients with these names."""
    count = images or len(users or ())
    empty, test = (Split(np.zeros((size, 1, 4, 4), np.uint8), np.zeros(size, np.int64)) for size in (0, count))
    known = None if users is None else np.array(users)
    partition = Partition(np.zeros(0, np.int32), len(names or ()), "users", 0, names=names)
    return records.test_owners(partition, ImageSet("t", ("a",), empty, test, (0.5,), (0.5,), test_users=known))


def users(classes=3, seed=0):
    """Images of three classes that four users took, some of them for the test; class 2 has no test images."""
    draw = np.random.default_rng(seed)

    def part(count, owners, highest):
        labels = draw.integers(0, highest, count)
        pixels = (60 * labels[:, None, None, None] + draw.integers(0, 60, (count, 1, 4, 4))).astype(np.uint8)
        return Split(pixels, labels), np.array([f"u{owner}" for owner in draw.integers(0, owners, count)])

    train, owners = part(60, 4, classes)
    test, testers = part(24, 5, classes - 1)
    return ImageSet("users", tuple("abc"), train, test, (0.5,), (0.25,), users=owners, test_users=testers)


OPTIONS = {"partition": "users", "rounds": 1, "epochs": 1, "batch": 8, "method": "fedavg + lda", "model": "tiny-cnn"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("clients") / "run"
    unskew.run(data=users(), out=path, engine="loop", **OPTIONS)
    return path


def test_a_run_tells_it_of_its_model_and_of_each_calibration(finished):
    result, arrays = read_result(finished), read_clients(finished)
    assert arrays["classifiers"].tolist() == ["", "lda"]
    assert arrays["accuracy"].shape == arrays["own_images"].shape == (2, 4)
    for place, told in enumerate((result.clients_accuracy, result.calibrations["lda"].clients_accuracy)):
        assert told.clients == 4
        assert told.partly == 4  # each of them has examples of the class without test images
        assert told.worst == pytest.approx(arrays["accuracy"][place].min(), abs=1e-6)
        assert told.own_images.worst == pytest.approx(arrays["own_images"][place].min(), abs=1e-6)
    images = users()
    mine = np.isin(images.test_users, images.users)
    assert arrays["own_counts"].sum() == mine.sum() < len(images.test)
    said = json.loads((finished / "result.json").read_text())
    assert "own_images" not in said["clients_accuracy"]["own_images"]
    assert said["calibrations"][0]["clients_accuracy"]["jain"] == result.calibrations["lda"].clients_accuracy.jain


def test_the_measure_reads_what_is_stored(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    values, arrays = unskew.analyse(run, "fairness")["fairness"].values, read_clients(run)
    assert values.spreads["lda"]["partly"] == 4
    assert values.images > 0
    for row, name in enumerate(("before", "lda")):
        assert values.curves[name] == pytest.approx(sorted(arrays["accuracy"][row].tolist()))
        assert values.own_curves[name] == pytest.approx(sorted(arrays["own_images"][row].tolist()))
    without_clients(run)
    with pytest.raises(UserError, match="the accuracy of single clients is not known"):
        unskew.analyse(run, "fairness")


def without_clients(run):
    """Remove the accuracy of single clients, as in the run of a federation."""
    (run / "clients.npz").unlink()
    said = json.loads((run / "result.json").read_text())
    del said["clients_accuracy"]
    for row in said["calibrations"]:
        del row["clients_accuracy"]
    (run / "result.json").write_text(json.dumps(said))
    seal_folder(run)


def test_a_calibration_made_again_replaces_its_row(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = read_clients(run)
    unskew.calibrate_run(run, "lda", data=users())
    after = read_clients(run)
    assert after["classifiers"].tolist() == ["", "lda"]
    np.testing.assert_array_equal(before["accuracy"], after["accuracy"])
