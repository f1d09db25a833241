"""A twin of our FedAvg, written apart from our code: do the two agree in accuracy, round by round?

Both train on one fixed partition of CIFAR-10, each with its own seeds: initial weights, order of the examples, crops
and flips are drawn independently. So the curves cannot be the same; their means should agree within their deviation.

    python benchmarks/twin.py --data-dir DIR --out twin.json              about an hour on two cores; it resumes
    python benchmarks/twin.py --data-dir DIR --out twin.json --show       the table of what is there

The twin is what a PyTorch user would write: nn.Module with PyTorch's own initialisation, torch.optim.SGD, reflect
padding, one crop and flip an image, state dicts averaged by the clients' shares. Nothing of the package is in it.
"""

import argparse
import copy
import json
import math
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import fmean, stdev, variance

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
RATE, MOMENTUM, DECAY, BATCH, PAD = 0.01, 0.9, 1e-5, 64, 4


class Twin(nn.Module):
    """The network of CCVR's Table 6."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.hidden = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 84), nn.ReLU()
        )
        self.features = nn.Linear(84, 256)
        self.classifier = nn.Linear(256, 10)

    def forward(self, x):
        return self.classifier(self.features(self.hidden(self.convolutions(x).flatten(1))))


def augmented(images):
    """Reflect-pad each image, cut out a random square of the old size, mirror every second one on average."""
    side = images.shape[-1]
    padded = F.pad(images, (PAD,) * 4, mode="reflect")
    result = torch.empty_like(images)
    tops, lefts = torch.randint(0, 2 * PAD + 1, (2, len(images))).tolist()
    mirrored = (torch.rand(len(images)) < 0.5).tolist()
    for place, (top, left, mirror) in enumerate(zip(tops, lefts, mirrored, strict=True)):
        crop = padded[place, :, top : top + side, left : left + side]
        result[place] = crop.flip(-1) if mirror else crop
    return result


def visit(server, images, labels):
    """One client's epoch, from the server's model; the state dict it sends back."""
    model = copy.deepcopy(server).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    for rows in torch.randperm(len(labels)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(augmented(images[rows])), labels[rows]).backward()
        optimizer.step()
    return model.state_dict()


@torch.no_grad()
def accuracy(model, images, labels):
    """The share of test images that the model gets right."""
    model.eval()
    right = sum(
        (model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(1000), labels.split(1000), strict=True)
    )
    return right / len(labels)


def train_twin(arrays, seed, rounds):
    """Accuracy after every round of the twin."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # noqa: TID251  as PyTorch's users do
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    train, test = ((torch.from_numpy(arrays[name]).float() / 255 - mean) / std for name in ("train", "test"))
    labels, test_labels = (torch.from_numpy(arrays[name]).long() for name in ("train_labels", "test_labels"))
    clients = [torch.from_numpy(np.flatnonzero(arrays["client"] == k)) for k in range(arrays["client"].max() + 1)]
    server, curve = Twin(), []
    for _ in range(rounds):
        states = [visit(server, train[index], labels[index]) for index in clients]
        shares = [len(index) / sum(map(len, clients)) for index in clients]
        server.load_state_dict(
            {name: sum(share * state[name] for share, state in zip(shares, states, strict=True)) for name in states[0]}
        )
        curve.append(accuracy(server, test, test_labels))
    return curve


def train_ours(data_dir, partition, seed, rounds):
    """Accuracy after every round of `unskew run`, in a process that is like a user's."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "data": "cifar10", "data-dir": data_dir, "clients": 10, "partition": f"file:{partition}", "seed": seed,
            "method": "fedavg", "model": "simple-cnn", "rounds": rounds, "epochs": 1, "batch": BATCH, "lr": RATE,
            "momentum": MOMENTUM, "weight-decay": DECAY, "evaluate-every": 1, "out": f"{folder}/run",
        }  # fmt: skip
        command = [sys.executable, "-m", "unskew", "run", *(f"--{name}={value}" for name, value in options.items())]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["accuracy"] for line in lines]


def table(curves):
    """Mean and deviation over the seeds by round, the difference, and how many standard errors it is."""
    names = sorted(curves)
    sides = {side: [curves[name] for name in names if name.startswith(f"{side}/")] for side in ("ours", "twin")}
    rounds = min((len(curve) for side in sides.values() for curve in side), default=0)
    lines = [
        "| rounds | ours | twin | difference, points | in standard errors |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    if min(map(len, sides.values())) < 2:
        return "two seeds of each are needed for a deviation"
    windows = [(first, min(first + 9, rounds)) for first in range(1, rounds + 1, 10)]
    for first, last in windows:  # the mean of ten rounds: a single round of a skewed federation jumps by points
        ours, twin = ([100 * fmean(curve[first - 1 : last]) for curve in several] for several in sides.values())
        gap = fmean(ours) - fmean(twin)
        error = math.sqrt(variance(ours) / len(ours) + variance(twin) / len(twin))
        cells = " | ".join(f"{fmean(values):.2f} ± {stdev(values):.2f}" for values in (ours, twin))
        lines.append(f"| {first} to {last} | {cells} | {gap:+.2f} | {gap / error:+.1f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file of curves; those in it are kept")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--partition", default="dirichlet(alpha=0.1)")
    parser.add_argument("--show", action="store_true", help="print the table and stop")
    options = parser.parse_args()
    curves = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    if not options.show:
        measure(options, curves)
    print(table(curves))


def measure(options, curves):
    """Train what is missing, one after another, and write it down as it comes."""
    from unskew.core.files import write_whole
    from unskew.core.key import Key
    from unskew.data.partition import partition_examples
    from unskew.data.partition_files import to_arrays
    from unskew.data.sources import load

    images = load("cifar10", options.data_dir)
    drawn = partition_examples(options.partition, images.train.labels, clients=10, key=Key(0), classes=10)
    parts = {"train": images.train, "test": images.test}
    arrays = {name: part.images for name, part in parts.items()} | {"client": drawn.client}
    arrays |= {f"{name}_labels": part.labels for name, part in parts.items()}
    file = options.out.with_suffix(".partition.npz")
    np.savez(file, **to_arrays(drawn, images.train.labels, 10))
    trainers = {
        "ours": lambda seed: train_ours(options.data_dir, file.resolve(), seed, options.rounds),
        "twin": lambda seed: train_twin(arrays, int(seed), options.rounds),
    }
    for seed, (side, train) in product(options.seeds.split(","), trainers.items()):
        if (name := f"{side}/{seed}") not in curves:
            curves[name] = train(seed)
            write_whole(options.out, json.dumps(curves).encode())
            print(f"{side}, seed {seed}: {curves[name][-1]:.2%}", flush=True)


if __name__ == "__main__":
    main()
