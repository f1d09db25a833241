"""SCAFFOLD: control variates correct the clients' drift in every step."""

from dataclasses import replace

import torch

from unskew.core.tensors import parameters, under
from unskew.core.types import Local, Memory, Statistic, Sums, Tensors, Visited
from unskew.round.algorithm import Algorithm, Method
from unskew.round.client import accumulated
from unskew.round.local_optimizers import require_sgd


def scaffold() -> Method:
    """Corrects each client's gradients for its drift from the others.

    g ← g + c − c_k in each step; after the visit c_k⁺ = c_k − c + (x − y_k)/(η·‖a‖₁) (option II);
    c ← c + Σ n_k·(c_k⁺ − c_k)/n over the round's clients, n over all clients. c_k stays with the client; c and the
    change of c_k are sent. η is the round's rate. With --clip, g is clipped before the correction is added, so that c_k
    is the mean of clipped gradients. Adam is refused, since its steps are not sums of gradients.

    Departs from the paper: it uses plain SGD, where ‖a‖₁ is the number of steps K; with local momentum the K gradients
    count ‖a‖₁ times (as in FedNova), and K would make c_k too long by up to 1/(1 − m). It weights clients equally; we
    weight them, and c, by their examples, so that the corrections of all clients add up to zero.

    Reference: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
    Algorithm 1 and eq. (4), option II.
    """
    statistic = Statistic(
        "scaffold",
        init=lambda model: {name: torch.zeros_like(value) for name, value in parameters(model).items()},
        measure=_change,
        fold=lambda sent, sums, info: {name: c + sums[name] / info.roster.examples for name, c in sent.items()},
    )
    memory = Memory("scaffold", blank=parameters, keep=_own_control)

    def corrected(algorithm: Algorithm) -> Algorithm:
        _require_sgd(algorithm.local)
        return replace(
            algorithm,
            correction=_difference,
            statistics=(*algorithm.statistics, statistic),
            remember=(*algorithm.remember, memory),
        )

    return corrected


def _require_sgd(local: Local) -> None:
    require_sgd(local, "scaffold", "its control variates are mean gradients, computed from SGD's updates")


def _difference(shared: Tensors, memory: Tensors) -> Tensors:
    """c − c_k; at a client's first visit c_k = 0."""
    common = under(shared, "sent/scaffold/")
    return {name: c - memory[f"scaffold/{name}"] if memory else c for name, c in common.items()}


def _own_control(visited: Visited) -> Tensors:
    """c_k⁺."""
    _require_sgd(visited.local)
    reach = visited.local.lr * accumulated(visited.steps, visited.local.momentum)
    received = {name: visited.shared[name] for name in parameters(visited.model)}
    if reach == 0:  # no step was taken, so the gradient is unknown
        return {name: visited.memory.get(f"scaffold/{name}", torch.zeros_like(x)) for name, x in received.items()}
    correction = _difference(visited.shared, visited.memory)
    return {name: (x - visited.model[name]) / reach - correction[name] for name, x in received.items()}


def _change(visited: Visited) -> Sums:
    """n_k·(c_k⁺ − c_k) for the visit that stores c_k⁺; other visits to the same client add nothing."""
    weight = float(visited.counts.sum()) if visited.visit.keep else 0.0
    change = {}
    for name, control in _own_control(visited).items():
        before = visited.memory.get(f"scaffold/{name}")
        change[name] = weight * (control.double() if before is None else control.double() - before.double())
    return change
