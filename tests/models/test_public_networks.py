"""MobileNetV2, ResNets, EfficientNet-Lite0: sizes and names of the public checkpoints, forms by image size, knobs."""

import pytest
import torch
from torch import nn

from unskew.core.errors import UserError
from unskew.models import PUBLIC, build
from unskew.models.imagenet import SamePadding

IMAGENET = (3, 224, 224)


@pytest.mark.parametrize(
    ("name", "parameters", "features"),
    [
        ("resnet-18", 11_689_512, 512),
        ("resnet-50", 25_557_032, 2048),
        ("mobilenet-v2", 3_504_872, 1280),
        ("efficientnet-lite0", 4_652_008, 1280),
    ],
)
def test_the_imagenet_form_has_the_published_number_of_parameters(name, parameters, features):
    network = PUBLIC[name](IMAGENET, 1000)
    assert sum(value.numel() for value in network.parameters()) == parameters
    classifier = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    assert (classifier.in_features, classifier.out_features) == (features, 1000)


def test_parameters_of_efficientnet_have_the_names_of_its_public_checkpoint():
    state = PUBLIC["efficientnet-lite0"](IMAGENET, 1000).state_dict()
    assert state["_blocks.15._project_conv.weight"].shape == (320, 1152, 1, 1)
    assert state["_conv_head.weight"].shape == (1280, 320, 1, 1)


def test_small_images_keep_their_size_in_the_first_layers():
    small, large = (PUBLIC["resnet-18"]((3, side, side), 10) for side in (32, 64))
    assert small.conv1.kernel_size == (3, 3)
    assert large.conv1.kernel_size == (7, 7)
    network = PUBLIC["mobilenet-v2"]((3, 32, 32), 10)
    assert network.features(torch.zeros(1, 3, 32, 32)).shape == (1, 1280, 4, 4)  # CCVR's Table 7 pools 4×4
    assert not any(isinstance(layer, nn.Dropout) for layer in network.modules())  # nor does it have dropout
    assert isinstance(PUBLIC["mobilenet-v2"]((3, 64, 64), 10).classifier[0], nn.Dropout)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("side", [(1, 8, 8), (3, 33, 40)])
def test_any_channels_and_sizes_work(name, side):
    network = build(name, side, 5)
    assert network.eval()(torch.zeros(2, *side)).shape == (2, 5)


@pytest.mark.parametrize("name", PUBLIC)
def test_group_norm_leaves_no_buffers(name):
    network = build(f"{name}(norm=group)", (3, 32, 32), 10)
    assert not list(network.buffers())
    assert any(isinstance(layer, nn.GroupNorm) for layer in network.modules())


def test_the_bottleneck_is_what_the_classifier_sees():
    network = build("mobilenet-v2(bottleneck=64)", (3, 32, 32), 10)
    assert network.classifier.in_features == 64
    assert network.eval().encoder(torch.zeros(2, 3, 32, 32)).shape == (2, 64)


@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [(7, 3, 2), (8, 3, 2), (8, 5, 2), (9, 5, 1), (1, 5, 2), (2, 3, 2)]
)
def test_same_padding_is_tensorflows(size, kernel, stride):
    """Output i sees the input from i·stride − ⌊missing/2⌋ on."""
    layer = SamePadding(1, 1, kernel, stride, bias=False)
    nn.init.ones_(layer.weight)
    image = torch.arange(1.0, size + 1).view(1, 1, 1, size).expand(1, 1, size, size).contiguous()
    out = -(-size // stride)
    before = max((out - 1) * stride + kernel - size, 0) // 2
    columns = [range(max(i * stride - before, 0), min(i * stride - before + kernel, size)) for i in range(out)]
    expected = torch.tensor(
        [[float(sum(len(rows) * (column + 1) for column in across)) for across in columns] for rows in columns]
    )
    torch.testing.assert_close(layer(image)[0, 0], expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resnet-19", "did you mean 'resnet-18'"),
        ("simple-cn", "no model is called 'simple-cn'; did you mean 'simple-cnn'"),
        ("Simple-CNN", "no model is called 'Simple-CNN'; did you mean 'simple-cnn'"),
        *((name, "model") for name in ("nowhere:net", *(f"outside_models:{n}" for n in ("missing", "number", "")))),
        ("resnet-18(norm=layer)", "choose from: batch, group"),
        ("resnet-18(depth=3)", "has no knob 'depth'"),
        ("resnet-18 + resnet-50", "give one model"),
        ("simple-cnn(3)", "has no knobs"),
        ("resnet-18 ", "no model is called"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(UserError, match=message):
        build(text, (3, 32, 32), 10)
