"""How alike local models see the same images, layer by layer: linear centred kernel alignment.

``analysis.alignment`` has the formula and the sums.

Shapes: k models, n images in all, b of them at a time, d features of a layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unskew.analysis.measure import Choice, Comparison, Element, Measure, list_by_run, name_layer
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


WIDE = 512  # features beyond which the d × d products of all pairs would take minutes: b × b kernels are used instead
ALIKE = 0.005  # of CKA: layers that differ by less are not ranked
MIN_JACKKNIFE = 4  # clients, below which leaving one out says little
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
    activated: bool = False  # outputs are taken after activation and pooling


def take_cka(
    run: FinishedRun, *, clients: int = 10, images: int = 10_000, round: int = -1, activated: bool = False
) -> Similarity:
    """CKA of local models on the test images, made from the model after ``round`` (−1: the last).

    A layer's output is what the convolution or linear layer gives. With ``activated`` it is what enters the layer that
    runs next, after activation and pooling: CCVR's layers are these (its Table 6). The classifier's is the logits.

    Reference: Luo et al. 2021, Figures 1, 2 and appendix B; Kornblith et al., ICML 2019.
    """
    if clients < 2 or images < 4:
        raise UserError(f"cka(clients={clients}, images={images}): give at least two clients and four images")
    number = run.number(round)
    models = run.local_models(number, clients)
    if len(models) < 2:
        raise Missing("cka compares local models of two clients or more; this run has only one in a round")
    side = run.side
    index = torch.arange(len(side.test.labels))[:images]
    if len(index) < 4:
        raise Missing(f"cka compares outputs of four images or more; the test set has {len(index)}")
    batches = torch.tensor_split(
        index, 1 if len(index) <= AT_ONCE else -(-len(index) // IMAGES_AT_ONCE)
    )  # none much smaller
    sums: dict[str, Exact | AtOnce | Unbiased] = {}
    for place, some in enumerate(batches):
        run.say("cka", place, len(batches))
        for layer, wide, seen in _by_layer(side.network, list(models.values()), side.test.batch(some)[0], activated):
            if layer not in sums:
                sums[layer] = Exact() if not wide else AtOnce() if len(batches) == 1 else Unbiased()
            sums[layer].add(seen)
    pairs = {layer: each.value() for layer, each in sums.items()}
    still = {layer: int((value.diagonal() == 0).sum()) for layer, value in pairs.items()}
    run.notes += [f"{layer} gives the same output for all images in {counted(n, 'model')}: CKA counts as 0 there"
                      for layer, n in still.items() if n]  # fmt: skip
    if len(models) < (everyone := len(run.engine.roster.inhabited)):
        run.notes.append(f"the models of {len(models)} of {everyone:,} clients are compared")
    different = ~torch.eye(len(models), dtype=torch.bool)
    return Similarity(
        round=number,
        images=len(index),
        clients=list(models),
        layers=list(pairs),
        pairs=[value.tolist() for value in pairs.values()],
        means=[float(value[different].mean()) for value in pairs.values()],
        estimated=[layer for layer, each in sums.items() if isinstance(each, Unbiased)],
        activated=activated,
    )


def _by_layer(
    network: Network, models: Sequence[Tensors], images: Tensor, activated: bool = False
) -> Iterator[tuple[str, bool, list[Tensor]]]:
    """Layer after layer, of every model: outputs [b, d], or kernels [b, b] of a wide layer, which are far smaller."""
    outputs: dict[str, list[Tensor]] = {}
    wide: set[str] = set()
    handles, current = [], 0
    last: list[tuple[str, Tensor]] = []  # the layer that has run and its output, until the next one runs

    def keep(name: str, output: Tensor) -> None:
        features = output.detach().flatten(1)
        if features.shape[1] > WIDE:
            wide.add(name)
        seen_so_far = outputs.setdefault(name, [])
        if len(seen_so_far) < current:  # of a layer that runs twice the first output counts
            seen_so_far.append(kernel(features) if name in wide else features.clone())  # ReLU may work in place

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


def draw_cka(values: Similarity) -> list[Chart]:
    """The layers' means, and each layer's table of pairs."""
    return [means_chart(values), *layer_charts(values).values()]


def means_chart(values: Similarity) -> Chart:
    """The mean CKA of each layer."""
    pairs = list(zip(values.layers, values.means, strict=True))
    bars = Bars(list(range(len(pairs))), values.means, tips=[f"{layer}: {mean:.3f}" for layer, mean in pairs])
    means = ", ".join(f"{layer} {mean:.2f}" for layer, mean in pairs)
    where = ", after the activation" if values.activated else ""
    return Chart(
        "cka-means", f"Similarity of local models, by layer{where}",
        f"Mean CKA between two clients' models: {means}.", [bars],
        x=Axis("layer", ticks=tuple(enumerate(values.layers))), y=Axis("mean CKA", low=0, high=1),
    )  # fmt: skip


def layer_charts(values: Similarity) -> dict[str, Chart]:
    """By layer, the CKA of every two clients."""
    charts = {}
    ticks = tuple((place, str(client)) for place, client in enumerate(values.clients))
    for layer, table, mean in zip(values.layers, values.pairs, values.means, strict=True):
        tips = [
            [f"{layer}, clients {a} and {b}: {value:.3f}" for b, value in zip(values.clients, row, strict=True)]
            for a, row in zip(values.clients, table, strict=True)
        ]
        numbers = ".2f" if len(values.clients) <= 10 else ""
        charts[layer] = Chart(
            f"cka-{layer}", f"CKA of {layer}{' after its activation' if values.activated else ''}, client by client",
            f"Pairwise CKA of {layer} between the models of {len(values.clients)} clients; mean {mean:.2f}.",
            [Cells(table, 0, 1, numbers=numbers, tips=tips)],
            x=Axis("client", ticks=ticks), y=Axis("client", ticks=ticks), height=380, square=True,
        )  # fmt: skip
    return charts


def show_cka(run: FinishedRun, values: Similarity) -> list[Element]:
    """The means, and one layer at a time, the last first."""
    return [means_chart(values), Choice("layer", layer_charts(values), start=values.layers[-1])]


def cka_findings(values: Similarity) -> list[str]:
    """Which layer differs most, if one clearly does, and whether likeness falls with depth."""
    if len(values.layers) == 1:
        return [f"The network is one layer, whose CKA between two clients is {values.means[0]:.2f} on average."]
    if max(values.means) - min(values.means) < ALIKE:
        low, high = min(values.means), max(values.means)
        return [f"Local models are about equally alike in all layers: CKA {low:.3f} to {high:.3f}."]
    least, *others = sorted(range(len(values.means)), key=lambda place: values.means[place])
    near = [place for place in others if not differ_clearly(values, least, place)]
    most = max(range(len(values.means)), key=lambda place: values.means[place])
    if near:
        names = [f"{name_layer(values.layers[place])} ({values.means[place]:.3f})" for place in (least, *near)]
        words = f"The least similar layers across clients are {', '.join(names[:-1])} and {names[-1]}, too close to "
        words += "tell apart with these clients"
    elif least == len(values.means) - 1:
        words = f"The classifier is the least similar layer across clients: CKA {values.means[-1]:.2f}"
    else:
        words = (
            f"The least similar layer across clients is {values.layers[least]} (CKA {values.means[least]:.2f}), not "
        )
        words += f"{name_layer(values.layers[-1])} ({values.means[-1]:.2f})"
    if most not in (least, *near):
        words += f"; the most similar is {name_layer(values.layers[most])} ({values.means[most]:.2f})"
    falls = sum(after < before for before, after in zip(values.means, values.means[1:], strict=False))
    steps = len(values.means) - 1
    how = "at every step" if falls == steps else f"at {falls} of {steps} steps"
    return [f"{words}; going deeper, similarity falls {how}."]


def differ_clearly(values: Similarity, low: int, high: int) -> bool:
    """Whether two layers' means differ by more than other clients would change: two standard errors, by jackknife.

    Each client is left out in turn; the pairs of the others give the difference again.
    """
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
    marks: list[Mark] = []
    ticks: tuple[tuple[float, str], ...] = ()
    for colour, (name, values) in enumerate(runs.items()):
        ticks = tuple(enumerate(values.layers)) if len(values.layers) > len(ticks) else ticks
        tips = [f"{name}, {layer}: {mean:.3f}" for layer, mean in zip(values.layers, values.means, strict=True)]
        marks.append(Line(list(range(len(values.means))), values.means, name, colour % 10, points=True, tips=tips))
    if not marks:
        return []
    alt = f"Mean CKA between local models by layer, for {len(marks)} runs."
    return [Chart("compare-cka", "Mean CKA between local models", alt, marks, x=Axis("layer", ticks=ticks),
                  y=Axis("mean CKA", high=1), width=640, height=360)]  # fmt: skip


def compared_findings(runs: Mapping[str, Similarity]) -> list[str]:
    """How alike the local classifiers of each run are; one run each ranks nothing."""
    return list_by_run("CKA of local classifiers", {name: values.means[-1] for name, values in runs.items()}, ".3f")


CKA = Measure(
    name="cka",
    values=Similarity,
    take=take_cka,
    draw=draw_cka,
    findings=cka_findings,
    show=show_cka,
    title="Where the bias is: similarity of local models",
    text=(
        "Clients train the server's model once more, each on its own images, and all get the same test images. CKA "
        "says how alike two models' outputs of a layer are: 1 where one is a rotation of the other, 0 where they share "
        "nothing."
    ),
    compare=Comparison(
        title="Similarity of local models, by layer",
        text="Every client trains the final model once more. CKA says how alike two clients' outputs of a layer then "
        "are.",
        draw=compare_cka,
        findings=compared_findings,
    ),
    headline=4,
)
