"""A stranger's network and data set go the whole way: run, resume, calibrate, analyse, report, load."""

import math

import pytest
import torch
from safetensors.torch import load_file

import outside_models
import unskew

SMALL = {"rounds": 2, "epochs": 1, "lr": 0.01, "clients": 3, "checkpoint_seconds": 0, "data": "outside_data:stripes"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "method"),
    [("resnet", "fedavgm(0.9)"), pytest.param("vit", "moon + clsprox + scaffold", marks=pytest.mark.heavy)],
)
def test_from_python_both_engines_give_the_same_bits_and_everything_follows(tmp_path, name, method):
    options = {**SMALL, "model": f"outside_models:{name}", "method": method, "during": "norms + drift"}
    result = unskew.run(out=tmp_path / "loop", engine="loop", **options)
    pool = unskew.run(out=tmp_path / "pool", engine="pool", workers=1, **options)
    assert result.weights_sha256 == pool.weights_sha256
    unskew.calibrate_run(result.path, "ccvr(per_class=20)")
    found = unskew.analyse(result.path, "cka", "norms", "drift")
    assert len(found["norms"].values.server) == 3
    assert "fc" in found["cka"].values.layers or "heads.0" in found["cka"].values.layers
    unskew.write_report(result.path)
    model = unskew.load(result.path)
    assert isinstance(model, outside_models.ResNet if name == "resnet" else outside_models.ViT)
    fresh = getattr(outside_models, name)((1, 8, 8), 3)
    values = load_file(result.path / "model.safetensors")
    fresh.load_state_dict({key: values[key] for key in fresh.state_dict()})
    images = torch.zeros(2, 1, 8, 8)
    assert torch.equal(fresh.eval()(images), model(images))
    assert unskew.load(result.path, "ccvr(per_class=20)")(images).shape == (2, 3)


def test_weights_that_a_network_brings_are_those_before_round_one(tmp_path):
    """With a rate of almost zero a round changes nothing: the accuracy is that of the weights it came with."""
    result = unskew.run(
        out=tmp_path / "run", model="outside_models:trained", rounds=1, epochs=1, lr=1e-30, momentum=0, weight_decay=0,
        engine="loop", clients=2,
    )  # fmt: skip
    assert result.accuracy > 0.85
    wanted = outside_models.trained((1, 8, 8), 10)[1].weight
    assert torch.equal(unskew.load(result.path)[1].weight, wanted)


def test_a_method_on_the_classifier_finds_it_by_the_networks_own_name(tmp_path):
    result = unskew.run(
        out=tmp_path / "run", **{**SMALL, "model": "outside_models:palette", "engine": "loop"},
        method="clsnorm + prototypes + fedir(target=uniform)",
    )  # fmt: skip
    rows = unskew.load(result.path).out.weight.norm(dim=1)
    assert torch.allclose(rows, torch.ones(3), atol=1e-5)
    assert math.isfinite(result.loss)


def test_dropout_draws_from_the_visits_key(tmp_path):
    options = {**SMALL, "model": "outside_models:vgg", "engine": "loop", "rounds": 1}
    first = unskew.run(out=tmp_path / "first", **options)
    torch.rand(3)  # moves the global generator
    again = unskew.run(out=tmp_path / "again", **options)
    assert first.weights_sha256 == again.weights_sha256
