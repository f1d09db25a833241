"""Every calibration and every protection gives the same classifier on a device as on the CPU."""

import os
from dataclasses import replace

import pytest
import torch
from placed import on, side_of, small

from unskew.calibration import CALIBRATIONS
from unskew.calibration.feasible import check, class_cells
from unskew.calibration.federated import Calibrator, Forecasted, real_features
from unskew.calibration.finisher import RealFeatures
from unskew.calibration.jobs import Moments
from unskew.core.key import Key
from unskew.core.types import Visit
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
KNOBS = [
    "ccvr(per_class=20, epochs=2, layers=2)",
    "ccvr(per_class=20, epochs=2, relu=true, tukey=0.5)",
    "ccvr(per_class=20, epochs=2, components=2)",
    "ccvr(per_class=20, epochs=2, covariance=diagonal)",
    "lda(expand=6)",
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


def test_the_statistics_of_a_client_leave_it_on_the_cpu(each_home):
    """Read before an engine moves anything: what a calibration's jobs answer is on the CPU."""
    from unskew.calibration.finisher import StatisticsRequest
    from unskew.calibration.jobs import client_statistics

    here = small(sizes=SIZES)
    model = here.state().tensors
    for request in (StatisticsRequest(), StatisticsRequest(clip=0.5), StatisticsRequest(expand=4, min_count=2)):
        sides = [side_of(here), side_of(on(each_home.device, here))]
        for client in range(len(SIZES)):
            one, other = (client_statistics(side, model, Visit(client, 1.0), request) for side in sides)
            assert {value.device for value in other.tensors().values()} == {CPU}
            assert all(torch.equal(value, other.tensors()[name]) for name, value in one.tensors().items())


@pytest.mark.parametrize("needs", [RealFeatures(), RealFeatures(layers=2, per_class=3)])
def test_a_bound_for_study_gets_real_features_on_the_cpu(each_home, needs):
    here = small(sizes=SIZES)
    sides = [side_of(here), side_of(on(each_home.device, here))]
    for side in sides:
        side.load(here.state().tensors, training=False)
    (features, labels), (other_features, other_labels) = (real_features(side, needs, Key(0)) for side in sides)
    assert other_features.device == other_labels.device == CPU
    assert torch.equal(features, other_features)
    assert torch.equal(labels, other_labels)


def test_what_a_calibration_is_checked_with_is_on_the_cpu(each_home):
    here = small(sizes=SIZES)
    sides = [side_of(here), side_of(on(each_home.device, here))]
    assert (sides[0].labels == sides[1].labels).all()
    for one, other in zip(*(class_cells(side) for side in sides), strict=True):
        assert (one == other).all()


def test_a_failing_client_says_why(home):
    """The device's own refusal reaches the user: it is not lost between the job and the calibration."""
    side = side_of(on(home.device, small(sizes=SIZES)))
    (failure,) = Loop(side).visit(Moments({"form": "full"}), {}, [Visit(0, 1.0)], Key(0))
    assert "KeyError" in failure.reason
