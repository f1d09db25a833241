"""A client's training: steps along the plan of its batches, on the objective that the methods put together."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.types import Local, Step, Tensors
from unskew.data.batches import Plan
from unskew.models.layers import Network
from unskew.round.local_optimizers import clipped, optimizer
from unskew.round.objective import objective

if TYPE_CHECKING:
    from unskew.round.client import ClientSide


def descend(side: "ClientSide", shared: Tensors, memory: Tensors, client: int, batches: Plan, local: Local) -> float:
    """Steps along the plan, in place; the sum of the loss over all examples seen. All of it is on the side's device."""
    losses = list[Tensor]()
    update = optimizer(side.trained, local, len(batches.counts))
    by_hand = side.passes if side.plain else None
    gradients_of = _by_autograd(side, shared, memory, client) if by_hand is None else by_hand.gradients
    correction = _correction(side, shared, memory)
    for step, count in enumerate(batches.counts):
        loss, gradients = gradients_of(*side.train.batch(*_row(batches, step, count)))
        if local.clip:  # before a correction is added, so that scaffold's control variates are means of what is clipped
            gradients = clipped(gradients, local.clip)
        update(gradients if correction is None else torch._foreach_add(list(gradients), correction))
        losses.append(loss)  # read after the last step: reading one waits for the device
    return _total(losses, batches.counts)


def _by_autograd(
    side: "ClientSide", shared: Tensors, memory: Tensors, client: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Sequence[Tensor]]]:
    """From images and labels to the loss that the methods make and its gradients."""
    algorithm, counts = side.algorithm, side.counts(client).to(side.device)
    encoder = side.network.encoder if side.passes is None else side.passes.encode
    encode, predict = _references(side, shared, memory)

    def gradients_of(images: Tensor, labels: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        features = encoder(images)
        logits = side.logits(features)
        others = partial(encode, images), partial(predict, images)
        seen = Step(features, logits, labels, side.params, shared, memory, counts, *others, side.classifier)
        value = objective(algorithm, seen).value()
        gradients = torch.autograd.grad(value, side.trained, materialize_grads=True)  # zero for one that is not used
        return value.detach(), gradients

    return gradients_of


def _total(losses: list[Tensor], counts: Sequence[int]) -> float:
    """Σ loss·count, in the order of the steps."""
    if len(losses) == 1:
        return losses[0].item() * counts[0]
    total = 0.0
    for loss, count in zip(torch.stack(losses).flatten().tolist() if losses else [], counts, strict=True):
        total += loss * count
    return total


def accumulated(steps: int, momentum: float) -> float:
    """‖a‖₁: how many plain gradients these steps of SGD with momentum add up to.

    With gradients g₁ … g_τ the model moves by η·Σ a_t·g_t, a_t = (1 − m^(τ−t+1)) / (1 − m); without momentum ‖a‖₁ = τ.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


Reference = Callable[[Tensor, str], Tensor]  # images, the model's name -> what that model makes of them


def _references(side: "ClientSide", shared: Tensors, memory: Tensors) -> tuple[Reference, Reference]:
    """Features and logits under a model other than the client's own. A model is loaded at first use, once a visit."""
    loaded: dict[str, Network] = {}

    def network(name: str) -> Network:
        if name not in loaded:
            model = shared if name == "shared" else tensors.under(memory, f"{name}/")
            loaded[name] = side.reference(name, model)
        return loaded[name]

    def encode(images: Tensor, name: str) -> Tensor:
        with torch.no_grad():
            features: Tensor = network(name).encoder(images)
        return features

    def predict(images: Tensor, name: str) -> Tensor:
        with torch.no_grad():
            return side.logits(encode(images, name), network(name).classifier)

    return encode, predict


def _correction(side: "ClientSide", shared: Tensors, memory: Tensors) -> list[Tensor] | None:
    correct = side.algorithm.correction
    if correct is None:
        return None
    added = correct(shared, memory)
    return [added[name] for name in side.params] if added else None


def _row(batches: Plan, step: int, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if batches.shift is None or batches.flip is None:
        return batches.index[step, :count], None, None
    return batches.index[step, :count], batches.shift[step, :count], batches.flip[step, :count]
