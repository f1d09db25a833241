"""Linear centred kernel alignment, summed up batch by batch: three ways, from exact to estimated.

CKA(X, Y) = ‖YᵀX‖²_F / (‖XᵀX‖_F·‖YᵀY‖_F) on centred features: 1 where one is a rotation and scaling of the other.

Shapes: k models, n images in all, b of them at a time, d features of a layer. Products are made where the features are,
sums in float64 on the CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def cka(x: Tensor, y: Tensor) -> float:
    """The definition, for features [n, d] and [n, d′] of the same n images."""
    x, y = x - x.mean(0), y - y.mean(0)
    return float((y.t() @ x).square().sum() / ((x.t() @ x).norm() * (y.t() @ y).norm()))


class Exact:
    """Sums over batches from which CKA is that of all images at once: Σ xyᵀ of every pair, Σ x of every model."""

    def __init__(self) -> None:
        self._count = 0
        self._shift: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._products: dict[tuple[int, int], Tensor] = {}

    def add(self, features: Sequence[Tensor]) -> None:
        """One batch: [b, d] of each model."""
        if not self._shift:  # any shift is right; one near the mean keeps the digits
            self._shift = [each.mean(0) for each in features]
            self._sums = [torch.zeros(len(each), dtype=torch.float64) for each in self._shift]
        moved = [each - shift for each, shift in zip(features, self._shift, strict=True)]
        self._count += len(moved[0])
        for i, x in enumerate(moved):
            self._sums[i] += x.cpu().sum(0, dtype=torch.float64)
            for j, y in enumerate(moved[i:], i):
                if (i, j) in self._products:
                    self._products[i, j].addmm_(x.t(), y)
                else:
                    self._products[i, j] = x.t() @ y

    def value(self) -> Tensor:
        """[k, k]; 0 for a model whose features do not vary, even with itself."""
        table = torch.zeros(len(self._sums), len(self._sums), dtype=torch.float64)
        for (i, j), product in self._products.items():
            centred = product.cpu().double() - torch.outer(self._sums[i], self._sums[j]) / self._count
            table[i, j] = table[j, i] = centred.square().sum()
        return _ratio(table)


class AtOnce:
    """For wide layers where all images are one batch: the definition, through kernels XXᵀ of all images."""

    def __init__(self) -> None:
        self._products: Tensor | None = None

    def add(self, kernels: Sequence[Tensor]) -> None:
        """The one batch: [n, n] of each model."""
        doubles = [each.cpu().double() for each in kernels]
        flat = torch.stack([each - each.mean(0) for each in doubles])
        flat = (flat - flat.mean(2, keepdim=True)).flatten(1)
        self._products = flat @ flat.t()

    def value(self) -> Tensor:
        """[k, k]."""
        assert self._products is not None
        return _ratio(self._products)


class Unbiased:
    """For wide layers and many images: HSIC without bias, averaged over batches of kernels XXᵀ.

    Reference: Nguyen, Raghu and Kornblith, ICLR 2021, equation 3.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, kernels: Sequence[Tensor]) -> None:
        """One batch: [b, b] of each model."""
        n = len(kernels[0])
        bare = torch.stack([each.clone().fill_diagonal_(0) for each in kernels]).cpu().double()  # [k, b, b]
        rows = bare.sum(2)  # [k, b]
        flat = bare.flatten(1)
        value = flat @ flat.t() + rows.sum(1)[:, None] * rows.sum(1)[None] / ((n - 1) * (n - 2))
        value = (value - 2 / (n - 2) * rows @ rows.t()) / (n * (n - 3))
        self._total = value if self._total is None else self._total + value

    def value(self) -> Tensor:
        """[k, k]."""
        assert self._total is not None
        return _ratio(self._total.clamp(min=0))


def kernel(features: Tensor) -> Tensor:
    """[b, b], products of features less their mean, which changes no HSIC; zero where nothing is left but rounding."""
    centred = features - features.mean(0)
    length, whole = (float(torch.linalg.vector_norm(each)) for each in (centred, features))
    if length <= 16 * torch.finfo(features.dtype).eps * whole:
        return torch.zeros(len(features), len(features), dtype=features.dtype, device=features.device)
    return centred @ centred.t()


def _ratio(products: Tensor) -> Tensor:
    own = products.diagonal().clamp(min=0).sqrt()
    both = own[:, None] * own[None]
    return torch.where(both > 0, (products / both.clamp(min=1e-300)).clamp(max=1), 0.0)
