"""Layers whose fast form needs saying: convolution and 2×2 max-pooling as one, and networks in two parts.

Pooling comes before ReLU: both are monotone, so the function and its gradient are the same, on a quarter of the values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class _MaxOfFour(torch.autograd.Function):
    """max over dimension 1 of [B, 4, …]; the first of equals takes the gradient, as max-pooling has it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        a, b, c, d = x.unbind(1)
        upper, lower = torch.maximum(a, b), torch.maximum(c, d)
        ctx.save_for_backward(x, upper, lower)
        return torch.maximum(upper, lower)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        # threshold_backward(g, x, 0) is g where x > 0 and 0 elsewhere: the one masked copy that is vectorised on CPUs
        take = torch.ops.aten.threshold_backward
        x, upper, lower = ctx.saved_tensors  # type: ignore[attr-defined]
        a, b, c, d = x.unbind(1)
        to_lower = take(gradients[0], lower - upper, 0)
        to_upper = gradients[0] - to_lower
        to_b, to_d = take(to_upper, b - a, 0), take(to_lower, d - c, 0)
        return torch.stack((to_upper - to_b, to_b, to_lower - to_d, to_d), 1)


class ConvPool(nn.Conv2d):
    """A convolution (stride 1) and 2×2 max-pooling in one: ``max_pool2d(conv2d(x), 2)``, faster where channels are few.

    The four outputs that meet in one pooling window come from one convolution of stride 2 whose kernel is one larger:
    four shifted copies of the weights side by side. Few output channels leave a CPU's vector lanes idle; four times as
    many fill them, and pooling becomes a maximum over four contiguous blocks. Made for a network's first layer: where a
    gradient of the input is wanted too, the plain form is the faster one.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, (H − k + 1) // 2, (W − k + 1) // 2]."""
        if x.requires_grad or x.device.type != "cpu":
            return F.max_pool2d(super().forward(x), 2)
        shifted = [F.pad(self.weight, (right, 1 - right, down, 1 - down)) for down in (0, 1) for right in (0, 1)]
        bias = None if self.bias is None else self.bias.repeat(4)
        phases = F.conv2d(x, torch.cat(shifted), bias, stride=2)  # [B, 4·out, h, w]
        pooled: Tensor = _MaxOfFour.apply(phases.unflatten(1, (4, self.out_channels)))  # type: ignore[no-untyped-call]
        return pooled
