"""5. The server's update: θ ← θ − step(ḡ), ḡ the pseudo-gradient old − new.

It is computed in float64 and rounded once, to the parameters' dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.types import RoundInfo, ServerOptimizer, Sums, Tensors


def weighted_mean(sums: Sums) -> Tensors:
    """ḡ = Σ wₖ·(old − newₖ) / Σ wₖ, parameters and buffers alike, in float64."""
    weight = sums["weight"]
    return {name: value / weight for name, value in tensors.under(sums, "delta/").items()}


def normalised_mean(sums: Sums) -> Tensors:
    """ḡ = (Σ wₖ·aₖ / Σ wₖ) · Σ wₖ·(old − newₖ)/aₖ / Σ wₖ for parameters; each visit has scaled its update by 1/aₖ."""
    common = sums["scaled"] / sums["weight"]
    mean = weighted_mean(sums)
    return {name: common * value if name.startswith("params/") else value for name, value in mean.items()}


def sgd(lr: float = 1.0) -> ServerOptimizer:
    """θ ← θ − γ·ḡ. With γ = 1 this is the clients' weighted mean."""

    def update(params: Tensors, gradient: Tensors, memory: Tensors, _: RoundInfo) -> tuple[Tensors, Tensors]:
        return apply_step(params, gradient, lr), memory

    return ServerOptimizer(init=lambda params: {}, update=update)


def momentum(beta: float, lr: float = 1.0, *, damped: bool = False) -> ServerOptimizer:
    """v ← β·v + ḡ; θ ← θ − γ·v. ``damped`` weights ḡ by 1 − β, as some public code does."""
    share = 1 - beta if damped else 1.0

    def update(params: Tensors, gradient: Tensors, memory: Tensors, _: RoundInfo) -> tuple[Tensors, Tensors]:
        velocity = {name: beta * memory[f"velocity/{name}"] + share * g for name, g in gradient.items()}
        return apply_step(params, velocity, lr), tensors.prefixed(velocity, "velocity/")

    return ServerOptimizer(init=lambda params: filled(params, "velocity/", 0.0), update=update)


def adaptive(second: Callable[[Tensor, Tensor], Tensor], lr: float, beta1: float, tau: float) -> ServerOptimizer:
    """m ← β₁·m + (1 − β₁)·ḡ; v ← second(v, ḡ²); θ ← θ − γ·m / (√v + τ), from v = τ²; no bias correction."""

    def update(params: Tensors, gradient: Tensors, memory: Tensors, _: RoundInfo) -> tuple[Tensors, Tensors]:
        first = {name: beta1 * memory[f"first/{name}"] + (1 - beta1) * g for name, g in gradient.items()}
        squares = {name: second(memory[f"second/{name}"], g * g) for name, g in gradient.items()}
        step = {name: first[name] / (squares[name].sqrt() + tau) for name in gradient}
        return apply_step(params, step, lr), tensors.prefixed(first, "first/") | tensors.prefixed(squares, "second/")

    def init(params: Tensors) -> Tensors:
        return filled(params, "first/", 0.0) | filled(params, "second/", tau * tau)

    return ServerOptimizer(init=init, update=update)


def apply_step(params: Tensors, step: Tensors, lr: float) -> Tensors:
    """θ − γ·step in θ's dtype; integer tensors (BatchNorm's batch count) are rounded."""
    new = {name: value.double() - lr * step[name] for name, value in params.items()}
    return {
        name: (new[name] if value.is_floating_point() else new[name].round()).to(value.dtype)
        for name, value in params.items()
    }


def filled(params: Tensors, prefix: str, value: float) -> Tensors:
    """A server's memory at the start: for each parameter, that value in float64."""
    return {prefix + name: torch.full_like(p, value, dtype=torch.float64) for name, p in params.items()}
