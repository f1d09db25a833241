"""Every calibration is what its formula says, leaves what it was given as it was, and refuses what it cannot do."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import unskew
from calibration import heads
from calibration.heads import same, weights
from unskew.calibration import covariances, is_bound, parse_calibration
from unskew.calibration.calibrate import calibrate, calibrate_on_features
from unskew.calibration.ccvr import draw_virtual_features, retrain
from unskew.calibration.classifier import Lift, Transformation
from unskew.calibration.lda import solve_discriminant
from unskew.calibration.oracle import minimise
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Local

D, C = 4, 3
QUICK = "ccvr(per_class=20, epochs=2, lr=0.1)"
EVERY = (QUICK, "uscc(per_class=20, epochs=2, lr=0.1)", "lda", "ridge")


normal, linear = partial(heads.normal, dtype=torch.float32), partial(heads.linear, inputs=D, outputs=C)


def deep(*, dtype=torch.float32, inputs=6):
    return nn.Sequential(nn.ReLU(), linear(inputs=inputs, outputs=D, dtype=dtype), nn.ReLU(), linear(dtype=dtype))


def examples(counts=(30, 20, 40), seed=0, width=D):
    """Classes with means of their own."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return normal(len(labels), width, seed=seed) + 3 * normal(len(counts), width, seed=50)[labels], labels


def statistics_of(counts=(30, 20, 40), form="full", classes=C, **knobs):
    return ClassStatistics.of_features(*examples(counts, **knobs), classes, form)


def fitting(method, *, width=D, classes=C, counts=(30, 20, 40)):
    """Statistics such as the method wants, of features beside which it may want random ones."""
    wanted = parse_calibration(method).needs
    features, labels = examples(counts, width=width)
    if wanted.expand:
        features = Lift.of(width, wanted.expand)(features)
    parts = labels * wanted.components + torch.arange(len(labels)) % wanted.components
    return ClassStatistics.of_features(features, parts, classes * wanted.components, wanted.form)


# virtual features


def test_every_class_has_equally_many_virtual_features_whatever_it_holds():
    features, labels, reports = draw_virtual_features(statistics_of((30, 5, 200)), 17, Key(0))
    assert features.shape == (51, D)
    assert features.dtype == torch.float32
    assert labels.tolist() == [0] * 17 + [1] * 17 + [2] * 17
    assert [(report.label, report.count) for report in reports] == [(0, 30), (1, 5), (2, 200)]


def test_proportional_counts_follow_the_examples_and_have_the_asked_mean():
    """M_c = M·N_c / mean(N): 100·(10, 30, 200)/80."""
    _, labels, _ = draw_virtual_features(statistics_of((10, 30, 200)), 100, Key(0), proportional=True)
    assert torch.bincount(labels).tolist() == [12, 38, 250]  # 12.5 is rounded to the even number
    _, labels, _ = draw_virtual_features(statistics_of((1, 2, 10_000)), 10, Key(0), proportional=True)
    assert torch.bincount(labels).tolist()[:2] == [1, 1]  # nobody has none


def test_a_class_of_several_parts_has_their_features_in_the_proportion_of_their_examples():
    """Parts of class c have the labels 2c and 2c + 1: here 30 and 10, then 5 alone, then 20 and 20."""
    features, parts = examples((30, 10, 0, 5, 20, 20))
    statistics = ClassStatistics.of_features(features, parts, 6)
    found, labels, reports = draw_virtual_features(statistics, 40, Key(0), components=2)
    assert labels.tolist() == [0] * 40 + [1] * 40 + [2] * 40
    assert [(report.label, report.count) for report in reports] == [(0, 30), (0, 10), (1, 5), (2, 20), (2, 20)]
    means = [features[parts == part].mean(0) for part in (0, 1, 3, 4, 5)]
    for rows, mean in zip(torch.split_with_sizes(found, [30, 10, 40, 20, 20]), means, strict=True):
        assert (rows.mean(0) - mean).abs().max() < 1.2
    _, labels, _ = draw_virtual_features(statistics, 40, Key(0), components=2, proportional=True)
    assert torch.bincount(labels).tolist() == [56, 7, 56]  # 40·(40, 5, 40)/(85/3), part by part


def test_more_virtual_features_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr(covariances, "physical_memory", lambda: 4 * D * 150 / 0.8)  # room for 150
    with pytest.raises(UserError, match=r"300 virtual features need 0.0 GB, .*; give a smaller per_class"):
        draw_virtual_features(statistics_of(), 100, Key(0))
    assert len(draw_virtual_features(statistics_of(), 50, Key(0))[0]) == 150


# ccvr


def test_ccvr_is_drawn_and_trained_as_by_hand():
    """To virtual features with nothing of ours but the streams of random numbers; the descent is in test_retraining."""
    features, labels = examples()
    statistics = ClassStatistics.of_features(features, labels, C, "diagonal")
    knobs = {"epochs": 3, "lr": 0.05, "batch": 8, "momentum": 0.8, "weight_decay": 0.01}
    words = ", ".join(f"{knob}={value}" for knob, value in knobs.items())
    classifier = linear(dtype=torch.float64)
    found = calibrate(classifier, statistics, f"ccvr(per_class=10, covariance=diagonal, {words})", seed=6)

    key, z = Key(6).fold("calibrate"), []
    for label in range(C):
        own = features[labels == label].double().numpy()
        noise = torch.randn(10, D, generator=key.fold("class", label).torch(), dtype=torch.float64).numpy()
        z.append(own.mean(0) + np.sqrt(own.var(0, ddof=1)) * noise)
    z, y = torch.from_numpy(np.concatenate(z)).float(), torch.arange(C).repeat_interleave(10)
    wanted, _, _ = retrain(classifier, z, y, Local(**knobs), key)
    for made, value in zip(weights(found.head), weights(wanted), strict=True):
        assert torch.allclose(made, value, rtol=0, atol=1e-6)  # float32 rounds at the last bit


def test_ccvr_has_the_papers_settings_and_uscc_is_ccvr_with_its_own_counts():
    statistics, classifier = statistics_of(), linear()
    plain = calibrate(classifier, statistics, "ccvr(per_class=30)")
    key = Key(0).fold("calibrate")
    features, labels, _ = draw_virtual_features(statistics, 30, key)
    wanted, before, after = retrain(classifier, features, labels, Local(10, 64, 0.001, 0.9, 1e-5), key)
    assert same(weights(plain.head), weights(wanted))
    assert (plain.report.loss_before, plain.report.loss_after) == (before, after)
    uscc, ccvr = (
        calibrate(classifier, statistics, text).head for text in ("uscc", "ccvr(per_class=400, epochs=20, lr=0.01)")
    )
    assert same(weights(uscc), weights(ccvr))


def test_a_classifier_that_favours_a_class_is_set_right():
    features, labels = examples((200, 200, 200), seed=3)
    skewed = linear()
    with torch.no_grad():
        skewed.weight.zero_()
        skewed.bias.copy_(torch.tensor([50.0, 0.0, 0.0]))
    for method in ("ccvr(per_class=200, lr=0.5)", "lda", "ridge"):
        found = calibrate(skewed, ClassStatistics.of_features(features, labels, C), method)
        assert float((found(features).argmax(1) == labels).float().mean()) > 0.95


@pytest.mark.parametrize("knobs", ["relu=true", "relu=true, tukey=0.5", "relu=true, tukey=0"])
def test_real_features_pass_what_virtual_ones_passed(knobs):
    """The transformation of training is that of inference."""
    statistics, classifier, key = statistics_of(), linear(), Key(1).fold("calibrate")
    found = calibrate(classifier, statistics, f"ccvr(per_class=20, epochs=2, lr=0.1, {knobs})", seed=1)
    power = 0.5 if "0.5" in knobs else 0.0 if "tukey" in knobs else 1.0

    def passed(features):
        above = features.clamp(min=0)
        return above.clamp(min=1e-12).log() if power == 0 else above**power

    features, labels, _ = draw_virtual_features(statistics, 20, key)
    head, _, _ = retrain(classifier, passed(features), labels, Local(epochs=2, lr=0.1), key)
    assert same(weights(found.head), weights(head))
    real = normal(30, D, seed=9)
    with torch.no_grad():
        assert torch.equal(found(real), head(passed(real)))


def test_several_gaussians_a_class_follow_what_one_cannot():
    """A class on both sides of zero: one Gaussian lies mostly between them, where nobody is; two do not."""
    side = torch.arange(400) % 2
    features = 0.5 * normal(400, 1) + torch.where(side == 1, 4.0, -4.0)[:, None]
    one, two = (ClassStatistics.of_features(features, *parts) for parts in ((0 * side, 1), (side, 2)))
    between = [
        float((draw_virtual_features(statistics, 400, Key(0), components=parts)[0].abs() < 2).float().mean())
        for statistics, parts in ((one, 1), (two, 2))
    ]
    assert between[0] > 0.3
    assert between[1] == 0
    found = calibrate(linear(inputs=1, outputs=1), two, "ccvr(per_class=20, epochs=1, components=2)")
    assert [(row.label, row.count) for row in found.report.classes] == [(0, 200), (0, 200)]


# lda


def test_lda_is_the_discriminant_of_means_and_pooled_covariance_and_draws_nothing():
    statistics = statistics_of(form="shared")
    wanted = solve_discriminant(linear(), statistics, 0.25)
    for seed in (0, 1):
        assert same(weights(calibrate(linear(), statistics, "lda(0.25)", seed=seed).head), weights(wanted))
    first, second = (calibrate(linear(), statistics, "lda", seed=seed) for seed in (0, 1))
    assert same(weights(first.head), weights(second.head))


# what all of them have in common


@pytest.mark.parametrize(
    "method", [*EVERY, "lda(expand=5)", "ridge(expand=5)", "ccvr(per_class=9, layers=2)", "lda(layers=2)"]
)
@pytest.mark.parametrize("given", [{}, {"dtype": torch.float64}, {"bias": False}], ids=str)
def test_a_new_classifier_has_the_old_ones_type_and_its_own_memory_and_disturbs_no_generator(method, given):
    several, dtype = "layers" in method, given.get("dtype", torch.float32)
    classifier = deep(dtype=dtype) if several else linear(**given)
    statistics = statistics_of(width=6) if several else fitting(method)
    kept, mode, state = weights(classifier), classifier.training, torch.random.get_rng_state()
    sums = {name: value.clone() for name, value in statistics.tensors().items()}
    found = calibrate(classifier, statistics, method)
    assert torch.equal(torch.random.get_rng_state(), state)
    logits = found(normal(7, 6 if several else D, dtype=dtype))
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    with torch.no_grad():
        for value in found.parameters():
            value.add_(1)
    assert same(weights(classifier), kept)
    assert classifier.training == mode
    assert all(torch.equal(value, sums[name]) for name, value in statistics.tensors().items())


@pytest.mark.parametrize("method", EVERY)
def test_a_classifier_without_bias_is_trained_with_one_from_zero(method):
    plain, zero = linear(bias=False), linear()
    with torch.no_grad():
        zero.bias.zero_()
    statistics = statistics_of()
    assert same(*(weights(calibrate(head, statistics, method).head) for head in (plain, zero)))


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("bias", [True, False])
def test_classes_that_nobody_holds_keep_their_rows_and_are_named(method, bias):
    statistics, classifier = statistics_of((30, 0, 20, 0), classes=4), linear(outputs=4, bias=bias)
    with pytest.warns(UserWarning, match=r"^no client has class 1, 3: it keeps its row"):
        found = calibrate(classifier, statistics, method)
    assert found.report.kept_rows == (1, 3)
    assert torch.equal(found.head.weight[1::2], classifier.weight[1::2])
    assert torch.equal(found.head.bias[1::2], classifier.bias[1::2] if bias else torch.zeros(2))
    assert not torch.equal(found.head.weight[::2], classifier.weight[::2])


def test_a_class_whose_parts_nobody_holds_is_told_from_its_parts():
    """Labels 2c and 2c + 1 are parts of class c: here 0, 1 and 5."""
    statistics, classifier = statistics_of((30, 20, 0, 0, 0, 40), classes=6), linear()
    with pytest.warns(UserWarning, match=r"^no client has class 1: it keeps its row"):
        found = calibrate(classifier, statistics, "ccvr(per_class=20, epochs=2, lr=0.1, components=2)")
    assert found.report.kept_rows == (1,)
    assert torch.equal(found.head.weight[1], classifier.weight[1])
    assert not torch.equal(found.head.weight[::2], classifier.weight[::2])


def test_in_a_head_of_several_layers_the_last_ones_rows_are_kept():
    head = deep()
    with pytest.warns(UserWarning, match="no client has class 2: it keeps its row of the classifier"):
        found = calibrate(head, statistics_of((30, 20), width=6), "ccvr(per_class=20, epochs=2, lr=0.1, layers=2)")
    assert torch.equal(found.head[-1].weight[2], head[-1].weight[2])
    assert torch.equal(found.head[-1].bias[2], head[-1].bias[2])
    assert not torch.equal(found.head[1].weight, head[1].weight)


@pytest.mark.parametrize("method", ["lda(expand=5)", "lda(layers=2)", "ridge(expand=5)", "ridge(layers=2)"])
def test_where_there_is_no_row_to_keep_a_class_is_never_answered(method):
    statistics, classifier = fitting(method, counts=(30, 20)), linear()
    if "layers" in method:
        statistics, classifier = statistics_of((30, 20), width=6), deep()
    with pytest.warns(UserWarning, match=r"^no client has class 2: .* is never predicted by a new one$"):
        found = calibrate(classifier, statistics, method)
    assert 2 not in found(100 * normal(1000, 6 if "layers" in method else D)).argmax(1).tolist()


def test_of_many_absent_classes_ten_are_named():
    with pytest.warns(UserWarning, match=r"^no client has class 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 …: it keeps"):
        calibrate(linear(outputs=20), statistics_of((30, 20), classes=20), QUICK)


@pytest.mark.parametrize("method", [*EVERY, "ccvr(per_class=9, covariance='low-rank(2)')"])
def test_one_class_two_classes_and_classes_of_one_example_can_be_calibrated(method):
    form = parse_calibration(method).needs.form
    for counts in ((30,), (30, 20), (1, 20), (1, 1, 2)):
        statistics = statistics_of(counts, form, classes=len(counts))
        found = calibrate(linear(outputs=len(counts)), statistics, method)
        assert found(normal(5, D)).shape == (5, len(counts))
        assert found(normal(5, D)).isfinite().all()


@pytest.mark.parametrize("method", EVERY)
def test_classes_of_one_example_each_have_no_spread_and_are_refused(method):
    with pytest.raises(UserError, match=r"^no class has two examples; a covariance needs at least two$"):
        calibrate(linear(), statistics_of((1, 1, 1), parse_calibration(method).needs.form), method)


def test_the_report_says_what_was_done():
    with pytest.warns(UserWarning, match="class 2"):
        report = calibrate(linear(), statistics_of((40, 3)), QUICK).report
    assert report.method == QUICK
    assert report.kept_rows == (2,)
    assert [(row.label, row.count, row.shrunk) for row in report.classes] == [(0, 40, 0.0), (1, 3, 0.5)]
    assert report.loss_after < report.loss_before
    assert 0 < report.seconds < 60
    report = calibrate(linear(), statistics_of(), "lda(ridge=0.001)").report
    assert [(row.label, row.count, row.shrunk) for row in report.classes] == [(0, 30, 1.0), (1, 20, 1.0), (2, 40, 1.0)]
    assert math.isnan(report.loss_before)
    assert report.notes() == []


# the oracle


def test_the_oracle_is_refused_where_there_are_statistics_alone():
    with pytest.raises(UserError, match=r"^oracle\(per_class=100\) needs the clients' real features, which only a sim"):
        unskew.calibrate(linear(), statistics_of(), "oracle(per_class=100)")


@pytest.mark.parametrize("make", [linear, lambda: nn.Sequential(nn.ReLU(), linear())])
def test_the_oracle_trains_on_the_features_it_is_given(make):
    features, labels = examples((30, 0, 1))
    classifier = make()
    kept = weights(classifier)
    found = calibrate_on_features(classifier, features, labels, "oracle(epochs=3, lr=0.1, batch=7)", seed=5)
    local = Local(3, 7, 0.1, 0.9, 1e-5)
    wanted, before, after = retrain(classifier, features, labels, local, Key(5).fold("oracle"), (1,))
    assert same(weights(found.head), weights(wanted))
    assert same(weights(classifier), kept)
    assert isinstance(found.before, Transformation)
    assert torch.equal(found.before(features), features)
    assert found.report.kept_rows == (1,)
    assert [(row.label, row.count) for row in found.report.classes] == [(0, 30), (2, 1)]
    assert (found.report.loss_before, found.report.loss_after) == (before, after)
    assert found.report.notes() == []  # of covariances there is nothing to say


def test_the_papers_oracle_is_sgd_with_the_papers_knobs_and_so_is_one_with_a_knob_of_sgd_or_several_layers():
    features, labels = examples((30, 0, 1))
    classifier = linear()
    wanted, _, _ = retrain(classifier, features, labels, Local(50, 64, 0.001, 0.9, 1e-5), Key(5).fold("oracle"), (1,))
    for text in ("oracle(paper=true)", "oracle(epochs=50)", "oracle(lr=0.001)", "oracle(batch=64, momentum=0.9)"):
        found = calibrate_on_features(classifier, features, labels, text, seed=5)
        assert same(weights(found.head), weights(wanted)), text
        assert found.report.notes() == []
    texts = "oracle(layers=2)", "oracle(layers=2, paper=true)"
    several = [calibrate_on_features(deep(inputs=D), features, labels, text, seed=5).head for text in texts]
    assert same(*map(weights, several))


def test_the_oracle_goes_to_the_minimum_and_says_how_near_it_is():
    features, labels = examples((30, 0, 10))
    classifier = linear()
    found = calibrate_on_features(classifier, features, labels, "oracle(weight_decay=0.01)", seed=5)
    wanted, _, _ = minimise(classifier, features, labels, 0.01, [1])
    assert same(weights(found.head), weights(wanted))
    said = r"^at most \d\S* above the smallest training loss with penalty 0.01, in \d steps$"
    assert re.match(said, found.report.notes()[0])
    assert (
        found.report.loss_after
        < calibrate_on_features(classifier, features, labels, "oracle(paper=true)").report.loss_after
    )
    assert found.report.kept_rows == (1,)


def test_a_bound_for_study_is_known_by_its_name_in_results():
    assert [is_bound(name) for name in ("oracle", "oracle(layers=2)", "oracle(per_class=7)")] == [True] * 3
    others = ("ccvr", "lda + secure", "ccvr(per_class=50) + withhold(3)", "oracles", "no_such:module", "", "oracle(")
    assert not any(is_bound(name) for name in others)


# what cannot be


WRONG_TEXTS = {
    "": "calibration is empty; give a name",
    "ccvx": "no calibration is called 'ccvx'; did you mean 'ccvr'?",
    "ccvr + lda": "give one calibration",
    "ccvr(per_clas=5)": "calibration ccvr has no knob 'per_clas'; did you mean 'per_class'?",
    "ccvr(per_class=0)": "ccvr(per_class=0): give a number above 0",
    "ccvr(lr=0)": "ccvr(lr=0.0): give a number above 0",
    "ccvr(momentum=1)": "ccvr(momentum=1.0): give at least 0 and less than 1",
    "ccvr(weight_decay=-1)": "ccvr(weight_decay=-1.0): weight_decay must be 0 or more",
    "ccvr(tukey=0.5)": "below 1 it needs relu=true",
    "ccvr(tukey=2, relu=true)": "give a power from 0 (the logarithm) to 1",
    "ccvr(covariance='low-rank(0)')": "rank=0: give a whole number from 1",
    "ridge(-1)": "ridge(strength=-1.0): strength must be 0 or more",
    "ridge(layers=0)": "ridge(layers=0): give a number above 0",
    "ridge(expand=-5)": "ridge(expand=-5): expand must be 0 or more",
    "lda(-1)": "lda(ridge=-1.0): ridge must be 0 or more",
    "lda(expand=-1)": "lda(expand=-1): expand must be 0 or more",
    "oracle(0)": "oracle(per_class=0): give all, or the number of features per class",
    "oracle(true)": "oracle(per_class=True): give all, or the number of features per class",
    "oracle(weight_decay=0)": "there may be no minimum; give a number above 0, or paper=true",
    "ccvr(": "found 'the end'",
}


@pytest.mark.parametrize("source", WRONG_TEXTS)
def test_a_text_that_is_no_calibration_is_refused_in_words(source):
    with pytest.raises(UserError, match=re.escape(WRONG_TEXTS[source])):
        calibrate(linear(), statistics_of(), source)


MISFITS = {
    "a classifier of more features": (lambda: linear(inputs=5), QUICK, "maps 5 features to 3 classes and needs"),
    "a classifier of more classes": (lambda: linear(outputs=4), QUICK, "of 4 features and 4 classes, not"),
    "parts that were not measured": (linear, "ccvr(components=2)", "of 4 features and 6 classes, not full"),
    "random features that were not": (linear, "lda(expand=7)", "of 11 features and 3 classes, not full"),
    "a head of several layers": (deep, QUICK, "must be an nn.Linear, not a Sequential with 2 linear layers; end"),
    "another width before several": (deep, "ccvr(layers=2)", "maps 6 features to 3 classes"),
    "a module without linear layer": (nn.ReLU, "ccvr(layers=2)", "2 linear layers, not a ReLU with 0 linear layers"),
    "no module": (lambda: "linear", QUICK, "a torch module and ClassStatistics, not a str and a ClassStatistics"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_belong_together_is_refused_in_one_clear_message(case):
    make, method, words = MISFITS[case]
    with pytest.raises(UserError, match=re.escape(words)) as said:
        calibrate(make(), statistics_of(), method)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("statistics", "method", "words"),
    [
        (None, QUICK, "calibrate takes a torch module and ClassStatistics, not a Linear and None"),
        (ClassStatistics.empty(C, D), QUICK, "the statistics are empty: no client has any examples"),
        (statistics_of(), None, "a calibration must be a text such as 'ccvr(per_class=500)' or a Finisher, not None"),
    ],
)
def test_statistics_and_methods_of_another_kind_are_refused(statistics, method, words):
    with pytest.raises(UserError, match=f"^{re.escape(words)}$"):
        calibrate(linear(), statistics, method)
