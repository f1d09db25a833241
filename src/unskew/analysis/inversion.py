"""What a feature gives away: images reconstructed from one feature, and from the mean of several.

An attacker who knows the encoder f looks for the image x with f(x) = z. Clients that send means of
features rely on that to fail.

Shapes: m targets, [ch, H, W] an image, d features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.analysis.measure import Measure
from unskew.charts import Axis, Chart, Mark, Picture, Words, grouped
from unskew.core import tensors
from unskew.core.errors import Missing, UserError
from unskew.core.key import Key
from unskew.core.machine import deterministic
from unskew.core.units import counted
from unskew.round.client import ClientSide
from unskew.runs.finished import FinishedRun


@dataclass(frozen=True)
class Inversion:
    """Images of clients, their reconstructions, and how alike they are."""

    of: int  # the number of features in a mean
    rows: list[
        dict[str, Any]
    ]  # "client", "class", "original", "one", "mean": pixels; figures "one_*", "mean_*", "other_*", "grey_*"


def take_inversion(
    run: FinishedRun, *, examples: int = 4, of: int = 3, steps: int = 300, lr: float = 0.05, smooth: float = 0.5
) -> Inversion:
    """Training images of the largest clients, reconstructed from their feature and from the mean of ``of`` features.

    The image minimises ‖f(x) − z‖²/‖z‖² + smooth·(mean squared difference of neighbouring pixels), by Adam from grey.
    Every similarity is to the same original, which is one of those in the mean; "other" is the similarity of another
    image of the same class, "grey" that of a picture in the data set's mean colour, from which the search starts. A
    reconstruction that is no more alike than these shows nothing. Features are what enters the classifier.

    Reference: Luo et al. 2021, appendix C, Figures 8 and 9; Mahendran and Vedaldi, CVPR 2015.
    """
    if examples < 1 or of < 2 or steps < 1 or lr <= 0 or smooth < 0:
        raise UserError("inversion takes examples and steps from 1, of from 2, lr above 0, smooth of 0 or more")
    side = run.side
    if side.train.stored:
        raise Missing("inversion needs images, and this run trained on the stored output of a frozen part")
    if not len(side.labels):
        raise Missing("inversion needs training images, and these are at the nodes of the federation")
    side.load(run.model, training=False)
    chosen = _chosen(side, examples, of)
    if not chosen:
        raise Missing(f"no client has {of + 1} images of one class")
    index = torch.tensor([held for _, _, held in chosen])  # [m, of + 1]; the last is the other one
    with torch.no_grad():
        images = side.train.batch(index.flatten())[0]
        features = side.network.encoder(images).view(len(chosen), of + 1, -1)
    targets = torch.cat([features[:, 0], features[:, :of].mean(1)])  # [2m, d]
    with tensors.one_thread(), deterministic(side.device):  # a batch this small is slower on two threads
        made = invert(side, targets, steps, lr, smooth, run)
    original = images.view(len(chosen), of + 1, *images.shape[1:])
    one, mean = made[: len(chosen)], made[len(chosen) :]
    rows = []
    for place, (client, label, _) in enumerate(chosen):
        figures: dict[str, Any] = {"client": client, "class": run.classes[label]}
        grey = torch.zeros_like(one[place])
        pictures = {"one": one[place], "mean": mean[place], "other": original[place, of], "grey": grey}
        for name, picture in pictures.items():
            figures[f"{name}_psnr"] = psnr(side, picture, original[place, 0])
            figures[f"{name}_ssim"] = ssim(side, picture, original[place, 0])
            with torch.no_grad():
                feature = side.network.encoder(picture[None])[0]
            figures[f"{name}_cosine"] = float(F.cosine_similarity(feature, features[place, 0], dim=0))
            figures[name] = _pixels(side, picture)
        figures["original"] = _pixels(side, original[place, 0])
        rows.append(figures)
    return Inversion(of, rows)


def _chosen(side: ClientSide, examples: int, of: int) -> list[tuple[int, int, list[int]]]:
    """(client, class, examples) of the largest clients: each client's largest class that was not taken yet."""
    chosen: list[tuple[int, int, list[int]]] = []
    for client in np.argsort(-side.population.sizes, kind="stable").tolist():
        index = side.population.examples(client)
        labels = side.labels[index]
        counts = np.bincount(labels)
        counts[[label for _, label, _ in chosen if label < len(counts)]] = 0
        if len(counts) and counts.max() > of:
            label = int(counts.argmax())
            chosen.append((client, label, index[labels == label][: of + 1].tolist()))
        if len(chosen) == examples:
            break
    return chosen


def invert(side: ClientSide, targets: Tensor, steps: int, lr: float, smooth: float, run: FinishedRun) -> Tensor:
    """[m, ch, H, W], normalised images whose features are as near to the targets as Adam finds."""
    shape = side.train.shape
    low, high = _ends(side)
    noise = torch.randn(shape, generator=_generator(run.key), dtype=targets.dtype)
    x = (0.01 * noise).to(targets.device).repeat(len(targets), 1, 1, 1).requires_grad_()
    scale = targets.square().sum(1).clamp(min=1e-12)
    optimiser = torch.optim.Adam([x], lr=lr)
    for step in range(steps):
        if step % 20 == 0:
            run.say("inverting features", step, steps)
        made = side.network.encoder(x)
        far = (made - targets).square().sum(1) / scale
        loss = (far + smooth * _roughness(x)).sum()
        (x.grad,) = torch.autograd.grad(loss, [x])
        optimiser.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()


def _roughness(images: Tensor) -> Tensor:
    """[m], the mean squared difference of pixels side by side and one above the other."""
    across, down = images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]
    return across.square().mean((1, 2, 3)) + down.square().mean((1, 2, 3))


def _generator(key: Key) -> torch.Generator:
    return key.fold("inversion").torch()


def _ends(side: ClientSide) -> tuple[Tensor, Tensor]:
    """What black and white are after normalisation, by channel [ch, 1, 1]."""
    return side.train.offset[0], (255 * side.train.scale + side.train.offset)[0]


def _unit(side: ClientSide, image: Tensor) -> Tensor:
    """[ch, H, W] from 0 to 1."""
    low, high = _ends(side)
    return ((image - low) / (high - low)).clamp(0, 1).cpu().double()


def _pixels(side: ClientSide, image: Tensor) -> list[Any]:
    """[H][W] or [H][W][3] of whole numbers 0..255."""
    values = (_unit(side, image) * 255).round().long()
    shown: list[Any] = (values[0] if len(values) != 3 else values.permute(1, 2, 0)).tolist()
    return shown


def psnr(side: ClientSide, a: Tensor, b: Tensor) -> float:
    """Peak signal to noise in dB; 100 where the images are the same."""
    wrong = float((_unit(side, a) - _unit(side, b)).square().mean())
    return 100.0 if wrong < 1e-10 else float(-10 * np.log10(wrong))


def ssim(side: ClientSide, a: Tensor, b: Tensor) -> float:
    """Structural similarity, −1 to 1, over windows of 7 × 7 pixels or the whole of a smaller image.

    Reference: Wang et al., 2004, equation 13.
    """
    x, y = _unit(side, a)[None], _unit(side, b)[None]
    size = min(7, *x.shape[2:])
    mx, my = F.avg_pool2d(x, size, 1), F.avg_pool2d(y, size, 1)
    vx, vy = F.avg_pool2d(x * x, size, 1) - mx * mx, F.avg_pool2d(y * y, size, 1) - my * my
    both = F.avg_pool2d(x * y, size, 1) - mx * my
    one, two = 0.01**2, 0.03**2
    table = (2 * mx * my + one) * (2 * both + two) / ((mx * mx + my * my + one) * (vx + vy + two))
    return float(table.mean())


def draw_inversion(values: Inversion) -> list[Chart]:
    """Originals and reconstructions side by side; and how alike they are."""
    columns = {"original": "original", "one": "from its feature", "mean": f"from the mean of {values.of}"}
    marks: list[Mark] = [Words(place, -0.62, words) for place, words in enumerate(columns.values())]
    for line, row in enumerate(values.rows):
        for place, name in enumerate(columns):
            likeness = "" if name == "original" else f"SSIM {row[f'{name}_ssim']:.2f}, {row[f'{name}_psnr']:.1f} dB"
            tip = f"client {row['client']}, {row['class']}, {columns[name]}" + (f": {likeness}" if likeness else "")
            label = f"{row['class']}, client {row['client']}" if name == "original" else likeness
            marks.append(Picture(row[name], place, 1.25 * line, 0.9, 0.9, label, tip))
    tall = 1.25 * (len(values.rows) - 1)
    pictures = Chart(
        "inversion-pictures", "Images reconstructed from features",
        f"{len(values.rows)} training images, each reconstructed from its feature and from the mean of {values.of}.",
        marks,
        x=Axis(low=-0.6, high=2.6), y=Axis(low=-0.8, high=tall + 0.75, reverse=True), frame=False, square=True,
        width=440, height=int(40 + 122 * (tall + 1.55)),
    )  # fmt: skip
    groups = {"one": "from its feature", "mean": columns["mean"], "other": "another image of the class"}
    groups |= {"grey": "a grey picture"} if _has_grey(values) else {}
    similarity = {words: [float(row[f"{name}_ssim"]) for row in values.rows] for name, words in groups.items()}
    bars = grouped(
        similarity, lambda words, at: f"{values.rows[at]['class']}, {words}: SSIM {similarity[words][at]:.3f}"
    )
    ticks = tuple((line, str(row["class"])) for line, row in enumerate(values.rows))
    return [
        pictures,
        Chart("inversion-likeness", "Similarity to the original", "Structural similarity of the reconstructions.", bars,
              x=Axis("", ticks=ticks), y=Axis("SSIM")),
    ]  # fmt: skip


def inversion_findings(values: Inversion) -> list[str]:
    """How alike the reconstructions are, beside what tells nothing, and whether they show anything at all."""
    names = ["one", "mean", "other", *(["grey"] if _has_grey(values) else [])]
    each = {name: [float(row[f"{name}_ssim"]) for row in values.rows] for name in names}
    said = {name: _spread(similarities) for name, similarities in each.items()}
    grey = f", a grey picture {said['grey']}" if "grey" in said else ""
    images = counted(len(values.rows), "image")
    sentence = (
        f"An image reconstructed from its feature has a structural similarity of {said['one']} to the original, one "
        f"from the mean of {values.of} features {said['mean']}; another image of the same class has "
        f"{said['other']}{grey} ({images})."
    )
    best, nothing = max(fmean(each["one"]), fmean(each["mean"])), max(fmean(each[name]) for name in names[2:])
    if best > nothing:
        return [sentence]
    return [f"{sentence} The reconstructions are no more alike than these: they do not show what features give away."]


def _has_grey(values: Inversion) -> bool:
    """Whether the grey picture was measured: values that were stored before have none."""
    return all("grey_ssim" in row for row in values.rows)


def _spread(values: Sequence[float]) -> str:
    """Mean and, of several, deviation."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


INVERSION = Measure(
    name="inversion",
    values=Inversion,
    take=take_inversion,
    draw=draw_inversion,
    findings=inversion_findings,
    title="What features give away",
    text=(
        "What an attacker who knows the model could make of a feature that a client sends, and of a mean of several: "
        "the image whose feature is nearest to it. Another image of the class and a plain grey picture are the "
        "yardstick: what is no more alike than they are gives nothing away that this search can find."
    ),
    headline=8,
)
