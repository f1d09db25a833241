"""Where a network can be cut so that the frozen part runs once for each image: its output is stored, the rest trained.

The cut is one tensor. It is proven: the two parts together must do what the network does.

Shapes: B images [B, ch, H, W], what the frozen part makes of them [B, …], features [B, d].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from unskew.models.any_module import AnyNetwork, run_probe, same_output
from unskew.models.finetune import FineTuned, last_layers
from unskew.models.layers import Network
from unskew.models.networks import Shape

MODAL = ("dropout", "batch_norm", "instance_norm", "rrelu")  # functions that are told whether the network trains


class Tail(nn.Module):
    """What follows the frozen part, [B, …] in the shape that images have -> features [B, d]."""

    def __init__(self, rest: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.rest = rest
        self.shape = shape  # of one image's output of the frozen part, as the rest takes it

    def forward(self, stored: Tensor) -> Tensor:
        """Through the layers before the classifier that are not frozen."""
        features: Tensor = self.rest(stored.reshape(len(stored), *self.shape))
        return features.flatten(1)


@dataclass(frozen=True)
class Cut:
    """A network in two: images -> what is stored, with its shape, and what is stored -> features."""

    front: nn.Module
    tail: Tail

    @property
    def shape(self) -> Shape:
        """[ch, h, w] of what is stored for one image."""
        if len(self.tail.shape) > 3:
            return int(torch.Size(self.tail.shape).numel()), 1, 1
        channels, height, width = (*self.tail.shape, 1, 1)[:3]
        return channels, height, width


def find_cut(network: Network, shape: Shape, count: int) -> Cut | None:
    """The latest cut before the last ``count`` layers; None where none can be proven."""
    if count == 1:
        width = network.classifier.in_features
        return Cut(network.encoder, Tail(nn.Identity(), (width,)))
    trained = last_layers(network, shape, count)[0]
    module = network.module if isinstance(network, AnyNetwork) else network
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        return _traced_cut(network, module, trained, shape)
    finally:
        for part, mode in modes.items():
            part.training = mode


def fine_tuned(network: Network, shape: Shape, count: int, *, stored: bool) -> FineTuned:
    """The network with its last ``count`` layers trained; ``stored``: it is given the frozen part's output."""
    trained, live = last_layers(network, shape, count)
    cut = find_cut(network, shape, count) if stored else None
    if stored and cut is None:
        raise ValueError("this network cannot be cut")
    return FineTuned(network, trained, live, None if cut is None else cut.tail)


class _Innermost(fx.Tracer):
    """Looks into every module that has parts; those without run as they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not m._modules


def _traced_cut(network: Network, module: nn.Module, trained: Sequence[nn.Module], shape: Shape) -> Cut | None:
    try:
        graph = _Innermost().trace(module)
    except Exception:  # noqa: BLE001  a forward that depends on its values cannot be traced: it raises anything
        return None
    by_name = dict(module.named_modules())
    nodes = list(graph.nodes)
    called = {node: by_name.get(str(node.target)) for node in nodes if node.op == "call_module"}
    classifier = [node for node, part in called.items() if part is network.classifier]
    places = [place for place, node in enumerate(nodes) if any(called.get(node) is part for part in trained)]
    images = [node for node in nodes if node.op == "placeholder"]
    if len(classifier) != 1 or len(images) != 1 or not classifier[0].all_input_nodes:
        return None
    end = classifier[0].all_input_nodes[0]
    for start in reversed(nodes[: places[0]]):
        if start.op in ("placeholder", "get_attr"):
            continue
        rest, front = _between(nodes, start, end), _between(nodes, images[0], start)
        if rest is None or front is None or any(_modal(node) for node in rest):
            continue
        first, second = _module(module, images[0], front, start), _module(module, start, rest, end)
        given = run_probe(first, "frozen", shape)
        if not isinstance(given, Tensor) or given.dtype != torch.float32 or given.dim() < 2 or len(given) != 2:
            continue
        cut = Cut(first, Tail(second, tuple(given.shape[1:])))
        if same_output(module, first, nn.Sequential(cut.tail, network.classifier), shape):
            return cut
    return None


def _between(nodes: Sequence[fx.Node], start: fx.Node, end: fx.Node) -> list[fx.Node] | None:
    """What computes ``end`` from ``start`` and nothing else, in the order of the network; None where it needs more."""
    needed, left = {end}, [end]
    while left:
        node = left.pop()
        if node is start:
            continue
        if node.op == "placeholder":
            return None
        new = set(node.all_input_nodes) - needed
        needed |= new
        left += new
    return [node for node in nodes if node in needed and node is not start] if start in needed else None


def _module(owner: nn.Module, start: fx.Node, between: Sequence[fx.Node], end: fx.Node) -> nn.Module:
    """A module of these steps, with the owner's own layers under their own names."""
    graph = fx.Graph()
    made = {start: graph.placeholder("given")}
    for node in between:
        made[node] = graph.node_copy(node, lambda old: made[old])
    graph.output(made[end])
    return fx.GraphModule(owner, graph)


def _modal(node: fx.Node) -> bool:
    """Whether the step was traced with the network's mode in it, which is not the mode that it will have."""
    if node.op != "call_function":
        return False
    return "training" in node.kwargs or getattr(node.target, "__name__", "").rstrip("d123_") in MODAL
