"""A calibration is a value: parsed once, with what it needs; one from outside the package works like ours."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import unskew
from unskew.calibration import CALIBRATIONS, is_bound, parse_calibration
from unskew.calibration.calibrate import calibrate, calibrate_on_features
from unskew.calibration.ccvr import ccvr, uscc
from unskew.calibration.finisher import Finisher, RealFeatures, StatisticsRequest
from unskew.calibration.lda import lda
from unskew.calibration.oracle import oracle
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import remember
from unskew.methods import parse_method
from unskew.round.algorithm import Algorithm

D, C = 6, 4


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    import outside_calibrations

    return outside_calibrations


def statistics_of(form="full", count=80):
    labels = torch.arange(count) % C
    features = torch.randn(count, D, generator=Key(1).torch()) + 2 * nn.functional.one_hot(labels, D)
    return ClassStatistics.of_features(features, labels, C, form)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (ccvr(), "ccvr"),
        (ccvr(2000, epochs=10), "ccvr"),
        (ccvr(50), "ccvr(per_class=50)"),
        (ccvr(relu=True, tukey=0.5), "ccvr(relu=true, tukey=0.5)"),
        (ccvr(covariance="low-rank(7)"), 'ccvr(covariance="low-rank(7)")'),
        (uscc(per_class=7), "uscc(per_class=7)"),
        (lda(expand=500, layers=2), "lda(layers=2, expand=500)"),
        (oracle("all"), "oracle"),
        (oracle(per_class=3), "oracle(per_class=3)"),
    ],
)
def test_the_text_is_the_plainest_spelling_and_parses_back_to_the_same_needs(value, text):
    assert value.text == text
    assert parse_calibration(text).text == text
    assert parse_calibration(text).needs == value.needs
    assert parse_calibration(value) is value


def test_what_is_a_bound_and_what_each_needs():
    assert {name: build().bound for name, build in CALIBRATIONS.items()} == {
        "ccvr": False, "uscc": False, "lda": False, "qda": False, "ridge": False, "oracle": True,
    }  # fmt: skip
    assert isinstance(oracle().needs, RealFeatures)
    assert lda(layers=2, expand=5).needs == StatisticsRequest(parse_calibration("lda").needs.form, 2, 5)
    assert ccvr(components=3).needs.components == 3


def test_a_finisher_is_a_method_that_appends_itself():
    algorithm = lda()(ccvr(per_class=7)(Algorithm()))
    assert [each.text for each in algorithm.finish] == ["ccvr(per_class=7)", "lda"]
    assert [each.text for each in parse_method("fedavg + ccvr(per_class=2000) + lda").finish] == ["ccvr", "lda"]


def test_a_calibration_from_outside_by_text_and_by_value(outside):
    head, statistics = nn.Linear(D, C), statistics_of("diagonal")
    by_text = unskew.calibrate(head, statistics, method="outside_calibrations:shrink(1.0)")
    assert by_text.report.method == "outside_calibrations:shrink(weight=1.0)"
    torch.testing.assert_close(by_text.head.weight, statistics.means().float())
    by_value = unskew.calibrate(head, statistics, method=outside.shrink(1.0))
    assert by_value.report.method == by_text.report.method
    assert torch.equal(by_text.head.weight, by_value.head.weight)
    assert unskew.calibrate(head, statistics, "outside_calibrations:shrink(0.5)").report.method == outside.shrink().text
    assert [each.text for each in parse_method("fedavg + outside_calibrations:shrink").finish] == [
        "outside_calibrations:shrink"
    ]


def test_a_bound_from_outside_is_one(outside):
    remember(["outside_calibrations:peek"])  # of one that was never used here nothing is imported
    assert is_bound("outside_calibrations:peek")
    assert not is_bound("outside_calibrations:shrink(weight=0.1) + secure")
    features, labels = torch.randn(40, D), torch.arange(40) % C
    assert calibrate_on_features(nn.Linear(D, C), features, labels, outside.peek()).report.kept_rows == ()
    with pytest.raises(UserError, match=r"^outside_calibrations:peek needs the clients' real features"):
        calibrate(nn.Linear(D, C), statistics_of(), outside.peek())


def test_a_layer_without_a_bias_gets_one_and_everything_else_is_refused_in_words():
    head, statistics = nn.Linear(D, C), statistics_of()
    made = calibrate(head, statistics, "outside_calibrations:wrong(bare)")
    assert not bool(made.head.bias.any())
    assert made(torch.zeros(2, D)).shape == (2, C)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("outside_calibrations:wrong(narrow)", "it must return a module that maps 6 features to 4 classes"),
        ("outside_calibrations:wrong(flat)", "a Sequential maps 2 examples to [8]; it must return a module that maps"),
        ("outside_calibrations:wrong(number)", "it must return a module that maps 6 features to 4 classes"),
        ("outside_calibrations:wrong(nan)", "returns NaN or infinite weights"),
        ("outside_calibrations:wrong", "wrong failed: AttributeError: 'Linear' object has no attribute"),
        ("outside_calibrations:number", "returns an int; a calibration must return a Finisher"),
        ("outside_calibrations:method", "returns a function; a calibration must return a Finisher"),
        ("outside_calibrations:nameless", "has no name; decorate its function with @finisher"),
        ("outside_calibrations:absent", "cannot be imported: AttributeError"),
        ("no_such_module:shrink", "cannot be imported: ModuleNotFoundError"),
        ("outside_calibrations:shrink(knob=1)", "has no knob 'knob'"),
        ("outside_calibrations:shrink(much)", "weight must be a number, not much"),
    ],
)
def test_a_calibration_from_outside_that_is_wrong_is_one_clear_message(method, words):
    with pytest.raises(UserError, match=re.escape(words)):
        calibrate(nn.Linear(D, C), statistics_of(), method)


def test_a_fault_of_ours_keeps_its_own_name(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("ours")

    monkeypatch.setattr(sys.modules["unskew.calibration.ccvr"], "draw_virtual_features", broken)
    with pytest.raises(RuntimeError, match="ours"):
        calibrate(nn.Linear(D, C), statistics_of(), "ccvr")


def test_a_nameless_finisher_cannot_be_filed_but_one_with_a_text_can(outside):
    with pytest.raises(UserError, match="has no name"):
        outside.nameless()(Algorithm())
    named = Finisher(outside.filled, text="mine")
    assert named(Algorithm()).finish == (named,)
