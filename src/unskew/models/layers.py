"""Layers whose fast form needs saying: convolution and 2×2 max-pooling as one, and networks in two parts.

Pooling comes before ReLU: both are monotone, so the function and its gradient are the same, on a quarter of the values.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Network(nn.Module):
    """Encoder and classifier apart: ``classifier(encoder(images))``."""

    def __init__(self, encoder: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C]."""
        logits: Tensor = self.classifier(self.encoder(images))
        return logits

    @property
    def classifier_names(self) -> tuple[str, ...]:
        """The classifier's weight and, where it has one, its bias, as the state's tensors are named."""
        names = {id(value): f"params/{name}" for name, value in self.named_parameters()}
        own = (self.classifier.weight, self.classifier.bias)
        return tuple(names[id(value)] for value in own if value is not None)


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters such as ``params/encoder.fc1.weight`` grouped by their layer, ``fc1``, in the order of the network.

    A parameter that belongs to no layer, such as ``params/cls_token``, is a layer by its own name.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        plain = name.partition("/")[2]
        layers.setdefault(plain.rpartition(".")[0] or plain, []).append(name)
    short = layer_names(layers)
    return {short[layer]: parameters for layer, parameters in layers.items()}


def layer_names(modules: Iterable[str]) -> dict[str, str]:
    """Layers' names without the part of the network that they belong to, unless two would then be the same."""
    short = {name: name.removeprefix("encoder.") or name for name in modules}
    return short if len(set(short.values())) == len(short) else {name: name for name in short}


class ConvPool(nn.Conv2d):
    """``max_pool2d(conv2d(x), 2)`` for stride 1 and no padding, in the form that is fastest on a CPU for few channels.

    The function and its gradient are those of the plain form; ``plain`` says it, and the tests hold one to the other.
    """

    def plain(self, x: Tensor) -> Tensor:
        """The definition: [B, in, H, W] -> [B, out, (H − k + 1) // 2, (W − k + 1) // 2]."""
        return F.max_pool2d(F.conv2d(x, self.weight, self.bias), 2)

    def forward(self, x: Tensor) -> Tensor:
        """The same, through whichever of the two forms below suits."""
        if x.device.type != "cpu" or self.bias is None:
            return self.plain(x)
        if x.requires_grad:
            mixed: Tensor = _MixedConv.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return F.max_pool2d(mixed, 2)
        pooled: Tensor = _PhasedConvPool.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return pooled


class _PhasedConvPool(torch.autograd.Function):
    """For a network's first layer, whose input needs no gradient.

    The four outputs that meet in one pooling window come from one convolution of stride 2 whose kernel is one larger:
    four shifted copies of the weights side by side. Few output channels leave a CPU's vector lanes idle; four times as
    many fill them, and pooling becomes a maximum over four contiguous blocks.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, inside, height, width = weight.shape
        placed = weight.reshape(out * inside, -1) @ _placement(height, width, weight.dtype)
        wide = placed.view(out, inside, 4, height + 1, width + 1).permute(2, 0, 1, 3, 4).flatten(0, 1)
        phases = F.conv2d(x, wide, torch.cat((bias,) * 4), stride=2)  # [B, 4·out, h, w]
        pooled, index = torch.ops.aten.max_pool2d_with_indices(_stacked(phases), [4, 1], [4, 1])
        ctx.save_for_backward(x, wide, phases, index)
        return pooled.view(len(x), out, *phases.shape[2:])  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        x, wide, phases, index = ctx.saved_tensors  # type: ignore[attr-defined]
        out, inside, height, width = wide.shape[0] // 4, wide.shape[1], wide.shape[2] - 1, wide.shape[3] - 1
        whole = torch.ops.aten.max_pool2d_with_indices_backward(
            _stacked(gradients[0], 1), _stacked(phases), [4, 1], [4, 1], [0, 0], [1, 1], False, index
        )
        _, wide_gradient, bias_gradient = _backward(whole.permute(0, 2, 3, 1).reshape(phases.shape), x, wide, stride=2)
        by_pixel = wide_gradient.view(4, out, *wide.shape[1:]).permute(1, 2, 0, 3, 4).reshape(out * inside, -1)
        weight_gradient = (by_pixel @ _placement(height, width, wide.dtype).t()).view(out, inside, height, width)
        return None, weight_gradient, bias_gradient.view(4, out).sum(0)


@lru_cache(maxsize=8)
def _placement(height: int, width: int, dtype: torch.dtype) -> Tensor:
    """[k·k, 4·(k+1)·(k+1)] of zeros and ones: the place of each weight of a kernel in its four shifted copies."""
    places = torch.arange(height * width).view(height, width)
    shifted = [F.pad(places, (right, 1 - right, down, 1 - down), value=-1) for down in (0, 1) for right in (0, 1)]
    return (torch.stack(shifted).flatten()[None] == places.flatten()[:, None]).to(dtype)


def _stacked(phases: Tensor, count: int = 4) -> Tensor:
    """[B, 4·out, h, w] seen as [B, out·h·w, 4, 1], channels last: max-pooling is then vectorised over out·h·w."""
    return phases.reshape(len(phases), count, 1, -1).permute(0, 3, 1, 2)


class _MixedConv(torch.autograd.Function):
    """For a later layer: channels last where that is faster (forward, weights), channels first where not (input)."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        last = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(last, weight)
        return F.conv2d(last, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        last, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        _, weight_gradient, bias_gradient = _backward(gradients[0], last, weight, stride=1)
        return F.conv_transpose2d(gradients[0].contiguous(), weight), weight_gradient, bias_gradient


def _backward(gradient: Tensor, x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's own gradients of a convolution with respect to weight and bias, not to its input."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient, x, weight, [len(weight)], [stride, stride], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True]
    )
    return gradients
