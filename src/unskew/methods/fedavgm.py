"""FedAvg and FedAvgM: the server applies the clients' mean update, plain or with momentum."""

from dataclasses import replace

from unskew.core.language import check_positive
from unskew.round.algorithm import Method
from unskew.round.server import momentum, sgd


def fedavg(lr: float = 1.0) -> Method:
    """Averages the clients' models: the basis of all other methods.

    θ ← θ − γ·ḡ with ḡ = Σ n_k/n·(θ − θ_k).

    Parameters
    ----------
    lr
        The server's learning rate γ; 1 is plain averaging.

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    AISTATS 2017.
    """
    check_positive("fedavg", lr=lr)
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
        Weights ḡ by 1 − β: a variant in public code, which learns much more slowly.

    Reference: Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution", ECCV 2020,
    section 5.1.
    """
    check_positive("fedavgm", lr=lr)
    if not 0 <= beta < 1:
        raise ValueError(f"fedavgm(beta={beta}): beta must be at least 0 and below 1")
    return lambda algorithm: replace(algorithm, server=momentum(beta, lr, damped=damped))
