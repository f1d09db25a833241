"""How similar local models' outputs for the same images are, layer by layer: linear centered kernel alignment.

Shapes: k models, n images, b of them at a time, d features of a layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unskew.analysis.measure import Choice, Comparison, Measure, list_by_run, name_clients, name_layer
from unskew.charts import Axis, Bars, Cells, Chart, Line, Mark
from unskew.core import tensors
from unskew.core.errors import Missing, UserError
from unskew.core.types import Tensors
from unskew.core.units import counted
from unskew.models.networks import Network, shorten_layer_names
from unskew.round.client import IMAGES_AT_ONCE
from unskew.runs.finished import FinishedRun


def cka(x: Tensor, y: Tensor) -> float:
    """The definition, for features [n, d] and [n, d′] of the same n images."""
    x, y = x - x.mean(0), y - y.mean(0)
    return float((y.t() @ x).square().sum() / ((x.t() @ x).norm() * (y.t() @ y).norm()))


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


class AtOnce:
    """CKA by its definition, through the kernels XXᵀ of all images; for wide layers if all images fit in a batch."""

    def add(self, kernels: Sequence[Tensor]) -> None:
        """The only batch: [n, n] of each model."""
        doubles = [kernel.cpu().double() for kernel in kernels]
        flat = torch.stack([kernel - kernel.mean(0) for kernel in doubles])
        flat = (flat - flat.mean(2, keepdim=True)).flatten(1)
        self._products = flat @ flat.t()

    def value(self) -> Tensor:
        """[k, k]."""
        return _ratio(self._products)


class Unbiased:
    """CKA from unbiased HSIC, averaged over batches of kernels XXᵀ; for wide layers and many images.

    Reference: Nguyen, Raghu and Kornblith, ICLR 2021, equation 3.
    """

    def __init__(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64)

    def add(self, kernels: Sequence[Tensor]) -> None:
        """One batch: [b, b] of each model."""
        n = len(kernels[0])
        hollow = torch.stack([kernel.clone().fill_diagonal_(0) for kernel in kernels]).cpu().double()  # [k, b, b]
        rows = hollow.sum(2)  # [k, b]
        flat = hollow.flatten(1)
        value = flat @ flat.t() + rows.sum(1)[:, None] * rows.sum(1)[None] / ((n - 1) * (n - 2))
        self._total = self._total + (value - 2 / (n - 2) * rows @ rows.t()) / (n * (n - 3))

    def value(self) -> Tensor:
        """[k, k]."""
        return _ratio(self._total.clamp(min=0))


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
    if clients < 2 or images < 4:
        raise UserError(f"cka(clients={clients}, images={images}): give at least two clients and four images")
    number = run.number(round)
    models = run.local_models(number, clients)
    if len(models) < 2:
        raise Missing("cka compares local models of at least two clients; this run has only one per round")
    side = run.side
    index = torch.arange(len(side.test.labels))[:images]
    if len(index) < 4:
        raise Missing(f"cka compares outputs for at least four images; the test set has {len(index)}")
    count = 1 if len(index) <= AT_ONCE else -(-len(index) // IMAGES_AT_ONCE)
    batches = torch.tensor_split(index, count)  # of about equal size
    sums: dict[str, Exact | AtOnce | Unbiased] = {}
    for done, batch in enumerate(batches):
        run.say("cka", done, len(batches))
        for layer, wide, outputs in _by_layer(side.network, [*models.values()], side.test.batch(batch)[0], activated):
            if layer not in sums:
                sums[layer] = Exact() if not wide else AtOnce() if len(batches) == 1 else Unbiased()
            sums[layer].add(outputs)
    pairs = {layer: total.value() for layer, total in sums.items()}
    for layer, value in pairs.items():
        if n := int((value.diagonal() == 0).sum()):
            run.notes.append(
                f"{layer} has the same output for all images in {counted(n, 'model')}; its CKA is set to 0"
            )
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
        estimated=[layer for layer, total in sums.items() if isinstance(total, Unbiased)],
        activated=activated,
    )


def _by_layer(
    network: Network, models: Sequence[Tensors], images: Tensor, activated: bool = False
) -> Iterator[tuple[str, bool, list[Tensor]]]:
    """For each layer, every model's outputs [b, d], or for a wide layer the far smaller kernels [b, b]."""
    outputs: dict[str, list[Tensor]] = {}
    wide: set[str] = set()
    handles, current = [], 0
    last: list[tuple[str, Tensor]] = []  # the previous layer and its output, until the next one runs

    def keep(name: str, output: Tensor) -> None:
        features = output.detach().flatten(1)
        if features.shape[1] > WIDE:
            wide.add(name)
        stored = outputs.setdefault(name, [])
        if len(stored) < current:  # if a layer runs twice, its first output counts
            stored.append(kernel(features) if name in wide else features.clone())  # ReLU may work in place

    def hooks(name: str) -> tuple[Any, Any]:
        def before(module: nn.Module, inputs: Any) -> None:
            if last:
                keep(last.pop()[0], inputs[0])

        def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if activated:
                last[:] = [(name, output)]
            else:
                keep(name, output)

        return before, after

    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    short = shorten_layer_names(layers)
    for name, module in layers.items():
        before, after = hooks(short[name])
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    own = tensors.of_module(network)
    try:
        network.eval()
        with torch.no_grad():
            for model in models:
                current += 1
                torch._foreach_copy_(list(own.values()), [model[name] for name in own])
                network(images)
                while last:
                    keep(*last.pop())
    finally:
        for handle in handles:
            handle.remove()
    while outputs:
        name = next(iter(outputs))
        yield name, name in wide, outputs.pop(name)


def means_chart(values: Similarity) -> Chart:
    """The mean CKA of each layer."""
    pairs = list(zip(values.layers, values.means, strict=True))
    bars = Bars(list(range(len(pairs))), values.means, tips=[f"{layer}: {mean:.3f}" for layer, mean in pairs])
    alt = f"Mean CKA between two clients' models: {', '.join(f'{layer} {mean:.2f}' for layer, mean in pairs)}."
    title = f"Similarity of local models, by layer{', after the activation' if values.activated else ''}"
    x, y = Axis("layer", ticks=tuple(enumerate(values.layers))), Axis("mean CKA", low=0, high=1)
    return Chart("cka-means", title, alt, [bars], x=x, y=y)


def layer_charts(values: Similarity) -> dict[str, Chart]:
    """The CKA of every pair of clients, by layer."""
    charts, count = {}, len(values.clients)
    axis = Axis("client", ticks=tuple((at, str(client)) for at, client in enumerate(values.clients)))
    for layer, table, mean in zip(values.layers, values.pairs, values.means, strict=True):
        tips = [
            [f"{layer}, clients {a} and {b}: {value:.3f}" for b, value in zip(values.clients, row, strict=True)]
            for a, row in zip(values.clients, table, strict=True)
        ]
        cells = Cells(table, 0, 1, numbers=".2f" if count <= 10 else "", tips=tips)
        title = f"CKA of {layer}{' after its activation' if values.activated else ''}, client by client"
        alt = f"Pairwise CKA of {layer} between the models of {count} clients; mean {mean:.2f}."
        charts[layer] = Chart(f"cka-{layer}", title, alt, [cells], x=axis, y=axis, height=380, square=True)
    return charts


def cka_findings(values: Similarity) -> list[str]:
    """Which layer differs most across clients, and whether similarity falls with depth."""
    layers, means = values.layers, values.means
    if len(layers) == 1:
        return [f"Only {name_layer(layers[0])} is trained; its CKA between two clients is {means[0]:.2f} on average."]
    if max(means) - min(means) < ALIKE:
        return [f"Local models are about equally similar in all layers: CKA {min(means):.3f} to {max(means):.3f}."]
    least, *others = sorted(range(len(means)), key=lambda at: means[at])
    tied = [at for at in others if not differ_clearly(values, least, at)]
    most = max(range(len(means)), key=lambda at: means[at])
    if tied:
        *names, last = [f"{name_layer(layers[at])} ({means[at]:.3f})" for at in (least, *tied)]
        text = f"The least similar layers across clients are {', '.join(names)} and {last}, statistically tied"
    elif least == len(means) - 1:
        text = f"The classifier is the least similar layer across clients: CKA {means[-1]:.2f}"
    else:
        text = f"The least similar layer across clients is {layers[least]} (CKA {means[least]:.2f}), not "
        text += f"{name_layer(layers[-1])} ({means[-1]:.2f})"
    if most not in (least, *tied):
        text += f"; the most similar is {name_layer(layers[most])} ({means[most]:.2f})"
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


def compare_cka(runs: Mapping[str, Similarity]) -> list[Chart]:
    """The mean CKA by layer, a line for each run."""
    if not runs:
        return []
    marks: list[Mark] = []
    for colour, (name, values) in enumerate(runs.items()):
        tips = [f"{name}, {layer}: {mean:.3f}" for layer, mean in zip(values.layers, values.means, strict=True)]
        marks.append(Line(list(range(len(values.means))), values.means, name, colour % 10, points=True, tips=tips))
    alt = f"Mean CKA between local models by layer, for {len(marks)} runs."
    most_layers = max(runs.values(), key=lambda values: len(values.layers)).layers
    x, y = Axis("layer", ticks=tuple(enumerate(most_layers))), Axis("mean CKA", high=1)
    return [Chart("compare-cka", "Mean CKA between local models", alt, marks, x=x, y=y, width=640, height=360)]


CKA = Measure(
    name="cka",
    values=Similarity,
    take=take_cka,
    draw=lambda values: [means_chart(values), *layer_charts(values).values()],
    findings=cka_findings,
    show=lambda run, values: [means_chart(values), Choice("layer", layer_charts(values), start=values.layers[-1])],
    title="Where the bias is: similarity of local models",
    text=(
        "Clients train the server's model once more, each on its own images, and are given the same test images. CKA "
        "measures how similar two models' outputs of a layer are: 1 if one is a rotation of the other, 0 if they have "
        "nothing in common."
    ),
    compare=Comparison(
        title="Similarity of local models, by layer",
        text="Every client trains the final model once more. CKA measures how similar two clients' outputs of a layer "
        "then are.",
        draw=compare_cka,
        findings=lambda runs: list_by_run(  # single runs are not ranked
            "CKA of local classifiers", {name: values.means[-1] for name, values in runs.items()}, ".3f"
        ),
    ),
    headline=4,
)
