"""FedProx: clients stay near the server's model."""

from dataclasses import replace

from unskew.core.tensors import half_squared_distance
from unskew.core.types import Loss, Step
from unskew.round.algorithm import Method


def fedprox(mu: float = 0.01) -> Method:
    """Adds a proximal term to each client's objective.

    + μ/2·‖w − w_global‖², over the parameters only (the norm is squared).
    Default μ: the CCVR paper's for CIFAR-10 with α = 0.05; it has 0.001 for 0.1 and 0.5.

    Reference: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. (2).
    """
    if not 0 <= mu < float("inf"):
        raise ValueError(f"fedprox(mu={mu}): mu weighs a penalty, give 0 or more")

    def proximal(loss: Loss, step: Step) -> Loss:
        reference = [step.shared[name] for name in step.params]
        return loss.plus(mu * half_squared_distance(list(step.params.values()), reference))

    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, proximal))
