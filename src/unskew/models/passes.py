"""A network's forward and backward pass by hand: the calls that autograd makes, in its order, without its bookkeeping.

The bits are autograd's. With few examples in a batch the calls are short, and recording them, finding them again and
starting them from there takes as long as what they compute. Only networks whose every layer is known here have one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unskew.models.conv_pool import FIRST, LATER, ConvPool
from unskew.models.networks import Network

Forward = Callable[[Tensor], tuple[Tensor, Any]]  # input -> output, what the way back needs
Backward = Callable[[Tensor, Any], tuple[Tensor | None, tuple[Tensor, ...]]]
"""The output's gradient -> the input's (None for a first layer) and those of the layer's own parameters."""

Layer = tuple[Forward, Backward]

_log_softmax = torch.ops.aten._log_softmax.default
_log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default
_losses = torch.ops.aten.nll_loss_forward.default
_losses_backward = torch.ops.aten.nll_loss_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default


@dataclass(frozen=True)
class Passes:
    """The layers of a network's encoder and its classifier, each with its way forward and back."""

    encoder: tuple[Layer, ...]
    classifier: Layer
    params: tuple[Tensor, ...]  # the encoder's, as autograd knows them

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The mean cross-entropy, and its gradients in the order of the network's parameters."""
        with torch.inference_mode():
            layers = (*self.encoder, self.classifier)
            logits, saved = _forward(layers, images)
            loss, above = _cross_entropy(logits, labels)
            return loss, _backward(layers, above, saved)

    def encode(self, images: Tensor) -> Tensor:
        """The features, to autograd one step from images and parameters: for any other objective."""
        features: Tensor = _Encoded.apply(self.encoder, images, *self.params)  # type: ignore[no-untyped-call]
        return features


def build_passes(network: nn.Module) -> Passes | None:
    """A network's passes by hand; None where a layer is not known here, or not on the CPU."""
    if type(network) is not Network or type(network.encoder) is not nn.Sequential:
        return None
    parts = [*network.encoder, network.classifier]
    if not all(_known(part) for part in [network, network.encoder, *parts]):
        return None
    if len({id(value) for value in network.parameters()}) < sum(len(list(part.parameters())) for part in parts):
        return None  # a layer that occurs twice: autograd adds its gradients
    *encoder, classifier = (LAYERS[type(part)](part, index == 0) for index, part in enumerate(parts))
    return Passes(tuple(encoder), classifier, tuple(network.encoder.parameters()))


class _Encoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: Sequence[Layer], images: Tensor, *params: Tensor) -> Tensor:
        features, saved = _forward(layers, images)
        ctx.layers, ctx.saved = layers, saved
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_backward(ctx.layers, gradients[0], ctx.saved)


def _known(part: nn.Module) -> bool:
    """Whether autograd would see nothing of this module but its own parameters, all of them trained."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    plain = type(part) in LAYERS or type(part) in (Network, nn.Sequential)
    trained = all(value.requires_grad and value.device.type == "cpu" for value in part.parameters(recurse=False))
    return plain and trained and not any(hooks) and getattr(part, "bias", 0) is not None


def _forward(layers: Sequence[Layer], value: Tensor) -> tuple[Tensor, list[Any]]:
    saved: list[Any] = []
    for forward, _ in layers:
        value, kept = forward(value)
        saved.append(kept)
    return value, saved


def _backward(layers: Sequence[Layer], above: Tensor, saved: Sequence[Any]) -> list[Tensor]:
    found: list[tuple[Tensor, ...]] = []
    for (_, backward), kept in zip(reversed(layers), reversed(saved), strict=True):
        below, own = backward(above, kept)
        above = above if below is None else below  # None at the first layer, which is the last one here
        found.append(own)
    return [gradient for own in reversed(found) for gradient in own]


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logarithms = _log_softmax(logits, 1, False)
    losses, weight = _losses(logarithms, labels, None, 0, -100)
    share = torch.full_like(losses, 1 / len(labels))
    above = _losses_backward(share, logarithms, labels, None, 0, -100, weight)
    return losses.mean(), _log_softmax_backward(above, logarithms, 1, logits.dtype)


def _linear(part: nn.Linear, first: bool) -> Layer:
    weight, bias = part.weight.detach(), part.bias.detach()

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, weight, bias), x

    def backward(gradient: Tensor, x: Tensor) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
        own = gradient.t().mm(x), gradient.sum(0)
        return None if first else gradient.mm(weight), own

    return forward, backward


def _relu(part: nn.ReLU, first: bool) -> Layer:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        result = x.relu() if first else x.relu_()  # no layer before it needs its own output on the way back
        return result, result

    def backward(gradient: Tensor, result: Tensor) -> tuple[Tensor | None, tuple[()]]:
        return _relu_backward(gradient, result, 0), ()

    return forward, backward


def _flatten(part: nn.Flatten, first: bool) -> Layer:
    def forward(x: Tensor) -> tuple[Tensor, torch.Size]:
        return x.flatten(part.start_dim, part.end_dim), x.shape

    def backward(gradient: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[()]]:
        return gradient.view(shape), ()

    return forward, backward


def _conv_pool(part: ConvPool, first: bool) -> Layer:
    weight, bias = part.weight.detach(), part.bias.detach()  # type: ignore[union-attr]  # one without a bias is not known
    forward, backward = FIRST if first else LATER

    def back(gradient: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
        below, *own = backward(gradient, saved)
        return below, (own[0], own[1])

    return lambda x: forward(x, weight, bias), back


LAYERS: Mapping[type[nn.Module], Callable[[Any, bool], Layer]] = {
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.Flatten: _flatten,
    ConvPool: _conv_pool,
}
