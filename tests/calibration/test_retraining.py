"""Re-training is SGD as the textbook has it, frozen rows stay to the last bit; the discriminant is Fisher's."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import nn

from calibration import heads
from calibration.heads import normal, same, weights
from unskew.calibration.calibrate import calibrate
from unskew.calibration.ccvr import draw_virtual_features, retrain
from unskew.calibration.lda import solve_discriminant
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Local

D, C = 3, 4
KEY = Key(5)
QUICK = Local(epochs=3, batch=4, lr=0.3, momentum=0.9, weight_decay=0.05)


linear = partial(heads.linear, inputs=D, outputs=C, dtype=torch.float64)


def deep(dtype=torch.float64, sizes=(D, 6, 5, C)):
    """Several linear layers with ReLU between them."""
    parts = []
    for place, (inputs, outputs) in enumerate(pairwise(sizes)):
        parts += [linear(inputs=inputs, outputs=outputs, dtype=dtype, seed=10 * place), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def examples(count=10, classes=C, seed=0):
    labels = torch.arange(count) % classes
    return normal(count, D, seed=seed) + labels[:, None], labels


# SGD


def by_hand(head, features, labels, local, key, frozen=()):
    """Cross-entropy and SGD with momentum in numpy: v ← m·v + g + λ·w, w ← w − η·v; frozen rows put back each step."""
    z, y = features.numpy(), labels.numpy()
    weight = head.weight.detach().numpy().copy()
    bias = np.zeros(C) if head.bias is None else head.bias.detach().numpy().copy()
    first = weight[list(frozen)].copy(), bias[list(frozen)].copy()
    velocity = np.zeros_like(weight), np.zeros_like(bias)

    def probabilities(z):
        logits = z @ weight.T + bias
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    def loss():
        return -np.log(probabilities(z)[np.arange(len(y)), y]).mean()

    before = loss()
    for epoch in range(local.epochs):
        order = torch.randperm(len(y), generator=key.fold("epoch", epoch).torch()).numpy()
        for start in range(0, len(y), local.batch):
            some = order[start : start + local.batch]
            error = (probabilities(z[some]) - np.eye(C)[y[some]]) / len(some)
            for value, speed, gradient in zip((weight, bias), velocity, (error.T @ z[some], error.sum(0)), strict=True):
                speed *= local.momentum
                speed += gradient + local.weight_decay * value
                value -= local.lr * speed
            weight[list(frozen)], bias[list(frozen)] = first
    return weight, bias, before, loss()


@pytest.mark.parametrize("frozen", [(), (3,), (0, 2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "local", [QUICK, Local(2, 64, 0.5, 0.0, 0.0), Local(1, 1, 0.01, 0.5, 0.0), Local(2, 3, 0.1, 0.0, 0.1)]
)
def test_the_classifier_descends_as_by_hand(local, bias, frozen):
    head, (features, labels) = linear(bias=bias), examples()
    made, before, after = retrain(head, features, labels, local, KEY, frozen)
    weight, shift, wanted_before, wanted_after = by_hand(head, features, labels, local, KEY, frozen)
    assert np.allclose(made.weight.detach(), weight, rtol=0, atol=1e-12)
    assert np.allclose(made.bias.detach(), shift, rtol=0, atol=1e-12)
    assert before == pytest.approx(wanted_before, abs=1e-12)
    assert after == pytest.approx(wanted_after, abs=1e-12)


def test_several_layers_descend_as_pytorchs_own_optimiser_has_it():
    head, (features, labels) = deep(), examples()
    made, _, _ = retrain(head, features, labels, QUICK, KEY)
    wanted = deep()
    optimiser = torch.optim.SGD(wanted.parameters(), QUICK.lr, QUICK.momentum, weight_decay=QUICK.weight_decay)
    for epoch in range(QUICK.epochs):
        for some in torch.randperm(len(labels), generator=KEY.fold("epoch", epoch).torch()).split(QUICK.batch):
            optimiser.zero_grad()
            F.cross_entropy(wanted(features[some]), labels[some]).backward()
            optimiser.step()
    for found, value in zip(weights(made), weights(wanted), strict=True):
        assert torch.allclose(found, value, rtol=0, atol=1e-12)


def test_layers_that_were_frozen_while_the_network_rested_are_trained():
    for head in (linear().requires_grad_(False), deep().requires_grad_(False)):
        made, before, after = retrain(head, *examples(), QUICK, KEY)
        assert not same(weights(made), weights(head))
        assert after < before
        assert not any(value.requires_grad for value in head.parameters())


def test_losses_over_many_features_are_means_over_all_of_them():
    features, labels = examples(10_000)
    _, before, _ = retrain(linear(), features, labels, Local(1, 10_000, 1e-9), KEY)
    with torch.no_grad():
        assert before == pytest.approx(float(F.cross_entropy(linear()(features), labels)), rel=1e-12)


# the discriminant


def classes_apart(counts=(40, 25, 60), d=5):
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    mixing = normal(d, d, seed=7)
    return normal(len(labels), d, seed=8) @ mixing + 2 * normal(len(counts), d, seed=9)[labels], labels


@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 0.5])
def test_it_is_sklearns_discriminant_with_the_same_covariance(ridge):
    """sklearn mixes one covariance a class by their priors: here each is its share of the pooled one, the ridge added.

    w_c = (Σ + ρ·tr(Σ)/d·I)⁻¹·μ_c, b_c = −½·μ_cᵀw_c, and log(1/3) the same for all.
    """
    features, labels = classes_apart()
    z, y = features.numpy(), labels.numpy()
    around = np.concatenate([z[y == label] - z[y == label].mean(0) for label in range(3)])
    pooled = around.T @ around / (len(y) - 3)

    class Share:
        def fit(self, own):
            scatter = (own - own.mean(0)).T @ (own - own.mean(0))
            self.covariance_ = 3 * scatter / (len(y) - 3) + ridge * np.trace(pooled) / 5 * np.eye(5)
            return self

    wanted = LinearDiscriminantAnalysis(solver="lsqr", priors=[1 / 3] * 3, covariance_estimator=Share()).fit(z, y)
    statistics = ClassStatistics.of_features(features, labels, 3, "shared")
    found = solve_discriminant(linear(inputs=5, outputs=3), statistics, ridge)
    assert np.allclose(found.weight.detach(), wanted.coef_, rtol=1e-8, atol=1e-10)
    assert np.allclose(found.bias.detach(), wanted.intercept_ - np.log(1 / 3), rtol=1e-8, atol=1e-10)
    fresh = normal(500, 5, seed=11) * 4
    assert np.array_equal(found(fresh).argmax(1), wanted.predict(fresh.numpy()))


@pytest.mark.parametrize("features", [torch.zeros(12, D), torch.eye(C)[:, :D][torch.arange(12) % C] * 1e5])
@pytest.mark.parametrize("form", ["shared", "full"])
def test_features_that_do_not_vary_within_their_classes_are_refused(features, form):
    statistics = ClassStatistics.of_features(features, torch.arange(12) % C, C, form)
    with pytest.raises(UserError, match="the features do not vary within classes; check the encoder"):
        solve_discriminant(linear(), statistics, 1e-3)


def test_features_that_repeat_each_other_are_the_ridges_business():
    features, labels = examples(40)
    twice = ClassStatistics.of_features(features.repeat(1, 2), labels, C)
    found = solve_discriminant(linear(), twice, 1e-3)
    assert torch.allclose(found.weight[:, :D], found.weight[:, D:], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"^lda\(ridge=0\) has no solution; give a larger ridge$"):
        solve_discriminant(linear(), ClassStatistics.of_features(features[:, :1].repeat(1, 2), labels, C), 0.0)


# features exactly as in the paper, and a guard against overfitting


def test_without_mixing_features_come_from_the_classs_own_covariance_alone():
    features = normal(3, 8).double()
    statistics = ClassStatistics.of_features(
        torch.cat([features, normal(50, 8, seed=5).double()]), [0] * 3 + [1] * 50, 2
    )
    mixed, _, reports = draw_virtual_features(statistics, 50, Key(0))
    exact, labels, plain = draw_virtual_features(statistics, 50, Key(0), mix=False)
    around = exact[labels == 0].double() - features.mean(0)
    assert int(torch.linalg.matrix_rank(around, atol=1e-4)) == 2  # three examples span a plane around their mean
    assert int(torch.linalg.matrix_rank(mixed[:50].double() - features.mean(0), atol=1e-4)) == 8
    assert [row.shrunk for row in plain] == [0.0, 0.0]
    assert reports[0].shrunk > 0.5
    alone = ClassStatistics.of_features(normal(21, 8), [0] + [1] * 20, 2)
    exact, labels, _ = draw_virtual_features(alone, 5, Key(0), mix=False)
    assert torch.allclose(exact[:5], alone.mean(0).float().expand(5, 8))


@pytest.mark.parametrize("method", ["ccvr", "uscc"])
def test_held_out_features_decide_which_epoch_is_kept(method):
    """With a rate that makes the loss worse from the first epoch on, the head stays as it was."""
    features, labels = normal(60, 4) + torch.arange(60)[:, None] % 2 * 3, torch.arange(60) % 2
    statistics = ClassStatistics.of_features(features, labels, 2)
    good = calibrate(nn.Linear(4, 2), statistics, "ridge").head
    wild = calibrate(good, statistics, f"{method}(per_class=100, epochs=2, lr=300)")
    guarded = calibrate(good, statistics, f"{method}(per_class=100, epochs=2, lr=300, held_out=0.3)")
    assert not torch.equal(wild.head.weight, good.weight)
    assert torch.equal(guarded.head.weight, good.weight)
    with pytest.raises(UserError, match=r"held_out=0\.9\): give a share of the virtual features from 0 to 0\.5"):
        calibrate(good, statistics, f"{method}(held_out=0.9)")
