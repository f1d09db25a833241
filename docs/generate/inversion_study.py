"""Reconstructs photographs from what clients send and writes docs/explanation/inversion.md: `make inversion-study`.

Part 1: EfficientNet-Lite0 with ImageNet weights and the photographs that scikit-image ships (install it first).
Part 2: simple-cnn on CIFAR-10 (UNSKEW_DATA), trained with prototypes for a few rounds. The search is a deep image
prior (`unskew.analysis.inversion.search_deep`). Half an hour on one core; finished searches in the work folder are
kept.
"""

import argparse
import copy
import os
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import skimage
import torch
from PIL import Image
from torch import Tensor

import unskew
from unskew.analysis.inversion import feature_loss, psnr, search_deep, ssim
from unskew.core import tensors
from unskew.core.files import write_whole
from unskew.core.key import Key
from unskew.models.imagenet import efficientnet_lite0
from unskew.models.pretrained import imagenet_file
from unskew.round.driver import as_used
from unskew.runs.finished import FinishedRun, replay

DOCS = Path(__file__).parents[1]
PAGE, PICTURE = DOCS / "explanation" / "inversion.md", DOCS / "pictures" / "inversion.png"
PHOTOGRAPHS = {"cat": "chelsea.png", "coffee": "coffee.png", "rocket": "rocket.jpg", "astronaut": "astronaut.png"}
SIZE = 96
PIXELS = {"offset": torch.full((1, 3, 1, 1), -127 / 128), "scale": torch.full((1, 3, 1, 1), 1 / 128)}
IMAGENET = SimpleNamespace(train=SimpleNamespace(**PIXELS))
ROUNDS = 5


def photograph(file: str) -> Tensor:
    """The center of a photograph as the network expects it, [3, SIZE, SIZE]."""
    picture = Image.open(Path(skimage.__file__).parent / "data" / file).convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    picture = picture.crop((left, top, left + side, top + side)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return (torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() - 127) / 128


def features_of_two(statistics: "unskew.ClassStatistics", label: int) -> tuple[Tensor, Tensor]:
    """Both features of a class with two examples: μ ± v·√(λ/2), with the covariance's only eigenvalue λ and its v."""
    values, vectors = torch.linalg.eigh(statistics.covariance(label))
    step = vectors[:, -1] * (values[-1] / 2).sqrt()
    return statistics.mean(label) + step, statistics.mean(label) - step


def kept(file: Path, make: Callable[[], Tensor]) -> Tensor:
    """The tensor in the file, made now if it is not there."""
    if not file.exists():
        write_whole(file, make().numpy().astype("<f4").tobytes())
    return torch.from_numpy(np.frombuffer(file.read_bytes(), "<f4").copy())


def photographs(work: Path, steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[str]]:
    """Originals, their reconstructions by kind, and the lines of the table."""
    network = efficientnet_lite0((3, SIZE, SIZE), 1000)
    network.load_state_dict(torch.load(imagenet_file("efficientnet-lite0"), weights_only=True))
    network.eval().requires_grad_(False)
    classifier, network._fc = network._fc, torch.nn.Identity()  # what is left gives the features
    originals = {name: photograph(file) for name, file in PHOTOGRAPHS.items()}
    names = list(originals)
    features = {name: network(image[None])[0] for name, image in originals.items()}
    targets: dict[str, dict[str, Tensor]] = {"one": features, "mean": {}}
    exact = 0.0  # how far the features recovered from mean and covariance of two are from the true ones
    for at, name in enumerate(names):
        second, third = names[(at + 1) % len(names)], names[(at + 2) % len(names)]
        targets["mean"][name] = torch.stack([features[name], features[second], features[third]]).mean(0)
        both = torch.stack([features[name], features[second]]).double()
        pair = features_of_two(unskew.ClassStatistics.of_features(both, torch.zeros(2, dtype=torch.long), classes=1), 0)
        exact = max(exact, min(float((z - features[name]).norm() / features[name].norm()) for z in pair))
    low, high = torch.full((3, 1, 1), -127 / 128), torch.full((3, 1, 1), 1.0)
    made: dict[str, dict[str, Tensor]] = {}
    for kind, some in targets.items():
        made[kind] = {}
        for at, (name, target) in enumerate(some.items()):
            search = partial(
                search_deep, feature_loss([network], [target]), (3, SIZE, SIZE), low, high, steps=steps, lr=0.01,
                key=Key(0).fold(kind, at),
            )  # fmt: skip
            made[kind][name] = kept(work / f"{kind}-{name}-{SIZE}-{steps}", search).view(3, SIZE, SIZE)
    lines = ["| reconstructed from | SSIM | PSNR (dB) | most like its own photograph | same class, of 1,000 |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    gray = dict.fromkeys(names, torch.zeros(3, SIZE, SIZE))
    captions = {
        "one": "its own feature",
        "mean": "the mean of three photographs", "gray": "nothing: a gray picture",
    }  # fmt: skip
    for kind, caption in captions.items():
        some = gray if kind == "gray" else made[kind]
        own = sum(
            max(names, key=lambda other: correlation(some[name], originals[other])) == name for name in names
        )  # fmt: skip
        right = sum(
            int(classifier(network(some[name][None])).argmax()) == int(classifier(features[name][None]).argmax())
            for name in names
        )
        likeness = fmean(ssim(IMAGENET, some[name], originals[name]) for name in names)
        signal = fmean(psnr(IMAGENET, some[name], originals[name]) for name in names)
        marks = ["", ""] if kind == "gray" else [f"{own} of {len(names)}", f"{right} of {len(names)}"]
        lines.append(f"| {caption} | {likeness:.3f} | {signal:.1f} | {marks[0]} | {marks[1]} |")
    lines += ["", f"From mean and covariance of two photographs, both features come out exactly (error {exact:.0e})."]
    return originals, made, lines


def correlation(a: Tensor, b: Tensor) -> float:
    """Of the pixels of two images; moved by colors and shapes, not by brightness and contrast."""
    return float(np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1])


def prototypes(work: Path, steps: int) -> list[str]:
    """The lines of a table: three images of a class on one client, from one round's prototype and from all rounds'."""
    out = work / "prototypes"
    if not (out / "result.json").exists():
        unskew.run(
            data="cifar10", data_dir=os.environ["UNSKEW_DATA"], model="simple-cnn", method="prototypes", clients=10,
            partition="dirichlet(alpha=0.1)", rounds=ROUNDS, epochs=1, lr=0.01, momentum=0.9, batch=64, seed=0,
            during="model(every=1)", out=out,
        )  # fmt: skip
    rows: dict[str, list[float]] = {}
    with FinishedRun(out) as run:
        side = run.side
        states = [
            replay(run, number, lambda engine, state: as_used(run.algorithm, state.tensors, side.classifier))
            for number in range(1, ROUNDS + 1)
        ]
        encoders = []
        for state in states:
            side.load(state, training=False)
            encoders.append(copy.deepcopy(side.network.encoder).eval().requires_grad_(False))
        low, high = side.train.offset[0], (255 * side.train.scale + side.train.offset)[0]
        for client in range(3):
            index = side.population.examples(client)
            label = int(np.bincount(side.labels[index]).argmax())
            chosen = torch.from_numpy(index[side.labels[index] == label][:4].copy())
            images = side.train.batch(chosen)[0]
            for count in (1, 3):
                for few in (1, ROUNDS):
                    used = encoders[-few:]
                    with torch.no_grad():
                        means = [encoder(images[:count]).mean(0) for encoder in used]
                    search = partial(
                        search_deep, feature_loss(used, means), side.train.shape, low, high, steps=steps, lr=0.01,
                        key=Key(0).fold("prototypes", client), count=count,
                    )  # fmt: skip
                    made = kept(work / f"prototype-{client}-{count}-{few}-{steps}", search).view(
                        count, *side.train.shape
                    )
                    best = max(
                        fmean(ssim(side, a, b) for a, b in zip(made[list(order)], images, strict=False))
                        for order in permutations(range(count))
                    )
                    number = "1 round" if few == 1 else f"{ROUNDS} rounds"
                    rows.setdefault(f"{'one image' if count == 1 else 'three images'}, {number}", []).append(best)
            rows.setdefault("none: another image of the class", []).append(ssim(side, images[3], images[0]))
    lines = ["| prototype of | SSIM, mean over 3 clients | each client |", "| --- | ---: | --- |"]
    for name, some in rows.items():
        lines.append(f"| {name} | {fmean(some):.3f} | {', '.join(f'{one:.3f}' for one in some)} |")
    return lines


def draw(originals: dict[str, Tensor], made: dict[str, dict[str, Tensor]]) -> None:
    """Photographs and reconstructions side by side."""
    columns: dict[str, Any] = {
        "photograph": originals, "from its feature": made["one"], "from the mean of three": made["mean"],
    }  # fmt: skip
    figure, axes = plt.subplots(len(originals), len(columns), figsize=(5, 1.6 * len(originals) + 0.4))
    for column, (title, some) in enumerate(columns.items()):
        for row, name in enumerate(originals):
            axes[row, column].imshow(((some[name] * 128 + 127) / 255).clamp(0, 1).permute(1, 2, 0).numpy())
            axes[row, column].axis("off")
        axes[0, column].set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/inversion-study"))
    parser.add_argument("--steps", type=int, default=800)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    with tensors.one_thread():
        originals, made, first = photographs(given.work, given.steps)
        draw(originals, made)
        second = prototypes(given.work, given.steps)
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in (("photographs", first), ("prototypes", second)):
        mark, end = f"<!-- {name}: make inversion-study -->", f"<!-- end of {name} -->"
        head, rest = page.split(mark)
        page = f"{head}{mark}\n" + "\n".join(lines) + f"\n{end}{rest.split(end)[1]}"
    write_whole(PAGE, page.encode())
