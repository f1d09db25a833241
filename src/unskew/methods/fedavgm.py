"""FedAvg and FedAvgM: the server takes the clients' mean, or moves with momentum."""

from dataclasses import replace

from unskew.round.algorithm import Method
from unskew.round.server import momentum, sgd


def fedavg(lr: float = 1.0) -> Method:
    """Takes the mean of the clients' models: the base of all others.

    θ ← θ − γ·ḡ with ḡ = Σ n_k/n·(θ − θ_k).

    Parameters
    ----------
    lr
        The server's learning rate γ; at 1 nothing changes.

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    AISTATS 2017.
    """
    _rate("fedavg", lr)
    return lambda algorithm: algorithm if lr == 1 else replace(algorithm, server=sgd(lr))


def fedavgm(beta: float = 0.9, lr: float = 1.0, damped: bool = False) -> Method:
    """Gives the server momentum.

    v ← β·v + ḡ; θ ← θ − γ·v. Without Nesterov; buffers are averaged without momentum.

    Parameters
    ----------
    beta
        The momentum β.
    lr
        The server's learning rate γ.
    damped
        Weighs ḡ by 1 − β: a form found in public code, and much slower.

    Reference: Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution", ECCV 2020,
    section 5.1.
    """
    _rate("fedavgm", lr)
    if not 0 <= beta < 1:
        raise ValueError(f"fedavgm(beta={beta}): beta must be at least 0 and below 1")
    return lambda algorithm: replace(algorithm, server=momentum(beta, lr, damped=damped))


def _rate(name: str, lr: float) -> None:
    if not 0 < lr < float("inf"):
        raise ValueError(f"{name}(lr={lr}): the server's learning rate must be above 0")
