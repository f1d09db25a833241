"""FedProx: clients stay near the server's model."""

from dataclasses import replace

from unskew.core.errors import nearest
from unskew.core.tensors import half_squared_distance
from unskew.core.types import Loss, Step
from unskew.round.algorithm import Method
from unskew.round.local_optimizers import DECAYS, is_weight


def fedprox(mu: float = 0.01, on: str = "all") -> Method:
    """Adds a proximal term to each client's objective.

    + μ/2·‖w − w_global‖², over the parameters only (the norm is squared).

    Parameters
    ----------
    mu
        The weight μ of the term. The default is the CCVR paper's for CIFAR-10 with α = 0.05; it has 0.001 for 0.1 and
        0.5.
    on
        ``all`` parameters, or ``weights``: without biases and the parameters of norms, like --decay weights.

    Reference: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. (2).
    """
    if not 0 <= mu < float("inf"):
        raise ValueError(f"fedprox(mu={mu}): mu must be 0 or more")
    if on not in DECAYS:
        raise ValueError(f"fedprox(on={on}): {nearest(on, DECAYS)}")

    def proximal(loss: Loss, step: Step) -> Loss:
        held = [name for name, value in step.params.items() if on == "all" or is_weight(value)]
        if not held:
            return loss
        own, reference = [step.params[name] for name in held], [step.shared[name] for name in held]
        return loss.plus(mu * half_squared_distance(own, reference))

    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, proximal))
