"""The linear layers behind the features: copies, blank layers, the last layer, their device."""

import copy

import torch
from torch import nn

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


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: the device of its first parameter or buffer; the CPU where it has none."""
    for value in (*module.parameters(), *module.buffers()):
        return value.device
    return torch.device("cpu")
