"""Everything computes where the classifier is: proved with tensors that only pretend to be on another device.

A pretending tensor keeps its values on the CPU and says that it is elsewhere ("meta", the one other device that every
machine has). Mixing it with a plain tensor is refused, as a GPU would refuse it.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from unskew.calibration.calibrate import calibrate, calibrate_on_features
from unskew.calibration.classifier import load_calibrated
from unskew.calibration.forecast import forecast
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

D, C = 5, 3
AWAY = torch.device("meta")
ATEN = torch.ops.aten
MAY_MIX = (ATEN._to_copy.default, ATEN.copy_.default, ATEN.index.Tensor)  # a GPU takes indices from the CPU


def pretended(function, args, kwargs):
    """The function on the values; its result is away where its arguments are, or where it was told to go."""
    away, here = [], []

    def value_of(given):
        if isinstance(given, Away):
            away.append(given)
            return given.value
        if isinstance(given, torch.Tensor) and given.dim():
            here.append(given)
        return given

    values, knobs = tree_map(value_of, args), tree_map(value_of, kwargs)
    if away and here and function not in MAY_MIX:
        raise RuntimeError(f"{function}: tensors on two devices")
    target = knobs.get("device")
    if target is not None:
        knobs["device"] = torch.device("cpu")
    result = function(*values, **knobs)
    if function._schema.is_mutable and isinstance(args[0], torch.Tensor):
        return args[0]
    goes_away = bool(away) if target is None else torch.device(target) == AWAY
    return tree_map(lambda each: Away(each) if goes_away and isinstance(each, torch.Tensor) else each, result)


class Away(torch.Tensor):
    """Values on the CPU that say they are on another device."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, value.stride(), value.storage_offset(), dtype=value.dtype, device=AWAY
        )

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return pretended(function, args, dict(kwargs or {}))


class Elsewhere(TorchDispatchMode):
    """Inside, what is made on the other device or moved there keeps its values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return pretended(function, args, dict(kwargs or {}))


def heads():
    """A head on the CPU, and the same one elsewhere."""
    plain, away = nn.Linear(D, C), nn.Linear(D, C)
    for name, value in plain.named_parameters():
        setattr(away, name, nn.Parameter(Away(value.detach().clone())))
    return plain, away


def features_of():
    labels = torch.arange(60) % C
    return torch.randn(60, D, generator=Key(2).torch()) + nn.functional.one_hot(labels, D), labels


def here(layer):
    return [value.detach().cpu() for value in layer.parameters()]


def test_the_pretence_is_one():
    with Elsewhere():
        away = torch.ones(3).to(AWAY)
        assert away.device == AWAY
        assert torch.equal((away + 1).cpu(), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="two devices"):
            away + torch.ones(3)


METHODS = ("ccvr(per_class=20, epochs=2)", "ccvr(per_class=20, epochs=2, relu=true, tukey=0.5)", "lda", "lda(expand=4)")


@pytest.mark.parametrize("method", METHODS)
def test_a_calibration_computes_where_the_classifier_is_and_gives_the_same(method):
    from unskew.calibration.classifier import Lift

    features, labels = features_of()
    measured = Lift.of(D, 4)(features) if "expand" in method else features
    statistics = ClassStatistics.of_features(measured, labels, C, "shared" if "lda" in method else "full")
    plain, away = heads()
    wanted = calibrate(plain, statistics, method)
    with Elsewhere():
        made = calibrate(away, statistics, method)
        assert {value.device for value in (*made.parameters(), *made.buffers())} == {AWAY}
        assert all(torch.equal(one, other) for one, other in zip(here(made.head), here(wanted.head), strict=True))
        torch.testing.assert_close(made(features.to(AWAY)).detach().cpu(), wanted(features).detach())
        assert {value.device.type for value in made.tensors().values()} == {"cpu"}
        _, loaded = load_calibrated(made.tensors(), lambda layers: (nn.Flatten(), away))
        torch.testing.assert_close(loaded(features.to(AWAY)).detach().cpu(), wanted(features).detach())


def test_the_oracle_and_the_forecast_take_a_classifier_elsewhere():
    features, labels = features_of()
    plain, away = heads()
    wanted = calibrate_on_features(plain, features, labels, "oracle(epochs=2)")
    statistics = ClassStatistics.of_features(features, labels, C)
    foreseen = forecast(plain, statistics, C, Key(0))
    with Elsewhere():
        made = calibrate_on_features(away, features.to(AWAY), labels, "oracle(epochs=2)")
        assert all(torch.equal(one, other) for one, other in zip(here(made.head), here(wanted.head), strict=True))
        assert forecast(away, statistics, C, Key(0)) == foreseen


def test_statistics_of_features_elsewhere_are_on_the_cpu():
    features, labels = features_of()
    wanted = ClassStatistics.of_features(features, labels, C)
    with Elsewhere():
        made = ClassStatistics.of_features(features.to(AWAY), labels, C)
    assert all(torch.equal(value, wanted.tensors()[name]) for name, value in made.tensors().items())
