"""What people who train elsewhere give by mistake is refused in one message, never with a traceback of ours."""

import pytest
import torch
from torch import nn

import unskew
from unskew import ClassStatistics, UserError

IMAGES, LABELS = torch.randn(20, 6, generator=unskew.Key(0).torch()), torch.arange(20) % 4
ENCODER = nn.Linear(6, 5)
TOTAL = ClassStatistics.measure(ENCODER, [(IMAGES, LABELS)], classes=4)


@pytest.mark.parametrize("encoder", [None, lambda images: images])
def test_an_encoder_is_a_module(encoder):
    with pytest.raises(UserError, match="the encoder must be a torch module"):
        ClassStatistics.measure(encoder, [(IMAGES, LABELS)], classes=4)


def test_statistics_and_numbers_are_not_added():
    with pytest.raises(TypeError, match="unsupported operand"):
        TOTAL + 1


def test_a_classifier_of_nan_is_not_told_to_descend_more_slowly():
    classifier = nn.Linear(5, 4)
    nn.init.constant_(classifier.bias, torch.nan)
    with pytest.raises(UserError, match="the classifier contains NaN or infinity"):
        unskew.calibrate(classifier, TOTAL, "ccvr(per_class=5, epochs=1)")


def test_what_is_missing_for_random_features_and_components_is_said():
    with pytest.raises(UserError, match=r"measure the output of unskew\.Lift\.of\(features, 7\)"):
        unskew.calibrate(nn.Linear(5, 4), TOTAL, "lda(expand=7)")
    with pytest.raises(UserError, match="every component of a class has its own label"):
        unskew.calibrate(nn.Linear(5, 4), TOTAL, "ccvr(components=2)")


def test_norms_between_the_linear_layers_of_a_head_stay_as_they_are():
    head = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4)).eval()
    made = unskew.calibrate(head, TOTAL, "ccvr(layers=2, per_class=10, epochs=2, lr=0.1)").head
    assert all(torch.equal(made[0].state_dict()[name], value) for name, value in head[0].state_dict().items())
    assert not torch.equal(made[1].weight, head[1].weight)
    assert not torch.equal(made[3].weight, head[3].weight)
