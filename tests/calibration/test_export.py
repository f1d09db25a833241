"""A calibrated classifier drops in: as a plain layer, scripted, traced, exported, and in ONNX."""

import io

import numpy as np
import pytest
import torch
from torch import nn

from unskew.calibration.calibrate import calibrate
from unskew.calibration.classifier import CalibratedClassifier, Lift
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key

D, C, PIXELS = 8, 4, 12
QUICK = "per_class=20, epochs=1"


class Model(nn.Module):
    """As a user has it: a body, then ``fc``."""

    def __init__(self, fc: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.fc = fc

    def forward(self, images):
        return self.fc(self.body(images))


def body():
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, D))


def images(count=5, seed=3):
    return torch.randn(count, 1, 3, 4, generator=Key(seed).torch())


def statistics_of(encoder, form="full"):
    return ClassStatistics.measure(encoder, [(images(60), torch.arange(60) % C)], C, form=form)


def linear_model(method=f"ccvr({QUICK})"):
    encoder, head = body(), nn.Linear(D, C)
    return Model(calibrate(head, statistics_of(encoder), method), encoder)


def deep_model(method):
    encoder = body()
    head = nn.Sequential(nn.ReLU(), nn.Linear(D, 6), nn.ReLU(), nn.Linear(6, C))
    return Model(calibrate(head, statistics_of(encoder), method), encoder)


def lifted_model(clip=0.0):
    encoder, head = body(), nn.Linear(D, C)
    statistics = statistics_of(nn.Sequential(encoder, Lift.of(D, 7)), "shared")
    made = calibrate(head, statistics, "lda(expand=7)")
    made.clip = clip
    return Model(made, encoder)


def clipped_model():
    model = linear_model()
    model.fc.clip = 1.5
    return model


VARIANTS = {
    "linear": linear_model,
    "discriminant": lambda: linear_model("lda"),
    "transformation": lambda: linear_model(f"ccvr({QUICK}, relu=true, tukey=0.5)"),
    "logarithm": lambda: linear_model(f"ccvr({QUICK}, relu=true, tukey=0)"),
    "clip": clipped_model,
    "lift": lifted_model,
    "lift and clip": lambda: lifted_model(2.0),
    "layers": lambda: deep_model(f"ccvr({QUICK}, layers=2)"),
    "one layer for two": lambda: deep_model("lda(layers=2)"),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")  # people still use it
every_variant = pytest.mark.parametrize("variant", VARIANTS)
FIRST = ("linear", "discriminant", "lift and clip")  # the others only under make test-all: the exporter is slow


@every_variant
def test_a_whole_model_can_be_scripted_saved_and_loaded(variant):
    model = VARIANTS[variant]().eval()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(images()), model(images()))
    assert torch.jit.load(io.BytesIO(file.getvalue()))(images(1)).shape == (1, C)


@every_variant
def test_a_whole_model_can_be_traced(variant):
    model = VARIANTS[variant]().eval()
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(model, (images(),))(images(3)), model(images(3)))


@every_variant
def test_a_whole_model_can_be_exported(variant):
    model = VARIANTS[variant]().eval()
    exported = torch.export.export(model, (images(),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for count in (5, 2):
        torch.testing.assert_close(exported.module()(images(count)), model(images(count)))


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[] if v in FIRST else pytest.mark.heavy) for v in VARIANTS])
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_a_whole_model_gives_the_same_logits_in_onnxruntime(variant, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model = VARIANTS[variant]().eval()
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(model, (images(),), tmp_path / "m.onnx", dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for count in (5, 2):
        logits = session.run(None, {session.get_inputs()[0].name: images(count).numpy()})[0]
        np.testing.assert_allclose(logits, model(images(count)).detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_is_a_plain_layer_that_drops_in_and_loads(dtype):
    encoder = body().to(dtype)
    model = Model(nn.Linear(D, C, dtype=dtype), encoder)
    statistics = ClassStatistics.measure(encoder, [(images(60).to(dtype), torch.arange(60) % C)], C)
    made = calibrate(model.fc, statistics, f"ccvr({QUICK})")
    wanted = made(encoder(images().to(dtype)))
    state = {**model.state_dict(), **{f"fc.{name}": value for name, value in made.linear().state_dict().items()}}
    layer = made.linear()
    assert type(layer) is nn.Linear
    assert layer.weight.dtype == dtype
    assert layer.weight.requires_grad
    assert layer.weight.data_ptr() != made.head.weight.data_ptr()
    other = Model(nn.Linear(D, C, dtype=dtype), body().to(dtype))
    other.load_state_dict(state)
    assert torch.equal(other(images().to(dtype)), wanted)
    model.fc = layer
    assert torch.equal(model(images().to(dtype)), wanted)


def test_one_layer_in_the_place_of_two_is_a_plain_layer_too():
    made = VARIANTS["one layer for two"]().fc
    assert torch.equal(made.linear().weight, made.head.weight)


@pytest.mark.parametrize("variant", ["transformation", "clip", "lift", "layers"])
def test_linear_is_refused_where_it_is_more_than_one_layer(variant):
    made = VARIANTS[variant]().fc
    assert isinstance(made, CalibratedClassifier)
    with pytest.raises(UserError, match=r"is not one linear layer: .*; use the calibrated module itself$"):
        made.linear()
