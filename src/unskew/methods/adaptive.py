"""FedAdam, FedYogi, FedAdagrad: the server's step is scaled coordinate by coordinate.

All three: m ← β₁·m + (1 − β₁)·ḡ; θ ← θ − γ·m/(√v + τ), v from τ², and they differ in how v follows ḡ², the mean
update weighted by the clients' examples. The rates of FedAdam and FedYogi are the paper's best for CIFAR-10, rounded to
a power of ten. The paper tuned them for each task; tune them for yours.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from unskew.core.language import check_positive
from unskew.round.algorithm import Method
from unskew.round.server import adaptive


def fedadam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> Method:
    """Gives the server Adam's step.

    v ← β₂·v + (1 − β₂)·ḡ².

    Parameters
    ----------
    lr
        The server's learning rate γ.
    beta1
        The momentum β₁ of the mean update.
    beta2
        How slowly v follows ḡ², β₂.
    tau
        τ, added to √v: how adaptive the step is.

    Reference: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    """
    return _method("fedadam", lambda v, g2: beta2 * v + (1 - beta2) * g2, lr, beta1, beta2, tau)


def fedyogi(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> Method:
    """Gives the server Yogi's step.

    v ← v − (1 − β₂)·ḡ²·sign(v − ḡ²).

    Parameters
    ----------
    lr, beta1, beta2, tau
        As in fedadam.

    Reference: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    """
    return _method("fedyogi", lambda v, g2: v - (1 - beta2) * g2 * (v - g2).sign(), lr, beta1, beta2, tau)


def fedadagrad(lr: float = 0.01, beta1: float = 0.0, tau: float = 0.001) -> Method:
    """Gives the server Adagrad's step.

    v ← v + ḡ².

    Departs from the paper: its best rate for CIFAR-10 is 0.1. From v = τ² the first step is about γ·sign(ḡ), so 0.1
    moves every weight by 0.1, more than the weights of a network without normalisation are. On CIFAR-10 with simple-cnn
    the second round then gives NaN; 0.01, the rate of the other two, trains.

    Parameters
    ----------
    lr, beta1, tau
        As in fedadam.

    Reference: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    """
    return _method("fedadagrad", lambda v, g2: v + g2, lr, beta1, 0.0, tau)


def _method(
    name: str, second: Callable[[Tensor, Tensor], Tensor], lr: float, beta1: float, beta2: float, tau: float
) -> Method:
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"{name}(beta1={beta1}, beta2={beta2}): both must be at least 0 and below 1")
    check_positive(name, lr=lr, tau=tau)
    return lambda algorithm: replace(algorithm, server=adaptive(second, lr, beta1, tau))
