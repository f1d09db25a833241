"""How the server moves: SGD and momentum as numpy lines, and what all servers keep; golden/ has the adaptive ones."""

import numpy as np
import pytest
import torch

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


SERVERS = {
    "sgd": sgd(0.7),
    "momentum": momentum(0.9),
    "adaptive": adaptive(lambda v, g2: 0.9 * v + 0.1 * g2, 0.1, 0.9, 1e-3),
}


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
