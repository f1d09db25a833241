"""Any module from images to logits is a network: its classifier is found and its own weights count."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outside_models
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.models import batch_norm_policy, build, initialise
from unskew.models.any_module import AnyNetwork
from unskew.models.cut import cut
from unskew.models.networks import Network, by_layer

SHAPE = (1, 8, 8)
STRANGERS = {"resnet": "fc", "vit": "heads.0", "palette": "out", "trained": "1", "vgg": "7"}


def images(count=3, shape=SHAPE):
    return torch.randn(count, *shape, generator=Key(1).torch())


def made(model, seed=0, shape=SHAPE, classes=10):
    network = build(f"outside_models:{model}" if isinstance(model, str) else model, shape, classes)
    initialise(network, Key(seed))
    return network


def refused(model, classes=10):
    with pytest.raises(UserError, match="model") as caught:
        build(model, SHAPE, classes)
    assert str(caught.value).count("\n") in (0, 2)  # the place in the user's code takes two lines
    return str(caught.value)


@pytest.mark.parametrize(("name", "classifier"), STRANGERS.items())
def test_the_classifier_is_found_and_features_are_what_enters_it(name, classifier):
    network = made(name).eval()
    assert isinstance(network, AnyNetwork)
    assert network.classifier is network.module.get_submodule(classifier)
    wanted = [f"params/{classifier}.weight", f"params/{classifier}.bias"][: 1 if name == "palette" else 2]
    assert list(network.classifier_names) == wanted
    features = network.encoder(images())
    assert features.shape == (3, network.classifier.in_features)
    assert torch.equal(network.classifier(features), network(images()))
    assert torch.equal(network(images()), network.module(images()))


@pytest.mark.parametrize("name", STRANGERS)
def test_names_are_the_modules_own_and_its_state_loads_into_a_fresh_module(name):
    network = made(name)
    values = {key.partition("/")[2]: value for key, value in tensors.of_module(network).items()}
    fresh = build(f"outside_models:{name}", SHAPE, 10).module
    assert set(fresh.state_dict()) <= set(values)
    fresh.load_state_dict({key: values[key] for key in fresh.state_dict()})
    assert torch.equal(fresh.eval()(images()), network.eval()(images()))


@pytest.mark.parametrize("name", ["resnet", "vit", "vgg"])
def test_gradients_through_encoder_and_head_are_those_of_the_plain_forward(name):
    network = made(name).eval()
    labels, values = torch.tensor([0, 3, 9]), list(network.parameters())
    plain = torch.autograd.grad(F.cross_entropy(network.module(images()), labels), values)
    head = (network.classifier.weight, network.classifier.bias)
    parts = torch.autograd.grad(F.cross_entropy(F.linear(network.encoder(images()), *head), labels), values)
    assert all(torch.equal(a, b) for a, b in zip(plain, parts, strict=True))


@pytest.mark.parametrize("name", ["resnet", "vit", "palette", "vgg"])
def test_the_same_key_gives_the_same_weights_another_key_others_and_nothing_global_is_drawn(name):
    before = torch.random.get_rng_state()
    first, again, other = (tensors.copy(tensors.of_module(made(name, seed))) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert tensors.sha256(first) == tensors.sha256(again) != tensors.sha256(other)


def test_a_networks_own_initialisation_counts():
    network = made("resnet")
    spread = network.module.layer2[0].conv2.weight.std().item()  # kaiming_normal_, fan out: √(2 / (16·9))
    assert spread == pytest.approx((2 / 144) ** 0.5, rel=0.1)
    assert bool((made("vit").classifier.weight == 0).all())
    initialise(network, Key(0))
    assert bool((network.module.bn1.weight == 1).all())


@pytest.mark.parametrize("name", ["trained", "trained_network"])
def test_weights_that_a_factory_loads_are_kept_and_come_back_after_training(name):
    network = made(name)
    wanted = outside_models.trained(SHAPE, 10)[1].weight
    assert torch.equal(network.classifier.weight, wanted)
    with torch.no_grad():
        network.classifier.weight.zero_()
    initialise(network, Key(7))
    assert torch.equal(network.classifier.weight, wanted)


def test_of_an_outside_network_what_pytorch_drew_is_drawn_by_name_and_what_the_factory_wrote_is_kept():
    def factory(shape, classes):
        network = Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 6)), nn.Linear(6, classes))
        nn.init.constant_(network.encoder[1].bias, 0.25)
        network.encoder[2].weight.data.normal_(std=3)  # .data leaves no version behind
        return network

    network, other = made(factory), made(factory, seed=1)
    bound = 64**-0.5
    wanted = nn.init.uniform_(torch.empty(5, 64), -bound, bound, generator=Key(0).fold("init", "encoder.1").torch())
    assert torch.equal(network.encoder[1].weight, wanted)
    assert bool((network.encoder[1].bias == 0.25).all())
    assert 1.5 < network.encoder[2].weight.std().item() < 5
    assert not torch.equal(network.encoder[2].weight, other.encoder[2].weight)


def test_a_module_itself_is_taken_as_it_is_and_left_alone():
    module = outside_models.trained(SHAPE, 10)
    network = made(module)
    with torch.no_grad():
        network.classifier.weight.zero_()
    assert bool(module[1].weight.any())
    initialise(network, Key(0))
    assert torch.equal(network.classifier.weight, module[1].weight)


def linear(classes, *, bias=True):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes, bias=bias))


@pytest.mark.parametrize(
    "factory",
    [
        lambda shape, classes: linear(classes),
        lambda a, b: linear(b) if len(a) == 3 else None,
        lambda classes: linear(classes),
        lambda n: linear(n),
        lambda num_classes=1000, width=3: linear(num_classes),
        lambda width=3, *, num_classes=1000: linear(num_classes),
        lambda **knobs: linear(classes=knobs["num_classes"]),
        lambda *given: linear(given[1]),
        lambda: linear(10),
        lambda in_channels, num_classes: linear(num_classes) if in_channels == 1 else None,
        lambda shape, classes, width=3: linear(classes),
    ],
)
def test_a_factory_takes_shape_and_classes_classes_alone_or_nothing(factory):
    assert made(factory).classifier.out_features == 10


def test_knobs_are_given_in_the_text():
    assert build("outside_models:resnet(width=4)", SHAPE, 10).classifier.in_features == 8
    assert build("outside_models:vgg(5)", SHAPE, 10).classifier.in_features == 5
    with pytest.raises(UserError, match="has no knob 'depth'"):
        build("outside_models:resnet(depth=4)", SHAPE, 10)


class Two(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(64, 7), nn.Linear(7, 10), nn.Linear(7, 10)
        self.end = end

    def forward(self, images):
        return self.end(self, self.body(images.flatten(1)).relu())


def raises(module, hidden):
    raise RuntimeError("my own trouble")


class Cosine(nn.Linear):
    def forward(self, features):
        return F.linear(F.normalize(features), self.weight, self.bias)


def in_weight_norm():
    module = linear(10)
    nn.utils.parametrizations.weight_norm(module[1])
    return module


def with_dtype(dtype):
    module = linear(10)
    module.register_parameter("odd", nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False))
    return module


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (lambda s, c: Two(lambda m, h: m.first(h) + m.second(h)), "has no classifier"),
        (lambda s, c: Two(lambda m, h: m.first(h).softmax(1)), "has no classifier"),
        (lambda s, c: Two(lambda m, h: m.first(m.first(h)[:, :7])), "runs once"),
        (lambda s, c: nn.Sequential(nn.Conv2d(1, c, 8), nn.Flatten()), "must end in one nn.Linear"),
        (lambda s, c: nn.Sequential(nn.Flatten(), nn.LazyLinear(c), nn.BatchNorm1d(c)), "has no classifier"),
        (lambda s, c: nn.Sequential(nn.Flatten(), Cosine(64, c)), "has no classifier"),
        (lambda s, c: in_weight_norm(), "has no classifier"),
        (lambda s, c: Two(lambda m, h: (m.first(h), m.second(h))), "returns a tuple for 2 images"),
        (lambda s, c: Two(lambda m, h: m.first(h)[None]), "returns [1, 2, 10] for 2 images"),
        (lambda s, c: linear(7), "returns [2, 7] for 2 images of [1, 8, 8] and 10 classes"),
        (lambda s, c: Two(raises), "fails on images [2, 1, 8, 8]: RuntimeError: my own trouble\n  File"),
        (lambda s, c: with_dtype(torch.complex64), "odd is torch.complex64"),
        (lambda s, c: with_dtype(torch.int64), "odd is torch.int64"),
        (lambda s, c: linear(c).to("meta"), "on the device meta"),
        (lambda s, c: linear(c).requires_grad_(False), "nothing could be trained"),
        (lambda s, c: 3, "returns an int; it must return a torch.nn.Module"),
        (lambda s, c: 1 / 0, "cannot be built: ZeroDivisionError"),
        (lambda a, b, c: linear(10), "a factory takes (shape, classes)"),
        (lambda s, c: Network(nn.Flatten(), nn.Linear(64, 3)), "returns [2, 3] for 2 images"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_looked_for_and_found(model, complaint):
    message = refused(model)
    assert complaint in message
    assert message.startswith("model ")


def test_zeros_in_a_classifier_do_not_hide_what_follows_it():
    """Its output equals the module's whatever follows; only other numbers in its place show the difference."""

    def factory(shape, classes):
        module = Two(lambda m, h: 2 * m.first(h))
        nn.init.zeros_(module.first.weight)
        nn.init.zeros_(module.first.bias)
        return module

    assert "has no classifier" in refused(factory)


def test_a_reshape_after_the_classifier_and_features_with_a_place_of_one_are_fine():
    network = made(lambda s, c: Two(lambda m, h: m.first(h[:, None])[:, 0])).eval()
    assert network.encoder(images()).shape == (3, 7)
    assert torch.allclose(network.classifier(network.encoder(images())), network(images()))


def test_half_precision_is_trained_in_single_and_tied_weights_are_one():
    assert made(lambda s, c: linear(c).half()).classifier.weight.dtype == torch.float32

    def tied(shape, classes):
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, classes))
        module[4].weight = module[2].weight
        return module

    network = made(tied)
    assert network.classifier_names == ("params/2.weight", "params/4.bias")


def test_copies_and_modes_follow_the_module():
    network = made("resnet")
    second = copy.deepcopy(network)
    with torch.no_grad():
        second.classifier.bias.add_(1)
    assert torch.equal(second.module.fc.bias, network.module.fc.bias + 1)
    network.eval()
    assert not any(part.training for part in (*network.modules(), *network.encoder.modules()))
    network.train()
    assert all(part.training for part in (*network.modules(), *network.encoder.modules()))
    assert network.double().module.fc.weight.dtype == torch.float64


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_sequential_end_can_be_cut_and_activations_in_place_leave_the_features_alone(layers):
    network = made("vgg").eval()
    encoder, head = cut(network, layers)
    with torch.no_grad():
        features = encoder(images())
        kept = features.clone()
        assert torch.allclose(head(features), network(images()), atol=1e-6)
    assert torch.equal(features, kept)
    assert sum(isinstance(part, nn.Linear) for part in head.modules()) == layers
    assert layers == 1 or features.min() < 0
    with pytest.raises(UserError, match="ends in 3 linear layers; give 1 to 3"):
        cut(network, 4)


def test_other_ends_cannot_be_cut_and_say_so():
    with pytest.raises(UserError, match=r"cannot be split earlier .it must be an nn.Sequential"):
        cut(made("resnet"), 2)
    relu = nn.ReLU()
    shared = made(
        lambda s, c: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, c))
    )
    cut(shared, 3)
    with pytest.raises(UserError, match="do not run in sequence"):  # one ReLU runs in two places
        cut(shared, 2)


def test_every_parameter_belongs_to_a_named_layer():
    layers = by_layer([f"params/{name}" for name, _ in made("vit").named_parameters()])
    assert "class_token" in layers
    assert "heads.0" in layers
    assert all(layers)
    assert by_layer(["params/encoder.fc.weight", "params/fc.weight"]).keys() == {"encoder.fc", "fc"}
    assert by_layer(["params/encoder.fc.weight", "params/classifier.weight"]).keys() == {"fc", "classifier"}


def test_what_is_done_with_batch_norm_is_said_where_there_is_any():
    assert batch_norm_policy(build("tiny-cnn", SHAPE, 10)) == ""
    assert batch_norm_policy(build("outside_models:vit", SHAPE, 10)) == ""
    policy = batch_norm_policy(build("outside_models:resnet", SHAPE, 10))
    assert policy.startswith("6 BatchNorm layers: running statistics are averaged")
    assert batch_norm_policy(build("outside_models:batch_norm", SHAPE, 10)).startswith("1 BatchNorm layer:")
    assert build("tiny-cnn", SHAPE, 10).origin is None
