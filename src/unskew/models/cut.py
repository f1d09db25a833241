"""A network in two parts: what describes an image, and the linear layers that may be made anew afterwards."""

from collections import OrderedDict

from torch import nn

from unskew.core.errors import UserError
from unskew.models.layers import Network

BETWEEN = (nn.ReLU, nn.Flatten, nn.Identity, nn.Dropout, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU)  # linear layers


def cut(network: Network, layers: int = 1) -> tuple[nn.Module, nn.Module]:
    """(images -> features [B, d], features -> logits [B, C]); the second part holds so many linear layers.

    With 1 they are encoder and classifier. With more, the cut lies before the activation that precedes the first of
    these layers: what a layer sums up is closer to Gaussian than what ReLU leaves of it. The parts share the network's
    weights.
    """
    if layers == 1:
        return network.encoder, network.classifier
    starts = _starts(network)
    if not 1 < layers <= len(starts) + 1:
        raise UserError(f"layers={layers}: this network ends in {len(starts) + 1} linear layers; give 1 to that many")
    assert isinstance(network.encoder, nn.Sequential)
    # not named_children: it leaves out a module that stands there a second time
    parts, start = list(zip(network.encoder._modules, network.encoder, strict=True)), starts[layers - 2]
    first, rest = (nn.Sequential(OrderedDict(some)) for some in (parts[:start], parts[start:]))
    encoder = nn.Sequential(first, nn.Flatten())
    head = nn.Sequential(OrderedDict(encoder=rest, classifier=network.classifier))  # the network's own names
    for made in (first, rest, encoder, head):
        made.training = network.training  # or whoever restores their mode later would change the network's
    return encoder, head


def _starts(network: Network) -> list[int]:
    """Where the network may be cut: before the activation of its last linear layer but one, but two, …"""
    if not isinstance(network.encoder, nn.Sequential):
        return []
    parts, starts = list(network.encoder), list[int]()
    for place in reversed(range(len(parts))):
        if isinstance(parts[place], nn.Linear):
            starts.append(place)
        elif not isinstance(parts[place], BETWEEN):
            break
        elif starts:
            starts[-1] = place
    return starts
