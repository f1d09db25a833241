"""Law 11: one exchange of statistics gives the same classifier for every partition, to rounding."""

import numpy as np
import pytest
import torch
from torch import nn

import unskew
from unskew.calibration import parse_calibration
from unskew.calibration.calibrate import calibrate
from unskew.calibration.classifier import Lift
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.sources import load

IMAGES = load("digits", None)
LABELS = IMAGES.train.labels
CLASSES = len(IMAGES.classes)
USERS = np.sort(Key(3).numpy().integers(0, 90, len(LABELS)))  # photographers with a few pictures each
PARTITIONS = {  # text -> clients
    "iid": (1, 2, 300),
    "dirichlet(alpha=0.01, min_size=0)": (3, 100),
    "dirichlet-client(alpha=0)": (10,),  # one class on every client, as far as classes are equally large
    "shards(per_client=1)": (10,),
    "users": (None,),
}
CLASSIFIERS = ("lda", "lda(expand=40)", "ridge", "ridge(balanced=false)", "ridge(strength=0.01, expand=40)")
TOLERANCE = 1e-9
TOLERANCE_SECURE = 1e-5  # masked sums are off by up to 2⁻²⁵ a client and entry, which the inverse makes larger


def features_of(split):
    """Features that are no small whole numbers, so that sums are rounded: pixels through random sums and ReLU."""
    pixels = torch.from_numpy(np.asarray(split.images)).double().flatten(1) / 255
    return (pixels @ torch.randn(64, 30, generator=Key(0).torch(), dtype=torch.float64) / 8).relu()


TRAIN, TEST = features_of(IMAGES.train), features_of(IMAGES.test)


def clients_of(text, clients):
    found = partition_examples(text, LABELS, clients=clients, key=Key(1), users=USERS.astype(str), classes=CLASSES)
    return [np.flatnonzero(found.client == client) for client in range(found.clients)]


def one_class_each():
    return [np.flatnonzero(label == LABELS) for label in range(CLASSES)]


def classifier_from(parts, method):
    """Each client measures its own features; the server adds up and solves."""
    needs = parse_calibration(method).needs
    lift = Lift.of(TRAIN.shape[1], needs.expand) if needs.expand else nn.Identity()
    labels = torch.from_numpy(LABELS).long()
    measured = (
        ClassStatistics.of_features(lift(TRAIN[part]), labels[part], CLASSES, needs.form) for part in parts if len(part)
    )
    head = nn.Linear(TRAIN.shape[1], CLASSES, dtype=torch.float64)
    return calibrate(head, ClassStatistics.merged(measured), method)


def apart(one, other):
    """The largest difference of two classifiers' values, as a share of the largest value."""
    found = [torch.cat([each.head.weight, each.head.bias[:, None]], 1).detach() for each in (one, other)]
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


@pytest.mark.parametrize("method", CLASSIFIERS)
def test_one_exchange_gives_the_same_classifier_for_every_partition(method):
    """Weights to 1e-9 of the largest, the same answer to every test image."""
    pooled = classifier_from([np.arange(len(LABELS))], method)
    answers = pooled(TEST).argmax(1)
    assert float((answers == torch.from_numpy(IMAGES.test.labels)).double().mean()) > 0.8
    splits = [clients_of(text, count) for text, counts in PARTITIONS.items() for count in counts]
    for parts in (*splits, one_class_each(), one_class_each()[::-1]):
        assert sum(map(len, parts)) == len(LABELS)
        found = classifier_from(parts, method)
        assert apart(pooled, found) <= TOLERANCE
        assert torch.equal(found(TEST).argmax(1), answers)
        assert found.report.notes() == pooled.report.notes()  # the same strength was chosen


@pytest.mark.parametrize("method", CLASSIFIERS)
def test_the_law_would_notice_one_example_that_is_lost(method):
    whole, lacking = (classifier_from([np.arange(n)], method) for n in (len(LABELS), len(LABELS) - 1))
    assert apart(whole, lacking) > 1000 * TOLERANCE


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """Runs of 0 rounds whose encoder passes pixels on as they are: by their partition and protections."""
    folder = tmp_path_factory.mktemp("exchanged")

    def run(name, partition, clients, protection=""):
        return unskew.run(
            data="digits", model="outside_models:linear", partition=partition, clients=clients, rounds=0,
            method=f"fedavg + lda + ridge{protection}", engine="loop", out=folder / name,
        )  # fmt: skip

    return {
        "all in one place": run("one", "iid", 1),
        "skewed": run("skewed", "dirichlet(alpha=0.01, min_size=0)", 60),
        "skewed, secure": run("secure", "dirichlet(alpha=0.01, min_size=0)", 6, " + secure"),
    }


@pytest.mark.parametrize("name", ["lda", "ridge"])
@pytest.mark.parametrize(
    ("first", "second", "tolerance"),
    [
        ("all in one place", "skewed", 2**-22),  # classifiers of a float32 network are written in float32
        ("all in one place", "skewed, secure", TOLERANCE_SECURE),
    ],
)
def test_runs_of_no_rounds_keep_it_masked_or_not(exchanged, name, first, second, tolerance):
    found = []
    for run in (exchanged[first], exchanged[second]):
        spelled = next(each for each in run.calibrations if each.split(" + ")[0] == name)
        found.append((run.calibrations[spelled], unskew.load(run.path, spelled).classifier))
    assert found[0][0].accuracy == found[1][0].accuracy > 0.9
    assert apart(found[0][1], found[1][1]) <= tolerance
