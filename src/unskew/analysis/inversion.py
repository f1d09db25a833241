"""What a feature reveals: images reconstructed from one feature, and from the mean of several.

An attacker who knows the encoder f searches for an image x with f(x) = z. Clients that send mean features rely on this
search to fail. It needs a prior, because most images with a given feature are not photographs: smooth pixels, or the
output of a convolutional network (a deep image prior), which draws photographs more easily than noise.

Shapes: m targets, [ch, H, W] an image, d features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.analysis.measure import Measure, name_clients
from unskew.charts import Axis, Chart, Mark, Picture, Words
from unskew.charts.builders import axis_of, grouped
from unskew.core import tensors
from unskew.core.errors import Missing, UserError, nearest
from unskew.core.key import Key, seeded
from unskew.core.machine import deterministic
from unskew.core.units import counted
from unskew.round.client import ClientSide
from unskew.runs.finished import FinishedRun

SHOWN = ("one", "mean", "other", "grey")  # two reconstructions and two yardsticks
RATES = {"smooth": 0.05, "deep": 0.01}  # the learning rate of each prior


@dataclass(frozen=True)
class Inversion:
    """Clients' images, their reconstructions, and how similar they are."""

    of: int  # the number of features in a mean
    rows: list[dict[str, Any]]  # "client", "class"; pixels "original", "one", "mean"; scores "one_*", "other_*", …


def take_inversion(
    run: FinishedRun, *, examples: int = 4, of: int = 3, prior: str = "smooth", steps: int = 300, lr: float = 0,
    smooth: float = 0.5,
) -> Inversion:  # fmt: skip
    """Training images of the largest clients, reconstructed from their feature and from the mean of ``of`` features.

    Adam minimizes ‖f(x) − z‖²/‖z‖². With ``prior="smooth"`` it searches for the pixels, starting from gray, and
    smooth·(mean squared difference of neighboring pixels) is added; with ``prior="deep"`` it searches for the weights
    of a small convolutional network that draws the image: stronger but slower, with 1,000 steps or more. ``lr=0`` is
    the prior's own rate, 0.05 or 0.01.

    All similarities are to the same original, which is part of the mean; "other" is another image of the same class,
    "grey" the data set's mean color, where the search starts. A reconstruction that is no more similar than these
    reveals nothing. Features are the input of the classifier.

    Reference: Luo et al. 2021, appendix C, Figures 8 and 9; Mahendran and Vedaldi, CVPR 2015; Ulyanov et al., CVPR
    2018 (deep image prior); Zhao et al., ICLR 2021.
    """
    if prior not in RATES:
        raise UserError(f"inversion(prior={prior}): {nearest(prior, RATES)}")
    if examples < 1 or of < 2 or steps < 1 or lr < 0 or smooth < 0:
        raise UserError("inversion needs examples ≥ 1, steps ≥ 1, of ≥ 2, lr ≥ 0 and smooth ≥ 0")
    rate = lr or RATES[prior]
    side = run.side
    if side.train.stored or not len(side.labels):
        raise Missing("it needs training images; this run trained on stored features, or its images are at nodes")
    side.load(run.model, training=False)
    chosen = _choose(side, examples, of)
    if not chosen:
        raise Missing(f"no client has {of + 1} images of one class")
    index = torch.tensor([examples for _, _, examples in chosen])  # [m, of + 1]; the last is the "other" image
    with torch.no_grad():
        images = side.train.batch(index.flatten())[0]
        features = side.network.encoder(images).view(len(chosen), of + 1, -1)
    targets = torch.cat([features[:, 0], features[:, :of].mean(1)])  # [2m, d]
    with tensors.one_thread(), deterministic(side.device):  # such a small batch is slower on two threads
        if prior == "deep":
            searched = []
            for at, target in enumerate(targets):
                run.say("inverting features", at, len(targets))
                loss, key = feature_loss([side.network.encoder], [target]), run.key.fold("deep", at)
                searched.append(search_deep(loss, side.train.shape, *_ends(side), steps=steps, lr=rate, key=key))
            reconstructed = torch.cat(searched)
        else:
            reconstructed = invert(side, targets, steps, rate, smooth, run)
    original, rows = images.view(len(chosen), of + 1, *images.shape[1:]), []
    ones, means = reconstructed[: len(chosen)], reconstructed[len(chosen) :]
    for at, (client, label, _) in enumerate(chosen):
        target, feature = original[at, 0], features[at, 0]
        figures: dict[str, Any] = {"client": name_clients(run, [client])[0], "class": run.classes[label]}
        pictures = (ones[at], means[at], original[at, of], torch.zeros_like(ones[at]))
        for name, picture in zip(SHOWN, pictures, strict=True):
            figures |= {f"{name}_psnr": psnr(side, picture, target), f"{name}_ssim": ssim(side, picture, target)}
            with torch.no_grad():
                similarity = F.cosine_similarity(side.network.encoder(picture[None])[0], feature, dim=0)
            figures |= {f"{name}_cosine": float(similarity), name: _pixels(side, picture)}
        rows.append(figures | {"original": _pixels(side, target)})
    return Inversion(of, rows)


def _choose(side: ClientSide, examples: int, of: int) -> list[tuple[int, int, list[int]]]:
    """(client, class, examples) of the largest clients: for each, its largest class that is not yet chosen."""
    chosen: list[tuple[int, int, list[int]]] = []
    for client in np.argsort(-side.population.sizes, kind="stable").tolist():
        index = side.population.examples(client)
        labels = side.labels[index]
        counts = np.bincount(labels, minlength=1)
        counts[[label for _, label, _ in chosen if label < len(counts)]] = 0
        label = int(counts.argmax())
        if counts[label] > of:
            chosen.append((client, label, index[labels == label][: of + 1].tolist()))
        if len(chosen) == examples:
            break
    return chosen


def invert(side: ClientSide, targets: Tensor, steps: int, lr: float, smooth: float, run: FinishedRun) -> Tensor:
    """[m, ch, H, W], normalized images found by Adam whose features are close to the targets."""
    shape = side.train.shape
    low, high = _ends(side)
    noise = torch.randn(shape, generator=run.key.fold("inversion").torch(), dtype=targets.dtype)
    x = (0.01 * noise).to(targets.device).repeat(len(targets), 1, 1, 1).requires_grad_()
    scale = targets.square().sum(1).clamp(min=1e-12)
    optimizer = torch.optim.Adam([x], lr=lr)
    for step in range(steps):
        if step % 20 == 0:
            run.say("inverting features", step, steps)
        distance = (side.network.encoder(x) - targets).square().sum(1) / scale
        across, down = x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]
        roughness = across.square().mean((1, 2, 3)) + down.square().mean((1, 2, 3))  # [m]
        loss = (distance + smooth * roughness).sum()
        (x.grad,) = torch.autograd.grad(loss, [x])
        optimizer.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()


def feature_loss(encoders: Sequence[Callable[[Tensor], Tensor]], means: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """How far the mean feature of images is from a target, over the encoders of rounds: mean_r ‖z − z_r‖² / ‖z_r‖²."""

    def loss(images: Tensor) -> Tensor:
        parts = [
            (encoder(images).mean(0) - mean).square().sum() / mean.square().sum().clamp(min=1e-12)
            for encoder, mean in zip(encoders, means, strict=True)
        ]
        return torch.stack(parts).mean()

    return loss


def search_deep(
    loss: Callable[[Tensor], Tensor], shape: Sequence[int], low: Tensor, high: Tensor, *,
    steps: int, lr: float, key: Key, count: int = 1,
) -> Tensor:  # fmt: skip
    """Images [count, ch, H, W] between black and white with a small loss, each drawn by its own network.

    ``low`` and ``high`` are black and white by channel [ch, 1, 1]; Adam optimizes the networks' weights.
    """
    with seeded(key.fold("weights")):
        networks = nn.ModuleList([DeepPrior(shape) for _ in range(count)]).to(low)
    draw = key.fold("noise").torch()
    inputs = 0.1 * torch.rand((count, DeepPrior.INPUTS, *shape[1:]), generator=draw, dtype=low.dtype)

    def images(z: Tensor) -> Tensor:
        drawn = [network(noise[None]) for network, noise in zip(networks, z.to(low.device), strict=True)]
        return low + (high - low) * torch.cat(drawn)

    optimizer = torch.optim.Adam(networks.parameters(), lr=lr)
    for _ in range(steps):
        noise = 0.03 * torch.randn(inputs.shape, generator=draw, dtype=low.dtype)
        optimizer.zero_grad()
        loss(images(inputs + noise)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return images(inputs)


class DeepPrior(nn.Module):
    """An hourglass of convolutions with skip connections, from fixed noise to an image between 0 and 1."""

    INPUTS = 16
    WIDTHS = (16, 32, 64, 96, 96)

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        levels = max(1, min(len(self.WIDTHS), int(np.log2(max(min(shape[1:]), 8) / 4))))
        widths = (self.INPUTS, *self.WIDTHS[:levels])
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList([self._layer(above, below, 2) for above, below in pairs])
        self.up = nn.ModuleList(
            [nn.Sequential(self._layer(above + below, above), self._layer(above, above)) for above, below in pairs]
        )
        self.out = nn.Conv2d(self.INPUTS, shape[0], 1)

    @staticmethod
    def _layer(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, padding_mode="reflect", bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2))

    def forward(self, z: Tensor) -> Tensor:
        """[B, INPUTS, H, W] -> [B, ch, H, W]."""
        sizes = []
        for layer in self.down:
            sizes.append(z)
            z = layer(z)
        for layer, skip in zip(reversed(self.up), reversed(sizes), strict=True):
            z = layer(torch.cat([F.interpolate(z, size=skip.shape[2:], mode="bilinear"), skip], 1))
        return torch.sigmoid(self.out(z))


def _ends(side: ClientSide) -> tuple[Tensor, Tensor]:
    """Black and white after normalization, by channel [ch, 1, 1]."""
    return side.train.offset[0], (255 * side.train.scale + side.train.offset)[0]


def _unit(side: ClientSide, image: Tensor) -> Tensor:
    low, high = _ends(side)
    return ((image - low) / (high - low)).clamp(0, 1).cpu().double()


def _pixels(side: ClientSide, image: Tensor) -> list[Any]:
    """[H][W] or [H][W][3] of integers 0..255."""
    values = (_unit(side, image) * 255).round().long()
    return list((values[0] if len(values) != 3 else values.permute(1, 2, 0)).tolist())


def psnr(side: ClientSide, a: Tensor, b: Tensor) -> float:
    """Peak signal to noise in dB; 100 if the images are equal."""
    wrong = float((_unit(side, a) - _unit(side, b)).square().mean())
    return 100.0 if wrong < 1e-10 else float(-10 * np.log10(wrong))


def ssim(side: ClientSide, a: Tensor, b: Tensor) -> float:
    """Structural similarity, −1 to 1, over windows of 7 × 7 pixels or a smaller image.

    Reference: Wang et al., 2004, equation 13.
    """
    x, y = _unit(side, a)[None], _unit(side, b)[None]
    size = min(7, *x.shape[2:])
    mx, my = F.avg_pool2d(x, size, 1), F.avg_pool2d(y, size, 1)
    vx, vy = F.avg_pool2d(x * x, size, 1) - mx * mx, F.avg_pool2d(y * y, size, 1) - my * my
    both = F.avg_pool2d(x * y, size, 1) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    table = (2 * mx * my + c1) * (2 * both + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return float(table.mean())


def _draw(values: Inversion) -> list[Chart]:
    columns = {"original": "original", "one": "from its feature", "mean": f"from the mean of {values.of}"}
    marks: list[Mark] = [Words(at, -0.62, title) for at, title in enumerate(columns.values())]
    for line, row in enumerate(values.rows):
        whose = f"{row['class']}, client {row['client']}"
        marks.append(Picture(row["original"], 0, 1.25 * line, 0.9, 0.9, whose, f"{whose}, original"))
        for at, name in enumerate(("one", "mean"), 1):
            label = f"SSIM {row[f'{name}_ssim']:.2f}, {row[f'{name}_psnr']:.1f} dB"
            marks.append(Picture(row[name], at, 1.25 * line, 0.9, 0.9, label, f"{whose}, {columns[name]}: {label}"))
    tall = 1.25 * (len(values.rows) - 1)
    alt = f"{len(values.rows)} training images, reconstructed from their feature and from the mean of {values.of}."
    axes = Axis(low=-0.6, high=2.6), Axis(low=-0.8, high=tall + 0.75, reverse=True)
    name, title, height = "inversion-pictures", "Images reconstructed from features", int(40 + 122 * (tall + 1.55))
    pictures = Chart(name, title, alt, marks, *axes, 440, height, frame=False, square=True)
    groups = columns | {"other": "another image of the class", "grey": "a gray picture"}
    scores = {groups[name]: [float(row[f"{name}_ssim"]) for row in values.rows] for name in SHOWN}
    bars = grouped(scores, lambda title, at: f"{values.rows[at]['class']}, {title}: SSIM {scores[title][at]:.3f}")
    title, alt = "Similarity to the original", "Structural similarity of the reconstructions."
    classes = axis_of("", [str(row["class"]) for row in values.rows])
    return [pictures, Chart("inversion-likeness", title, alt, bars, classes, Axis("SSIM"))]


def _findings(values: Inversion) -> list[str]:
    scores = {name: [float(row[f"{name}_ssim"]) for row in values.rows] for name in SHOWN}
    spread = {name: f" ± {stdev(column):.3f}" if len(column) > 1 else "" for name, column in scores.items()}
    shown = {name: f"{fmean(column):.3f}{spread[name]}" for name, column in scores.items()}
    sentence = (
        f"The structural similarity to the original is {shown['one']} for images reconstructed from their feature and "
        f"{shown['mean']} from the mean of {values.of} features, compared with {shown['other']} for another image of "
        f"the same class and {shown['grey']} for a gray picture ({counted(len(values.rows), 'image')})."
    )
    one, mean, *yardsticks = map(fmean, scores.values())
    best = max(one, mean)
    if best > max(yardsticks):
        return [sentence]
    if best > min(yardsticks):
        return [f"{sentence} The reconstructions beat only one of these two, so nothing is clearly recovered."]
    return [f"{sentence} By this measure the search recovers nothing; look at the pictures, too."]


INVERSION = Measure(
    name="inversion",
    values=Inversion,
    take=take_inversion,
    draw=_draw,
    findings=_findings,
    title="What features reveal",
    text=(
        "What an attacker who knows the model could reconstruct from a feature that a client sends, and from the mean "
        "of several: the image whose feature is closest to it. Another image of the class and a plain gray picture are "
        "the yardstick: a reconstruction that is no more similar than these reveals nothing."
    ),
    headline=8,
)
