"""How similar local models' outputs for the same images are, layer by layer: linear centered kernel alignment.

Shapes: k models, n images, b of them at a time, d features of a layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unskew.analysis.measure import Choice, Comparison, Measure, list_by_run, name_clients, name_layer
from unskew.charts import Axis, Bars, Chart, Line, Mark
from unskew.charts.builders import axis_of, heat_map
from unskew.core import tensors
from unskew.core.errors import Missing
from unskew.core.types import Tensors
from unskew.models.networks import Network, shorten_layer_names
from unskew.round.client import IMAGES_AT_ONCE
from unskew.runs.finished import FinishedRun


class Exact:
    """Sums over batches that give exact CKA over all images: Σ xyᵀ for every pair of models, Σ x for every model."""

    def __init__(self) -> None:
        self._count = 0
        self._shift: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._products: dict[tuple[int, int], Tensor] = {}

    def add(self, features: Sequence[Tensor]) -> None:
        """One batch: [b, d] of each model."""
        if not self._shift:  # any shift is correct; one near the mean has the smallest rounding errors
            self._shift = [x.mean(0) for x in features]
            self._sums = [torch.zeros(len(shift), dtype=torch.float64) for shift in self._shift]
        shifted = [x - shift for x, shift in zip(features, self._shift, strict=True)]
        self._count += len(shifted[0])
        for i, x in enumerate(shifted):
            self._sums[i] += x.cpu().sum(0, dtype=torch.float64)
            for j, y in enumerate(shifted[i:], i):
                if (i, j) in self._products:
                    self._products[i, j].addmm_(x.t(), y)
                else:
                    self._products[i, j] = x.t() @ y

    def value(self) -> Tensor:
        """[k, k]; 0 for a model whose features do not vary, even with itself."""
        table = torch.zeros(len(self._sums), len(self._sums), dtype=torch.float64)
        for (i, j), product in self._products.items():
            centered = product.cpu().double() - torch.outer(self._sums[i], self._sums[j]) / self._count
            table[i, j] = table[j, i] = centered.square().sum()
        return _ratio(table)


class Kernels:
    """Sums for wide layers, from kernels XXᵀ: CKA by its definition from one batch, otherwise from unbiased HSIC.

    Reference: Nguyen, Raghu and Kornblith, ICLR 2021, equation 3.
    """

    def __init__(self, batches: int) -> None:
        self.unbiased = batches > 1
        self._total = torch.zeros((), dtype=torch.float64)

    def add(self, kernels: Sequence[Tensor]) -> None:
        """One batch: [b, b] of each model."""
        if not self.unbiased:
            doubles = [kernel.cpu().double() for kernel in kernels]
            flat = torch.stack([kernel - kernel.mean(0) for kernel in doubles])
            flat = (flat - flat.mean(2, keepdim=True)).flatten(1)
            self._total = flat @ flat.t()
            return
        n = len(kernels[0])
        hollow = torch.stack([kernel.clone().fill_diagonal_(0) for kernel in kernels]).cpu().double()  # [k, b, b]
        rows = hollow.sum(2)  # [k, b]
        flat = hollow.flatten(1)
        value = flat @ flat.t() + rows.sum(1)[:, None] * rows.sum(1)[None] / ((n - 1) * (n - 2))
        self._total = self._total + (value - 2 / (n - 2) * rows @ rows.t()) / (n * (n - 3))

    def value(self) -> Tensor:
        """[k, k]."""
        return _ratio(self._total.clamp(min=0) if self.unbiased else self._total)


def kernel(features: Tensor) -> Tensor:
    """[b, b], products of centered features (centering does not change HSIC); zero if only rounding errors remain."""
    centered = features - features.mean(0)
    norm, uncentered = (float(torch.linalg.vector_norm(x)) for x in (centered, features))
    if norm <= 16 * torch.finfo(features.dtype).eps * uncentered:
        return torch.zeros(len(features), len(features), dtype=features.dtype, device=features.device)
    return centered @ centered.t()


def _ratio(products: Tensor) -> Tensor:
    own = products.diagonal().clamp(min=0).sqrt()
    both = own[:, None] * own[None]
    return torch.where(both > 0, (products / both.clamp(min=1e-300)).clamp(max=1), 0.0)


WIDE = 512  # features; for wider layers, b × b kernels replace the d × d products, which would take minutes
ALIKE = 0.005  # layers whose CKA differs by less are not ranked
MIN_JACKKNIFE = 4  # clients; with fewer, a jackknife is meaningless
AT_ONCE = 1000  # images that fit in one batch, so that their kernels are exact


@dataclass(frozen=True)
class Similarity:
    """CKA between every two local models, for every layer."""

    round: int  # after which clients train the local models
    images: int
    clients: list[str]
    layers: list[str]
    pairs: list[list[list[float]]]  # [layer][client][client]
    means: list[float]  # over the pairs of two clients
    estimated: list[str]  # layers too wide for the exact form
    activated: bool = False  # True: outputs after activation and pooling


def take_cka(
    run: FinishedRun, *, clients: int = 10, images: int = 10_000, round: int = -1, activated: bool = False
) -> Similarity:
    """CKA of local models on the test images, trained from the model after ``round`` (−1: the last).

    A layer's output is that of the convolution or linear layer. With ``activated`` it is the input of the next layer,
    after activation and pooling, as in CCVR's Table 6. The classifier's output is the logits.

    Reference: Luo et al. 2021, Figures 1, 2 and appendix B; Kornblith et al., ICML 2019.
    """
    number, side = run.number(round), run.side
    models = run.local_models(number, clients)
    index = torch.arange(len(side.test.labels))[:images]
    if len(models) < 2 or len(index) < 4:
        raise Missing("cka compares local models of at least two clients on at least four images")
    count = 1 if len(index) <= AT_ONCE else -(-len(index) // IMAGES_AT_ONCE)
    batches = torch.tensor_split(index, count)  # of about equal size
    sums: dict[str, Exact | Kernels] = {}
    for done, batch in enumerate(batches):
        run.say("cka", done, len(batches))
        for layer, wide, outputs in _by_layer(side.network, [*models.values()], side.test.batch(batch)[0], activated):
            if layer not in sums:
                sums[layer] = Kernels(len(batches)) if wide else Exact()
            sums[layer].add(outputs)
    pairs = {layer: total.value() for layer, total in sums.items()}
    for layer, value in pairs.items():
        if n := int((value.diagonal() == 0).sum()):
            run.notes.append(f"{layer} has the same output for all images in {n} models; its CKA is set to 0")
    if len(models) < (everyone := len(run.engine.roster.inhabited)):
        run.notes.append(f"only the models of {len(models)} of {everyone:,} clients are compared")
    different = ~torch.eye(len(models), dtype=torch.bool)
    return Similarity(
        round=number,
        images=len(index),
        clients=name_clients(run, models),
        layers=list(pairs),
        pairs=[value.tolist() for value in pairs.values()],
        means=[float(value[different].mean()) for value in pairs.values()],
        estimated=[layer for layer, total in sums.items() if isinstance(total, Kernels) and total.unbiased],
        activated=activated,
    )


def _by_layer(
    network: Network, models: Sequence[Tensors], images: Tensor, activated: bool = False
) -> Iterator[tuple[str, bool, list[Tensor]]]:
    """For each layer, every model's outputs [b, d], or for a wide layer the far smaller kernels [b, b]."""
    outputs: dict[str, list[Tensor]] = {}
    wide: set[str] = set()
    current = 0
    last: list[tuple[str, Tensor]] = []  # the previous layer and its output, until the next one runs

    def keep(name: str, output: Tensor) -> None:
        features = output.detach().flatten(1)
        if features.shape[1] > WIDE:
            wide.add(name)
        stored = outputs.setdefault(name, [])
        if len(stored) < current:  # if a layer runs twice, its first output counts
            stored.append(kernel(features) if name in wide else features.clone())  # ReLU may work in place

    def before(module: nn.Module, inputs: Any) -> None:
        if last:
            keep(last.pop()[0], inputs[0])

    def after(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if activated:
            last[:] = [(name, output)]
        else:
            keep(name, output)

    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    short, own = shorten_layer_names(layers), tensors.of_module(network)
    with ExitStack() as hooks, torch.no_grad():
        for name, module in layers.items():
            hooks.enter_context(module.register_forward_pre_hook(before))
            hooks.enter_context(module.register_forward_hook(partial(after, short[name])))
        network.eval()
        for model in models:
            current += 1
            torch._foreach_copy_(list(own.values()), [model[name] for name in own])
            network(images)
            while last:
                keep(*last.pop())
    for name in list(outputs):
        yield name, name in wide, outputs.pop(name)


def _draw_means(values: Similarity) -> Chart:
    texts = [f"{layer}: {mean:.3f}" for layer, mean in zip(values.layers, values.means, strict=True)]
    alt = f"Mean CKA between two clients' models: {', '.join(texts)}."
    title = f"Similarity of local models, by layer{', after the activation' if values.activated else ''}"
    bars, x = Bars(range(len(texts)), values.means, tips=texts), axis_of("layer", values.layers)
    return Chart("cka-means", title, alt, [bars], x, Axis("mean CKA", low=0, high=1))


def _draw_layers(values: Similarity) -> dict[str, Chart]:
    names, axis = values.clients, axis_of("client", values.clients)

    def draw(layer: str, table: list[list[float]], mean: float) -> Chart:
        def tip(a: int, b: int) -> str:
            return f"{layer}, clients {names[a]} and {names[b]}: {table[a][b]:.3f}"

        title = f"CKA of {layer}{' after its activation' if values.activated else ''}, client by client"
        alt = f"Pairwise CKA of {layer} between the models of {len(names)} clients; mean {mean:.2f}."
        return heat_map(f"cka-{layer}", title, alt, table, tip, axis, axis, numbers=".2f", height=380, square=True)

    return dict(zip(values.layers, map(draw, values.layers, values.pairs, values.means), strict=True))


def _findings(values: Similarity) -> list[str]:
    layers, means = [name_layer(layer) for layer in values.layers], values.means
    if len(layers) == 1:
        return [f"Only {layers[0]} is trained; its CKA between two clients is {means[0]:.2f} on average."]
    if max(means) - min(means) < ALIKE:
        return [f"Local models are about equally similar in all layers: CKA {min(means):.3f} to {max(means):.3f}."]
    most, *_, least = order = sorted(range(len(means)), key=lambda at: -means[at])
    if tied := [at for at in reversed(order[:-1]) if not differ_clearly(values, least, at)]:
        *names, last = [f"{layers[at]} ({means[at]:.3f})" for at in (least, *tied)]
        text = f"The least similar layers across clients are {', '.join(names)} and {last}, statistically tied"
    else:
        text = f"The least similar layer across clients is {layers[least]} (CKA {means[least]:.2f})"
        text += f", not {layers[-1]} ({means[-1]:.2f})" if least != len(means) - 1 else ""
    text += f"; the most similar is {layers[most]} ({means[most]:.2f})" if most not in tied else ""
    falls, steps = sum(before - after >= ALIKE for before, after in pairwise(means)), len(means) - 1
    depth = "every step" if falls == steps else f"{falls} of {steps} steps"
    return [f"{text}. With depth, similarity falls at {depth}." if falls else f"{text}."]


def differ_clearly(values: Similarity, low: int, high: int) -> bool:
    """Whether two layers' means differ by more than two standard errors, by a jackknife over clients."""
    gaps = torch.tensor(values.pairs[high], dtype=torch.float64) - torch.tensor(values.pairs[low], dtype=torch.float64)
    count, mean = len(gaps), values.means[high] - values.means[low]
    if mean < ALIKE or count < MIN_JACKKNIFE:
        return mean >= ALIKE
    gaps.fill_diagonal_(0)
    without = (gaps.sum() - 2 * gaps.sum(1)) / ((count - 1) * (count - 2))  # [k]
    error = ((count - 1) / count * (without - without.mean()).square().sum()).sqrt()
    return mean > 2 * float(error)


def _compare(runs: Mapping[str, Similarity]) -> list[Chart]:
    if not runs:
        return []
    marks = list[Mark]()
    for colour, (name, values) in enumerate(runs.items()):
        tips = [f"{name}, {layer}: {mean:.3f}" for layer, mean in zip(values.layers, values.means, strict=True)]
        marks.append(Line(range(len(values.means)), values.means, name, colour, points=True, tips=tips))
    alt = f"Mean CKA between local models by layer, for {len(marks)} runs."
    x = axis_of("layer", max((values.layers for values in runs.values()), key=len))
    return [Chart("compare-cka", "Mean CKA between local models", alt, marks, x, Axis("mean CKA", high=1), 640, 360)]


CKA = Measure(
    name="cka",
    values=Similarity,
    take=take_cka,
    draw=lambda values: [_draw_means(values), *_draw_layers(values).values()],
    findings=_findings,
    show=lambda run, values: [_draw_means(values), Choice("layer", _draw_layers(values), start=values.layers[-1])],
    title="Where the bias is: similarity of local models",
    text=(
        "Clients train the server's model once more, each on its own images, and are given the same test images. CKA "
        "measures how similar two models' outputs of a layer are: 1 if one is a rotation of the other, 0 if they have "
        "nothing in common."
    ),
    compare=Comparison(
        draw=_compare,
        findings=lambda runs: list_by_run(  # single runs are not ranked
            "CKA of local classifiers", {name: values.means[-1] for name, values in runs.items()}, ".3f"
        ),
    ),
    headline=4,
)
