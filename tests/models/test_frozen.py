"""What is trained of a network: its last layers by the order in which they run, and the cut in front of them."""

import copy

import pytest
import torch
from torch import nn

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.models import build, initialise
from unskew.models.finetune import find_cut, fine_tune, parse_train

SHAPE = (3, 32, 32)


def made(model, shape=SHAPE):
    network = build(model, shape, 10)
    initialise(network, Key(3))
    return network


@pytest.mark.parametrize(
    ("text", "layers"), [("all", None), ("classifier", 1), ("last(1)", 1), ("last(2)", 2), ("last(layers=3)", 3)]
)
def test_the_text_says_how_many_layers_are_trained(text, layers):
    assert parse_train(text) == layers


@pytest.mark.parametrize(
    "text", ["last", "last(0)", "last(1.5)", "last(x=2)", "clasifier", "last(1) + all", "all(1)", ""]
)
def test_other_texts_are_refused(text):
    with pytest.raises(UserError, match=r"--train|last\(0\): give a number of layers of at least 1"):
        parse_train(text)


@pytest.mark.parametrize(
    ("model", "count", "layers", "stored"),
    [
        ("simple-cnn", 1, {"classifier"}, (256, 1, 1)),
        ("simple-cnn", 3, {"encoder.fc3", "encoder.fc4", "classifier"}, (84, 1, 1)),
        ("efficientnet-lite0", 2, {"_conv_head", "_bn1", "_fc"}, (320, 1, 1)),
        ("mobilenet-v2(bottleneck=64)", 2, {"bottleneck", "classifier.1"}, (1280, 1, 1)),
        ("mobilenet-v2", 2, {"features.18.0", "features.18.1", "classifier.1"}, (320, 4, 4)),
        ("resnet-18", 2, {"layer4.1.conv2", "layer4.1.bn2", "fc"}, (512, 4, 4)),  # from before the way around
    ],
)
def test_the_last_layers_and_what_is_stored_before_them(model, count, layers, stored):
    network = made(model)
    cut = find_cut(network, SHAPE, count)
    assert cut.shape == stored
    tuned = fine_tune(copy.deepcopy(network), SHAPE, count, stored=True)
    assert {name.partition("/")[2].rpartition(".")[0] for name in tensors.of_module(tuned)} == layers
    images = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = network.eval()(images)
        parts = tuned.eval()(cut.front.eval()(images).reshape(3, *cut.shape))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_everything_before_the_first_trained_layer_is_in_eval_mode():
    network = made("efficientnet-lite0")
    for count, live in ((1, {"_fc"}), (2, {"_conv_head", "_bn1", "_relu1", "_pool.0", "_pool.1", "_dropout", "_fc"})):
        tuned = fine_tune(copy.deepcopy(network), SHAPE, count, stored=False).train()
        assert {name for name, part in tuned.named_modules() if part.training and not part._modules} == live
        tuned.eval()
        assert not any(part.training for part in tuned.modules())


def test_frozen_running_statistics_and_weights_stay_while_the_rest_trains():
    tuned = fine_tune(made("resnet-18"), SHAPE, 2, stored=False).train()
    before = tensors.copy(tensors.of_module(tuned.whole))
    tuned(torch.randn(4, *SHAPE)).square().sum().backward()
    with torch.no_grad():
        for value in tuned.parameters():
            value -= 0.1 * value.grad
    moved = {name for name, value in tensors.of_module(tuned.whole).items() if not torch.equal(value, before[name])}
    assert moved == set(tensors.of_module(tuned))
    assert all(value.grad is None for name, value in tuned.whole.named_parameters() if f"params/{name}" not in moved)


def test_a_copy_is_a_network_of_its_own():
    tuned = fine_tune(made("simple-cnn"), SHAPE, 2, stored=True)
    other = copy.deepcopy(tuned)
    with torch.no_grad():
        for value in other.parameters():
            value.zero_()
    assert not other(torch.ones(1, 84, 1, 1)).any()
    assert tuned(torch.ones(1, 84, 1, 1)).any()


class Wavering(nn.Module):
    """Its way depends on the values, so it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(48, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, images):
        x = torch.relu(self.first(images.flatten(1)))
        x = self.second(x) if float(x.sum()) > -1e9 else x
        return self.last(x)


class Doubtful(Wavering):
    """Its dropout is a function that is told the mode: traced, it would keep the mode of that moment."""

    def forward(self, images):
        x = self.second(torch.relu(self.first(images.flatten(1))))
        return self.last(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("kind", [Wavering, Doubtful])
def test_a_network_that_cannot_be_cut_is_frozen_without_storing(kind):
    shape = (3, 4, 4)
    network = build(lambda shape, classes: kind(), shape, 10)
    assert find_cut(network, shape, 2) is None
    assert find_cut(network, shape, 1).shape == (8, 1, 1)  # before the classifier every network can be cut
    tuned = fine_tune(network, shape, 2, stored=False)
    assert [name for name, _ in tuned.named_parameters()] == [
        "second.weight", "second.bias", "last.weight", "last.bias",
    ]  # fmt: skip


def test_more_layers_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"last\(9\): this network has only 7 layers with weights"):
        fine_tune(made("simple-cnn"), SHAPE, 9, stored=False)
