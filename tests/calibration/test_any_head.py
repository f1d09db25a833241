"""A calibration may return any module: it is checked, saved as what it computes, loaded, and used in a run."""

import json
import re

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import unskew
from unskew.calibration.calibrate import calibrate
from unskew.calibration.classifier import GRAPH, load_calibrated, read_graph, write_graph
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key

D, C = 6, 4
HALF = (torch.float16, torch.bfloat16)


def drawn(count=400, seed=0, apart=2.0):
    generator = Key(seed).torch()
    labels = torch.arange(count) % C
    means = apart * torch.randn(C, D, generator=Key(99).torch())
    return torch.randn(count, D, generator=generator) + means[labels], labels


def statistics_of(form="full"):
    return ClassStatistics.of_features(*drawn(), C, form)


def accuracy(classifier, dtype=torch.float32):
    features, labels = drawn(seed=1)
    return float((classifier(features.to(dtype)).argmax(1) == labels).double().mean())


def test_a_module_of_a_foreign_class_is_back_without_its_class():
    made = calibrate(nn.Linear(D, C), statistics_of("diagonal"), "outside_calibrations:cosine")
    values = load(save({name: value.contiguous() for name, value in made.tensors().items()}))
    _, back = load_calibrated(values, lambda layers: (nn.Identity(), nn.Linear(D, C)))
    for rows in (0, 1, 7):
        features = torch.randn(rows, D)
        assert torch.equal(made(features), back(features))
    assert accuracy(back) > 0.5
    again = back.tensors()  # and may be saved a second time
    assert torch.equal(read_graph({n.removeprefix("head."): v for n, v in again.items()})(features), back(features))
    with pytest.raises(UserError, match="is not one linear layer"):
        made.linear()


def test_a_run_saves_evaluates_and_loads_a_module_of_a_foreign_class(tmp_path):
    result = unskew.run(
        method="fedavg + outside_calibrations:cosine", data="digits", rounds=1, clients=2, epochs=1, engine="loop",
        out=tmp_path / "run",
    )  # fmt: skip
    name = "outside_calibrations:cosine"
    model = unskew.load(tmp_path / "run", name)
    images = torch.rand(5, 1, 8, 8)
    assert model(images).shape == (5, 10)
    assert result.calibrations[name].accuracy > 0.3


def test_what_no_graph_can_show_is_refused_when_it_is_saved():
    made = calibrate(nn.Linear(D, C), statistics_of(), "outside_calibrations:wrong(branching)")
    with pytest.raises(UserError, match=r"a Branching cannot be saved because .*write forward with tensor operations"):
        made.tensors()


@pytest.mark.parametrize(
    "step",
    [
        ["x", "aten.from_file.default", ["/etc/hostname"], {"given": {}}],
        ["x", "aten.add_.Tensor", [{"node": "features"}, 1], {"given": {}}],
        ["x", "aten.__class__.mro", [], {"given": {}}],
        ["x", "os.system", ["true"], {"given": {}}],
        ["x", "prims.add", [], {"given": {}}],
    ],
)
def test_a_graph_of_a_stranger_runs_nothing_but_functions_of_tensors(step):
    steps = json.dumps([["features", "features"], step, ["", "output", {"node": "x"}]]).encode()
    with pytest.raises(UserError, match=re.escape(f"the operation {step[1]!r} cannot be part of a saved classifier")):
        read_graph({GRAPH: torch.frombuffer(bytearray(steps), dtype=torch.uint8)})


def test_a_graph_of_plain_layers_is_the_layers():
    module = nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, 9), nn.SiLU(), nn.Dropout(), nn.Linear(9, C)).eval()
    features = torch.randn(5, D)
    assert torch.allclose(read_graph(write_graph(module, D))(features), module(features), atol=1e-6)


# half precision


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", ["ccvr(per_class=200, lr=0.01)", "uscc", "lda", "ridge"])
def test_a_head_of_half_precision_gets_what_a_float32_head_gets(method, dtype):
    head = nn.Linear(D, C)
    nn.init.zeros_(head.weight)
    full = calibrate(head, statistics_of("full"), method)
    half = calibrate(head.to(dtype), statistics_of("full"), method)
    assert half.head.weight.dtype == dtype
    assert not torch.equal(half.head.weight, head.weight)
    assert accuracy(half, dtype) == pytest.approx(accuracy(full), abs=0.02)
    assert head.weight.dtype == dtype


def test_a_class_without_examples_is_never_predicted_in_half_precision_either():
    features, labels = drawn()
    held = labels != 2
    statistics = ClassStatistics.of_features(features[held], labels[held], C, "shared")
    head = nn.Sequential(nn.ReLU(), nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, C)).half()
    with pytest.warns(UserWarning, match="never predicted"):
        made = calibrate(head, statistics, "lda(layers=2)")
    assert not bool((made(features.half()).argmax(1) == 2).any())


def test_dropout_before_the_linear_layer_does_not_matter():
    head = nn.Linear(D, C)
    plain = calibrate(head, statistics_of(), "lda").head.weight
    for wrapped in (nn.Sequential(nn.Dropout(0.2), head), nn.Sequential(head)):
        assert torch.equal(calibrate(wrapped, statistics_of(), "lda").head.weight, plain)
