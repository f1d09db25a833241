"""A network cut in two is the same network, wherever it is cut; what cannot be cut so far is told how far it can."""

import pytest
import torch
from torch import nn

from unskew.calibration.finisher import StatisticsRequest
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.models import build, initialise
from unskew.models.cut import cut, width_of
from unskew.models.networks import InParts, Network

ENDS = {"simple-cnn": 5, "lenet-64": 3, "tiny-cnn": 2}  # linear layers after the last convolution
CUTS = [(name, layers) for name, most in ENDS.items() for layers in range(1, most + 1)]
SHAPE = (1, 4, 4)


def images(count, shape, seed=0):
    return torch.randn(count, *shape, generator=Key(seed).torch())


def ready(encoder, classifier):
    made = Network(encoder, classifier)
    initialise(made, Key(1))
    return made.eval()


def network(name, shape):
    made = build(name, shape, 7)
    return ready(made.encoder, made.classifier)


def same_function(made, layers, x):
    encoder, head = cut(made, layers)
    with torch.no_grad():
        features = encoder(x)
        assert features.dim() == 2
        assert torch.equal(head(features), made(x))
    return encoder, head


def linear_layers(head):
    return [part for part in head.modules() if isinstance(part, nn.Linear)]


@pytest.mark.parametrize(("name", "layers"), CUTS)
def test_the_two_parts_are_the_network_bit_for_bit_and_the_second_holds_so_many_linear_layers(name, layers):
    shape = (3, 20, 24) if name == "simple-cnn" else (3, 8, 12)
    made = network(name, shape)
    encoder, head = same_function(made, layers, images(5, shape))
    assert len(linear_layers(head)) == layers
    assert layers == 1 or encoder(images(50, shape)).min() < 0, "the cut is before the activation"
    assert width_of(encoder, shape) == linear_layers(head)[0].in_features


@pytest.mark.parametrize("name", ENDS)
def test_more_layers_than_there_are_is_refused_with_how_many_there_are(name):
    made = network(name, (1, 16, 16))
    for layers in (ENDS[name] + 1, 99, 0, -1):
        words = f"layers={layers}: this network ends in {ENDS[name]} linear layers; give 1 to {ENDS[name]}"
        with pytest.raises(UserError, match=f"^{words}$"):
            cut(made, layers)


def test_an_encoder_that_is_no_sequence_has_its_classifier_alone():
    layers = nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU()
    made = ready(InParts(nn.Sequential(*layers)), nn.Linear(6, 3))
    same_function(made, 1, images(4, SHAPE))
    with pytest.raises(UserError, match=r"cannot be split earlier .*; give layers=1$"):
        cut(made, 2)


@pytest.mark.parametrize("between", [lambda: nn.Softmax(1), lambda: nn.LayerNorm(8), lambda: nn.Sequential(nn.ReLU())])
def test_another_part_between_linear_layers_ends_the_search(between):
    parts = [nn.Flatten(), nn.Linear(16, 8), between(), nn.Linear(8, 6), nn.ReLU()]
    made = ready(nn.Sequential(*parts), nn.Linear(6, 3))
    same_function(made, 2, images(5, SHAPE))
    with pytest.raises(UserError, match="ends in 2 linear layers"):
        cut(made, 3)


def test_the_head_has_the_networks_own_names():
    made = network("tiny-cnn", SHAPE)
    _, head = cut(made, 2)
    own = made.state_dict()
    assert set(head.state_dict()) == {"encoder.fc1.weight", "encoder.fc1.bias", "classifier.weight", "classifier.bias"}
    assert all(torch.equal(value, own[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_neither_cutting_nor_asking_for_the_width_changes_a_mode(training, layers):
    """A normalisation that is left in training mode would change what is measured afterwards."""
    convolution = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()]
    made = ready(nn.Sequential(*convolution, nn.Linear(8, 6), nn.Dropout(), nn.ReLU()), nn.Linear(6, 3))
    made.train(training)
    statistics = {name: value.clone() for name, value in made.named_buffers()}
    encoder, width = StatisticsRequest(layers=layers, expand=2).encoder(made, SHAPE)
    assert width == (6 if layers == 1 else 8) + 2
    assert [part.training for part in made.modules()] == [training] * len(list(made.modules()))
    assert all(torch.equal(value, statistics[name]) for name, value in made.named_buffers())
    for part in cut(made, layers):
        assert part.training == training
    with torch.no_grad():
        assert encoder.eval()(images(2, SHAPE)).shape == (2, width)
