"""Hand-written forward and backward passes: the same calls as autograd's, in the same order, without its bookkeeping.

The bits are autograd's. For small batches, autograd's bookkeeping takes as long as the computation. Only networks
whose every layer is in ``LAYERS`` have such passes.
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

Forward = Callable[[Tensor], tuple[Tensor, Any]]  # input -> output, what the backward pass needs
Backward = Callable[[Tensor, Any], tuple[Tensor | None, tuple[Tensor, ...]]]
"""The output's gradient -> the input's (None for a first layer) and those of the layer's parameters."""

Layer = tuple[Forward, Backward]

_log_softmax = torch.ops.aten._log_softmax.default
_log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default
_losses = torch.ops.aten.nll_loss_forward.default
_losses_backward = torch.ops.aten.nll_loss_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default


@dataclass(frozen=True)
class Passes:
    """The forward and backward functions of a network's encoder layers and classifier."""

    encoder: tuple[Layer, ...]
    classifier: Layer
    params: tuple[Tensor, ...]  # the encoder's, for autograd

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The mean cross-entropy, and its gradients in the order of the network's parameters."""
        with torch.inference_mode():
            layers = (*self.encoder, self.classifier)
            logits, saved = _forward(layers, images)
            loss, above = _cross_entropy(logits, labels)
            return loss, _backward(layers, above, saved)

    def encode(self, images: Tensor) -> Tensor:
        """The features as one autograd function of images and parameters, for other objectives."""
        features: Tensor = _Encoded.apply(self.encoder, images, *self.params)  # type: ignore[no-untyped-call]
        return features


def build_passes(network: nn.Module) -> Passes | None:
    """A network's passes; None if a layer is not in ``LAYERS`` or not on the CPU."""
    if type(network) is not Network or type(network.encoder) is not nn.Sequential:
        return None
    parts = [*network.encoder, network.classifier]
    if not all(_known(part) for part in [network, network.encoder, *parts]):
        return None
    if len({id(value) for value in network.parameters()}) < sum(len(list(part.parameters())) for part in parts):
        return None  # a layer occurs twice: autograd would add its gradients
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
    """Whether the module is plain: a known type without hooks, all its parameters trained on the CPU."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    plain = type(part) in LAYERS or type(part) in (Network, nn.Sequential)
    trained = all(value.requires_grad and value.device.type == "cpu" for value in part.parameters(recurse=False))
    return plain and trained and not any(hooks) and getattr(part, "bias", 0) is not None


def _forward(layers: Sequence[Layer], value: Tensor) -> tuple[Tensor, list[Any]]:
    saved: list[Any] = []
    for forward, _ in layers:
        value, state = forward(value)
        saved.append(state)
    return value, saved


def _backward(layers: Sequence[Layer], above: Tensor, saved: Sequence[Any]) -> list[Tensor]:
    by_layer: list[tuple[Tensor, ...]] = []
    for (_, backward), state in zip(reversed(layers), reversed(saved), strict=True):
        below, gradients = backward(above, state)
        above = above if below is None else below  # None at the first layer, the last one in this loop
        by_layer.append(gradients)
    return [gradient for gradients in reversed(by_layer) for gradient in gradients]


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
        gradients = gradient.t().mm(x), gradient.sum(0)
        return None if first else gradient.mm(weight), gradients

    return forward, backward


def _relu(part: nn.ReLU, first: bool) -> Layer:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        result = x.relu() if first else x.relu_()  # the layer before does not need its output in the backward pass
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
    weight, bias = part.weight.detach(), part.bias.detach()  # type: ignore[union-attr]  # _known requires a bias
    forward, backward = FIRST if first else LATER
    return lambda x: forward(x, weight, bias), backward


LAYERS: Mapping[type[nn.Module], Callable[[Any, bool], Layer]] = {
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.Flatten: _flatten,
    ConvPool: _conv_pool,
}
