"""A network in two parts: what describes an image, and the linear layers that calibration makes new."""

import copy
from collections import OrderedDict

from torch import nn

from unskew.core.errors import UserError
from unskew.core.units import counted
from unskew.models.any_module import AnyNetwork, Features, same_output
from unskew.models.networks import Network

BETWEEN = (nn.ReLU, nn.Flatten, nn.Identity, nn.Dropout, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU)  # linear layers


def cut(network: Network, layers: int = 1) -> tuple[nn.Module, nn.Module]:
    """(images -> features [B, d], features -> logits [B, C]); the second part has this many linear layers.

    With 1 they are encoder and classifier. With more, the cut is before the activation that precedes the first of
    these layers: what a layer sums up is closer to Gaussian than what ReLU leaves of it. The parts share the network's
    weights.
    """
    if layers == 1:
        return network.encoder, network.classifier
    before = _before_classifier(network)
    starts = _starts([part for _, part in before])
    if not 1 < layers <= len(starts) + 1:
        where = "" if before else " that can be found (only an nn.Sequential can be split)"
        ends = counted(len(starts) + 1, "linear layer")
        most = "1 to that many" if starts else "1"
        raise UserError(f"layers={layers}: this network ends in {ends}{where}; give {most}")
    start = starts[layers - 2]
    rest = nn.Sequential(OrderedDict((name, _not_in_place(part)) for name, part in before[start:]))
    if isinstance(network, AnyNetwork):
        encoder: nn.Module = Features(network.module, before[start][1])
    else:
        first = nn.Sequential(OrderedDict(before[:start]))
        first.training = network.training
        encoder = nn.Sequential(first, nn.Flatten())
    head = nn.Sequential(OrderedDict(encoder=rest, classifier=network.classifier))  # our own networks' names
    for made in (rest, encoder, head):
        made.training = network.training  # or restoring their mode later would change the network's
    if isinstance(network, AnyNetwork) and not same_output(network.module, encoder, head, network.shape):
        raise UserError(f"layers={layers}: this network's last layers do not run one after another; give layers=1")
    return encoder, head


def _before_classifier(network: Network) -> list[tuple[str, nn.Module]]:
    """The parts of the nn.Sequential that runs before the classifier, with their names; none where it is not one."""
    if not isinstance(network, AnyNetwork):
        # not named_children: it leaves out a module that is there a second time
        encoder = network.encoder
        return list(encoder._modules.items()) if isinstance(encoder, nn.Sequential) else []
    for owner in network.module.modules():
        parts = list(owner._modules.items()) if isinstance(owner, nn.Sequential) else []
        index = next((n for n, (_, part) in enumerate(parts) if part is network.classifier), None)
        if index is not None:
            return parts[:index]
    return []


def _starts(parts: list[nn.Module]) -> list[int]:
    """Where the network may be cut: before the activation of its last linear layer but one, but two, …"""
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
    """An activation that would overwrite the features it is given, as one that does not."""
    if getattr(part, "inplace", False):
        part = copy.copy(part)
        part.inplace = False  # type: ignore[assignment]
    return part
