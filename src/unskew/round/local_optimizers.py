"""Local training: SGD, Adam, AdamW; clipping; weight decay of all parameters or only weights; learning rate schedules.

An optimizer's state (momentum, Adam's means) is new at every visit: it is neither stored nor sent. Each step is one
fused call for all parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from unskew.core import language
from unskew.core.errors import UserError, nearest
from unskew.core.types import Local, Tensors

Gradients = Sequence[Tensor]
Update = Callable[[Gradients], None]  # updates the parameters in place
Optimizer = Callable[[list[Tensor], Local], Update]

DECAYS = ("all", "weights")


def make_optimizer(values: list[Tensor], local: Local, steps: int | None = None) -> Update:
    """The update function for these parameters and settings; ``steps`` is the number of steps, if known."""
    if steps == 1 and local.momentum and uses_sgd(local):
        local = replace(local, momentum=0.0)  # momentum does not affect a first step
    make = sgd if local.optimizer == "sgd" else parse_optimizer(local.optimizer)
    if local.decay == "all" or local.weight_decay == 0:
        return make(values, local)
    groups = [
        (replace(local, weight_decay=local.weight_decay if decays else 0.0), indices)
        for decays in (True, False)
        if (indices := [index for index, value in enumerate(values) if is_weight(value) == decays])
    ]
    parts = [(make([values[index] for index in indices], settings), indices) for settings, indices in groups]

    def update(gradients: Gradients) -> None:
        for part, indices in parts:
            part([gradients[index] for index in indices])

    return update


def is_weight(value: Tensor) -> bool:
    """Whether a parameter is a matrix or a kernel. Biases and the parameters of norms have one dimension."""
    return value.ndim > 1


def clip_gradients(gradients: Gradients, longest: float) -> list[Tensor]:
    """Clip the joint norm to ``longest``: ×min(1, longest/(‖g‖₂ + 1e-6)), like clip_grad_norm_."""
    length = torch.nn.utils.get_total_norm(gradients)
    return list(torch._foreach_mul(list(gradients), torch.clamp(longest / (length + 1e-6), max=1.0)))


def sgd(values: list[Tensor], local: Local) -> Update:
    """PyTorch's SGD (v ← m·v + g + λ·w, v₀ = g; w ← w − η·v) as one fused call for all parameters."""
    velocity = [torch.empty_like(value) for value in values] if local.momentum != 0 else []
    knobs: dict[str, Any] = {"weight_decay": local.weight_decay, "momentum": local.momentum, "lr": local.lr}
    knobs |= {"dampening": 0.0, "nesterov": False, "maximize": False}
    first = True

    def update(gradients: Gradients) -> None:
        nonlocal first
        plain = [gradient.contiguous() for gradient in gradients]  # the fused call reads memory, not strides
        with torch.no_grad():
            torch._fused_sgd_(values, plain, velocity, **knobs, is_first_step=first)
        first = False

    return update


def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """PyTorch's Adam: steps along the mean gradient, divided by its root mean square; λ·w is part of the gradient.

    Reference: Kingma, Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, Algorithm 1.
    """
    return _adaptive("adam", torch._fused_adam_, beta1, beta2, eps)


def adamw(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """PyTorch's AdamW: like Adam, but weight decay shrinks w by η·λ·w separately from the step.

    Reference: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, Algorithm 2.
    """
    return _adaptive("adamw", torch._fused_adamw_, beta1, beta2, eps)


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {"sgd": lambda: sgd, "adam": adam, "adamw": adamw}


def parse_optimizer(source: str) -> Optimizer:
    """The optimizer that a text such as ``"adam(beta2=0.99)"`` describes."""
    return cast(Optimizer, _parse_one(source, "optimizer", OPTIMIZERS))


def _parse_one(source: str, kind: str, table: Mapping[str, Callable[..., Any]]) -> Any:
    call = language.parse_call(source, kind)
    if call.name not in table:
        raise call.error(f"no {kind} is called {call.name!r}; {nearest(call.name, table)}")
    return language.apply(call, table[call.name], kind)


def uses_sgd(local: Local) -> bool:
    """Whether the clients use SGD, so that --momentum applies."""
    return local.optimizer.partition("(")[0].strip() == "sgd"


def require_sgd(local: Local, method: str, why: str) -> None:
    """Reject a method that needs SGD, for the reason ``why``, if the settings have another optimizer."""
    if not uses_sgd(local):
        needs = f"{method} needs SGD, not --optimizer {local.optimizer}: {why}"
        raise UserError(f"{needs}; use --optimizer sgd, or leave out {method}")


def _adaptive(name: str, fused: Callable[..., Any], beta1: float, beta2: float, eps: float) -> Optimizer:
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and 0 < eps < math.inf):
        raise ValueError(f"{name}: beta1 and beta2 must be at least 0 and below 1, eps must be above 0")

    def make(values: list[Tensor], local: Local) -> Update:
        means, squares = ([torch.zeros_like(value) for value in values] for _ in range(2))
        steps = [torch.zeros((), dtype=torch.float32, device=value.device) for value in values]
        knobs = {"lr": local.lr, "beta1": beta1, "beta2": beta2, "weight_decay": local.weight_decay, "eps": eps}
        knobs |= {"amsgrad": False, "maximize": False}

        def update(gradients: Gradients) -> None:
            with torch.no_grad():
                torch._foreach_add_(steps, 1)
                fused(values, [gradient.contiguous() for gradient in gradients], means, squares, [], steps, **knobs)

        return update

    return make


RATE = "rate"  # the name of a round's rate among the tensors that the server sends


@dataclass(frozen=True)
class Schedule:
    """A schedule of the learning rate: it rises for ``warmup`` rounds, then follows ``after``.

    ``after(done, left, lr)`` is the rate when ``done`` of the ``left`` rounds after the warm-up are over.
    """

    warmup: int
    after: Callable[[int, int, float], float]

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError("warmup must be 0 or more rounds")

    def rate(self, lr: float, number: int, rounds: int) -> float:
        """The rate of round ``number`` of ``rounds``; later rounds have the last one's."""
        number = min(number, rounds)
        if number <= self.warmup:
            return lr * number / (self.warmup + 1)
        return self.after(number - self.warmup - 1, rounds - self.warmup, lr)


def constant(warmup: int = 0) -> Schedule:
    """The same rate in every round."""
    return Schedule(warmup, lambda done, left, lr: lr)


def step(every: int = 30, factor: float = 0.1, warmup: int = 0) -> Schedule:
    """Multiply the rate by ``factor`` every ``every`` rounds, like torch's StepLR: η·factor^⌊(r − 1)/every⌋."""
    if every < 1 or not 0 < factor < math.inf:
        raise ValueError("step: every must be at least 1 round, factor must be above 0")
    return Schedule(warmup, lambda done, left, lr: lr * factor ** (done // every))


def cosine(least: float = 0.0, warmup: int = 0) -> Schedule:
    """Half a cosine down to ``least``, like torch's CosineAnnealingLR: least + (η − least)·(1 + cos(π·(r − 1)/R))/2.

    Only the round after the last would have the rate ``least``, so no round trains with a rate of 0.
    """
    if not 0 <= least < math.inf:
        raise ValueError("cosine: least, a learning rate, must be 0 or more")

    def after(done: int, left: int, lr: float) -> float:
        if least > lr:
            raise UserError(f"--schedule cosine(least={least:g}): least is above --lr {lr:g}; give a smaller least")
        return least + (lr - least) * (1 + math.cos(math.pi * done / left)) / 2

    return Schedule(warmup, after)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {"constant": constant, "step": step, "cosine": cosine}


def parse_schedule(source: str) -> Schedule:
    """The schedule that a text such as ``"step(every=30, factor=0.1)"`` describes."""
    return cast(Schedule, _parse_one(source, "schedule", SCHEDULES))


def check_rounds(local: Local, rounds: int) -> None:
    """Reject a schedule that does not fit the number of rounds or the rate; without rounds, any fits."""
    if local.schedule == "constant" or not rounds:
        return
    schedule = parse_schedule(local.schedule)
    if schedule.warmup >= rounds:
        excess = f"a warm-up of {schedule.warmup} rounds leaves no rounds at the full rate (--rounds {rounds})"
        raise UserError(f"--schedule {local.schedule}: {excess}; shorten it")
    schedule.rate(local.lr, rounds, rounds)


def rate_of_round(local: Local, number: int, rounds: int) -> float | None:
    """The clients' rate in a round; None if it is constant."""
    if local.schedule == "constant":
        return None
    return parse_schedule(local.schedule).rate(local.lr, number, rounds)


def encode_rate(rate: float | None) -> Tensors:
    """The round's rate as the server sends it; nothing if it is constant."""
    return {} if rate is None else {RATE: torch.tensor(rate, dtype=torch.float64)}


def with_round_rate(local: Local, shared: Tensors) -> Local:
    """The settings with the rate that the server sent for the round."""
    return replace(local, lr=float(shared[RATE])) if RATE in shared else local
