"""Every calibration and every protection gives the same classifier on a device as on the CPU."""

import os
from dataclasses import replace

import pytest
import torch
from placed import on, side_of, small

from unskew.calibration import CALIBRATIONS, parse_calibration
from unskew.calibration.calibrate import calibrate, calibrate_on_features
from unskew.calibration.classifier import Lift, load_calibrated
from unskew.calibration.federated import Calibrator, Forecasted, check
from unskew.calibration.forecast import forecast
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key
from unskew.engines.loop import Loop
from unskew.methods import METHODS
from unskew.privacy.sessions import Sessions
from unskew.runs.execute import finish

CPU = torch.device("cpu")
SIZES = (14, 9, 1, 12)
QUICK = {
    "ccvr": "ccvr(per_class=20, epochs=2)",
    "uscc": "uscc(per_class=20, epochs=2)",
    "oracle": "oracle(epochs=2)",
}
SHAPES = ["ccvr(per_class=20, epochs=2, layers=2)", "lda(expand=6)"]
KNOBS = [
    "ccvr(per_class=20, epochs=2, relu=true, tukey=0.5)",
    "ccvr(per_class=20, epochs=2, components=2)",
    "ccvr(per_class=20, epochs=2, covariance=diagonal)",
    "lda(layers=2)",
    "oracle(epochs=2, per_class=3)",
    "oracle(epochs=2, layers=2)",
]
PROTECTIONS = [name for name, method in METHODS.items() if method.__module__ == "unskew.methods.protections"]
PROTECTED = {
    "withhold": "ccvr(per_class=20, epochs=2) + withhold(2)",
    "secure": "ccvr(per_class=20, epochs=2) + secure(updates=true)",
    "private": "lda + private(epsilon=50, delta=0.1, clip=2)",
    "private-updates": "lda + private-updates(noise=0.1)",
    "rounded": "lda + rounded",
}


def calibrated(federated):
    """A whole small run: two rounds, then its calibrations. Scores, tensors, and what was forecast."""
    state, side, events = federated.run(2), side_of(federated), []
    for finisher in side.algorithm.finish:
        check(finisher, side.algorithm, side)
    engine = Loop(replace(side_of(federated), secret=os.urandom(32), sessions=Sessions.temporary()))
    done = list(finish(Calibrator(engine, side, state.tensors, side.algorithm, Key(0), events.append, {})))
    forecasts = [event.forecast for event in events if isinstance(event, Forecasted)]
    return done, forecasts


def agree(here, home):
    (done, forecasts), (others, other_forecasts) = calibrated(here), calibrated(on(home.device, here))
    assert len(done) == len(others) > 0
    assert forecasts == other_forecasts
    for one, other in zip(done, others, strict=True):
        assert (one.result.name, one.notes) == (other.result.name, other.notes)
        assert (one.result.accuracy, one.result.loss) == (other.result.accuracy, other.result.loss)
        values, other_values = one.classifier.tensors(), other.classifier.tensors()
        assert {value.device for value in (*other.classifier.parameters(), *other.classifier.buffers())} == {CPU}
        assert list(values) == list(other_values)
        assert all(torch.equal(value, other_values[name]) for name, value in values.items())


@pytest.mark.parametrize(
    "calibration",
    [
        *(QUICK.get(name, name) for name in CALIBRATIONS),
        *SHAPES,
        *(pytest.param(knob, marks=pytest.mark.heavy) for knob in KNOBS),
    ],
)
def test_every_calibration_is_the_same_as_on_the_cpu(home, calibration):
    agree(small(f"fedavg + {calibration}", sizes=SIZES), home)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_every_protection_gives_the_same_as_on_the_cpu(home, protection):
    agree(small(f"fedavg + {PROTECTED[protection]}", sizes=SIZES), home)


def test_a_classifier_that_the_method_transforms_is_calibrated_the_same(each_home):
    agree(small(f"clsnorm + {QUICK['ccvr']} + lda", sizes=SIZES), each_home)


@pytest.mark.parametrize(
    "method", ["ccvr(per_class=20, epochs=2, relu=true, tukey=0.5)", "lda", "lda(expand=4)", "oracle"]
)
def test_a_classifier_of_the_users_is_calibrated_where_it_is_and_gives_the_same(each_home, method):
    """From Python, without a run: it stays on its device, what is saved is on the CPU."""
    labels = torch.arange(60) % 3
    features = torch.randn(60, 5, generator=Key(2).torch()) + torch.nn.functional.one_hot(labels, 5)
    made, foreseen = [], []
    for device in (CPU, each_home.device):
        head, own = torch.nn.Linear(5, 3), features.to(device)
        torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        head.to(device)
        if method == "oracle":
            made.append(calibrate_on_features(head, own, labels, "oracle(epochs=2)"))
        else:
            needs = parse_calibration(method).needs
            measured = Lift.of(5, needs.expand).to(device)(own) if needs.expand else own
            statistics = ClassStatistics.of_features(measured, labels, 3, needs.form)
            foreseen.append(forecast(head, statistics, 3, Key(0)))
            made.append(calibrate(head, statistics, method))
        assert {value.device for value in (*made[-1].parameters(), *made[-1].buffers())} == {device}
        _, loaded = load_calibrated(made[-1].tensors(), lambda layers, head=head: (torch.nn.Flatten(), head))
        assert torch.equal(loaded(own).cpu(), made[-1](own).cpu())
    values, others = (each.tensors() for each in made)
    assert {value.device for value in others.values()} == {CPU}
    assert foreseen[:1] == foreseen[1:]
    assert all(torch.equal(value, others[name]) for name, value in values.items())
