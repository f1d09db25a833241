"""How alike local models see the same images, layer by layer: linear centred kernel alignment.

CKA(X, Y) = ‖YᵀX‖²_F / (‖XᵀX‖_F·‖YᵀY‖_F) on centred features: 1 where one is a rotation and scaling of the other.

Shapes: k models, n images in all, b of them at a time, d features of a layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unskew.analysis.phrases import said
from unskew.charts import Axis, Bars, Cells, Chart
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.types import Tensors
from unskew.models.layers import Network, layer_names
from unskew.round.client import IMAGES_AT_ONCE as CHUNK
from unskew.runs.study import FinishedRun, Missing

WIDE = 512  # features beyond which every pair's d × d products would take minutes: b × b kernels are kept instead
ALIKE = 0.005  # of CKA: layers that differ by less are not ranked
AT_ONCE = 1000  # images that pass as one batch: their kernels are exact


@dataclass(frozen=True)
class Similarity:
    """CKA between every two local models, for every layer."""

    round: int  # the local models are those that clients make after it
    images: int
    clients: list[int]
    layers: list[str]
    pairs: list[list[list[float]]]  # [layer][client][client]
    means: list[float]  # over the pairs of two clients
    estimated: list[str]  # layers too wide for the exact form


def measure(subject: FinishedRun, *, clients: int = 10, images: int = 10_000, round: int = -1) -> Similarity:
    """CKA of local models on the test images, made from the model after ``round`` (−1: the last).

    Reference: Luo et al. 2021, Figures 1, 2 and appendix B; Kornblith et al., ICML 2019.
    """
    if clients < 2 or images < 4:
        raise UserError("cka compares at least two clients on at least four images")
    number = subject.number(round)
    models = subject.local_models(number, clients)
    if len(models) < 2:
        raise Missing("cka compares local models of two clients or more; only one comes to a round of this run")
    side = subject.side
    index = torch.arange(len(side.test.labels))[:images]
    if len(index) < 4:
        raise Missing(f"cka compares outputs of four images or more; the test set has {len(index)}")
    batches = torch.tensor_split(index, 1 if len(index) <= AT_ONCE else -(-len(index) // CHUNK))  # none much smaller
    found: dict[str, Exact | AtOnce | Unbiased] = {}
    for place, some in enumerate(batches):
        subject.say("cka", place, len(batches))
        for layer, wide, seen in _by_layer(side.network, list(models.values()), side.test.batch(some)[0]):
            if layer not in found:
                found[layer] = Exact() if not wide else AtOnce() if len(batches) == 1 else Unbiased()
            found[layer].add(seen)
    pairs = {layer: sums.value() for layer, sums in found.items()}
    still = {layer: int((value.diagonal() == 0).sum()) for layer, value in pairs.items()}
    subject.notes += [f"{layer} gives the same for all images in {n} models: their CKA counts as 0"
                      for layer, n in still.items() if n]  # fmt: skip
    if len(models) < (everybody := len(subject.engine.roster.inhabited)):
        subject.notes.append(f"the models of {len(models)} of {everybody} clients are compared")
    apart = ~torch.eye(len(models), dtype=torch.bool)
    return Similarity(
        round=number,
        images=len(index),
        clients=list(models),
        layers=list(pairs),
        pairs=[value.tolist() for value in pairs.values()],
        means=[float(value[apart].mean()) for value in pairs.values()],
        estimated=[layer for layer, sums in found.items() if isinstance(sums, Unbiased)],
    )


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
            self._sums = [torch.zeros_like(each, dtype=torch.float64) for each in self._shift]
        moved = [each - shift for each, shift in zip(features, self._shift, strict=True)]
        self._count += len(moved[0])
        for i, x in enumerate(moved):
            self._sums[i] += x.sum(0, dtype=torch.float64)
            for j, y in enumerate(moved[i:], i):
                if (i, j) in self._products:
                    self._products[i, j].addmm_(x.t(), y)
                else:
                    self._products[i, j] = x.t() @ y

    def value(self) -> Tensor:
        """[k, k]; a model whose features do not vary is like none, not even itself: 0."""
        found = torch.zeros(len(self._sums), len(self._sums), dtype=torch.float64)
        for (i, j), product in self._products.items():
            centred = product.double() - torch.outer(self._sums[i], self._sums[j]) / self._count
            found[i, j] = found[j, i] = centred.square().sum()
        return _ratio(found)


class AtOnce:
    """For wide layers where all images are one batch: the definition, through kernels XXᵀ of all images."""

    def __init__(self) -> None:
        self._found: Tensor | None = None

    def add(self, kernels: Sequence[Tensor]) -> None:
        """The one batch: [n, n] of each model."""
        flat = torch.stack([each.double() - each.double().mean(0) for each in kernels])
        flat = (flat - flat.mean(2, keepdim=True)).flatten(1)
        self._found = flat @ flat.t()

    def value(self) -> Tensor:
        """[k, k]."""
        assert self._found is not None
        return _ratio(self._found)


class Unbiased:
    """For wide layers and many images: HSIC without bias, averaged over batches of kernels XXᵀ.

    Reference: Nguyen, Raghu and Kornblith, ICLR 2021, equation 3.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, kernels: Sequence[Tensor]) -> None:
        """One batch: [b, b] of each model."""
        n = len(kernels[0])
        bare = torch.stack([each.clone().fill_diagonal_(0) for each in kernels]).double()  # [k, b, b]
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
    if float(centred.norm()) <= 16 * torch.finfo(features.dtype).eps * float(features.norm()):
        return torch.zeros(len(features), len(features), dtype=features.dtype)
    return centred @ centred.t()


def _ratio(found: Tensor) -> Tensor:
    own = found.diagonal().clamp(min=0).sqrt()
    both = own[:, None] * own[None]
    return torch.where(both > 0, (found / both.clamp(min=1e-300)).clamp(max=1), 0.0)


def _by_layer(network: Network, models: Sequence[Tensors], images: Tensor) -> Iterator[tuple[str, bool, list[Tensor]]]:
    """Layer after layer, of every model: outputs [b, d], or kernels [b, b] of a wide layer, which are far smaller."""
    outputs: dict[str, list[Tensor]] = {}
    wide: set[str] = set()
    handles, current = [], 0

    def keep(name: str) -> Any:
        def seen(module: nn.Module, inputs: Any, output: Tensor) -> None:
            features = output.detach().flatten(1)
            if features.shape[1] > WIDE:
                wide.add(name)
            seen_so_far = outputs.setdefault(name, [])
            if len(seen_so_far) < current:  # of a layer that runs twice the first output counts
                seen_so_far.append(kernel(features) if name in wide else features)

        return seen

    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    short = layer_names(layers)
    for name, module in layers.items():
        handles.append(module.register_forward_hook(keep(short[name])))
    own = tensors.of_module(network)
    try:
        network.eval()
        with torch.no_grad():
            for model in models:
                current += 1
                torch._foreach_copy_(list(own.values()), [model[name] for name in own])
                network(images)
    finally:
        for handle in handles:
            handle.remove()
    while outputs:
        name = next(iter(outputs))
        yield name, name in wide, outputs.pop(name)


def draw(found: Similarity) -> list[Chart]:
    """The layers' means, and each layer's table of pairs."""
    places = list(range(len(found.layers)))
    names = tuple(enumerate(found.layers))
    means = ", ".join(f"{layer} {mean:.2f}" for layer, mean in zip(found.layers, found.means, strict=True))
    charts = [
        Chart(
            "cka-means", "Similarity of local models, by layer", f"Mean CKA between two clients' models: {means}.",
            [Bars(places, found.means, tips=[f"{n}: {m:.3f}" for n, m in zip(found.layers, found.means, strict=True)])],
            x=Axis("layer", ticks=names), y=Axis("mean CKA", low=0, high=1),
        )
    ]  # fmt: skip
    ticks = tuple((place, str(client)) for place, client in enumerate(found.clients))
    for layer, table, mean in zip(found.layers, found.pairs, found.means, strict=True):
        tips = [
            [f"{layer}, clients {a} and {b}: {value:.3f}" for b, value in zip(found.clients, row, strict=True)]
            for a, row in zip(found.clients, table, strict=True)
        ]
        few = ".2f" if len(found.clients) <= 10 else ""
        charts.append(
            Chart(
                f"cka-{layer}", f"CKA of {layer}, client by client",
                f"Pairwise CKA of {layer} between the models of {len(found.clients)} clients; mean {mean:.2f}.",
                [Cells(table, 0, 1, numbers=few, tips=tips)],
                x=Axis("client", ticks=ticks), y=Axis("client", ticks=ticks), height=380, square=True,
            )
        )  # fmt: skip
    return charts


def findings(found: Similarity) -> list[str]:
    """Which layer differs most, and whether likeness falls with depth."""
    if len(found.layers) == 1:
        return [f"The network is one layer, whose CKA between two clients is {found.means[0]:.2f} on average."]
    if max(found.means) - min(found.means) < ALIKE:
        return [
            f"Local models are about equally alike in all layers: CKA {min(found.means):.3f} to {max(found.means):.3f}."
        ]
    least = min(range(len(found.means)), key=lambda place: found.means[place])
    most = max(range(len(found.means)), key=lambda place: found.means[place])
    last, others = found.layers[-1], found.means[:-1]
    if least == len(found.means) - 1 and others:
        words = f"The classifier is the least similar layer across clients: CKA {found.means[-1]:.2f} against "
        words += f"{found.layers[most]}'s {found.means[most]:.2f}"
    else:
        words = f"The least similar layer across clients is {found.layers[least]} (CKA {found.means[least]:.2f}), not "
        words += f"{said(last)} ({found.means[-1]:.2f}); the most similar is {found.layers[most]} "
        words += f"({found.means[most]:.2f})"
    falls = sum(after < before for before, after in zip(found.means, found.means[1:], strict=False))
    steps = len(found.means) - 1
    how = "at every step" if falls == steps else f"at {falls} of {steps} steps"
    return [f"{words}; going deeper, similarity falls {how}."]
