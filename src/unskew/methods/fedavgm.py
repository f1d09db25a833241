"""FedAvgM: the server applies the clients' mean update with momentum."""

from dataclasses import replace

from unskew.core.language import check_positive
from unskew.round.algorithm import Method
from unskew.round.server import momentum


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
