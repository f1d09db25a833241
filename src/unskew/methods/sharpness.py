"""FedSAM and FedLESAM: gradients are computed uphill of the model, so that training ends in a flat minimum."""

from dataclasses import replace

import torch

from unskew.core.language import check_not_negative
from unskew.core.tensors import parameters, under
from unskew.core.types import Displacement, Memory, Tensors
from unskew.round.algorithm import Method

SHORTEST = 1e-12  # a shorter direction counts as zero


def fedsam(rho: float = 0.05) -> Method:
    """Takes each gradient uphill of the client's model.

    w ← w − η·∇ℓ(w + ρ·g/‖g‖), g = ∇ℓ(w) on the same mini-batch: two backward passes per step. ℓ includes the terms of
    other methods. BatchNorm's running statistics are updated by the second pass only.

    Parameters
    ----------
    rho
        The distance ρ. The default is that of sharpness-aware minimization (Foret et al., ICLR 2021).

    Reference: Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022, Algorithm 1;
    Caldarola, Caputo, Ciccone, "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022.
    """
    check_not_negative("fedsam", rho=rho)

    def perturbation(shared: Tensors, memory: Tensors) -> Displacement:
        return lambda gradient: _scale(gradient(), rho)

    return lambda algorithm: replace(algorithm, perturbation=perturbation)


def fedlesam(rho: float = 0.05) -> Method:
    """Takes each gradient behind the server's last step.

    w ← w − η·∇ℓ(w − ρ·D/‖D‖), D = w_global − w_old, where w_old is the global model that the client received at its
    last visit. With all clients in every round, D is the server's last step. −D estimates the gradient of all clients,
    so one backward pass per step is enough. At a client's first visit there is no D, and the gradient is taken at w.

    The authors' code divides by the sum of the layers' norms instead of ‖D‖; we follow the paper.

    Parameters
    ----------
    rho
        The distance ρ. The default is that of the authors' example.

    Reference: Fan et al., "Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
    Sharpness-aware Minimization", ICML 2024, Algorithm 1.
    """
    check_not_negative("fedlesam", rho=rho)

    def perturbation(shared: Tensors, memory: Tensors) -> Displacement:
        old = under(memory, "fedlesam/")
        uphill = _scale({name: value - shared[name] for name, value in old.items()}, rho)
        return lambda gradient: uphill

    received = Memory(
        "fedlesam",
        blank=parameters,
        keep=lambda visited: {name: visited.shared[name] for name in parameters(visited.model)},
    )
    return lambda algorithm: replace(algorithm, perturbation=perturbation, remember=(*algorithm.remember, received))


def _scale(direction: Tensors, rho: float) -> Tensors:
    """The direction at length ρ, measured over all parameters."""
    if not direction:
        return {}
    length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(direction.values())))).clamp(min=SHORTEST)
    return {name: value * (rho / length) for name, value in direction.items()}
