"""Encoders and classifiers as users have them: frozen, in half precision, made in inference mode, with hooks."""

import copy

import pytest
import torch
from torch import nn

import unskew
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key

IMAGES = torch.randn(40, 1, 6, 6, generator=Key(0).torch())
LABELS = torch.arange(40) % 3


def encoder():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    draw = Key(1).torch()
    with torch.no_grad():
        for value in layers.parameters():
            value.copy_(0.3 * torch.randn(value.shape, generator=draw))
        layers[1].running_mean.copy_(torch.rand(4, generator=draw))
    return layers


def made_in_inference_mode():
    with torch.inference_mode():
        return copy.deepcopy(encoder())


def frozen():
    return encoder().requires_grad_(False)


WAYS = {"as it is": encoder, "in inference mode": made_in_inference_mode, "frozen": frozen}


def measured(module, images=IMAGES):
    return ClassStatistics.measure(module, [(images[:25], LABELS[:25]), (images[25:], LABELS[25:])], 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_is_left_as_it_was_however_it_was_made(way, training):
    module = WAYS[way]().train(training)
    module[2].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    found = measured(module).tensors()
    wanted = measured(encoder()).tensors()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("images", [IMAGES, IMAGES.double(), IMAGES.numpy()], ids=["float32", "float64", "numpy"])
def test_an_encoder_of_another_precision_takes_images_as_they_are(kind, images):
    module = encoder().to(kind)
    found = measured(module, images)
    with torch.no_grad():
        features = module.eval()(IMAGES.to(kind))
    wanted = ClassStatistics.of_features(features, LABELS, 3)
    assert torch.allclose(found.means(), wanted.means(), rtol=1e-2, atol=1e-2)


def test_an_encoder_that_casts_its_images_itself_gets_them_as_they_are():
    seen = []

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(36, 5).bfloat16()

        def forward(self, images):
            seen.append(images.dtype)
            return self.inner(images.flatten(1).bfloat16())

    measured(Casting())
    assert set(seen) == {torch.float32}


def test_an_encoders_own_error_is_its_own():
    class Broken(nn.Linear):
        def forward(self, images):
            raise RuntimeError("the sensor is unplugged")

    with pytest.raises(RuntimeError, match="unplugged"):
        measured(Broken(3, 3), IMAGES.double())


def test_hooks_run_and_autocast_inside_the_encoder_counts():
    calls = []

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = encoder()

        def forward(self, images):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(images)

    module = Own()
    module.inner[4].register_forward_hook(lambda *_: calls.append(torch.is_autocast_enabled("cpu")))
    own, plain = measured(module), measured(encoder())
    assert calls == [True, True]
    assert not torch.equal(own.means(), plain.means())


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", ["ccvr(per_class=20, epochs=1)", "lda", "uscc(epochs=1)"])
def test_a_classifier_made_in_inference_mode_is_calibrated_as_any_other(kind, method):
    torch_layer = nn.Linear(5, 3).to(kind)
    with torch.inference_mode():
        layer = copy.deepcopy(torch_layer)
        assert layer.weight.is_inference()
    statistics = measured(encoder())
    plain = unskew.calibrate(torch_layer, statistics, method).tensors()
    found = unskew.calibrate(layer, statistics, method)
    assert all(torch.equal(value, plain[name]) for name, value in found.tensors().items())
    assert not any(value.is_inference() for value in found.parameters())


def test_several_layers_made_in_inference_mode_are_calibrated_too():
    with torch.inference_mode():
        head = nn.Sequential(nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).requires_grad_(False)
    found = unskew.calibrate(head, measured(encoder()), "ccvr(per_class=20, epochs=1, layers=2)")
    assert all(value.requires_grad for value in found.parameters())


def test_a_network_that_was_made_in_inference_mode_can_be_trained(tmp_path):
    with torch.inference_mode():
        network = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))
    pixels = (IMAGES * 50 + 100).clamp(0, 255).byte()[:, 0].numpy()
    data = pixels, LABELS.numpy(), pixels, LABELS.numpy()
    result = unskew.run(
        data=data, model=lambda: network, partition="iid", clients=2, rounds=1, epochs=1, out=tmp_path / "run"
    )
    assert result.rounds == 1
    assert network[1].weight.is_inference()


class Output:
    """As Hugging Face's models return it."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Named(nn.Module):
    """Takes its inputs by name, as Hugging Face's models do; returns what it is told to."""

    def __init__(self, returns="pooler_output"):
        super().__init__()
        self.layer, self.returns = nn.Linear(4, 3), returns

    def forward(self, pixel_values, mask):
        return Output(**{self.returns: (self.layer(pixel_values) * mask)[:, :, None, None]})


def test_inputs_in_a_dict_and_outputs_with_features_are_taken_as_hugging_face_has_them():
    images, labels = {"pixel_values": torch.randn(6, 4), "mask": torch.ones(6, 1)}, torch.arange(6) % 2
    batch = (images, labels)
    assert ClassStatistics.measure(Named(), [batch, {"image": images, "label": labels}], 2).width == 3
    for returns in ("logits", "last_hidden_state"):
        with pytest.raises(UserError, match=r"not an Output; give a module that returns one, such as the base_model"):
            ClassStatistics.measure(Named(returns), [batch], 2)


def test_inputs_in_a_dict_are_converted_refused_and_named_like_images():
    images, labels = {"pixel_values": torch.randn(6, 4).double(), "mask": torch.ones(6, 1)}, torch.arange(6) % 2
    assert ClassStatistics.measure(Named(), [(images, labels)], 2).width == 3
    images["pixel_values"] = torch.zeros(6, 4, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"the images are torch.uint8, but the encoder takes torch.float32"):
        ClassStatistics.measure(Named(), [(images, labels)], 2)
    with pytest.raises(UserError, match=r"the encoder takes pixel_values, mask, not a dict with 'pixels'"):
        ClassStatistics.measure(Named(), [({"pixels": torch.randn(6, 4)}, labels)], 2)


class TakesDict(nn.Module):
    def forward(self, batch):
        return batch["pixel_values"].flatten(1)


def test_an_encoder_may_take_the_whole_dict():
    images, labels = torch.randn(6, 1, 2, 2), torch.arange(6) % 2
    for batch in ({"pixel_values": images, "label": labels}, ({"pixel_values": images}, labels)):
        assert ClassStatistics.measure(TakesDict(), [batch], 2).width == 4


def test_images_of_whole_numbers_are_for_their_owner_to_normalize():
    encoder = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())
    images, labels = torch.zeros(4, 3, 5, 5, dtype=torch.uint8), torch.arange(4) % 2
    for given in (images, images.numpy()):
        with pytest.raises(
            UserError, match=r"the images are torch.uint8, but the encoder takes torch.float32; normalize"
        ):
            ClassStatistics.measure(encoder, [(given, labels)], 2)


@pytest.mark.parametrize("memory", ["physical_memory", "available_memory"])
def test_statistics_that_memory_does_not_hold_are_refused_before_they_are_made(memory, monkeypatch):
    monkeypatch.setattr(f"unskew.calibration.covariances.{memory}", lambda: 10_000)
    with pytest.raises(UserError, match=r"full statistics of 9 classes and 20 features need .* use covariance=shared"):
        ClassStatistics.of_features(torch.randn(18, 20), torch.arange(18) % 9, 9)


def test_what_a_sum_already_has_in_memory_is_not_counted_again_and_qda_counts_its_factors(monkeypatch):
    parts = [ClassStatistics.of_features(torch.randn(6, 20), torch.arange(6) % 3 + at, 6) for at in (0, 3)]
    monkeypatch.setattr("unskew.calibration.covariances.available_memory", lambda: parts[0].size)
    total = ClassStatistics.merged(parts)
    assert total.held.tolist() == list(range(6))
    monkeypatch.setattr("unskew.calibration.covariances.available_memory", lambda: parts[0].size - 1)
    with pytest.raises(UserError, match="full statistics of 3 classes and 20 features need"):
        ClassStatistics.merged(parts)
    monkeypatch.setattr("unskew.calibration.covariances.available_memory", lambda: 4 * 6 * 20**2 - 1)
    with pytest.raises(UserError, match=r"qda's 6 factors of 20 features need .* use lda, or fewer features"):
        unskew.calibrate(nn.Linear(20, 6), total, "qda")
