"""fedlc, fedrs and balanced: the numpy lines of a mini-batch, and whole rounds as a plain loop.

Four examples of three features, three classes; the client holds 16, 4 and 0 examples of them.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_objectives_golden import BOTH, CLOSE, FEATURES, HOLDS, WEIGHT, distance, loss_of, plainly, small

from unskew import methods
from unskew.core.errors import UserError
from unskew.core.types import Step
from unskew.round.client import objective
from unskew.round.evaluation import evaluate

Y = np.array([0, 1, 0, 1])
COUNTS = np.array([16, 4, 0])


# The numpy lines


def held_softmax(margin):
    """Cross-entropy over the two classes that the client holds, their logits moved by the margin."""
    logits = FEATURES @ WEIGHT[:2].T + margin
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return -np.log(p[range(4), Y]).mean(), (p - np.eye(2)[Y]) @ WEIGHT[:2] / 4


def fedlc(tau):
    return held_softmax(np.array([-tau / 2, -tau / np.sqrt(2)]))  # 16^(−1/4) = 1/2, 4^(−1/4) = 1/√2


def balanced():
    return held_softmax(np.array([np.log(16), np.log(4)]))


def fedrs(alpha):
    rows = WEIGHT * np.array([[1], [1], [alpha]])  # the third class is missing: its logit counts α times
    scores = np.exp(FEATURES @ rows.T)
    p = scores / scores.sum(1, keepdims=True)
    return -np.log(p[range(4), Y]).mean(), (p - np.eye(3)[Y]) @ rows / 4


DERIVED = {
    "fedlc": lambda: fedlc(0.5),
    "fedlc(tau=2)": lambda: fedlc(2.0),
    "balanced": balanced,
    "fedrs": lambda: fedrs(0.5),
    "fedrs(alpha=0.9)": lambda: fedrs(0.9),
    "fedrs(alpha=0)": lambda: fedrs(0.0),
}


def step_of(counts=COUNTS, dtype=torch.float64):
    z = torch.tensor(FEATURES, dtype=dtype, requires_grad=True)
    logits = z @ torch.tensor(WEIGHT, dtype=dtype).t()
    return Step(z, logits, torch.tensor(Y), {}, {}, {}, torch.tensor(counts), None, None)


@pytest.mark.parametrize("method", DERIVED)
def test_loss_and_gradient_are_the_numpy_lines(method):
    loss, gradient = loss_of(method, step_of())
    expected_loss, expected_gradient = DERIVED[method]()
    assert loss == pytest.approx(expected_loss, abs=1e-14)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-14)


# Whole rounds


def plain_margin(margin):
    """Cross-entropy of logits that ``margin(logits, counts)`` changes, as an ordinary loss."""

    def loss(own, server, images, labels, client, r):
        counts = torch.tensor([HOLDS[client].count(str(label)) for label in range(4)])
        return F.cross_entropy(margin(own(images), counts.double()), labels)

    return loss


PLAIN = {
    "fedlc(tau=1.5)": lambda logits, n: torch.where(n > 0, logits - 1.5 * n.clamp(min=1e-300) ** -0.25, -torch.inf),
    "balanced": lambda logits, n: torch.where(n > 0, logits + n.clamp(min=1e-300).log(), -torch.inf),
    "fedrs(alpha=0.3)": lambda logits, n: torch.where(n > 0, logits, 0.3 * logits),
}


@BOTH
@pytest.mark.parametrize("method", PLAIN)
def test_two_rounds_are_the_plain_loop(method, sgd):
    fed = small(method, **sgd)
    *_, (server, _) = plainly(fed, 2, plain_margin(PLAIN[method]))
    assert distance(fed.run(2), server) < CLOSE


# Laws of each


def test_margins_of_several_methods_add_up():
    """fedrs scales the logits as they are, whatever margin another method adds."""
    logits = FEATURES @ WEIGHT.T
    moved = logits[:, :2] + np.log([16, 4]) - 0.5 * np.array([0.5, 1 / np.sqrt(2)])
    expected = -(moved[range(4), Y] - np.log(np.exp(moved).sum(1))).mean()
    for order in ("fedlc + balanced + fedrs", "fedrs + balanced + fedlc"):
        assert loss_of(order, step_of())[0] == pytest.approx(expected, abs=1e-14)


def test_departs_from_the_paper_the_own_class_stays_in_fedlcs_denominator():
    """So the loss is never below 0; without it, a right answer by a wide margin would give −∞."""
    step = step_of()
    assert (objective(methods.parse_method("fedlc(tau=9)"), step).example >= 0).all()


@pytest.mark.parametrize("method", ["fedlc", "balanced"])
def test_equal_counts_of_all_classes_leave_cross_entropy(method):
    step = step_of(counts=np.array([7, 7, 7]))
    plain = F.cross_entropy(step.logits, step.labels)
    assert loss_of(method, step)[0] == pytest.approx(plain.item(), abs=1e-14)


@pytest.mark.parametrize("method", ["fedlc", "balanced"])
@pytest.mark.parametrize("counts", [[1, 1, 0], [10**6, 1, 0], [1, 10**9, 0]])
def test_extreme_counts_give_finite_losses_in_float32(method, counts):
    loss, gradient = loss_of(method, step_of(np.array(counts), torch.float32))
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("method", ["fedlc", "balanced"])
def test_a_client_of_one_class_has_nothing_to_learn(method):
    """Its softmax has one class: the loss is 0 and so is the gradient. fedrs still separates from the others."""
    step = step_of(counts=np.array([5, 0, 0]))
    alone = Step(step.features, step.logits, torch.zeros(4, dtype=torch.int64), {}, {}, {}, step.counts, None, None)
    loss, gradient = loss_of(method, alone)
    assert loss == 0
    assert not gradient.any()
    assert objective(methods.parse_method("fedrs"), alone).value() > 0


def test_evaluation_uses_plain_logits():
    """Margins are for training: the same weights evaluate alike, whatever the method."""
    plain = small("fedavg")
    state, results = plain.state(), []
    for method in ("fedavg", "fedlc", "fedrs", "balanced"):
        fed = plain.with_method(method)
        engine = fed.open()
        results.append(evaluate(engine, state.tensors, len(fed.data["test/labels"]), fed.key))
        engine.close()
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedlc(tau=-1)", r"fedlc\(tau=-1.0\): tau must be 0 or more"),
        ("fedrs(alpha=1.5)", r"fedrs\(alpha=1.5\): alpha must be between 0 and 1"),
        ("fedrs(alpha=-0.1)", "alpha must be between 0 and 1"),
        ("balanced(1)", "balanced takes no values, but 1 were given"),
    ],
)
def test_wrong_knobs_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        methods.parse_method(text)
