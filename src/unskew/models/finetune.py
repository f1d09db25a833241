"""Training of only the last layers: ``all``, ``classifier`` or ``last(2)``.

Frozen layers are not in the network's named parameters and buffers: they are not sent, averaged or counted. Everything
before the first trained layer is in eval mode, so BatchNorm keeps its running statistics and dropout does nothing.

Shapes: B images [B, ch, H, W], features [B, d], logits [B, C].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from unskew.core.errors import UserError, nearest
from unskew.core.language import apply, parse_call
from unskew.core.units import counted
from unskew.models.any_module import TABLES, AnyNetwork, evaluating, run_probe, same_output
from unskew.models.networks import Network, Shape

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


def parse_train(source: str) -> int | None:
    """The number of layers to train, counted from the end: None for all, 1 for the classifier."""
    call = parse_call(source, "--train")
    if call.name not in TRAINED:
        raise call.error(f"--train: {nearest(call.name, ('all', 'classifier', 'last(2)'))}")
    layers: int | None = apply(call, TRAINED[call.name], "--train")
    return layers


def _last(layers: int) -> int:
    if layers < 1:
        raise ValueError(f"last({layers}): give a number of layers of at least 1")
    return layers


TRAINED: Mapping[str, Callable[..., int | None]] = {"all": lambda: None, "classifier": lambda: 1, "last": _last}


class FineTuned(Network):
    """A network whose named parameters and buffers are only those of its trained layers, under their usual names.

    ``encoder`` is the network's, or a part of it whose input is the frozen part's output; then the frozen part does
    not run at all.
    """

    whole: Network
    trained: tuple[nn.Module, ...]  # with weights
    live: tuple[nn.Module, ...]  # the trained layers, and those without weights after the first of them

    def __init__(
        self, network: Network, trained: Sequence[nn.Module], live: Sequence[nn.Module], encoder: nn.Module | None
    ) -> None:
        nn.Module.__init__(self)
        attributes = self.__dict__  # not setattr, which would register modules
        attributes |= {"whole": network, "origin": network.origin, "trained": tuple(trained), "live": tuple(live)}
        attributes |= {"encoder": encoder or network.encoder, "classifier": network.classifier}
        attributes |= {table: network.__dict__[table] for table in TABLES}  # shared, so names and values are the same
        chosen = self._chosen()
        for value in network.parameters():
            value.requires_grad_(value.requires_grad and id(value) in chosen)
        self.train(network.training)

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """What ``named_parameters`` and ``named_buffers`` list: the trained layers', named as in the whole network."""
        chosen, named = self._chosen(), super()._named_members(*args, **kwargs)
        return ((name, value) for name, value in named if id(value) in chosen)

    def train(self, mode: bool = True) -> "FineTuned":
        """Set the mode of the trained layers and those between and after them; all others stay in eval mode."""
        self.whole.train(False)
        self.training = mode
        for part in self.live:
            part.training = mode
        return self

    def _chosen(self) -> set[int]:
        return {id(value) for part in self.trained for value in (*part._parameters.values(), *part._buffers.values())}


def last_layers(network: Network, shape: Shape, count: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """The last ``count`` layers with weights, and these with the layers without weights after the first of them.

    A norm belongs to the layer before it. The classifier is the last layer, whatever runs in parallel.
    """
    ran: dict[nn.Module, None] = {}  # the innermost modules in the order in which they first run
    with ExitStack() as stack:
        for part in network.modules():
            if not part._modules:
                stack.callback(part.register_forward_hook(lambda layer, *_: ran.update({layer: None})).remove)
        run_probe(network, "to be fine-tuned", shape)
    order = [part for part in ran if part is not network.classifier]
    weighted = [part for part in order if part._parameters or part._buffers]
    starts = [index for index, part in enumerate(weighted) if not index or not isinstance(part, NORMS)]
    if count > len(starts) + 1:
        most = counted(len(starts) + 1, "layer")
        raise UserError(f"--train last({count}): this network has only {most} with weights; give fewer, or --train all")
    trained = weighted[starts[len(starts) + 1 - count] :] if count > 1 else []
    first = order.index(trained[0]) if trained else len(order)
    trained.append(network.classifier)
    live = [part for part in order[first:] if part in trained or part not in weighted]
    return trained, [*live, network.classifier]


MODAL = ("dropout", "batch_norm", "instance_norm", "rrelu")  # functions with an argument for the training mode


class Tail(nn.Module):
    """The part of the encoder after the frozen part: [B, …], its output stored like images -> features [B, d]."""

    def __init__(self, rest: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.rest = rest
        self.shape = shape  # of the frozen part's output for one image

    def forward(self, stored: Tensor) -> Tensor:
        """Run the layers between the frozen part and the classifier."""
        features: Tensor = self.rest(stored.reshape(len(stored), *self.shape))
        return features.flatten(1)


@dataclass(frozen=True)
class Cut:
    """An encoder in two parts: the frozen ``front``, whose output is stored, and the ``tail`` up to the features."""

    front: nn.Module
    tail: Tail

    @property
    def shape(self) -> Shape:
        """[ch, h, w] of the stored output for one image."""
        if len(self.tail.shape) > 3:
            return int(torch.Size(self.tail.shape).numel()), 1, 1
        channels, height, width = (*self.tail.shape, 1, 1)[:3]
        return channels, height, width


def find_cut(network: Network, shape: Shape, count: int) -> Cut | None:
    """The latest possible cut before the last ``count`` layers; None if none is known to be correct."""
    if count == 1:
        return Cut(network.encoder, Tail(nn.Identity(), (network.classifier.in_features,)))
    trained = last_layers(network, shape, count)[0]
    module = network.module if isinstance(network, AnyNetwork) else network
    try:
        with evaluating(module):
            graph = _Innermost().trace(module)
    except Exception:  # noqa: BLE001  tracing a data-dependent forward may raise anything
        return None
    by_name = dict(module.named_modules())
    nodes = list(graph.nodes)
    called = {node: by_name.get(str(node.target)) for node in nodes if node.op == "call_module"}
    classifier = [node for node, part in called.items() if part is network.classifier]
    positions = [index for index, node in enumerate(nodes) if any(called.get(node) is part for part in trained)]
    images = [node for node in nodes if node.op == "placeholder"]
    if len(classifier) != 1 or len(images) != 1 or not classifier[0].all_input_nodes:
        return None
    end = classifier[0].all_input_nodes[0]
    for start in reversed(nodes[: positions[0]]):
        if start.op in ("placeholder", "get_attr"):
            continue
        rest, front = _between(nodes, start, end), _between(nodes, images[0], start)
        if rest is None or front is None or any(_modal(node) for node in rest):
            continue
        first, second = _module(module, images[0], front, start), _module(module, start, rest, end)
        output = run_probe(first, "frozen", shape)
        if not isinstance(output, Tensor) or output.dtype != torch.float32 or output.dim() < 2 or len(output) != 2:
            continue
        cut = Cut(first, Tail(second, tuple(output.shape[1:])))
        if same_output(module, first, nn.Sequential(cut.tail, network.classifier), shape):
            return cut
    return None


def fine_tune(network: Network, shape: Shape, count: int, *, stored: bool) -> FineTuned:
    """The network with its last ``count`` layers trained; ``stored``: its input is the frozen part's output."""
    trained, live = last_layers(network, shape, count)
    cut = find_cut(network, shape, count) if stored else None
    return FineTuned(network, trained, live, None if cut is None else cut.tail)


class _Innermost(fx.Tracer):
    """Traces into every module that has children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not m._modules


def _between(nodes: Sequence[fx.Node], start: fx.Node, end: fx.Node) -> list[fx.Node] | None:
    """The nodes that compute ``end`` from ``start`` alone, in order; None if it depends on more."""
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
    graph = fx.Graph()
    copies = {start: graph.placeholder("x")}
    for node in between:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
    graph.output(copies[end])
    return fx.GraphModule(owner, graph)


def _modal(node: fx.Node) -> bool:
    """Whether the training mode during tracing is part of the node."""
    if node.op != "call_function":
        return False
    return "training" in node.kwargs or getattr(node.target, "__name__", "").rstrip("d123_") in MODAL
