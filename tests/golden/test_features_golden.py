"""fedntd, feddecorr and fedetf on one mini-batch as numpy lines; fedsam and fedlesam on a network with BatchNorm."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_objectives_golden import (
    CLOSE,
    FEATURES,
    WEIGHT,
    Y,
    distance,
    entropies,
    loss_of,
    network_of,
    plainly,
    small,
    step_of,
)

from unskew.core.errors import UserError
from unskew.methods import parse_method
from unskew.methods.fedetf import simplex
from unskew.round.client import objective
from unskew.round.driver import as_used

SERVER = np.array([[0.5, 0.1, -0.4], [0.2, 0.9, 0.3], [-0.7, 0.4, 0.2], [1.1, 0.3, 0.6]])  # its logits


def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum()


def distilled(tau, beta):
    """Cross-entropy + β·τ²·mean KL(server ‖ client) over the two classes that an example is not."""
    total = entropies(FEATURES)[0].mean()
    for z, server, y in zip(FEATURES, SERVER, Y, strict=True):
        others = [c for c in range(3) if c != y]
        p, q = softmax(server[others] / tau), softmax((WEIGHT @ z)[others] / tau)
        total += beta * tau**2 * (p * np.log(p / q)).sum() / 4
    return total


def decorrelated(beta):
    return entropies(FEATURES)[0].mean() + beta / 9 * (np.corrcoef(FEATURES.T) ** 2).sum()


def tight_frame(scale, gamma, counts):
    """Three classes, three features: the frame is √(3/2)·(I − 1/3)."""
    frame = np.sqrt(3 / 2) * (np.eye(3) - 1 / 3)
    cosines = FEATURES @ frame / np.linalg.norm(FEATURES, axis=1, keepdims=True)
    logits = scale * cosines + gamma * np.log(counts)
    return np.mean([-np.log(softmax(row)[y]) for row, y in zip(logits, Y, strict=True)])


GOLDEN = {
    "fedntd": lambda: distilled(1.0, 1.0),
    "fedntd(beta=0.3, tau=2)": lambda: distilled(2.0, 0.3),
    "feddecorr(beta=0.5)": lambda: decorrelated(0.5),
    "fedetf": lambda: tight_frame(10.0, 1.0, (1, 2, 1)),
    "fedetf(scale=4, gamma=0.5)": lambda: tight_frame(4.0, 0.5, (1, 2, 1)),
}


def batch(method):
    step = replace(step_of(), predict={"shared": torch.tensor(SERVER)}.__getitem__)
    head = parse_method(method).head
    return step if head is None else replace(step, logits=F.linear(step.features, *head(torch.tensor(WEIGHT), None)))


@pytest.mark.parametrize("method", GOLDEN)
def test_the_loss_of_a_mini_batch_is_the_numpy_lines(method):
    assert loss_of(method, batch(method))[0] == pytest.approx(
        GOLDEN[method](), abs=1e-7 if "decorr" in method else 1e-12
    )


def test_feddecorr_does_not_depend_on_which_gram_matrix_it_multiplies_out():
    tall, wide = FEATURES, FEATURES[:2]
    for features in (tall, wide):
        z = torch.tensor(features, requires_grad=True)
        step = replace(step_of(), features=z, logits=z @ torch.tensor(WEIGHT).t(), labels=torch.tensor(Y[: len(z)]))
        found = objective(parse_method("feddecorr(beta=1)"), step).penalty.item()
        assert found == pytest.approx((np.corrcoef(features.T) ** 2).sum() / 9, abs=1e-6)


@pytest.mark.parametrize("features", [FEATURES[:1], 0 * FEATURES, np.ones_like(FEATURES)])
def test_one_example_or_constant_features_leave_feddecorr_finite(features):
    z = torch.tensor(features, requires_grad=True)
    step = replace(step_of(), features=z, logits=z @ torch.tensor(WEIGHT).t(), labels=torch.tensor(Y[: len(z)]))
    value, gradient = loss_of("feddecorr(beta=1)", step)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (3, 3), (4, 9), (10, 64), (100, 256)])
def test_the_frame_has_rows_of_length_one_and_equal_angles(classes, width):
    products = simplex(classes, width) @ simplex(classes, width).t()
    wanted = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1.0)
    torch.testing.assert_close(products, wanted, rtol=0, atol=1e-12)


def test_fewer_features_than_classes_are_refused():
    with pytest.raises(ValueError, match="as many features as classes, not 10 classes, 4 features"):
        simplex(10, 4)


def test_fedetf_writes_its_frame_and_leaves_the_networks_own_classifier_unused():
    fed = small("fedetf")
    before, after = fed.state().tensors, fed.run(2).tensors
    assert torch.equal(before["params/classifier.weight"], after["params/classifier.weight"])
    used = as_used(fed.algorithm, after)
    torch.testing.assert_close(used["params/classifier.weight"], simplex(4, 64))
    assert not used["params/classifier.bias"].any()


@pytest.mark.parametrize("text", ["fedsam(rho=-1)", "fedlesam(rho=inf)", "fedntd(tau=0)", "feddecorr(-1)", "fedetf(0)"])
def test_a_knob_out_of_range_is_refused(text):
    with pytest.raises(UserError, match=r"must be|give a number"):
        parse_method(text)


# Where the gradient is taken


class Uphill:
    """The loss at w + ρ·direction/‖direction‖ with a gradient for w, in plain PyTorch."""

    def __init__(self, rho, direction):
        self.rho, self.direction = rho, direction

    def __call__(self, own, server, images, labels, client, r):
        towards = self.direction(own, server, images, labels, client)
        if towards is None:
            return F.cross_entropy(own(images), labels)
        length = torch.cat([part.flatten() for part in towards]).norm()
        there = {
            name: value + self.rho / length * part
            for (name, value), part in zip(own.named_parameters(), towards, strict=True)
        }
        return F.cross_entropy(torch.func.functional_call(own, there, images), labels)


@pytest.mark.parametrize("model", ["tiny-cnn", "outside_models:batch_norm"])
def test_fedsam_is_the_plain_loop_whose_running_statistics_see_one_pass_a_step(model):
    def own_gradient(own, server, images, labels, client):
        twin = copy.deepcopy(own)
        return torch.autograd.grad(F.cross_entropy(twin(images), labels), list(twin.parameters()))

    fed = small("fedsam(rho=0.3)", model=model)
    *_, (server, _) = plainly(fed, 2, Uphill(0.3, own_gradient))
    assert distance(fed.run(2), server) < CLOSE


@pytest.mark.parametrize("model", ["tiny-cnn", "outside_models:batch_norm"])
def test_fedlesam_is_the_plain_loop_that_looks_back_along_the_servers_last_step(model):
    received = {}

    def backwards(own, server, images, labels, client):
        old = received.get(client)
        return old and [a - b.detach() for a, b in zip(old, server.parameters(), strict=True)]

    fed = small("fedlesam(rho=0.3)", model=model)
    now = None
    for server, visited in plainly(fed, 3, Uphill(0.3, backwards)):
        sent = [value.detach() for value in (now or network_of(fed)).parameters()]
        received.update({client: sent for client, _ in visited})
        now = server
    assert distance(fed.run(3), now) < CLOSE
