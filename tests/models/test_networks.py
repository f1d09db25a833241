"""Networks: the fast layer is its plain definition, sizes follow from the images, weights from the key."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.models import NETWORKS, build, initialise
from unskew.models.conv_pool import ConvPool
from unskew.models.networks import InParts


def layer(inside, outside, kernel=5, dtype=torch.float32, whole=False):
    """A layer and a way to draw images; ``whole`` numbers are exact in any order of summation."""
    conv = ConvPool(inside, outside, kernel, dtype=dtype)
    draw = Key(1).torch()
    with torch.no_grad():
        for value in conv.parameters():
            if whole:
                value.copy_(torch.randint(-2, 3, value.shape, generator=draw))
            else:
                value.copy_(torch.rand(value.shape, generator=draw, dtype=dtype) - 0.5)
    return conv, draw


def both_ways(conv, images, input_gradient):
    """(output, gradients) by the fast form and by the plain one, for the same random gradient from above."""
    found = []
    for form in (conv.forward, conv.plain):
        x = images.clone().requires_grad_(input_gradient)
        wanted = [conv.weight, conv.bias, *([x] if input_gradient else [])]
        output = form(x)
        above = torch.randint(-3, 4, output.shape, generator=Key(2).torch()).to(output.dtype)
        found.append((output.detach(), torch.autograd.grad(output, wanted, above)))
    return found


def assert_alike(conv, images, tolerance, *, input_gradient):
    (fast, fast_gradients), (plain, plain_gradients) = both_ways(conv, images, input_gradient)
    assert fast.shape == plain.shape
    assert fast.dtype == plain.dtype
    for got, want in [(fast, plain), *zip(fast_gradients, plain_gradients, strict=True)]:
        assert got.shape == want.shape
        assert (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


def test_weights_changed_between_the_passes_are_an_error_and_not_a_wrong_gradient():
    conv, draw = layer(3, 4)
    output = conv(torch.rand(2, 3, 12, 12, generator=draw).requires_grad_())
    with torch.no_grad():
        conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("input_gradient", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("batch", "inside", "outside", "height", "width"),
    [
        *[(4, 3, 6, 32, 32), (1, 1, 6, 28, 28), (2, 6, 16, 14, 14), (3, 3, 6, 33, 32)],
        *[(2, 1, 1, 7, 12), (1, 2, 3, 6, 6), (5, 3, 2, 9, 6)],
    ],
)
def test_convolution_and_pooling_as_one_are_their_plain_definition(
    batch, inside, outside, height, width, dtype, tolerance, input_gradient
):
    conv, draw = layer(inside, outside, dtype=dtype)
    images = torch.randn(batch, inside, height, width, generator=draw, dtype=dtype)
    assert_alike(conv, images, tolerance, input_gradient=input_gradient)


@settings(deadline=None, max_examples=60)
@given(*[st.integers(1, 4)] * 3, st.tuples(*[st.integers(1, 4)] * 2), *[st.integers(0, 6)] * 2, st.booleans())
def test_whatever_the_sizes_the_fast_form_is_exact_on_whole_numbers(
    batch, inside, outside, kernel, taller, wider, input_gradient
):
    """Small whole numbers have no rounding, and many ties: even which of four equals gets the gradient must agree."""
    conv, draw = layer(inside, outside, kernel, whole=True)
    size = batch, inside, kernel[0] + 1 + taller, kernel[1] + 1 + wider
    images = torch.randint(-1, 2, size, generator=draw).float()
    assert_alike(conv, images, 0.0, input_gradient=input_gradient)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [16, 28, 32, 33])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_takes_these_images_and_gives_finite_logits_and_gradients(name, side, channels):
    network = build(name, (channels, side, side), 7)
    initialise(network, Key(0))
    images = torch.randn(2, channels, side, side, generator=Key(1).torch())
    features = network.encoder(images)
    logits = network(images)
    assert logits.shape == (2, 7)
    assert torch.equal(network.classifier(features), logits)
    assert features.shape == (2, network.classifier.in_features)
    gradients = torch.autograd.grad(F.cross_entropy(logits, torch.tensor([0, 6])), list(network.parameters()))
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in gradients)


@pytest.mark.parametrize(
    ("name", "shape", "features", "wanted"),
    [
        # conv1 3·6·25+6, conv2 6·16·25+16, fc1 400·120+120, fc2 120·84+84, fc3 84·84+84, fc4 84·256+256,
        # classifier 256·10+10
        ("simple-cnn", (3, 32, 32), 256, 456 + 2_416 + 48_120 + 10_164 + 7_140 + 21_760 + 2_570),  # 92,626
        # conv1 3·64·25+64, conv2 64·64·25+64, fc1 64·8·8·384+384, fc2 384·192+192, classifier 192·10+10
        ("lenet-64", (3, 32, 32), 192, 4_864 + 102_464 + 1_573_248 + 73_920 + 1_930),
        # conv1 16·9+16, conv2 16·32·9+32, fc1 32·2·2·64+64, classifier 64·10+10
        ("tiny-cnn", (1, 8, 8), 64, 160 + 4_640 + 8_256 + 650),
    ],
)
def test_parameters_and_features_are_as_many_as_the_papers_layers_have(name, shape, features, wanted):
    network = build(name, shape, 10)
    assert sum(value.numel() for value in network.parameters()) == wanted
    assert network.classifier.in_features == features


def test_simple_cnn_is_the_papers_network_layer_by_layer():
    """Table 6 of the CCVR paper, written out with ReLU before pooling as it stands there."""
    network = build("simple-cnn", (3, 32, 32), 10)
    initialise(network, Key(3))
    weights = network.state_dict()

    def linear(x, name):
        return F.linear(x, weights[f"encoder.{name}.weight"], weights[f"encoder.{name}.bias"])

    def conv(x, name):
        x = F.conv2d(x, weights[f"encoder.{name}.weight"], weights[f"encoder.{name}.bias"])
        return F.max_pool2d(F.relu(x), 2)

    images = torch.randn(4, 3, 32, 32, generator=Key(1).torch())
    hidden = conv(conv(images, "conv1"), "conv2").flatten(1)
    for name in ("fc1", "fc2", "fc3"):
        hidden = F.relu(linear(hidden, name))
    assert (network.encoder(images) - linear(hidden, "fc4")).abs().max() < 1e-6


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("turned", [False, True])
def test_images_that_are_too_small_are_refused_with_the_least_size(name, turned):
    least = 16 if name == "simple-cnn" else 4
    build(name, (1, least, least), 2)
    shape = (1, least, least - 1) if turned else (1, least - 1, least)
    with pytest.raises(UserError, match=rf"{name} needs images of .*{least}x{least} pixels.*{least - 1}"):
        build(name, shape, 2)


# Weights


def drawn(name, key, shape=(3, 16, 16)):
    network = build(name, shape, 5)
    initialise(network, key)
    return network


@pytest.mark.parametrize("name", [*NETWORKS, "outside_models:batch_norm"])
def test_the_same_key_gives_the_same_weights_another_key_others_and_nothing_global_is_drawn(name):
    before = torch.random.get_rng_state()
    first, again, other = (drawn(name, Key(seed)).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[n], again[n]) for n in first)
    weights = [n for n, value in first.items() if value.dim() > 1]
    assert not any(torch.equal(first[n], other[n]) for n in weights)


def test_weights_do_not_depend_on_what_other_layers_there_are():
    colour, grey = drawn("tiny-cnn", Key(0), (3, 8, 8)), drawn("tiny-cnn", Key(0), (1, 8, 8))
    assert torch.equal(colour.encoder.conv2.weight, grey.encoder.conv2.weight)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_uniform_within_one_over_the_root_of_the_inputs(name):
    for module in drawn(name, Key(0), (3, 32, 32)).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())
            largest = module.weight.abs().max().item()
            assert 0.95 * bound < largest <= bound
            assert module.bias.abs().max().item() <= bound
            spread = bound / math.sqrt(3 * module.weight.numel())  # of the mean of uniform draws
            assert abs(module.weight.mean().item()) < 5 * spread


@pytest.mark.parametrize("name", ["outside_models:batch_norm", "outside_models:norms"])
def test_norms_begin_with_ones_and_zeros(name):
    network = drawn(name, Key(0))
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm)]
    assert len(norms) == (1 if name.endswith("batch_norm") else 3)
    for norm in norms:
        ones = [norm.weight, *([norm.running_var] if isinstance(norm, nn.BatchNorm2d) else [])]
        assert all(bool((value == 1).all()) for value in ones)
        others = [value for value in norm.state_dict(keep_vars=True).values() if all(value is not one for one in ones)]
        assert not any(bool(value.any()) for value in others)


@pytest.mark.parametrize("name", NETWORKS)
def test_images_whose_layers_do_not_fit_into_memory_are_refused(name, monkeypatch):
    monkeypatch.setattr("unskew.models.networks.physical_memory", lambda: 1e6)
    build(name, (1, 16, 16), 10) if name != "lenet-64" else build(name, (1, 4, 4), 10)
    with pytest.raises(UserError, match=f"{name} for images of 4096x4096 pixels has a layer of .* GB, too large"):
        build(name, (1, 4096, 4096), 10)


@pytest.mark.parametrize("count", [0, 1, 50, 51, 130])
def test_a_network_in_parts_has_the_same_output_and_leaves_its_mode_alone(count):
    network = NETWORKS["tiny-cnn"]((1, 8, 8), 3)
    parts = InParts(network.encoder.eval())
    images = torch.randn(count, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(parts(images), network.encoder(images))
    assert parts.training == network.encoder.training is False
