"""Convolution and 2×2 max-pooling as one layer, in the forms that are fastest on a CPU for few channels.

Pooling comes before ReLU: both are monotone, so the function and its gradient are the same, on a quarter of the values.
A form is a pair of functions, forward and backward, so that autograd and hand-written passes make the same calls.
Forward returns the output and what backward needs to compute the gradients of input (or None), weight and bias.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, tuple[Tensor, Tensor]]  # of the input, and of weight and bias
Form = tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Saved]], Callable[[Tensor, Saved], Gradients]]

_pool = torch.ops.aten.max_pool2d_with_indices.default
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default
_conv_backward = torch.ops.aten.convolution_backward.default


class ConvPool(nn.Conv2d):
    """``max_pool2d(conv2d(x), 2)`` for stride 1 and no padding.

    ``plain`` is the definition; tests compare the function and its gradient with it.
    """

    def plain(self, x: Tensor) -> Tensor:
        """The definition: [B, in, H, W] -> [B, out, (H − k + 1) // 2, (W − k + 1) // 2]."""
        return F.max_pool2d(F.conv2d(x, self.weight, self.bias), 2)

    def forward(self, x: Tensor) -> Tensor:
        """``plain`` in the faster of the two forms below; exporters see the definition."""
        exported = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        if x.device.type != "cpu" or self.bias is None or exported:
            return self.plain(x)
        form = LATER if x.requires_grad else FIRST
        pooled: Tensor = _Formed.apply(form, x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return pooled


def first_forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Saved]:
    """For a network's first layer, whose input needs no gradient.

    The four outputs of a pooling window come from one convolution of stride 2 with four shifted copies of the weights,
    whose kernel is one larger. Few output channels leave a CPU's vector lanes idle; four times as many fill them, and
    pooling becomes a maximum over four contiguous blocks.
    """
    out, inside, height, width = weight.shape
    size = 4 * out * inside * (height + 1) * (width + 1)
    parts = torch.cat((weight.reshape(-1), bias, bias.new_zeros(1))).index_select(0, _sources(*weight.shape))
    wide = parts[:size].view(4 * out, inside, height + 1, width + 1)
    phases = F.conv2d(x, wide, parts[size:], stride=2)  # [B, 4·out, h, w]
    stacked = phases.reshape(len(x), 4, 1, -1).permute(0, 3, 1, 2)
    pooled, index = _pool(stacked, [4, 1], [4, 1])
    return pooled.view(len(x), out, *phases.shape[2:]), (x, wide, stacked, index)


def first_backward(gradient: Tensor, saved: Saved) -> Gradients:
    """The gradients of weight and bias, and None for the input."""
    x, wide, stacked, index = saved
    out, inside, height, width = wide.shape[0] // 4, wide.shape[1], wide.shape[2] - 1, wide.shape[3] - 1
    above = gradient.reshape(len(x), 1, 1, -1).permute(0, 3, 1, 2)
    unpooled = _pool_backward(above, stacked, [4, 1], [4, 1], [0, 0], [1, 1], False, index).permute(0, 2, 3, 1)
    unpooled = unpooled.reshape(len(x), 4 * out, *gradient.shape[2:])
    wide_gradient, bias_gradient = _weight_gradients(unpooled, x, wide, stride=2)
    by_pixel = wide_gradient.view(4, out, inside, -1).permute(1, 2, 0, 3).reshape(out * inside, -1)
    weight_gradient = (by_pixel @ _placement(height, width, wide.dtype).t()).view(out, inside, height, width)
    return None, (weight_gradient, bias_gradient.view(4, out).sum(0))


def later_forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Saved]:
    """For later layers: channels last where that is faster (forward, weights), channels first elsewhere (input)."""
    last = x.contiguous(memory_format=torch.channels_last)
    pooled, index = _pool(F.conv2d(last, weight, bias), [2, 2], [2, 2])
    return pooled, (last, weight, index)


def later_backward(gradient: Tensor, saved: Saved) -> Gradients:
    """The gradients of input, weight and bias; only the shape of the pooling's input is needed."""
    last, weight, index = saved
    (out, _, *kernel), (_, _, *sides) = weight.shape, last.shape
    shaped = last.new_empty(len(last), out, sides[0] - kernel[0] + 1, sides[1] - kernel[1] + 1)
    unpooled = _pool_backward(gradient, shaped, [2, 2], [2, 2], [0, 0], [1, 1], False, index)
    over = unpooled.contiguous(memory_format=torch.channels_last)
    return F.conv_transpose2d(unpooled, weight), _weight_gradients(over, last, weight, stride=1)


FIRST: Form = (first_forward, first_backward)
LATER: Form = (later_forward, later_backward)


class _Formed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        pooled, saved = form[0](x, weight, bias)
        ctx.save_for_backward(*saved)
        ctx.form = form
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        below, (weight, bias) = ctx.form[1](gradients[0], ctx.saved_tensors)
        return None, below, weight, bias


def _weight_gradients(gradient: Tensor, x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """PyTorch's gradients of a convolution with respect to weight and bias, not to its input."""
    sizes = [len(weight)], [stride, stride], [0, 0], [1, 1]  # of the bias; stride, padding, dilation
    _, *gradients = _conv_backward(gradient, x, weight, *sizes, False, [0, 0], 1, [False, True, True])
    return gradients[0], gradients[1]


@lru_cache(maxsize=8)
def _placement(height: int, width: int, dtype: torch.dtype) -> Tensor:
    """[k·k, 4·(k+1)·(k+1)] of zeros and ones: the position of each kernel weight in its four shifted copies."""
    positions = _positions(height, width).flatten()
    return (positions[None] == torch.arange(height * width)[:, None]).to(dtype)


@lru_cache(maxsize=8)
def _sources(out: int, inside: int, height: int, width: int) -> Tensor:
    """Indices into (weights, bias, zero) for the four shifted copies [4·out, in, k+1, k+1] and biases [4·out]."""
    positions, count = _positions(height, width), out * inside * height * width
    kernels = torch.arange(out * inside).view(1, out, inside, 1, 1) * (height * width)
    copies = torch.where(positions[:, None, None] < 0, count + out, kernels + positions[:, None, None])
    return torch.cat((copies.flatten(), (count + torch.arange(out)).repeat(4)))


def _positions(height: int, width: int) -> Tensor:
    """[4, k+1, k+1]: the index of a kernel's weight at each position of its four shifted copies; −1: none."""
    indices = torch.arange(height * width).view(height, width)
    return torch.stack([F.pad(indices, (x, 1 - x, y, 1 - y), value=-1) for y in (0, 1) for x in (0, 1)])
