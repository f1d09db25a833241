"""Measures calibrations on long-tailed data that one machine holds, and writes a table of docs/how-to/long-tail.md.

`make long-tail-table`. Two encoders: EfficientNet-Lite0 with ImageNet weights (extra `imagenet`) on CIFAR-100, at most
150 training images of a class, and simple-cnn trained on the long tail of CIFAR-10 itself, at most 2,000. Class c of C
has a share of ratio^(-c/(C - 1)) of these. Judged on balanced test images. Features, runs and results in the work
folder are kept. UNSKEW_DATA names the folder with both sets.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
import torch.nn.functional as F
from methods_table import replaced
from torch import Tensor, nn

import unskew
from unskew.calibration.ccvr import retrain
from unskew.calibration.statistics import ClassStatistics
from unskew.core.files import write_whole
from unskew.core.key import Key
from unskew.core.types import Local
from unskew.data.sources import load
from unskew.models.imagenet import efficientnet_lite0
from unskew.models.pretrained import imagenet_file, read_weights

PAGE = Path(__file__).parents[1] / "how-to" / "long-tail.md"
RATIOS, SEEDS = (1, 20, 100), (0, 1, 2)
SIDE, MOST = 96, {"pretrained": 150, "trained": 2000}
PLAIN = Local(epochs=20, batch=64, lr=0.01, momentum=0.9, weight_decay=1e-4)  # on pretrained features
CALIBRATIONS = {
    "pretrained": (
        "lda",
        "lda(ridge=0.001)",
        "ridge",
        "ccvr(per_class=200, covariance=shared)",
        "uscc(per_class=200, covariance=shared)",
    ),
    "trained": ("lda", "lda(ridge=0.001)", "ridge", "ccvr", "uscc"),
}
Case = tuple[Tensor, Tensor, Tensor, Tensor, nn.Linear]  # features and labels to learn from, and to judge by; the head


def folder() -> Path | None:
    """Where the data are."""
    given = os.environ.get("UNSKEW_DATA")
    return Path(given) if given else None


def long_tail(labels: np.ndarray, most: int, ratio: int, seed: int) -> np.ndarray:
    """The indices of a long tail: fewer of each class, from ``most`` of the first to 1/ratio of that of the last."""
    order, classes = np.random.default_rng(seed).permutation(len(labels)), int(labels.max()) + 1
    counts = [max(1, round(most * ratio ** (-label / (classes - 1)))) for label in range(classes)]
    return np.sort(np.concatenate([order[labels[order] == label][:count] for label, count in enumerate(counts)]))


def extract(work: Path) -> dict[str, Tensor]:
    """Features of CIFAR-100 under EfficientNet-Lite0: 150 training and 40 test images of each class."""
    cached = work / "efficientnet.npz"
    if not cached.exists():
        images, network = load("cifar100", folder()), efficientnet_lite0((3, SIDE, SIDE), 1000).eval()
        network.load_state_dict(read_weights(imagenet_file("efficientnet-lite0")))
        network._fc = nn.Identity()
        found = {}
        for name, part, count in (("train", images.train, MOST["pretrained"]), ("test", images.test, 40)):
            index = long_tail(part.labels, count, 1, 0)
            features = []
            with torch.inference_mode():
                for some in np.array_split(index, max(1, len(index) // 100)):
                    pixels = torch.from_numpy(part.images[some]).float()
                    pixels = F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", antialias=True)
                    features.append(network((pixels - 127) / 128).numpy())
            found |= {name: np.concatenate(features), f"{name}_labels": part.labels[index]}
        np.savez(cached, **found)
    with np.load(cached) as values:
        return {name: torch.from_numpy(values[name]) for name in values}


def pretrained(work: Path, ratio: int, seed: int) -> Case:
    """A linear classifier, trained on the long tail's features."""
    values = extract(work)
    index = torch.from_numpy(long_tail(values["train_labels"].numpy(), MOST["pretrained"], ratio, seed))
    features, labels = values["train"][index], values["train_labels"][index].long()
    head = nn.Linear(features.shape[1], 100)
    nn.init.zeros_(head.weight)
    head = retrain(head, features, labels, PLAIN, Key(seed))[0]
    return features, labels, values["test"], values["test_labels"].long(), head


def trained(work: Path, ratio: int, seed: int) -> Case:
    """simple-cnn, trained on the long tail for about 120,000 images."""
    data, run = work / f"tail-{ratio}-{seed}.npz", work / f"run-{ratio}-{seed}"
    if not data.exists():
        images = load("cifar10", folder())
        index = long_tail(images.train.labels, MOST["trained"], ratio, seed)
        pixels = [part.transpose(0, 2, 3, 1) for part in (images.train.images[index], images.test.images[:5000])]
        labels = images.train.labels[index], images.test.labels[:5000]
        np.savez(data, x_train=pixels[0], y_train=labels[0], x_test=pixels[1], y_test=labels[1])
    with np.load(data) as values:
        known = {name: values[name] for name in values}
    if not (run / "result.json").exists():
        rounds = max(8, min(20, 120_000 // len(known["y_train"])))
        unskew.run(method="centralised", data=f"arrays:{data}", rounds=rounds, epochs=1, model="simple-cnn", seed=seed,
                   augment=False, engine="loop", evaluate_every=rounds, out=run, progress=False)  # fmt: skip
    network = unskew.load(run)
    scaled = known["x_train"] / 255
    mean, std = scaled.mean((0, 1, 2)), scaled.std((0, 1, 2))

    def encode(some: np.ndarray) -> Tensor:
        with torch.no_grad():
            inputs = torch.from_numpy(((some / 255 - mean) / std).transpose(0, 3, 1, 2)).float()
            return torch.cat([network.encoder(part) for part in inputs.split(500)])

    train_labels, test_labels = (torch.from_numpy(known[name]).long() for name in ("y_train", "y_test"))
    return encode(known["x_train"]), train_labels, encode(known["x_test"]), test_labels, network.classifier


def measure(case: Case, calibrations: tuple[str, ...]) -> dict[str, float]:
    """Accuracy on the balanced test images, %: plain, logit-adjusted, and after each calibration."""
    features, labels, unseen, truth, head = case
    classes = head.out_features

    def score(logits: Tensor) -> float:
        right = (logits.argmax(1) == truth).double()
        return 100 * float(torch.stack([right[truth == label].mean() for label in range(classes)]).mean())

    with torch.no_grad():
        plain = head(unseen)
        prior = torch.bincount(labels, minlength=classes).double() / len(labels)
        found = {"plain": score(plain), "logit adjustment": score(plain - prior.log())}
        for source in calibrations:
            form = "shared" if "shared" in source or not source.startswith(("ccvr", "uscc")) else "full"
            statistics = ClassStatistics.of_features(features, labels, classes, form)
            with torch.enable_grad():
                made = unskew.calibrate(head, statistics, source)
            found[source] = score(made(unseen))
    return found


def table(kind: str, results: dict[str, dict[str, float]]) -> list[str]:
    """Markdown: means and standard deviations over the seeds."""
    lines = ["| classifier | " + " | ".join(f"1:{ratio}, %" for ratio in RATIOS) + " |", "| --- | ---: | ---: | ---: |"]
    for name in ("plain", "logit adjustment", *CALIBRATIONS[kind]):
        cells = []
        for ratio in RATIOS:
            values = [results[f"{kind}-{ratio}-{seed}"][name] for seed in SEEDS]
            cells.append(f"{fmean(values):.1f} ± {stdev(values):.1f}")
        shown = f"`{name}`" if name in CALIBRATIONS[kind] else name
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Measure what is missing, then write both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/long-tail"), help="where features and runs are kept")
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    file = work / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for seed in SEEDS:
        for ratio in RATIOS:
            for kind, build in (("trained", trained), ("pretrained", pretrained)):
                known = results.setdefault(f"{kind}-{ratio}-{seed}", {})
                if missing := tuple(source for source in CALIBRATIONS[kind] if source not in known):
                    known |= measure(build(work, ratio, seed), missing)
                    write_whole(file, json.dumps(results).encode())
    page = PAGE.read_text(encoding="utf-8")
    for kind in CALIBRATIONS:
        page = replaced(page, kind, table(kind, results))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
