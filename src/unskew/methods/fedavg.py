"""FedAvg: the server applies the clients' mean update."""

from dataclasses import replace

from unskew.core.language import check_positive
from unskew.round.algorithm import Method
from unskew.round.server import sgd


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
