"""FedNova: a client does not count more because it takes more steps."""

from dataclasses import replace

from unskew.core.types import Local
from unskew.round.aggregation import normalised_mean
from unskew.round.algorithm import Method
from unskew.round.descent import accumulated


def fednova() -> Method:
    """Divides each client's update by its number of steps.

    The mean is multiplied by the average number of steps: θ ← θ − (Σ p_k·‖a_k‖₁)·Σ p_k·(θ − θ_k)/‖a_k‖₁, p_k = n_k/n.
    ‖a_k‖₁ is the number of steps τ with plain SGD; with momentum m it is (τ − m·(1 − m^τ)/(1 − m))/(1 − m). Buffers are
    averaged plainly, and proximal terms of other methods do not change ‖a_k‖₁.

    Reference: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
    NeurIPS 2020, eqs. (6) and (7).
    """
    return lambda algorithm: replace(algorithm, scale=_per_step, aggregate=normalised_mean)


def _per_step(steps: int, local: Local) -> float:
    return 1 / accumulated(steps, local.momentum) if steps else 1.0
