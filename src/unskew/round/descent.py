"""A client's training: SGD along the plan of its batches, on the objective that the methods put together."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew import tensors
from unskew.data.batches import Plan
from unskew.round.objective import objective
from unskew.types import Local, Step, Tensors

if TYPE_CHECKING:
    from unskew.round.client import Bench


def descend(bench: "Bench", shared: Tensors, memory: Tensors, counts: Tensor, batches: Plan) -> float:
    """SGD along the plan, in place; the sum of the loss over all examples seen."""
    network, terms, total = bench.network, bench.algorithm.terms, 0.0
    values = list(bench.params.values())
    update = sgd(values, bench.algorithm.local)
    encode = _references(bench, shared, memory)
    correction = _correction(bench, shared, memory)
    for step, count in enumerate(batches.counts):
        images, labels = bench.train.batch(*_row(batches, step, count))
        features = network.encoder(images)
        logits = bench.logits(features)
        seen = Step(features, logits, labels, bench.params, shared, memory, counts, partial(encode, images))
        value = objective(terms, seen).value()
        gradients = torch.autograd.grad(value, values)
        update(gradients if correction is None else torch._foreach_add(gradients, correction))
        total += value.item() * count
    return total


def sgd(values: list[Tensor], local: Local) -> Callable[[tuple[Tensor, ...]], None]:
    """PyTorch's SGD (v ← m·v + g + λ·w, v₀ = g; w ← w − η·v) as one fused call for all parameters."""
    moving = local.momentum != 0
    velocity = [torch.empty_like(value) for value in values] if moving else []
    first = True

    def update(gradients: tuple[Tensor, ...]) -> None:
        nonlocal first
        with torch.no_grad():
            torch._fused_sgd_(
                values,
                [gradient.contiguous() for gradient in gradients],  # the fused call reads memory, not strides
                velocity,
                weight_decay=local.weight_decay,
                momentum=local.momentum,
                lr=local.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=first,
            )
        first = False

    return update


def accumulated(steps: int, momentum: float) -> float:
    """‖a‖₁: how many plain gradients so many steps of SGD with momentum add up to.

    With gradients g₁ … g_τ the model moves by η·Σ a_t·g_t, a_t = (1 − m^(τ−t+1)) / (1 − m); without momentum ‖a‖₁ = τ.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def _references(bench: "Bench", shared: Tensors, memory: Tensors) -> Callable[[Tensor, str], Tensor]:
    """The features of images under another model than the client's: loaded when first asked for, once a visit."""
    loaded: dict[str, torch.nn.Module] = {}

    def encode(images: Tensor, name: str) -> Tensor:
        if name not in loaded:
            model = shared if name == "shared" else tensors.under(memory, f"{name}/")
            loaded[name] = bench.reference(name, model)
        with torch.no_grad():
            features: Tensor = loaded[name](images)
        return features

    return encode


def _correction(bench: "Bench", shared: Tensors, memory: Tensors) -> list[Tensor] | None:
    correct = bench.algorithm.correction
    if correct is None:
        return None
    found = correct(shared, memory)
    return [found[name] for name in bench.params] if found else None


def _row(batches: Plan, step: int, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if batches.shift is None or batches.flip is None:
        return batches.index[step, :count], None, None
    return batches.index[step, :count], batches.shift[step, :count], batches.flip[step, :count]
