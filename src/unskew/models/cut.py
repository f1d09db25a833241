"""Cuts a network into a feature extractor and the linear layers that calibration replaces."""

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn

from unskew.core.errors import UserError
from unskew.models.any_module import AnyNetwork, Features, evaluating, same_output
from unskew.models.networks import Network, device_of

BETWEEN = (nn.ReLU, nn.Flatten, nn.Identity, nn.Dropout, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU)  # allowed in the head


def cut(network: Network, layers: int = 1) -> tuple[nn.Module, nn.Module]:
    """(images -> features [B, d], features -> logits [B, C]); the second part has this many linear layers.

    With 1 they are encoder and classifier. With more, the cut is before the activation that precedes the first of
    these layers, since pre-activations are closer to Gaussian. The parts share the network's weights.
    """
    if layers == 1:
        return network.encoder, network.classifier
    before = _before_classifier(network)
    starts = _starts([part for _, part in before])
    most = len(starts) + 1
    if not starts:
        needed = "it must be an nn.Sequential ending in several linear layers"
        raise UserError(f"layers={layers}: this network cannot be split earlier ({needed}); give layers=1")
    if not 1 < layers <= most:
        raise UserError(f"layers={layers}: this network ends in {most} linear layers; give 1 to {most}")
    start = starts[layers - 2]
    rest = nn.Sequential(OrderedDict((name, _not_in_place(part)) for name, part in before[start:]))
    if isinstance(network, AnyNetwork):
        encoder: nn.Module = Features(network.module, before[start][1])
    else:
        first = nn.Sequential(OrderedDict(before[:start]))
        first.training = network.training
        encoder = nn.Sequential(first, nn.Flatten())
    head = nn.Sequential(OrderedDict(encoder=rest, classifier=network.classifier))  # named as in our own networks
    for part in (rest, encoder, head):
        part.training = network.training  # otherwise restoring their mode later would change the network's
    if isinstance(network, AnyNetwork) and not same_output(network.module, encoder, head, network.shape):
        raise UserError(f"layers={layers}: this network's last layers do not run in sequence; give layers=1")
    return encoder, head


def _before_classifier(network: Network) -> list[tuple[str, nn.Module]]:
    """The parts of the nn.Sequential before the classifier, with their names; empty without one."""
    if not isinstance(network, AnyNetwork):
        encoder = network.encoder  # below: named_children would skip a module's second occurrence
        return list(encoder._modules.items()) if isinstance(encoder, nn.Sequential) else []
    for owner in network.module.modules():
        parts = list(owner._modules.items()) if isinstance(owner, nn.Sequential) else []
        index = next((n for n, (_, part) in enumerate(parts) if part is network.classifier), None)
        if index is not None:
            return parts[:index]
    return []


def _starts(parts: list[nn.Module]) -> list[int]:
    """Where the network may be cut: before the activation after its second-to-last linear layer, and so on."""
    starts: list[int] = []
    for index in reversed(range(len(parts))):
        if isinstance(parts[index], nn.Linear):
            starts.append(index)
        elif not isinstance(parts[index], BETWEEN):
            break
        elif starts:
            starts[-1] = index
    return starts


def _not_in_place(part: nn.Module) -> nn.Module:
    """Replace an in-place activation, which would overwrite its input."""
    if getattr(part, "inplace", False):
        part = copy.copy(part)
        part.inplace = False  # type: ignore[assignment]
    return part


def width_of(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """The number of features that the encoder returns for images of this shape."""
    part = next(encoder.parameters(), torch.zeros(0))
    with evaluating(encoder), torch.no_grad():
        features: Tensor = encoder(torch.zeros(1, *shape, dtype=part.dtype, device=device_of(encoder)))
    return features.shape[1]
