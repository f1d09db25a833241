"""What features pass before a calibrated classifier, and that a classifier on a disk is the one that was made."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from calibration import heads
from unskew.calibration.classifier import (
    CalibratedClassifier,
    Lift,
    Report,
    Transformation,
    copy_head,
    last_linear,
    load_calibrated,
)
from unskew.calibration.covariances import ClassReport
from unskew.calibration.protection import clip_features
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.models import build, initialise
from unskew.models.cut import cut

D, C = 5, 3
REPORT = Report("ccvr", (), (), 1.0, 0.5, 0.1)


normal, linear = partial(heads.normal, dtype=torch.float32), partial(heads.linear, inputs=D, outputs=C)


# what features pass


@pytest.mark.parametrize("expand", [1, 7, 64])
def test_a_lift_is_relu_of_random_sums_and_of_the_features(expand):
    """Its definition, apart from the code; whoever knows d and m has the same."""
    features = normal(11, D)
    drawn = torch.randn(D, expand, generator=Key(0).fold("lift", D).torch()).numpy() / math.sqrt(D)
    wanted = np.maximum(np.concatenate([features.numpy() @ drawn, features.numpy()], axis=1), 0)
    found = Lift.of(D, expand)(features)
    assert found.shape == (11, expand + D)
    assert np.allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_everybody_has_the_same_lift_and_nobody_can_change_anothers():
    mine, yours = Lift.of(D, 6), Lift.of(D, 6)
    assert torch.equal(mine.weight, yours.weight)
    with torch.no_grad():
        mine.weight.zero_()
    assert torch.equal(Lift.of(D, 6).weight, yours.weight)
    assert yours.weight.abs().min() > 0


def test_a_lift_works_in_the_features_own_type():
    lift = Lift.of(D, 4)
    found = lift(normal(6, D, dtype=torch.float64))
    assert found.dtype == torch.float64
    assert lift.weight.dtype == torch.float32
    assert torch.allclose(found.float(), lift(normal(6, D, dtype=torch.float64).float()), atol=1e-6)


def test_features_are_cut_before_a_transformation_and_after_a_lift():
    """Statistics are of cut features, which the transformation changes; but of cut random features."""
    features, head = 3 * normal(50, D), linear()
    found = CalibratedClassifier(Transformation(True, 0.5), head, REPORT, clip=2.0)(features)
    assert torch.equal(found, head(clip_features(features, 2.0).relu().sqrt()))
    lift, wide = Lift.of(D, 7), linear(inputs=D + 7)
    assert torch.equal(
        CalibratedClassifier(lift, wide, REPORT, clip=2.0)(features), wide(clip_features(lift(features), 2.0))
    )


# layers made anew


def test_the_layer_whose_rows_are_the_classes_is_the_last_linear_one():
    last = linear(inputs=4)
    assert last_linear(last) is last
    assert last_linear(nn.Sequential(linear(outputs=4), nn.Sequential(nn.ReLU(), last))) is last
    with pytest.raises(UserError, match=r"a classifier must end in an nn.Linear, but a ReLU contains none"):
        last_linear(nn.ReLU())


# what is said of a calibration

SAID = [
    ([], []),
    ([ClassReport(0, 100), ClassReport(1, 90, clipped=1e-9)], []),
    ([ClassReport(0, 1), ClassReport(1, 1)], []),  # one real example has nothing to do with covariances
    (
        [ClassReport(0, 4, shrunk=0.25), ClassReport(1, 2, shrunk=0.75), ClassReport(2, 100)],
        ["2 of 3 class Gaussians have fewer examples than features: their covariance was mixed with the pooled one, "
         "with weight up to 0.75"],
    ),
    ([ClassReport(0, 100, clipped=0.031)], ["negative eigenvalues were set to zero, at most 0.031 of a covariance"]),
    (
        [ClassReport(0, 100, left_over=0.126)],
        ["the low-rank form leaves at most 13% of a class's variance to the diagonal"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "notes"), SAID)
def test_what_was_done_to_covariances_is_said_in_words(rows, notes):
    assert Report("ccvr", tuple(rows), (), 1.0, 0.5, 0.1).notes() == notes


# on a wire and on a disk


def network(dtype=torch.float32):
    made = build("tiny-cnn", (1, 8, 8), C).to(dtype)
    initialise(made, Key(3))
    return made.eval()


KINDS = {  # what comes before the head, the head's features, its layers, and the length of features
    "linear": (Transformation(), 64, 1, 0.0),
    "transformed": (Transformation(True, 0.37), 64, 1, 0.0),
    "logarithm": (Transformation(True, 0.0), 64, 1, 0.0),
    "two layers": (Transformation(), None, 2, 0.0),
    "one for two layers": (Transformation(), 128, 2, 0.0),
    "lifted": (Lift.of(64, 10), 74, 1, 0.0),
    "lifted and cut": (Lift.of(64, 10), 74, 1, 0.123),
    "cut": (Transformation(True, 0.5), 64, 1, 0.123),
}


def calibrated(kind, made):
    """A calibrated classifier of every kind that the methods make, for this network."""
    before, width, layers, clip = KINDS[kind]
    if width is None:
        head = copy_head(cut(made, 2)[1])
        with torch.no_grad():
            for place, value in enumerate(head.parameters()):
                value.add_(normal(*value.shape, seed=place, dtype=value.dtype))
    else:
        head = linear(inputs=width, dtype=made.classifier.weight.dtype)
    return CalibratedClassifier(before, head, REPORT, layers, clip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_is_back_from_its_tensors_bit_for_bit(kind, dtype):
    made, images = network(dtype), normal(6, 1, 8, 8, dtype=dtype)
    classifier = calibrated(kind, made)
    values = load(save({name: value.contiguous() for name, value in classifier.tensors().items()}))
    encoder, again = load_calibrated(values, lambda layers: cut(made, layers))
    with torch.no_grad():
        wanted = classifier(cut(made, classifier.layers)[0](images))
        assert torch.equal(again(encoder(images)), wanted)
    assert not again.training
    assert wanted.dtype == dtype
    for name, value in again.tensors().items():
        assert torch.equal(value, values[name]), name
        assert value.dtype == values[name].dtype
        assert not value.requires_grad
    assert set(again.tensors()) == set(values)
