"""How the server moves: every optimiser against numpy lines over three rounds, and what all of them keep."""

import copy

import numpy as np
import pytest
import torch

from unskew import methods
from unskew.core import tensors
from unskew.core.types import RoundInfo
from unskew.round.server import adaptive, apply_step, momentum, sgd

INFO = RoundInfo(1, 1, None, 1.0)  # these servers do not look at it

START = np.array([1.0, -2.0, 0.5])
GRADIENTS = np.array([[0.1, -0.3, 0.0], [0.2, 0.4, 0.0], [-0.5, 0.05, 1e-4]])  # old − new, three rounds


def walk(server, dtype=torch.float64):
    """The parameters after each of the three rounds, and the memory after the last."""
    params = {"params/w": torch.tensor(START, dtype=dtype)}
    memory, places = server.init(params), []
    for gradient in GRADIENTS:
        params, memory = server.update(params, {"params/w": torch.tensor(gradient)}, memory, INFO)
        places.append(params["params/w"])
    return places, memory


def assert_walks(server, wanted):
    places, memory = walk(server)
    for got, want in zip(places, wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-14, atol=1e-15)
    return memory


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_sgd_takes_the_mean_step_times_its_rate(lr):
    w, wanted = START, []
    for g in GRADIENTS:
        w = w - lr * g
        wanted.append(w)
    assert assert_walks(sgd(lr), wanted) == {}


@pytest.mark.parametrize("lr", [1.0, 0.3])
@pytest.mark.parametrize("damped", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_momentum_remembers(beta, damped, lr):
    w, v, wanted = START, np.zeros(3), []
    for g in GRADIENTS:
        v = beta * v + (1 - beta if damped else 1) * g
        w = w - lr * v
        wanted.append(w)
    memory = assert_walks(momentum(beta, lr, damped=damped), wanted)
    assert list(memory) == ["velocity/params/w"]
    np.testing.assert_allclose(memory["velocity/params/w"].numpy(), v, rtol=1e-14)


def adam(v, g):
    return 0.99 * v + 0.01 * g**2


def yogi(v, g):
    return v - 0.01 * g**2 * np.sign(v - g**2)


def adagrad(v, g):
    return v + g**2


@pytest.mark.parametrize(
    ("method", "second", "beta1"),
    [
        ("fedadam(lr=0.1, beta1=0.8, beta2=0.99, tau=0.05)", adam, 0.8),
        ("fedyogi(lr=0.1, beta1=0.8, beta2=0.99, tau=0.05)", yogi, 0.8),
        ("fedadagrad(lr=0.1, beta1=0.8, tau=0.05)", adagrad, 0.8),
        ("fedadagrad(lr=0.1, tau=0.05)", adagrad, 0.0),
    ],
)
def test_adaptive_servers_divide_by_the_root_of_what_they_saw(method, second, beta1):
    tau, lr = 0.05, 0.1
    w, m, v, wanted = START, np.zeros(3), np.full(3, tau**2), []
    for g in GRADIENTS:
        m = beta1 * m + (1 - beta1) * g
        v = second(v, g)
        w = w - lr * m / (np.sqrt(v) + tau)
        wanted.append(w)
    memory = assert_walks(methods.parse_method(method).server, wanted)
    np.testing.assert_allclose(memory["first/params/w"].numpy(), m, rtol=1e-14)
    np.testing.assert_allclose(memory["second/params/w"].numpy(), v, rtol=1e-14)


def test_yogi_forgets_where_adam_does_but_slower():
    """v above ḡ²: Adam's v falls by (1 − β₂)·(v − ḡ²), Yogi's by (1 − β₂)·ḡ²; below, both rise."""
    params = {"params/w": torch.zeros(2, dtype=torch.float64)}
    gradient = {"params/w": torch.tensor([0.01, 10.0], dtype=torch.float64)}
    after = {}
    for name in ("fedadam", "fedyogi"):
        server = methods.parse_method(f"{name}(beta2=0.9, tau=1)").server
        _, memory = server.update(params, gradient, server.init(params), INFO)
        after[name] = memory["second/params/w"]
    assert after["fedadam"][0] < after["fedyogi"][0] < 1.0
    assert after["fedyogi"][1] == pytest.approx(1 + 0.1 * 100)
    assert after["fedadam"][1] == pytest.approx(0.9 + 0.1 * 100)


SERVERS = {
    "sgd": sgd(0.7),
    "momentum": momentum(0.9),
    "adaptive": adaptive(lambda v, g2: 0.9 * v + 0.1 * g2, 0.1, 0.9, 1e-3),
}


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_no_gradient_from_rest_is_no_step(server):
    params = {"params/w": torch.tensor(START)}
    after, _ = server.update(params, {"params/w": torch.zeros(3, dtype=torch.float64)}, server.init(params), INFO)
    assert torch.equal(after["params/w"], params["params/w"])


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_a_step_leaves_its_arguments_alone(server):
    params, gradient = {"params/w": torch.tensor(START)}, {"params/w": torch.tensor(GRADIENTS[0])}
    memory = server.init(params)
    before = copy.deepcopy((params, gradient, memory))
    server.update(params, gradient, memory, INFO)
    for now, then in zip((params, gradient, memory), before, strict=True):
        assert tensors.sha256(now) == tensors.sha256(then)


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_memory_keeps_its_names_and_is_float64_whatever_the_parameters_are(server):
    params = {"params/w": torch.tensor(START, dtype=torch.float32)}
    memory = server.init(params)
    places, after = walk(server, torch.float32)
    assert list(memory) == list(after)
    assert all(value.dtype == torch.float64 for value in [*memory.values(), *after.values()])
    assert all(place.dtype == torch.float32 for place in places)


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_float32_parameters_are_rounded_once(server):
    """A step in float64, then one rounding: what float64 parameters give, rounded."""
    start = {"params/w": torch.tensor(START, dtype=torch.float32)}
    gradient = {"params/w": torch.tensor(GRADIENTS[0])}
    wide = {"params/w": start["params/w"].double()}
    after, _ = server.update(start, gradient, server.init(start), INFO)
    exact, _ = server.update(wide, gradient, server.init(wide), INFO)
    assert torch.equal(after["params/w"], exact["params/w"].float())


def test_whole_numbers_are_rounded_to_the_nearest():
    found = apply_step({"n": torch.tensor([10, 10, -3])}, {"n": torch.tensor([-2.6, 2.4, 0.0]).double()}, 1.0)
    assert found["n"].tolist() == [13, 8, -3]
    assert found["n"].dtype == torch.int64
    large = apply_step({"n": torch.tensor(2**40 + 1)}, {"n": torch.tensor(-1.0).double()}, 1.0)
    assert large["n"].item() == 2**40 + 2
