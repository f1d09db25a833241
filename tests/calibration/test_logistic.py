"""The minimum of logistic regression is the minimum, and as near as is said."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unskew.calibration.oracle import TOLERANCE, minimise
from unskew.core.errors import UserError
from unskew.core.key import Key

C, D = 4, 5


def examples(count=200, apart=1.0, seed=0):
    generator = Key(seed).fold("logistic").torch()
    labels = torch.randint(0, C, (count,), generator=generator)
    features = torch.randn(count, D, generator=generator) * torch.logspace(-2, 1, D)
    return features + apart * F.one_hot(labels, D), labels


def head(seed=0):
    layer = nn.Linear(D, C)
    with torch.no_grad():
        for value in layer.parameters():
            value.copy_(torch.randn(value.shape, generator=Key(seed).fold("head").torch()))
    return layer


def objective(weights, features, labels, penalty):
    """f in plain torch: weights [C, D + 1], the bias last."""
    logits = features.double() @ weights[:, :-1].t() + weights[:, -1]
    return F.cross_entropy(logits, labels) + penalty / 2 * weights.square().sum()


def rows(linear):
    return torch.cat([linear.weight, linear.bias[:, None]], 1).detach().double()


def by_lbfgs(features, labels, penalty):
    """The twin: torch's own L-BFGS on the plain objective."""
    weights = torch.zeros(C, D + 1, dtype=torch.float64, requires_grad=True)
    descent = torch.optim.LBFGS([weights], max_iter=2000, tolerance_grad=1e-10, tolerance_change=0,
                                line_search_fn="strong_wolfe")  # fmt: skip

    def closure():
        descent.zero_grad()
        value = objective(weights, features, labels, penalty)
        value.backward()
        return value

    descent.step(closure)
    return weights.detach()


@pytest.mark.parametrize("penalty", [1e-1, 1e-3, pytest.param(1e-5, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("apart", [0.0, 1.0, 30.0])  # noise alone, overlapping classes, separable ones
def test_it_finds_what_another_method_finds(penalty, apart):
    features, labels = examples(apart=apart)
    found, gap, _ = minimise(head(), features, labels, penalty)
    assert gap <= TOLERANCE
    wanted = by_lbfgs(features, labels, penalty)
    left, right = (float(objective(each, features, labels, penalty)) for each in (rows(found), wanted))
    assert left - right <= TOLERANCE + 1e-6 * abs(right)  # the layer is float32


def test_the_gap_is_a_true_bound_however_early_it_stops(monkeypatch):
    features, labels = examples()
    double = head().double()
    best = float(objective(by_lbfgs(features, labels, 1e-3), features, labels, 1e-3))
    for steps in range(1, 6):
        monkeypatch.setattr(sys.modules["unskew.calibration.oracle"], "MAX_STEPS", steps)
        found, gap, taken = minimise(double, features, labels, 1e-3)
        assert taken <= steps
        assert float(objective(rows(found), features, labels, 1e-3)) - best <= gap + 1e-12
    assert taken == 5


def test_classes_without_examples_keep_their_rows_and_the_others_answer_to_them():
    features, labels = examples()
    features, labels = features[labels != 2], labels[labels != 2]
    start = head().double()
    found, _, _ = minimise(start, features, labels, 1e-3, [2])
    assert torch.equal(found.weight[2], start.weight[2])
    assert torch.equal(found.bias[2], start.bias[2])
    free = torch.tensor([0, 1, 3])
    weights = rows(found).requires_grad_()
    value = objective(weights, features, labels, 0.0) + 1e-3 / 2 * weights[free].square().sum()
    (gradient,) = torch.autograd.grad(value, weights)
    assert float(gradient[free].norm()) ** 2 / 2e-3 <= TOLERANCE * 1.01
    assert float(gradient[2].norm()) > 1e-4  # it was not free to move


def test_where_it_starts_does_not_matter_nor_does_anything_change_in_place():
    features, labels = examples()
    first, second = head(0), head(1)
    before = first.weight.clone()
    found = [minimise(each, features, labels, 1e-3)[0] for each in (first, second)]
    assert torch.equal(found[0].weight, found[1].weight)
    assert torch.equal(found[0].bias, found[1].bias)
    assert torch.equal(first.weight, before)


def test_it_takes_a_layer_of_any_type_without_a_bias_and_one_class_alone():
    features, labels = examples()
    made = minimise(nn.Linear(D, C, bias=False).to(torch.bfloat16), features, labels, 1e-3)[0]
    assert made.weight.dtype == torch.bfloat16
    assert made.bias is not None
    alone, _, _ = minimise(nn.Linear(D, 1), features, torch.zeros(len(features), dtype=torch.int64), 1e-3)
    assert float(alone.weight.detach().abs().max()) == 0.0


def test_broken_features_are_refused():
    features, labels = examples()
    features[3, 1] = float("nan")
    with pytest.raises(UserError, match="features contain NaN or infinity"):
        minimise(head(), features, labels, 1e-3)
