"""Networks of the timm package by name: with the package where it can be imported, and with a stand-in."""

import sys
import types

import pytest
import torch
from torch import nn

from unskew.core.errors import UserError
from unskew.core.plugins import plugins_in
from unskew.models import build


@pytest.fixture
def timm(monkeypatch):
    """A stand-in with one network."""

    def create_model(name, *, num_classes, in_chans, width=4):
        return nn.Sequential(nn.Conv2d(in_chans, width, 3), nn.Flatten(), nn.LazyLinear(num_classes))

    module = types.ModuleType("timm")
    module.is_model = lambda name: name == "resnet10t"
    module.list_models = lambda: ["resnet10t"]
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)


def test_a_network_is_made_for_the_images_and_classes(timm):
    network = build("timm:resnet10t(width=6)", (1, 8, 8), 5)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 5)
    assert network.classifier.in_features == 6 * 36


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timm:resnet10", "did you mean 'resnet10t'"),
        ("timm:resnet10t(pretrained=true)", "weights with --pretrained FILE"),
        ("timm:resnet10t(depth=3)", "cannot be built"),
    ],
)
def test_mistakes_are_named(timm, text, message):
    with pytest.raises(UserError, match=message):
        build(text, (1, 8, 8), 5)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r'pip install "unskew\[timm\]"'):
        build("timm:resnet10t", (1, 8, 8), 5)


def test_it_is_no_plug_in_that_needs_trust():
    assert plugins_in("timm:resnet10t") == []


def test_the_real_package_works():
    pytest.importorskip("timm", exc_type=ImportError)
    assert build("timm:resnet10t", (3, 64, 64), 7).classifier.out_features == 7
