"""QDA is sklearn's quadratic discriminant where nothing is shrunk, and LDA where all of it is."""

import pytest
import torch
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from torch import nn

from unskew.calibration.calibrate import calibrate
from unskew.calibration.classifier import load_calibrated
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key

D, C = 5, 3


def drawn(count=4000, seed=0):
    """Classes that differ in their spread as well as in their means."""
    labels = torch.arange(count) % C
    spread = torch.tensor([0.5, 1.0, 2.0])[labels][:, None]
    means = torch.randn(C, D, generator=Key(9).torch())
    return means[labels] + spread * torch.randn(count, D, generator=Key(seed).torch()), labels


def accuracy(classifier):
    features, labels = drawn(seed=1)
    return float((classifier(features).argmax(1) == labels).double().mean())


def made(method, form="full", **given):
    features, labels = drawn()
    return calibrate(nn.Linear(D, C, **given), ClassStatistics.of_features(features, labels, C, form), method)


def test_with_many_examples_it_answers_as_sklearns():
    features, labels = drawn()
    peer = QuadraticDiscriminantAnalysis(priors=[1 / C] * C).fit(features.numpy(), labels.numpy())
    unseen, _ = drawn(seed=1)
    same = made("qda(pooled=0.0001)")(unseen).argmax(1).numpy() == peer.predict(unseen.numpy())
    assert same.mean() > 0.98
    assert accuracy(made("qda(pooled=0.1)")) > accuracy(made("lda")) + 0.1


def test_with_the_pooled_covariance_alone_it_answers_as_lda():
    unseen, _ = drawn(seed=1)
    same = made("qda(pooled=1)")(unseen).argmax(1) == made("lda")(unseen).argmax(1)
    assert float(same.double().mean()) > 0.999


def test_it_is_saved_and_back_and_works_in_half_precision():
    found = made("qda")
    _, back = load_calibrated(found.tensors(), lambda layers: (nn.Identity(), nn.Linear(D, C)))
    unseen, _ = drawn(seed=1)
    assert torch.allclose(back(unseen), found(unseen), atol=1e-4)
    half = made("qda", dtype=torch.bfloat16)
    assert half(unseen.bfloat16()).dtype == torch.bfloat16


def test_a_class_without_examples_is_never_predicted_and_smaller_forms_are_refused():
    features, labels = drawn()
    held = labels != 1
    statistics = ClassStatistics.of_features(features[held], labels[held], C)
    with pytest.warns(UserWarning, match="never predicted"):
        found = calibrate(nn.Linear(D, C), statistics, "qda")
    assert not bool((found(features).argmax(1) == 1).any())
    with pytest.raises(UserError, match="qda needs full statistics"):
        made("qda", form="shared")
    with pytest.raises(UserError, match=r"qda\(pooled=0\.0\): give a weight above 0"):
        made("qda(pooled=0)")
