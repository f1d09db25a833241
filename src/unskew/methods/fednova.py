"""FedNova: clients that take more steps do not have more influence."""

from dataclasses import replace

from unskew.core.types import Local
from unskew.round.algorithm import Algorithm, Method
from unskew.round.client import accumulated
from unskew.round.local_optimizers import require_sgd
from unskew.round.server import normalised_mean


def fednova() -> Method:
    """Divides each client's update by its number of steps.

    The mean is multiplied by the average number of steps: θ ← θ − (Σ p_k·‖a_k‖₁)·Σ p_k·(θ − θ_k)/‖a_k‖₁, p_k = n_k/n.
    ‖a_k‖₁ is the number of steps τ with plain SGD; with momentum m it is (τ − m·(1 − m^τ)/(1 − m))/(1 − m). Buffers are
    averaged plainly, and proximal terms of other methods do not change ‖a_k‖₁. Adam is refused, since its steps have no
    such number.

    Reference: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
    NeurIPS 2020, eqs. (6) and (7).
    """

    def normalised(algorithm: Algorithm) -> Algorithm:
        _require_sgd(algorithm.local)
        return replace(algorithm, scale=_per_step, aggregate=normalised_mean)

    return normalised


def _require_sgd(local: Local) -> None:
    require_sgd(local, "fednova", "it divides an update by the number of gradients in it")


def _per_step(steps: int, local: Local) -> float:
    _require_sgd(local)
    return 1 / accumulated(steps, local.momentum) if steps else 1.0
