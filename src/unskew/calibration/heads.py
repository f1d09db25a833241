"""The linear layers behind the features: copies, blank layers, new rows, the last layer, their device."""

import copy

import torch
from torch import Tensor, nn

from unskew.core.errors import UserError, a_kind

NEVER = -1e9  # the logit of a class without a row in a new classifier: below all others


def copy_of(head: nn.Module) -> nn.Module:
    """A trainable copy of the same layers in eval mode, even where the given ones are frozen.

    A single linear layer gets a bias where it had none.
    """
    if not isinstance(head, nn.Linear):
        return copy.deepcopy(head).eval().requires_grad_()
    made = blank(head.in_features, head.out_features, head.weight.dtype, head.weight.device)
    with torch.no_grad():
        made.weight.copy_(head.weight)
        if head.bias is None:
            made.bias.zero_()
        else:
            made.bias.copy_(head.bias)
    return made


def outside_inference(head: nn.Module) -> nn.Module:
    """The same module; a copy of one that was made in inference mode, whose tensors autograd refuses."""
    made_inside = any(value.is_inference() for value in (*head.parameters(), *head.buffers()))
    return copy.deepcopy(head) if made_inside else head


def last_linear(head: nn.Module) -> nn.Linear:
    """The layer whose rows belong to the classes."""
    layers = [part for part in head.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise UserError(f"a classifier must end in an nn.Linear; this is {a_kind(head)} without one")
    return layers[-1]


def blank(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Linear:
    """A layer that draws no weights: they are about to be overwritten."""
    return nn.Linear(inputs, outputs, dtype=dtype, device="meta").to_empty(device=device)


def with_rows(head: nn.Module | None, weight: Tensor, bias: Tensor, held: Tensor, classes: int) -> nn.Linear:
    """A linear layer that has these rows [P, d] and biases [P] for the classes held.

    The others keep the rows of a linear head of the same width; where there is no such head they are never predicted.
    """
    width = weight.shape[1]
    if isinstance(head, nn.Linear) and head.in_features == width:
        linear = copy_of(head)
    else:
        like = torch.zeros(0) if head is None else last_linear(head).weight
        linear = blank(width, classes, like.dtype, like.device)
        nn.init.zeros_(linear.weight)
        nn.init.constant_(linear.bias, max(NEVER, torch.finfo(linear.bias.dtype).min))
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        rows = held.to(linear.weight.device)
        linear.weight[rows] = weight.to(linear.weight)
        linear.bias[rows] = bias.to(linear.bias)
    return linear


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: the device of its first parameter or buffer; the CPU where it has none."""
    for value in (*module.parameters(), *module.buffers()):
        return value.device
    return torch.device("cpu")
