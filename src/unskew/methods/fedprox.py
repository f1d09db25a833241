"""FedProx: clients stay close to the server's model."""

from dataclasses import replace

from unskew.core.errors import nearest
from unskew.core.language import check_not_negative
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
        The weight μ of the term. The default is the CCVR paper's for CIFAR-10 with α = 0.05; for 0.1 and 0.5 it uses
        0.001.
    on
        ``all`` parameters, or ``weights``: without biases and the parameters of norms, like --decay weights.

    Reference: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. (2).
    """
    check_not_negative("fedprox", mu=mu)
    if on not in DECAYS:
        raise ValueError(f"fedprox(on={on}): {nearest(on, DECAYS)}")

    def proximal(loss: Loss, step: Step) -> Loss:
        names = [name for name, value in step.params.items() if on == "all" or is_weight(value)]
        if not names:
            return loss
        local, reference = [step.params[name] for name in names], [step.shared[name] for name in names]
        return loss.plus(mu * half_squared_distance(local, reference))

    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, proximal))
